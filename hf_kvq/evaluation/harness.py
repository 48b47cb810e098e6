# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Benchmarks of lm-evaluation-harness, through a quantized cache.

`python -m hf_kvq.evaluation.harness` is `lm_eval` that knows one model more, `hf-kvq`: the harness's own "hf", with
`cache_implementation` and `cache_config` among its arguments. With the papers' sampling:

    python -m hf_kvq.evaluation.harness run --model hf-kvq \\
        --model_args '{"pretrained": "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "dtype": "bfloat16",
                       "cache_implementation": "pmkvq", "cache_config": {"fbit": 2, "max_length": 32768}}' \\
        --tasks aime24,gpqa_diamond_cot_zeroshot --apply_chat_template --batch_size 8 \\
        --gen_kwargs '{"do_sample": true, "temperature": 0.6, "top_p": 0.95, "max_gen_toks": 32768}' \\
        --output_path out --log_samples --use_cache out/answers

`--use_cache` lets an interrupted run go on, and `accelerate launch -m hf_kvq.evaluation.harness run ...` spreads one
over processes.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from ..hub.discovery import options_for
from ..presets import resolve
from ..registration import CACHES, NAMES, cache_argument


@register_model("hf-kvq")
class KVQLM(HFLM):
    """`HFLM` that generates, and scores given text, through a quantized cache.

    Text is scored in chunks, so that what is older than a chunk is read from the cache; in one forward over all of it
    no cache would be read, and every score would look perfect.

    Args:
        pretrained: as for `HFLM`, as everything else that is not named here.
        cache_implementation: one of ours, or any that `generate` knows; None for the ordinary cache.
        cache_config: its options: a dict, or JSON.
        score_chunk: tokens per forward where given text is scored.

    Raises:
        ValueError: `cache_config` is no dict, or the model is not a decoder.
    """

    def __init__(
        self,
        pretrained: Any,
        cache_implementation: str | None = None,
        cache_config: dict[str, Any] | str | None = None,
        score_chunk: int = 128,
        **kwargs: Any,
    ):
        super().__init__(pretrained, **kwargs)
        if self.backend != "causal":
            raise ValueError(f"hf-kvq evaluates decoders; {type(self.model).__name__} is an encoder-decoder model")
        if isinstance(cache_config, str):
            cache_config = json.loads(cache_config)
        if not isinstance(cache_config, dict | None):
            raise ValueError(f"cache_config must be a dict of options; got {cache_config!r}")
        self.cache_implementation, self.cache_config = cache_implementation, cache_config
        self.score_chunk = int(score_chunk)

    def loglikelihood(self, requests: list, *args: Any, **kwargs: Any) -> list:
        self._check_scoring()
        return super().loglikelihood(requests, *args, **kwargs)

    def loglikelihood_rolling(self, requests: list, *args: Any, **kwargs: Any) -> list:
        self._check_scoring()
        return super().loglikelihood_rolling(requests, *args, **kwargs)

    def _check_scoring(self) -> None:
        """Raise `ValueError` where a score would not come from the cache that was asked for."""
        if self.cache_implementation not in (None, *NAMES):
            raise ValueError(
                f"given text can be scored through {', '.join(NAMES)}, but not through "
                f"cache_implementation={self.cache_implementation!r}; use one of these, or only tasks that generate"
            )

    def _model_call(self, inps: torch.Tensor, attn_mask: Any = None, labels: Any = None) -> torch.Tensor:
        """Logits of [batch, tokens]; rows that are shorter are padded behind, where nothing reads the padding."""
        if self.cache_implementation is None:
            return super()._model_call(inps, attn_mask, labels)
        name, options = resolve(self.cache_implementation, self.cache_config)
        options = options_for(self.model, name, options)
        cache = CACHES[name](self.model.config, options, max_length=inps.shape[1])
        argument = cache_argument(self.model)
        with torch.no_grad():
            parts = [
                self.model(input_ids=part, use_cache=True, **{argument: cache}).logits
                for part in inps.split(self.score_chunk, dim=1)
            ]
        return torch.cat(parts, dim=1)

    def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **kwargs: Any) -> torch.Tensor:
        if self.cache_implementation is not None:
            kwargs |= {"cache_implementation": self.cache_implementation, "cache_config": self.cache_config}
        return super()._model_generate(context, max_length, stop, **kwargs)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
