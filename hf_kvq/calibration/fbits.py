# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""From a model and a budget to a final width for each layer."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel

from ..codecs import WIDTHS
from ..config import PMKVQConfig
from .allocation import allocate, layer_costs, parse_budget, require_cvxpy, require_feasible
from .data import load_texts, token_blocks
from .measured import measured_sensitivity
from .sensitivity import Sensitivity, cached_shapes, sensitivity


#: Ways to find out how much a layer suffers from a width.
MEASURES = {"kl": measured_sensitivity, "gradient": sensitivity}

#: Samples by measure, and tokens per sample, of an unguided calibration.
DEFAULT_SAMPLES, DEFAULT_LENGTH = {"kl": 2, "gradient": 16}, 2048


def calibrate_fbits(
    model: PreTrainedModel,
    max_length: int,
    budget: int | str,
    samples: torch.Tensor | Sequence[torch.Tensor] | None = None,
    config: PMKVQConfig | dict[str, Any] | None = None,
    measure: str = "kl",
    checkpoint: str | os.PathLike | None = None,
) -> PMKVQConfig:
    """Options of a `PMKVQCache` whose final widths, layer by layer, are the best that a budget buys.

    Args:
        model: a causal language model.
        max_length: tokens per request that the budget is for.
        budget: bytes per request for all quantized layers together, or text: "512MiB", "2.25bits"; see `parse_budget`.
        samples: token ids, [samples, tokens]; the default is 2 blocks of the bundled text, or 16 for "gradient".
        config: the cache's other options.
        measure: "kl", see `measured_sensitivity`, or "gradient", see `sensitivity`: to first order, as in the paper.
        checkpoint: folder of finished samples, from which an interrupted call goes on; see `over_samples`.

    Returns:
        `config` with one `fbit` per quantized layer, and with `max_length`. A cache made with it holds, filled, the
        bytes that were allocated.

    Raises:
        ImportError: cvxpy is not installed.
        ValueError: the budget is too small (the message names the smallest feasible one), `config` has options that
            speak about widths or bytes themselves, or the model cannot be calibrated.
        MemoryError: a sample is too long.

    Example:

    ```python
    >>> config = calibrate_fbits(model, max_length=32768, budget="3bits")
    >>> model.generate(**inputs, cache_implementation="pmkvq", cache_config=config.to_dict())
    ```
    """
    config = dataclasses.replace(PMKVQConfig.of(config), max_length=max_length)
    for name in ("budget_bytes", "boundary_layers", "value_fbit"):
        if getattr(config, name):
            raise ValueError(f"{name} would overrule the calibrated widths; leave it out of config")
    if measure not in MEASURES:
        raise ValueError(f"measure must be {' or '.join(map(repr, MEASURES))}; got {measure!r}")
    # Better now than after the long part.
    require_cvxpy()
    shapes = cached_shapes(model)
    require_feasible(layer_costs(shapes, max_length, WIDTHS, config), parse_budget(budget, shapes, max_length))
    if samples is None:
        tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
        samples = token_blocks(load_texts(), tokenizer, DEFAULT_SAMPLES[measure], DEFAULT_LENGTH)
    found = MEASURES[measure](model, samples, config, checkpoint=checkpoint)
    return fbits_for_budget(found, max_length, budget, config)


def fbits_for_budget(
    measured: Sensitivity, max_length: int, budget: int | str, config: PMKVQConfig | None = None
) -> PMKVQConfig:
    """The second half of `calibrate_fbits`, for sensitivities that were measured already; 16 bits is a choice too."""
    config = config or PMKVQConfig()
    widths = (16, *measured.widths)
    exact = measured.total.new_zeros(len(measured.layers), 1)
    costs = layer_costs(measured.shapes, max_length, widths, config)
    size = parse_budget(budget, measured.shapes, max_length)
    fbits = allocate(torch.cat([exact, measured.total], dim=1).numpy(), costs, size, widths)
    return dataclasses.replace(config, fbit=fbits, max_length=max_length)
