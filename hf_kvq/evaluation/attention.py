# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""What a cache does to the output of each attention layer by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import Cache, PreTrainedModel

from ..registration import cache_argument
from .methods import exact_cache


@torch.no_grad()
def attention_errors(
    model: PreTrainedModel,
    ids: torch.Tensor,
    caches: Mapping[str, Cache],
    chunk: int = 128,
    exact: Cache | None = None,
    desc: str | None = None,
) -> dict[str, torch.Tensor]:
    """Relative error of every attention layer's output, each layer fed with the exact model's hidden states.

    So errors do not add up from layer to layer: each is what that layer's keys and values have lost.

    Args:
        model: a causal language model.
        ids: [rows, tokens].
        caches: empty caches by name; each holds the tokens afterwards.
        chunk: tokens per forward.
        exact: the empty cache to compare with; the default is an ordinary one.
        desc: label of a progress bar; None for no bar.

    Returns:
        By name, float64 [attention layers, chunks]: ||output - exact|| / ||exact||, over all tokens of a chunk.

    Raises:
        ValueError: the model has no attention layers that can be told by their `layer_idx`.
    """
    ids, exact = ids.to(model.device), exact if exact is not None else exact_cache(model)
    errors: dict[str, list[torch.Tensor]] = {name: [] for name in caches}
    for start in tqdm(range(0, ids.shape[1], chunk), desc=desc, disable=desc is None, unit="chunk"):
        with _comparing(model, exact, caches) as found:
            model(input_ids=ids[:, start : start + chunk], use_cache=True, **{cache_argument(model): exact})
        for name, by_layer in found.items():
            if not by_layer:
                raise ValueError(f"{type(model).__name__} has no attention layers that are told by their layer_idx")
            errors[name].append(torch.tensor([by_layer[i] for i in sorted(by_layer)], dtype=torch.float64))
    return {name: torch.stack(parts, dim=1) for name, parts in errors.items()}


@contextmanager
def _comparing(model: PreTrainedModel, exact: Cache, caches: Mapping[str, Cache]) -> Iterator[dict]:
    """While it lasts, every attention layer runs once more for each cache, on the same input."""
    found: dict[str, dict[int, float]] = {name: {} for name in caches}

    def compare(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        keyword = next((key for key, value in kwargs.items() if value is exact), None)
        if keyword is None:
            return
        true = _first(output).float()
        for name, cache in caches.items():
            # `forward` and not the module itself, which would come here again.
            here = _first(module.forward(*args, **{**kwargs, keyword: cache})).float()
            found[name][module.layer_idx] = ((here - true).norm() / true.norm()).item()

    hooks = [module.register_forward_hook(compare, with_kwargs=True) for module in _attention_layers(model)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _attention_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """Modules that know their `layer_idx` and hold no other that does."""
    known = [module for module in model.modules() if hasattr(module, "layer_idx")]
    return [m for m in known if not any(hasattr(child, "layer_idx") for child in list(m.modules())[1:])]


def _first(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output
