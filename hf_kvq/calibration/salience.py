# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""How salient a model's key channels are for MixKVQ, and which thresholds are worth trying."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from ..cache.base import stock_layers
from ..cache.mixkvq import MixKVQCache
from ..cache.tiered import TieredLayer
from ..codecs import tiered
from ..config import MixKVQConfig
from ..registration import cache_argument
from .samples import over_samples
from .sensitivity import frozen


#: Average key bits whose pooled thresholds are tried first.
FIRST_TARGETS = (2.25, 2.5, 3.0, 4.0)


@torch.no_grad()
def observed_salience(
    model: PreTrainedModel, samples: torch.Tensor | Sequence[torch.Tensor], config: MixKVQConfig
) -> torch.Tensor:
    """Salience A_d = I_d * S_d of every key channel of every layer, KV head and page, float64 [n].

    I_d is the mean over all queries of a sample, where a running cache has those up to a page's end.

    Raises:
        ValueError: a sample is too short to fill a page.
    """
    # All channels at BF16: the cache gives keys back as they were.
    exact = dataclasses.replace(config, target_bits=16.0, importance_window="all")
    layers = stock_layers(model.config.get_text_config(decoder=True))[1]

    def measure(ids: torch.Tensor) -> torch.Tensor:
        cache = MixKVQCache(model.config, exact)
        model(input_ids=ids[None].to(model.device), use_cache=True, **{cache_argument(model): cache})
        cache.nbytes()  # stores the last layer's
        return torch.cat([_salience(cache.layers[i]).cpu() for i in layers])

    with frozen(model):
        return over_samples(measure, samples).flatten()


def search_ranges(salience: torch.Tensor) -> dict[str, Any]:
    """Thresholds worth trying.

    Args:
        salience: of a model's key channels, [n].

    Returns:
        `tau_bf16` and `tau_uint4`, each [low, high]; `first`, pairs of them to begin with.

    Raises:
        ValueError: all channels are alike.
    """
    ordered = salience[salience > 0].sort().values
    if not len(ordered) or ordered[0] == ordered[-1]:
        raise ValueError("all key channels of this model are alike, so there are no thresholds to search")
    at = {share: ordered[int(share * (len(ordered) - 1))].item() for share in (0.01, 0.8, 1.0)}
    first = []
    for bits in FIRST_TARGETS:
        tiers = tiered.tiers_by_target(ordered, bits)
        # A threshold is the largest salience below it; promotions go from the top.
        below = [ordered[max(0, int((tiers < tier).sum()) - 1)].item() for tier in (tiered.BF16, tiered.UINT4)]
        first.append([max(below[0], at[0.8]), max(below[1], at[0.01])])
    return {"tau_bf16": [at[0.8], at[1.0]], "tau_uint4": [at[0.01], at[1.0]], "first": first}


def _salience(layer: TieredLayer) -> torch.Tensor:
    """Of one layer of a cache of one row, float64 [heads * pages * dim]."""
    state, page = layer.states[0], layer.page_tokens
    if not state.pages:
        raise ValueError(
            f"a sample of {layer.columns} tokens fills no page of the cache; it takes {layer.sink_tokens + page}"
        )
    keys = layer.keys[0, :, state.sink : state.sink + state.pages * page].unflatten(1, (-1, page))
    steps = layer.body.codec.sensitivity(keys)
    return (layer.importance(slice(0, 1))[0][:, None] * steps).flatten()
