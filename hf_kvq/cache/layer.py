# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""One attention layer of a quantized cache: exact sink, packed body, exact recent tokens, row by row."""

from __future__ import annotations

import dataclasses
import weakref
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from ..ops import ExactPart, PackedPart, Part, attend
from .body import PagedBody
from .handle import KVHandle
from .layout import LayerLayout
from .padding import Padding
from .rows import RowState, runs
from .static import NotStaticError, StaticSteps


_DEQUANTIZED_AT_ONCE = 4096


class KVQLayer(CacheLayerMixin):
    """What every method has in common; a method adds how tokens become pages and how much room there is.

    Rows are independent: what a row stores never depends on its neighbours, and padding is not stored at all. New
    tokens are first *pending*: attention sees them exact, and they are stored right after it.

    Args:
        padding: the padding columns of the batch, shared by the layers of a cache.
        kernel: implementation of attention, see `hf_kvq.ops`.
        sink_tokens: first tokens of each row, kept exact.
        window: least number of recent tokens that stay exact.
        initial_bits: width that a row's first page would have.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = True
    #: Whether later layers of the model attend to what this one holds, too.
    is_shared = False

    def __init__(self, padding: Padding, kernel: str, sink_tokens: int, window: int, initial_bits: int):
        self.padding, self.kernel = padding, kernel
        self.sink_tokens, self.window, self.initial_bits = sink_tokens, window, initial_bits
        self.reset()

    # --- what a method adds --------------------------------------------------------------------------------------

    #: Tokens of one page.
    page_tokens: int

    @abstractmethod
    def _allocate(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Set `layout`, `body`, `sink` and `recent` for K and V like these, [batch, heads, any, head_dim]."""

    @abstractmethod
    def _make_room(self, tokens: int) -> None:
        """Before a row comes to hold `tokens` tokens."""

    @abstractmethod
    def _append_pages(self, rows: slice, state: RowState, keys: torch.Tensor, values: torch.Tensor) -> RowState:
        """Pack [rows, heads, n * page_tokens, head_dim] behind the pages of rows of one state."""

    def check_room(self, batch: int, new_columns: int) -> None:  # noqa: B027
        """Raise if `new_columns` more columns are not allowed; the default allows any number."""

    def observe_query(self, query: torch.Tensor) -> None:  # noqa: B027
        """See the queries of the pending columns, [batch, query heads, columns, head_dim], before they are stored."""

    def forget_query(self, has_run: bool) -> None:  # noqa: B027
        """After a static step that failed: undo what `observe_query` did in it, if the device has done it."""

    def count_appended(self, count: int) -> None:  # noqa: B027
        """After static steps in which every row got `count` tokens."""

    # --- storing -------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget all tokens and give the memory back."""
        self.columns = 0
        #: Counts what makes the handles returned so far stale.
        self.changes = getattr(self, "changes", 0) + 1
        self.states: list[RowState] = []
        self.layout: LayerLayout | None = None
        self.body: PagedBody | None = None
        self.sink: tuple[torch.Tensor, torch.Tensor] | None = None
        self.recent: tuple[torch.Tensor, torch.Tensor] | None = None
        self._pending: tuple[torch.Tensor, torch.Tensor] | None = None
        self._handles: list[weakref.ref[KVHandle]] = []
        self.static = StaticSteps(self)
        self.is_initialized = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate for the batch, heads, head_dims, dtype and device of [batch, heads, any, head_dim]."""
        self.device = key_states.device
        # A cache made under inference_mode must go on working outside it.
        with torch.inference_mode(False):
            self._allocate(key_states, value_states)
        self.states = [RowState(self.initial_bits)] * key_states.shape[0]
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take in new tokens, [batch, heads, new columns, head_dim]; they count as cached from now on.

        Returns:
            Handles that stand for all keys and all values, see `KVHandle`.

        Raises:
            ValueError: the shapes do not go with what is cached.
            BudgetExceededError: the layer's budget forbids it; nothing has been stored.
        """
        if self.static.is_open:
            return self.static.update(key_states, value_states)
        self.settle()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._check_shapes(key_states, value_states)
        self.check_room(key_states.shape[0], key_states.shape[2])
        self._pending = (key_states, value_states)
        self.columns += key_states.shape[2]
        self.changes += 1
        handles = KVHandle(self, False, key_states), KVHandle(self, True, value_states)
        self._handles = [weakref.ref(handle) for handle in handles]
        return handles

    def settle_idle(self) -> None:
        """Store the pending tokens unless somebody may still attend to them. So looking at a cache changes nothing."""
        if self._pending is None or all(handle() is None for handle in self._handles):
            self.settle()

    def settle_attended(self) -> None:
        """Store the pending tokens, as attention is done; those of a shared layer are to stay exact for the others."""
        if not self.is_shared and not self.static.is_open:
            self.settle()

    def settle(self) -> None:
        """Store the pending tokens."""
        self.static.take()
        if self._pending is None:
            return
        pending, start = self._pending, self._pending_start
        self._pending = None
        for rows in self._runs():
            new = self.padding.tokens(rows.start, start, self.columns)
            # Whatever graph made these tensors ends here.
            tokens = (pick(pick(x, rows, dim=0), new).detach().to(s) for x, s in zip(pending, self.sink))
            self.states[rows] = [self._store(rows, new, *tokens)] * (rows.stop - rows.start)

    def _store(self, rows: slice, index: slice | torch.Tensor, *new: torch.Tensor) -> RowState:
        """Append keys and values [rows, heads, n, head_dim] to rows of one state; returns their new state.

        `index` tells which of the pending columns these tokens are.
        """
        state, count = self.states[rows.start], new[0].shape[2]
        self._make_room(state.tokens(self.page_tokens) + count)

        if state.sink < self.sink_tokens and count:
            taken = min(self.sink_tokens - state.sink, count)
            for store, x in zip(self.sink, new):
                store[rows, :, state.sink : state.sink + taken] = x[:, :, :taken]
            new = tuple(x[:, :, taken:] for x in new)
            state = dataclasses.replace(state, sink=state.sink + taken)

        leaving = max(0, state.recent + new[0].shape[2] - self.window) // self.page_tokens * self.page_tokens
        if leaving:
            if state.recent:
                new = tuple(torch.cat([s[rows, :, : state.recent], x], dim=2) for s, x in zip(self.recent, new))
            state = dataclasses.replace(state, recent=0)
            state = self._append_pages(rows, state, *(x[:, :, :leaving] for x in new))
            new = tuple(x[:, :, leaving:] for x in new)
        stop = state.recent + new[0].shape[2]
        for store, x in zip(self.recent, new):
            pick(pick(store, rows, dim=0), slice(state.recent, stop)).copy_(x)
        return RowState(state.bits, state.sink, state.pages, stop, state.short)

    # --- attending -----------------------------------------------------------------------------------------------

    @property
    def prompt(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """K and V if all of them are pending: a prompt, which attends to itself exactly."""
        return self._pending if self._pending_start == 0 else None

    def attend(
        self,
        query: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float,
        is_causal: bool = True,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of `query` over everything cached, without dequantizing the history at once.

        Args:
            query: [batch, query heads, queries, head_dim]; the queries belong to the newest columns.
            mask: broadcasts against [batch, query heads, queries, columns]; bool (true = visible), additive, or None.
            scaling: factor on the scores.
            is_causal: without a mask, queries do not see the columns after their own.
            softcap, sinks: see `hf_kvq.ops.naive.attend`.

        Returns:
            [batch, query heads, queries, head_dim] in the query's dtype.
        """
        results = [
            attend(pick(query, rows, dim=0), parts, scaling, self.kernel, softcap, sinks)
            for rows, parts in self._row_parts(query, mask, is_causal)
        ]
        return results[0] if len(results) == 1 else torch.cat(results)

    def _row_parts(
        self, query: torch.Tensor, mask: torch.Tensor | None, is_causal: bool
    ) -> Iterator[tuple[slice, list[Part]]]:
        """All tokens of all rows, those together that can be."""
        if self.static.is_open:
            if mask is not None:
                raise NotStaticError("the model masks what it attends to")
            yield from self.static.parts(query)
            return
        for rows in self._runs():
            row_mask = mask[rows] if mask is not None and mask.shape[0] > 1 else mask
            yield rows, self._parts(rows, query.shape[2], row_mask, is_causal)

    def _parts(self, rows: slice, queries: int, mask: torch.Tensor | None, is_causal: bool) -> list[Part]:
        """All tokens of rows of one state."""
        state = self.states[rows.start]
        tokens = self.padding.tokens(rows.start, 0, self.columns)
        if mask is not None:
            # A mask may cover more columns than there are, or one for all.
            mask = mask[..., : self.columns].expand(*mask.shape[:-1], self.columns)
            mask = pick(mask, tokens, dim=-1)
        elif is_causal and queries > 1:
            column = torch.arange(self.columns, device=self.device)
            mask = (pick(column, tokens, dim=0) <= column[self.columns - queries :, None])[None, None]

        def span(start: int, tokens: int) -> torch.Tensor | None:
            return None if mask is None else mask[..., start : start + tokens]

        packed = state.body(self.page_tokens)
        parts: list[Part] = []
        if state.pages:
            parts.append(self._packed_part(rows, state, span(state.sink, packed)))
        start = 0
        for is_recent, (keys, values) in enumerate(self._exact_pieces(rows)):
            if is_recent == 1:
                start += packed
            parts.append(ExactPart(keys, values, span(start, keys.shape[2])))
            start += keys.shape[2]
        return parts

    def _packed_part(
        self, rows: slice, state: RowState, mask: torch.Tensor | None, held: torch.Tensor | None = None
    ) -> PackedPart:
        """The packed tokens of rows of one state; `mask` covers just them.

        With `held`, int64 [rows], all places of pages, whatever their number is now.
        """
        pages = self.body.pages(rows, state.bits, state.pages if held is None else None)
        layout = self.layout
        return PackedPart(pages, layout.keys, layout.values, layout.widths(state.bits), mask, state.short, held)

    def _exact_pieces(self, rows: slice) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of the exact tokens: the sink, and behind the body the recent and the pending ones."""
        state = self.states[rows.start]
        stored = ((self.sink, state.sink), (self.recent, state.recent))
        pieces = [tuple(pick(pick(s, rows, dim=0), slice(count)) for s in pair) for pair, count in stored]
        if self._pending is not None:
            new = self.padding.tokens(rows.start, self._pending_start, self.columns)
            pieces.append(tuple(pick(pick(x, rows, dim=0), new).to(s) for x, s in zip(self._pending, self.sink)))
        return pieces

    def dequantize(self, value: bool) -> torch.Tensor:
        """All keys or values as attention sees them, [batch, heads, columns, head_dim]; padding columns are zero."""
        if self.static.is_open:
            raise NotStaticError("the model looks at keys and values itself")
        out = self.sink[value].new_zeros(
            len(self.states), self.sink[value].shape[1], self.columns, self.sink[value].shape[3]
        )
        for rows in self._runs():
            state = self.states[rows.start]
            pieces = [piece[value] for piece in self._exact_pieces(rows)]
            if state.pages:
                part = self._packed_part(rows, state, None)
                packed = torch.cat([block[2 + value] for block in part.blocks(_DEQUANTIZED_AT_ONCE)], dim=2)
                codec, bits = (part.values, part.bits[1]) if value else (part.keys, part.bits[0])
                pieces.insert(1, codec.restore(packed, bits).to(out.dtype))
            out[rows, :, self.padding.tokens(rows.start, 0, self.columns)] = torch.cat(pieces, dim=2)
        return out

    @property
    def keys(self) -> torch.Tensor | None:
        """All keys dequantized, [batch, heads, columns, head_dim]; a new tensor at every access."""
        self.settle_idle()
        return self.dequantize(False) if self.is_initialized else None

    @property
    def values(self) -> torch.Tensor | None:
        """All values dequantized, [batch, heads, columns, head_dim]; a new tensor at every access."""
        self.settle_idle()
        return self.dequantize(True) if self.is_initialized else None

    # --- the rest of the layer contract ----------------------------------------------------------------------------

    def get_seq_length(self) -> int:
        return self.columns

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def nbytes(self) -> int:
        """Bytes of all storages this layer holds."""
        if not self.is_initialized:
            return 0
        self.settle_idle()
        return self.static.nbytes() + sum(x.nbytes for x in (*self.tensors(), *(self._pending or ())))

    def elements(self) -> int:
        """Numbers that the tokens held stand for: K and V, all rows, without padding."""
        if not self.is_initialized:
            return 0
        self.settle_idle()
        per_token = sum(x.shape[1] * x.shape[3] for x in self.sink)
        return per_token * sum(state.tokens(self.page_tokens) for state in self.states)

    def exact_nbytes(self) -> int:
        """Bytes that an ordinary cache holds for the same columns, padding included."""
        if not self.is_initialized:
            return 0
        per_token = sum(x.shape[1] * x.shape[3] * x.element_size() for x in self.sink)
        return per_token * self.columns * len(self.states)

    def bits(self) -> int:
        """Width of the packed tokens now, the narrowest row's where rows differ; 16 while all tokens are exact."""
        self.settle_idle()
        return min((state.bits for state in self.states if state.pages), default=16)

    def tensors(self) -> list[torch.Tensor]:
        """All memory that steps read or write, pending tokens apart."""
        return [*self.sink, *self.recent, *self.body.tensors()]

    def summary(self) -> dict[str, Any]:
        """What the layer holds; token counts are lists, one entry per row."""
        self.settle_idle()
        return {
            "kind": type(self).__name__,
            "bits": self.bits(),
            "columns": self.columns,
            "sink": [state.sink for state in self.states],
            "packed": [state.body(self.page_tokens) for state in self.states],
            "recent": [state.recent for state in self.states],
            "nbytes": self.nbytes(),
        }

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` columns. What stays is not touched: exact or packed as it was.

        Raises:
            ValueError: `tokens_to_remove` is positive.
        """
        # Assisted decoding may pass a tensor.
        tokens_to_remove = int(tokens_to_remove)
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop takes the number of tokens to remove as a negative integer, got {tokens_to_remove}"
            )
        self.settle()
        self.columns = max(0, self.columns + tokens_to_remove)
        self.changes += 1
        for row, state in enumerate(self.states):
            tokens = count_tokens(self.padding, row, 0, self.columns)
            self.states[row] = state.cropped(tokens, self.page_tokens, self.initial_bits)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row `i` becomes what row `beam_idx[i]` was."""
        self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times."""
        self._select(torch.arange(len(self.states)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices` (integers or a bool mask)."""
        if indices.dtype == torch.bool:
            indices = indices.nonzero().flatten()
        self._select(indices)

    # As in `lazy_initialization`: what lives on must not belong to inference_mode.
    @torch.inference_mode(False)
    def _select(self, indices: torch.Tensor) -> None:
        if not self.is_initialized:
            return
        self.settle()
        self.changes += 1
        at = indices.to(self.device)
        self.body.select(at)
        self.sink, self.recent = (tuple(x.index_select(0, at) for x in pair) for pair in (self.sink, self.recent))
        self.states = [self.states[i] for i in indices.tolist()]

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles consist of; handles are not theirs."""
        self.settle_idle()
        return {**vars(self), "_handles": [], "static": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, static=StaticSteps(self))

    # --- helpers ---------------------------------------------------------------------------------------------------

    @property
    def _pending_start(self) -> int:
        """First pending column, or the number of columns if none is pending."""
        return self.columns - (self._pending[0].shape[2] if self._pending is not None else 0)

    def _runs(self) -> Iterator[slice]:
        """Rows that stand alike, so that they can be handled together."""
        return runs(len(self.states), lambda row: (self.states[row], self.padding.of(row)))

    def _exact(self, like: tuple[torch.Tensor, torch.Tensor], batch: int, tokens: int):
        """Room for `tokens` exact tokens per row, keys and values."""
        return tuple(x.new_empty(batch, x.shape[1], tokens, x.shape[3]) for x in like)

    def _check_shapes(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        for name, x, store in zip(("keys", "values"), (keys, values), self.sink):
            expected = (len(self.states), store.shape[1], keys.shape[2], store.shape[3])
            if tuple(x.shape) != expected:
                raise ValueError(
                    f"the new {name} have shape {tuple(x.shape)}, but this cache layer goes on with {expected} "
                    "(batch, KV heads, new tokens, head_dim); use a new cache, or reset() this one, for another batch"
                )


def count_tokens(padding: Padding, row: int, start: int, stop: int) -> int:
    """Tokens, that is columns without padding, among `[start, stop)`."""
    return stop - start - sum(max(0, min(high, stop) - max(low, start)) for low, high in padding.of(row))


def pick(x: torch.Tensor, index: slice | torch.Tensor, dim: int = 2) -> torch.Tensor:
    """`x` at `index` along `dim`; where the index is a slice a view, or `x` itself if that is all of it."""
    if isinstance(index, slice):
        size = x.shape[dim]
        start, stop, _ = index.indices(size)
        return x if stop - start == size else x.narrow(dim, start, stop - start)
    return x.index_select(dim, index.to(x.device))
