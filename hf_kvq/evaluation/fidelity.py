# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Teacher-forced fidelity: perplexity and KL divergence of a model that reads its history from a cache."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from .forced import teacher_forced


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


def compare_fidelity(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    caches: Mapping[str, Cache],
    chunk: int = 128,
    desc: str | None = None,
    exact: Cache | None = None,
) -> dict[str, Fidelity]:
    """The means of `teacher_forced` over a text.

    Args:
        model: a causal language model.
        input_ids: [1, tokens].
        caches: empty caches by name; each holds the text afterwards.
        chunk: tokens per forward.
        desc: label of a progress bar; None for no bar.
        exact: the empty cache to compare with; the default is an ordinary one of the model's dtype.
    """
    exact = exact if exact is not None else DynamicCache(config=model.config)
    found = teacher_forced(model, input_ids, caches, chunk=chunk, exact=exact, desc=desc)
    return {
        name: Fidelity(
            math.exp(found[name].nll.mean().item()),
            found[name].kl.mean().item(),
            found[name].agreed.double().mean().item(),
            found[name].nll.numel(),
        )
        for name in caches
    }
