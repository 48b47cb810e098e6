# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Teacher-forced fidelity: perplexity and KL divergence of a model that reads its history from a cache."""

from __future__ import annotations

import math
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


@torch.no_grad()
def measure_fidelity(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    cache: Cache,
    chunk: int = 128,
    skip: int = 0,
    desc: str | None = None,
) -> Fidelity:
    """Feed a text through `cache` in chunks, so that all tokens but the newest are read from it, and compare.

    One forward over the whole text would never read the cache. The exact model, on an ordinary cache, runs beside.

    Args:
        model: a causal language model.
        input_ids: [1, tokens].
        cache: an empty cache; it holds the text afterwards.
        chunk: tokens per forward.
        skip: leave the first `skip` predictions out of the means.
        desc: label of a progress bar; None for no bar.
    """
    name = cache_argument(model)
    exact = DynamicCache(config=model.config)
    nll = kl = agree = 0.0
    count, length = 0, input_ids.shape[1]
    for start in tqdm(range(0, length, chunk), desc=desc, disable=desc is None, unit="chunk"):
        ids = input_ids[:, start : start + chunk]
        here = model(input_ids=ids, use_cache=True, **{name: cache}).logits[0].float().log_softmax(-1)
        true = model(input_ids=ids, use_cache=True, **{name: exact}).logits[0].float().log_softmax(-1)
        first = max(0, skip - start)
        targets = input_ids[0, start + 1 : start + 1 + len(here)]
        used = slice(first, len(targets))
        nll -= here[: len(targets)].gather(1, targets[:, None])[used].double().sum().item()
        divergence = (true.exp() * (true - here)).sum(-1).double()
        kl += divergence[used].sum().item()
        agree += (here.argmax(-1) == true.argmax(-1))[used].sum().item()
        count += len(targets[used])
    return Fidelity(math.exp(nll / count), kl / count, agree / count, count)
