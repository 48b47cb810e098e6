# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Quest (arXiv 2406.10774) on top of `PMKVQCache`: which pages a query attends to, the combination of PM-KVQ's C.6.

Follows the paper: each page has the minimum and maximum of every key channel, which bound the score that a query can
have there; each query head attends to the pages with the highest bounds, and the first two layers to all. Exact sinks,
the window and a prompt's attention to itself are untouched. Leaves out: pages are only taken from the packed body, and
several queries in one call each choose their own, as if decoded one by one. Bounds are of the exact keys.
"""

from __future__ import annotations

import dataclasses
from types import MappingProxyType
from typing import Any

import torch

from ...cache.rows import RowState
from ...ops import PackedPart
from .base import SimulatedCache, SimulatedLayer


def visible_pages(query: torch.Tensor, low: torch.Tensor, high: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` pages with the highest upper bounds, bool [rows, query heads, queries, pages].

    Args:
        query: [rows, query heads, queries, dim].
        low, high: least and largest of each key channel in each page, [rows, heads, pages, dim].
        count: pages per query; more than there are means all.
    """
    groups = query.shape[1] // low.shape[1]
    low, high = (x.float().repeat_interleave(groups, dim=1).transpose(-1, -2) for x in (low, high))
    query = query.float()
    bound = query.clamp(min=0) @ high + query.clamp(max=0) @ low
    best = bound.topk(min(count, bound.shape[-1]), dim=-1).indices
    return torch.zeros_like(bound, dtype=torch.bool).scatter_(-1, best, True)


class QuestLayer(SimulatedLayer):
    """A layer that hides most of its body from each query."""

    @property
    def is_dense(self) -> bool:
        """Whether all queries see everything."""
        return self.place < self.own["dense_layers"]

    def attend(self, query: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        self._query = query
        try:
            return super().attend(query, *args, **kwargs)
        finally:
            self._query = None

    def _packed_part(self, rows: slice, state: RowState, mask: torch.Tensor | None) -> PackedPart:
        part = super()._packed_part(rows, state, mask)
        query = getattr(self, "_query", None)
        if query is None or self.is_dense or part.short:
            return part
        page = self.own["page"]
        low, high = self._exact_pages(rows, state)[0].unflatten(2, (-1, page)).aminmax(dim=3)
        seen = visible_pages(query[rows], low, high, self.own["budget"] // page).repeat_interleave(page, dim=-1)
        if mask is None:
            return dataclasses.replace(part, mask=seen)
        if mask.dtype == torch.bool:
            return dataclasses.replace(part, mask=mask & seen)
        return dataclasses.replace(part, mask=mask.masked_fill(~seen, float("-inf")))

    def nbytes(self) -> int:
        """Bytes of the layer, and of (min, max) of each key channel in each page, in the model's dtype."""
        held = super().nbytes()
        if self.is_initialized and not self.is_dense:
            tokens = sum(state.pages for state in self.states) * self.page_tokens
            shape = self.layout.shape
            held += tokens // self.own["page"] * 2 * shape.heads * shape.key_dim * shape.dtype.itemsize
        return held


class QuestCache(SimulatedCache):
    """`PMKVQCache` where a query reads pages of `page` tokens, `budget` tokens in all, but in `dense_layers`."""

    layer_class = QuestLayer
    own_options = MappingProxyType({"page": 16, "budget": 512, "dense_layers": 2})

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        page, budget = self.own["page"], self.own["budget"]
        if not (16 % page == 0 and budget >= page):
            raise ValueError(f"page must divide 16 and be at most the budget; got page={page}, budget={budget}")
