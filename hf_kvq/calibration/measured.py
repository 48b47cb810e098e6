# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""What one layer at a lower width costs by itself: measured, through a cache, rather than by gradients."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import torch
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ..cache.base import stock_layers
from ..cache.layer import KVQLayer
from ..cache.layout import LayerLayout
from ..cache.pmkvq import PMKVQCache
from ..config import PMKVQConfig
from ..registration import cache_argument
from .samples import over_parts
from .sensitivity import Sensitivity, cached_shapes, check_request, frozen, measurement_facts, packed_tokens


#: Rows that run together: bigger products, for the memory of as many ordinary caches.
DEFAULT_ROWS = 8


@torch.no_grad()
def measured_sensitivity(
    model: PreTrainedModel,
    samples: torch.Tensor | Sequence[torch.Tensor],
    config: PMKVQConfig | dict[str, Any] | None = None,
    widths: Sequence[int] = (8, 4, 2),
    chunk: int = 128,
    rows: int = DEFAULT_ROWS,
    desc: str | None = "measured sensitivity",
    checkpoint: str | os.PathLike | None = None,
) -> Sensitivity:
    """Sensitivity of every quantized layer to every width: what it does to the next token when all others are exact.

    s_{i,b} = KL(exact || layer i at b bits), the mean over the predicted tokens. The sample is fed in chunks, so that
    all but the newest tokens are read from the cache, as `hf_kvq.evaluation` does. This takes layers x widths forward
    passes and no backward pass: more time than `sensitivity`, and less memory.

    Args:
        model: a causal language model.
        samples: token ids, [samples, tokens], or a sequence of [tokens].
        config: the cache's options; `fbit`, `initial_bits` and budgets are overruled.
        widths: the widths b, all below 16.
        chunk: tokens per forward.
        rows: how many (layer, width) run together, as rows of a batch, next to an exact one.
        desc: label of the progress bar; None for no bar.
        checkpoint: folder of finished samples, from which an interrupted call goes on; see `over_samples`.

    Raises:
        ValueError: a width or a sample is impossible, or a sample is too short to fill a page.
        MemoryError: a sample is too long, or there are too many rows.
    """
    config, widths = PMKVQConfig.of(config), tuple(widths)
    check_request(samples, widths)
    if rows < 1 or chunk < 1:
        raise ValueError(f"rows and chunk must be 1 at least; got {rows} and {chunk}")
    shapes = cached_shapes(model)
    layers = stock_layers(model.config.get_text_config(decoder=True))[1]
    probes = [(layer, bits) for layer in layers for bits in widths]
    groups = [probes[i : i + rows] for i in range(0, len(probes), rows)]

    def measure(ids: torch.Tensor, group: int) -> torch.Tensor:
        for shape in shapes:
            packed_tokens(LayerLayout.of(config, shape), len(ids))
        return divergence(model, ids, groups[group], config, chunk)

    facts = {**measurement_facts("kl", model, config, widths), "chunk": chunk, "rows": rows}
    with frozen(model):
        found = over_parts(measure, samples, len(groups), facts, checkpoint, desc)
    total = torch.stack([torch.cat(parts) for parts in found]).mean(0).view(len(layers), len(widths))
    # Where there is hardly any divergence, rounding may take it below zero.
    total = total.clamp(min=0)
    return Sensitivity(tuple(layers), shapes, widths, total, len(samples))


def divergence(
    model: PreTrainedModel, ids: torch.Tensor, probes: Sequence[tuple[int, int]], config: PMKVQConfig, chunk: int
) -> torch.Tensor:
    """KL from the exact cache, in nats per token, of each (layer, width) alone.

    Args:
        model: a causal language model.
        ids: token ids, [tokens].
        probes: layers and the width of each; every one is a row of a batch.
        config: the cache's other options.
        chunk: tokens per forward.

    Returns:
        float64 [probes]
    """
    cache = probing_cache(model, probes, config, len(ids))
    total = torch.zeros(len(probes), dtype=torch.float64)
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk].to(model.device)
        logits = model(
            input_ids=part.expand(1 + len(probes), -1), use_cache=True, **{cache_argument(model): cache}
        ).logits
        # The last token of a sample predicts nothing that is known.
        exact, *others = (row[: len(ids) - 1 - start].float().log_softmax(-1) for row in logits)
        total += torch.stack([(exact.exp() * (exact - row)).sum() for row in others]).double().cpu()
    return total / (len(ids) - 1)


def probing_cache(
    model: PreTrainedModel, probes: Sequence[tuple[int, int]], config: PMKVQConfig, length: int
) -> Cache:
    """An ordinary cache for a batch of an exact row and, for each probe, one with a single quantized layer."""
    text_config = model.config.get_text_config(decoder=True)
    layers, quantized = stock_layers(text_config)
    for i in quantized:
        layers[i] = ProbingLayer({})
    for row, (i, bits) in enumerate(probes, start=1):
        fixed = dataclasses.replace(config, fbit=bits, value_fbit=None, initial_bits=bits, budget_bytes=None)
        layers[i].probes[row] = PMKVQCache(text_config, fixed, length).layers[i]
    return Cache(layers=layers)


class ProbingLayer(DynamicLayer):
    """An ordinary layer, some rows of which come back as a quantized layer would show them.

    Args:
        probes: by row, the layer that its keys and values are read through.
    """

    def __init__(self, probes: dict[int, KVQLayer]):
        super().__init__()
        self.probes = probes

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        for row, probe in self.probes.items():
            probe.update(key_states[row : row + 1], value_states[row : row + 1])
            # What the quantized layer was given is all there is of this row: nothing is lost.
            keys[row : row + 1], values[row : row + 1] = probe.dequantize(False), probe.dequantize(True)
        return keys, values
