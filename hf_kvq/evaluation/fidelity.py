# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Teacher-forced fidelity: perplexity and KL divergence of a model that reads its history from a cache."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from tqdm.auto import tqdm
from transformers import Cache, DynamicCache, PreTrainedModel

from ..registration import cache_argument


@dataclass(frozen=True)
class Fidelity:
    """Means over the predicted tokens.

    Args:
        perplexity: exp of the mean negative log likelihood of the text.
        kl: mean KL(exact || this cache) of the next-token distribution, nats per token; 0 for the exact cache.
        top1: share of tokens whose most likely successor is the exact cache's.
        tokens: number of predicted tokens.
    """

    perplexity: float
    kl: float
    top1: float
    tokens: int


def measure_fidelity(
    model: PreTrainedModel, input_ids: torch.Tensor, cache: Cache, chunk: int = 128, desc: str | None = None
) -> Fidelity:
    """Fidelity of one cache; see `compare_fidelity`."""
    return compare_fidelity(model, input_ids, {"": cache}, chunk, desc)[""]


@torch.no_grad()
def compare_fidelity(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    caches: Mapping[str, Cache],
    chunk: int = 128,
    desc: str | None = None,
    exact: Cache | None = None,
) -> dict[str, Fidelity]:
    """Feed a text through caches in chunks, so that all but the newest tokens are read from them, and compare.

    One forward over the whole text would never read a cache. The exact model, on an ordinary cache, runs beside.

    Args:
        model: a causal language model.
        input_ids: [1, tokens].
        caches: empty caches by name; each holds the text afterwards.
        chunk: tokens per forward.
        desc: label of a progress bar; None for no bar.
        exact: the empty cache to compare with; the default is an ordinary one.
    """
    argument = cache_argument(model)
    exact = exact if exact is not None else DynamicCache(config=model.config)

    def log_probs(ids: torch.Tensor, cache: Cache) -> torch.Tensor:
        return model(input_ids=ids, use_cache=True, **{argument: cache}).logits[0].float().log_softmax(-1)

    sums = {name: torch.zeros(3, dtype=torch.float64) for name in caches}
    for start in tqdm(range(0, input_ids.shape[1], chunk), desc=desc, disable=desc is None, unit="chunk"):
        ids = input_ids[:, start : start + chunk]
        targets = input_ids[0, start + 1 : start + 1 + ids.shape[1], None]
        true = log_probs(ids, exact)[: len(targets)]
        for name, cache in caches.items():
            here = log_probs(ids, cache)[: len(targets)]
            nll = -here.gather(1, targets).sum()
            kl = (true.exp() * (true - here)).sum()
            agreed = (here.argmax(-1) == true.argmax(-1)).sum()
            sums[name] += torch.stack([nll, kl, agreed]).double().cpu()
    count = input_ids.shape[1] - 1
    means = {name: (total / count).tolist() for name, total in sums.items()}
    return {name: Fidelity(math.exp(nll), kl, agreed, count) for name, (nll, kl, agreed) in means.items()}
