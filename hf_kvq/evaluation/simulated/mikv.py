# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""MiKV (arXiv 2402.18096, "No Token Left Behind"): important tokens at a high width, the others at a low one.

Follows the paper: a token's importance is the attention it has received, as in H2O, per KV head; both widths have
groups along the channels of a token; keys of the low width are balanced by factors per channel,
b = sqrt(max |q| / max |k|), which even out their outliers; recent tokens are exact.

Leaves out: tokens that are demoted later on, which would quantize stored data anew. A token has its width once and for
all when its page leaves the window, the same share of each page being important. Counted are the queries of the tokens
from the page's first to the last one of a window behind it, whichever call they come in, over exact keys. The factors
are those of the first page and the window behind it, which stand for the prompt.
"""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import Any

import torch
from transformers import PretrainedConfig

from ...cache.layer import pick
from ...cache.rows import RowState
from ...codecs import WIDTHS, quantize
from ...codecs.uniform import decode_groups, scale_of
from ...ops import PackedPart
from .base import SimulatedCache, SimulatedLayer, SimulatedPart


# Options of `PMKVQCache` that would change what MiKV is.
_FIXED = frozenset("plan fbit value_fbit initial_bits key_codec key_shrink transform key_clip value_clip".split())


def received_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention that each of the last tokens gets from the queries of all of these.

    Args:
        query: queries of the last tokens, [rows, query heads, queries, dim].
        keys: keys of all tokens, [rows, heads, tokens, dim].
        scaling, softcap, sinks: as in `hf_kvq.ops.naive.attend`.

    Returns:
        Sums over the queries, and over the query heads of each KV head, float64 [rows, heads, queries].
    """
    heads, count, tokens = keys.shape[1], query.shape[2], keys.shape[2]
    # In float64 no rank depends on the order of additions, which another batch may change.
    scores = query.double().unflatten(1, (heads, -1)) @ keys.double().unsqueeze(2).transpose(-1, -2) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(tokens, device=keys.device)
    scores = scores.masked_fill(position > position[tokens - count :, None], float("-inf"))
    if sinks is not None:
        extra = sinks.double().view(1, heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([extra, scores], dim=-1)
    return scores.softmax(-1).sum((2, 3))[..., -count:]


def important_count(share: float, tokens: int) -> int:
    """Important ones of the tokens of a page."""
    return round(share * tokens)


def most_important(importance: torch.Tensor, share: float) -> torch.Tensor:
    """The share of the tokens [rows, heads, tokens] with the highest importance, the first of equal ones; bool."""
    order = importance.argsort(dim=-1, descending=True, stable=True)
    chosen = order[..., : important_count(share, importance.shape[-1])]
    return torch.zeros_like(importance, dtype=torch.bool).scatter_(-1, chosen, True)


def balancer(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Factors on key channels, [rows, heads, dim] in the keys' dtype; 1 where a channel of either is all zero.

    Args:
        query: [rows, query heads, queries, dim].
        keys: [rows, heads, tokens, dim].
    """
    peaks = [x.float().abs().unflatten(1, (keys.shape[1], -1)).amax((2, 3)) for x in (query, keys)]
    factors = (peaks[0] / peaks[1]).sqrt()
    return torch.where(factors.isfinite() & (factors > 0), factors, 1.0).to(keys.dtype)


def simulate(x: torch.Tensor, bits: int, group_size: int) -> torch.Tensor:
    """[..., dim] as it comes back from groups along the channels, float32."""
    if bits == 16:
        return x.float()
    codes, low, high = quantize(x, bits, group_size)
    return decode_groups(codes, low, scale_of(low, high, bits), group_size, -1)


class MiKVLayer(SimulatedLayer):
    """A layer whose packed tokens have one of two widths each, head by head."""

    def reset(self) -> None:
        super().reset()
        #: Queries of the pending columns.
        self._query: torch.Tensor | None = None

    def _allocate(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super()._allocate(keys, values)
        batch, heads, _, dim = keys.shape
        # Per row: queries of the recent tokens [query heads, tokens, dim], which packed tokens are important, bool
        # [heads, tokens], and the balancer [heads, dim].
        self.queries: list[torch.Tensor | None] = [None] * batch
        self.important = [keys.new_zeros(heads, 0, dtype=torch.bool)] * batch
        self.balance = [keys.new_ones(heads, dim)] * batch

    # --- which tokens matter -------------------------------------------------------------------------------------

    @property
    def prompt(self) -> None:
        """Nothing: a prompt's queries, and how it attends, have to be seen by `attend`."""
        return None

    def attend(
        self,
        query: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float,
        is_causal: bool = True,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        # Of layers that share their keys, the first is the one that has made them.
        if self._query is None:
            self._query, self._attention = query.detach(), (scaling, softcap, sinks)
        return super().attend(query, mask, scaling, is_causal, softcap, sinks)

    def settle(self) -> None:
        if self._pending is not None and self._query is None:
            raise RuntimeError(
                "mikv ranks tokens by the attention they get, but was not shown the queries that attend to them; load "
                "the model with attn_implementation='sdpa'"
            )
        super().settle()
        self._query = None

    def _store(self, rows: slice, index: slice | torch.Tensor, *new: torch.Tensor) -> RowState:
        state = self.states[rows.start]
        self._stop = state.tokens(self.page_tokens) + new[0].shape[2]
        coming = [pick(self._query[rows], index)], [new[0]]
        if state.recent:
            coming[0].insert(0, torch.stack([x[:, : state.recent] for x in self.queries[rows]]))
            coming[1].insert(0, self.recent[0][rows, :, : state.recent])
        #: Queries and keys of the last tokens, at least of those that are neither sinks nor packed.
        self._last = tuple(torch.cat(x, dim=2) for x in coming)
        state = super()._store(rows, index, *new)
        queries, self._last = self._last[0], None
        self.queries[rows] = queries[:, :, queries.shape[2] - state.recent :].clone().unbind()
        return state

    def _append_pages(self, rows: slice, state: RowState, keys: torch.Tensor, values: torch.Tensor) -> RowState:
        page, start = self.page_tokens, state.tokens(self.page_tokens)
        queries, last = (x[:, :, x.shape[2] - (self._stop - start) :] for x in self._last)
        before = self._packed_or_sink_keys(rows, state)
        chosen = []
        for first in range(0, keys.shape[2], page):
            stop = first + page + self.window
            seen = torch.cat([*before, last[:, :, :stop]], dim=2)
            importance = received_attention(queries[:, :, first:stop], seen, *self._attention)[..., :page]
            chosen.append(most_important(importance, self.own["important"]))
        if self.own["balancer"] and not state.pages:
            first = slice(page + self.window)
            self.balance[rows] = balancer(queries[:, :, first], last[:, :, first]).unbind()
        for row, more in zip(range(rows.start, rows.stop), torch.cat(chosen, dim=2)):
            self.important[row] = torch.cat([self.important[row][:, : state.pages * page], more], dim=1)
        return super()._append_pages(rows, state, keys, values)

    def _packed_or_sink_keys(self, rows: slice, state: RowState) -> list[torch.Tensor]:
        """Exact keys of the sink and of all pages, [rows, heads, tokens, dim] each."""
        sink = self.sink[0][rows, :, : state.sink]
        if not state.pages:
            return [sink]
        part = super()._packed_part(rows, state, None)
        exact = SimulatedPart(**vars(part), content=self._exact_pages(rows, state))
        return [sink, *(keys for _, _, keys, _ in exact.blocks(state.pages * self.page_tokens))]

    @torch.inference_mode(False)
    def _select(self, indices: torch.Tensor) -> None:
        super()._select(indices)
        if self.is_initialized:
            for name in ("queries", "important", "balance"):
                held = getattr(self, name)
                setattr(self, name, [held[i] for i in indices.tolist()])

    # --- what they come back as ----------------------------------------------------------------------------------

    def _packed_part(self, rows: slice, state: RowState, mask: torch.Tensor | None) -> PackedPart:
        part = super()._packed_part(rows, state, mask)
        keys, values = self._exact_pages(rows, state)
        size = self.config.group_size
        important = torch.stack([x[:, : keys.shape[2]] for x in self.important[rows]])[..., None]
        factors = torch.stack(self.balance[rows])[:, :, None]
        low = simulate(keys * factors, self.widths[0], size) / factors, simulate(values, self.widths[1], size)
        high = (simulate(x, self._high(bits), size) for x, bits in zip((keys, values), self.widths))
        held = tuple(torch.where(important, many, few) for many, few in zip(high, low))
        return SimulatedPart(**vars(part), content=held)

    def _high(self, low: int) -> int:
        """The important tokens' width, where that of the others is `low`."""
        return max(self.own["high_bits"], low)

    def nbytes(self) -> int:
        """Exact tokens and the attention that each recent one got, 4 bytes per head; pages, and the balancer."""
        if not self.is_initialized:
            return 0
        self.settle_idle()
        shape = self.layout.shape
        exact = sum(x.nbytes for x in (*self.sink, *self.recent, *(self._pending or ())))
        sums = 4 * shape.heads * self.recent[0].shape[2] * len(self.states)
        factors = self.own["balancer"] * shape.heads * shape.key_dim * shape.dtype.itemsize
        pages = sum(state.pages * self._page_bytes() + bool(state.pages) * factors for state in self.states)
        return exact + sums + pages

    def _page_bytes(self) -> int:
        """Codes and (min, max) of each token at its width, and a bit per token and head that says which it is."""
        shape, page = self.layout.shape, self.page_tokens
        many, bits = important_count(self.own["important"], page), page
        for low, dim in zip(self.widths, (shape.key_dim, shape.value_dim)):
            for tokens, width in ((many, self._high(low)), (page - many, low)):
                ranges = 2 * math.ceil(dim / self.config.group_size) if width < 16 else 0
                numbers = 8 * shape.dtype.itemsize
                bits += tokens * (dim * (width if width < 16 else numbers) + ranges * numbers)
        return math.ceil(shape.heads * bits / 8)


class MiKVCache(SimulatedCache):
    """The `important` share of tokens at `high_bits`, the others at `low_bits`, their keys with or without balancer.

    `boundary_layers` is what can raise both; else the widths and the groups, along channels, are the method's own.
    """

    layer_class = MiKVLayer
    own_options = MappingProxyType({"important": 0.25, "high_bits": 8, "low_bits": 2, "balancer": True})

    def __init__(
        self, model_config: PretrainedConfig, options: dict[str, Any] | None = None, max_length: int | None = None
    ):
        options = options or {}
        own = {**self.own_options, **options}
        if not (isinstance(own["important"], (int, float)) and 0 <= own["important"] <= 1):
            raise ValueError(f"important must be a share, between 0 and 1; got {own['important']!r}")
        widths = own["low_bits"], own["high_bits"]
        if not (all(bits in WIDTHS for bits in widths) and widths[0] < widths[1]):
            raise ValueError(
                f"low_bits and high_bits must be two of {', '.join(map(str, WIDTHS))}, low_bits the smaller; got "
                f"low_bits={widths[0]!r}, high_bits={widths[1]!r}"
            )
        if given := sorted(name for name in _FIXED if options.get(name) is not None):
            raise ValueError(
                f"mikv has widths and groups of its own; leave {', '.join(given)} out, and say high_bits and low_bits"
            )
        fixed = {"fbit": widths[0], "initial_bits": widths[0], "key_codec": "token"}
        super().__init__(model_config, {**options, **fixed}, max_length)
