# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""PM-KVQ for one layer: 16 bits while the budget lasts, then 8, 4 and 2 in place (arXiv 2505.18610)."""

from __future__ import annotations

import dataclasses

import torch
from transformers.utils import logging

from ..config import PMKVQConfig
from ..ops import require_kernel
from .body import PagedBody
from .layer import KVQLayer, count_tokens
from .layout import LayerLayout, LayerShape, length_for_budget
from .padding import Padding
from .rows import RowState


logger = logging.get_logger(__name__)


class BudgetExceededError(RuntimeError):
    """A request outgrew its byte budget with `on_overflow="error"`. The cache holds what it held before."""


class ProgressiveLayer(KVQLayer):
    """A layer whose body is narrowed, whole, each time it no longer fits its budget, down to its final widths.

    Args:
        config: the cache's options.
        widths: final widths of this layer's keys and values. Each stops at its own.
        all_widths: those of all quantized layers; together they share `config.budget_bytes`.
        max_length: tokens per request that the budget is made for, unless `config.budget_bytes` says it.
        padding: the padding columns of the batch, shared by the layers of a cache.
        key_scale: λ of this layer, float32 [heads, key_dim]; part of the plan, so its bytes are not the cache's.
    """

    def __init__(
        self,
        config: PMKVQConfig,
        widths: tuple[int, int],
        all_widths: tuple[tuple[int, int], ...],
        max_length: int,
        padding: Padding | None = None,
        key_scale: torch.Tensor | None = None,
    ):
        self.config, self.widths, self.all_widths, self.max_length = config, widths, all_widths, max_length
        #: Width at which the body narrows no further.
        self.fbit = min(widths)
        self.key_scale = key_scale
        super().__init__(
            padding if padding is not None else Padding(),
            require_kernel(config.kernel),
            config.sink_tokens,
            config.window,
            max(config.initial_bits, self.fbit),
        )

    @property
    def budget(self) -> int:
        """Bytes per row that `max_length` tokens take at the final widths, everything counted."""
        return self.layout.bytes_for(self.max_length, self.fbit)

    def _allocate(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        shape = LayerShape(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype)
        scale = self.key_scale
        if scale is not None:
            if tuple(scale.shape) != (shape.heads, shape.key_dim):
                raise ValueError(
                    f"the plan's {tuple(scale.shape)} factors (KV heads, head_dim) do not go with this layer's keys, "
                    f"which have {(shape.heads, shape.key_dim)}"
                )
            scale = scale.to(keys.device)
        self.layout = LayerLayout.of(self.config, shape, keys.device.type, scale, self.widths)
        if self.config.budget_bytes is not None:
            self.max_length = length_for_budget(self.layout, self.all_widths, self.config.budget_bytes)
        self.page_tokens = self.layout.page_tokens
        sink, pages, recent = self.layout.split(self.max_length)
        batch = keys.shape[0]
        # The schedule goes by what was budgeted, whatever is allocated later on: a row that needs more must not change
        # the widths of the others.
        self.body_bytes, self._room = pages * self.layout.page_bytes(self.fbit), self.max_length
        self.body = PagedBody(self.layout, self.body_bytes, batch, keys.device, self.kernel)
        self.sink, self.recent = (self._exact((keys, values), batch, n) for n in (sink, recent))

    def check_room(self, batch: int, new_columns: int) -> None:
        """Raise `BudgetExceededError` if the budget forbids `new_columns` more columns."""
        # How many tokens a number of bytes holds is known once the layer's shape is.
        is_known = self.is_initialized or self.config.budget_bytes is None
        if self.config.on_overflow != "error" or not is_known:
            return
        for row in range(batch):
            tokens = count_tokens(self.padding, row, 0, self.columns + new_columns)
            if tokens > self.max_length:
                raise BudgetExceededError(
                    f"row {row} would hold {tokens} tokens, but its budget ends at {self.max_length} tokens of "
                    f"{self.fbit} bits; the cache still holds what it held. Raise max_length or budget_bytes, lower "
                    "fbit, or use on_overflow='grow'"
                )

    def _make_room(self, tokens: int) -> None:
        """Past the budget at the final width: allocate more, in steps that keep the cost per token constant."""
        if tokens <= self._room:
            return
        logger.warning_once(
            f"a request outgrew the KV cache's budget of {self.max_length} tokens; the cache keeps its final width "
            "and grows (on_overflow='grow'). Give max_length or budget_bytes to reserve enough from the start."
        )
        self._room = max(tokens, self._room + self._room // 2)
        sink, pages, recent = self.layout.split(self._room)
        with torch.inference_mode(False):
            self.body.resize(pages * self.layout.page_bytes(self.fbit))
            for name, size in (("sink", sink), ("recent", recent)):
                old = getattr(self, name)
                new = self._exact(old, len(self.states), max(size, old[0].shape[2]))
                for source, target in zip(old, new):
                    target[:, :, : source.shape[2]] = source
                setattr(self, name, new)

    def _append_pages(self, rows: slice, state: RowState, keys: torch.Tensor, values: torch.Tensor) -> RowState:
        pages = state.pages + keys.shape[2] // self.page_tokens
        bits = self.layout.bits_for(pages, self.body_bytes, self.fbit, state.bits)
        # Pages that `crop` left short can outnumber the budget's although their tokens do not.
        self.body.resize(pages * self.layout.page_bytes(bits))
        if bits < state.bits:
            self.body.narrow(rows, state.pages, state.bits, bits)
        self.body.write(rows, state.pages, bits, keys, values)
        return dataclasses.replace(state, bits=bits, pages=pages)
