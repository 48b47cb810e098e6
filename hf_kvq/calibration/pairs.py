# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""A width for the keys and one for the values of each layer (KVTuner, arXiv 2502.04420), as an integer program."""

from __future__ import annotations

import dataclasses
from itertools import product

import torch

from ..cache.layout import LayerLayout
from ..config import PMKVQConfig
from .allocation import allocate, parse_budget
from .sensitivity import Sensitivity


def pairs_for_budget(
    measured: Sensitivity, max_length: int, budget: int | str, config: PMKVQConfig | None = None
) -> PMKVQConfig:
    """Options with the pairs of final widths, layer by layer, that lose the least of all that a budget buys.

    As `fbits_for_budget`, but keys and values may differ; a layer may also stay at 16 bits, with both.

    Args:
        measured: sensitivities of keys and of values.
        max_length: tokens per request.
        budget: bytes per request, or text; see `parse_budget`.
        config: the cache's other options.

    Returns:
        `config` with one `fbit` and one `value_fbit` per quantized layer, and with `max_length`.

    Raises:
        ImportError: cvxpy is not installed.
        ValueError: the budget is too small, or keys and values were not measured apart.
    """
    if measured.keys is None or measured.values is None:
        raise ValueError("pairs of widths need the sensitivities of keys and of values; measure with `sensitivity`")
    config = config or PMKVQConfig()
    pairs = [(16, 16), *product(measured.widths, repeat=2)]
    both = measured.keys[:, :, None] + measured.values[:, None, :]
    losses = torch.cat([both.new_zeros(len(both), 1), both.flatten(1)], dim=1)
    costs = [
        [LayerLayout.of(config, shape, floors=pair).bytes_for(max_length, min(pair)) for pair in pairs]
        for shape in measured.shapes
    ]
    size = parse_budget(budget, measured.shapes, max_length)
    chosen = [pairs[i] for i in allocate(losses.numpy(), costs, size, range(len(pairs)))]
    keys, values = zip(*chosen)
    return dataclasses.replace(config, fbit=keys, value_fbit=values, max_length=max_length)
