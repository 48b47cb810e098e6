# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""What simulated caches share: exact K and V are kept, attention gets what the method would give it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from transformers import PretrainedConfig

from ...cache import PMKVQCache
from ...cache.body import PagedBody
from ...cache.progressive import ProgressiveLayer
from ...cache.rows import RowState
from ...ops import PackedPart


@dataclass(frozen=True)
class SimulatedPart(PackedPart):
    """Pages that stand for `content`, keys and values, float32 [rows, heads, tokens, dim], instead of for codes."""

    content: tuple[torch.Tensor, ...] = ()

    def decode_keys(self, first: int, last: int) -> torch.Tensor:
        """Keys of the pages `[first, last)`, [rows, heads, tokens, dim]."""
        return self.content[0][:, :, first * self.keys.tokens : last * self.keys.tokens]

    def decode_values(self, first: int, last: int) -> torch.Tensor:
        """Values of the pages `[first, last)`, [rows, heads, tokens, dim]."""
        return self.content[1][:, :, first * self.keys.tokens : last * self.keys.tokens]


class SimulatedLayer(ProgressiveLayer):
    """A layer of `PMKVQCache`, pages, schedule, sinks and window included, that also keeps its pages exact.

    What attention gets is made anew from these at each call, so it depends on the tokens alone: not on how they were
    cut into calls, nor on other rows. The exact pages are not counted.
    """

    #: The simulating cache's own options, and the layer's place among the quantized ones.
    own: dict[str, Any]
    place: int

    def _allocate(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super()._allocate(keys, values)
        layout = dataclasses.replace(self.layout, floors=(16, 16))
        self.exact = PagedBody(layout, 0, keys.shape[0], keys.device, "torch")

    def _append_pages(self, rows: slice, state: RowState, keys: torch.Tensor, values: torch.Tensor) -> RowState:
        pages = state.pages + keys.shape[2] // self.page_tokens
        self.exact.resize(pages * self.exact.layout.page_bytes(16))
        self.exact.write(rows, state.pages, 16, keys, values)
        return super()._append_pages(rows, state, keys, values)

    def _exact_pages(self, rows: slice, state: RowState) -> tuple[torch.Tensor, torch.Tensor]:
        """Exact keys and values of all pages of rows of one state, [rows, heads, tokens, dim]."""
        pages = self.exact.pages(rows, 16)[:, : state.pages]
        split = self.layout.keys.nbytes(16)
        return self.layout.keys.decode(pages[..., :split], 16), self.layout.values.decode(pages[..., split:], 16)

    # As in `KVQLayer._select`.
    @torch.inference_mode(False)
    def _select(self, indices: torch.Tensor) -> None:
        super()._select(indices)
        if self.is_initialized:
            self.exact.select(indices.to(self.device))


class SimulatedCache(PMKVQCache):
    """Takes the options of `PMKVQCache`, `defaults` before its own, and those of the method, `own_options`."""

    layer_class: type[SimulatedLayer]
    defaults: MappingProxyType[str, Any] = MappingProxyType({})
    own_options: MappingProxyType[str, Any] = MappingProxyType({})

    def __init__(
        self, model_config: PretrainedConfig, options: dict[str, Any] | None = None, max_length: int | None = None
    ):
        given = {"plan": None, **self.defaults, **(options or {})}
        #: The method's own options.
        self.own = {name: given.pop(name, default) for name, default in self.own_options.items()}
        # Fused kernels would read the codes.
        super().__init__(model_config, {**given, "kernel": "torch"}, max_length)
        place = 0
        for i, layer in enumerate(self.layers):
            if isinstance(layer, ProgressiveLayer):
                arguments = (layer.config, layer.widths, layer.all_widths, layer.max_length)
                self.layers[i] = self.layer_class(*arguments, self.padding, layer.key_scale)
                self.layers[i].own, self.layers[i].place = self.own, place
                place += 1
        self.quantized_layers = [layer for layer in self.layers if isinstance(layer, SimulatedLayer)]
