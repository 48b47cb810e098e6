# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""MixKVQ for one layer: key channels at BF16, UINT4 or UINT2 by query magnitude x difficulty (arXiv 2512.19206)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import torch
from transformers.utils import logging

from ..codecs.tiered import TieredKeyCodec, most_promoted, tiers_by_target, tiers_by_threshold
from ..config import MixKVQConfig
from ..ops import PackedPart
from .fixed import FixedLayer, room_for
from .layer import pick
from .layout import LayerLayout, LayerShape
from .padding import Padding
from .rows import RowState
from .static import NotStaticError
from .tiered_body import RECORDS, Records, TieredBody


logger = logging.get_logger(__name__)

# Query magnitudes are summed in fixed point: integer sums do not depend on the order, so neither on how the tokens
# were cut into calls nor on the batch. Magnitudes saturate at 2^20, which leaves room for 2^23 tokens.
_FRACTION_BITS, _LARGEST = 20, 2.0**20


class TieredLayer(FixedLayer):
    """Keys per channel in three tiers, values per token; a packed page is never touched again.

    The importance of a channel for a page is the mean magnitude of the queries of all tokens up to the page's end, so
    the tiers are the same however the tokens arrive. Queries of tokens that `crop` removes stay counted.

    Args:
        config: the cache's options.
        tau: (tau_bf16, tau_uint4) of this layer, each a number or one per KV head; None to go by `target_bits`.
        padding: the padding columns of the batch, shared by the layers of a cache.
    """

    def __init__(self, config: MixKVQConfig, tau: tuple | None, padding: Padding | None = None):
        self.config, self.tau = config, tau
        super().__init__(
            2,
            config.value_bits,
            config.residual,
            config.group_size,
            config.sink_tokens,
            config.kernel,
            padding,
            config.transform == "hadamard",
            (config.key_clip, config.value_clip),
        )

    def reset(self) -> None:
        super().reset()
        #: Sum of |query| over the queries seen, fixed point int64 [batch, heads, dim], and their number, per row.
        self.query_sum: torch.Tensor | None = None
        self.query_count: list[int] = []
        self._query: torch.Tensor | None = None
        #: What the static step that is underway has added to `query_sum`.
        self._counted: torch.Tensor | None = None

    def _allocate(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super()._allocate(keys, values)
        batch, heads, _, dim = keys.shape
        for name, tau in zip(("tau_bf16", "tau_uint4"), self.tau or ()):
            if isinstance(tau, tuple) and len(tau) != heads:
                raise ValueError(f"{name} lists {len(tau)} KV heads for a layer, but the model has {heads}")
        self.query_sum = torch.zeros(batch, heads, dim, dtype=torch.int64, device=self.device)
        self.query_count = [0] * batch

    def _make_body(self, batch: int) -> TieredBody:
        return TieredBody(self.layout, _key_codec(self.layout), batch, self.device, self.kernel)

    def bytes_for(self, shape: LayerShape, length: int) -> int:
        """See `FixedLayer`; the most that it can be, as it depends on the keys which channels get 4 bits and which 16.

        Raises:
            ValueError: the layer goes by thresholds, so anything is possible.
        """
        if self.config.tau_bf16 is not None:
            raise ValueError("how many channels pass a threshold depends on the keys; give target_bits instead")
        codec = _key_codec(self.layout_for(shape))
        pages = max(0, length - self.sink_tokens) // self.page_tokens

        def records(per_head: tuple[int, int]) -> int:
            low, exact = (room_for(pages, count * shape.heads) if count else 0 for count in per_head)
            return low * (codec.low_bytes + 1) + exact * (codec.tokens * shape.dtype.itemsize + 1)

        most = max(map(records, most_promoted(shape.key_dim, self.config.key_bits)))
        counts, query_sum = 4 * shape.heads * room_for(pages), 8 * shape.heads * shape.key_dim
        return super().bytes_for(shape, length) + most + counts + query_sum

    # --- which channels matter -----------------------------------------------------------------------------------

    def observe_query(self, query: torch.Tensor) -> None:
        # Of layers that share their keys, the first is the one that has made them.
        if self.static.is_open:
            if self.config.importance == "query":
                self._counted = _magnitudes(query.detach(), self.query_sum.shape[1])
                self.query_sum += self._counted
            return
        is_anothers = self.is_shared and self._query is not None
        if self.config.importance == "query" and self._pending is not None and not is_anothers:
            self._query = query.detach()

    def forget_query(self, has_run: bool) -> None:
        if has_run and self._counted is not None:
            self.query_sum -= self._counted
        self._counted = None

    def count_appended(self, count: int) -> None:
        if self.config.importance == "query":
            self.query_count = [seen + count for seen in self.query_count]

    def settle(self) -> None:
        if self._pending is not None and self._query is None and self.config.importance == "query":
            logger.warning_once(
                "mixkvq was given keys but not the queries that attend to them, so it ranks key channels by "
                "quantization difficulty alone. A model shows its queries if it takes its attention function from "
                "transformers, as nearly all do; some older ones compute attention by themselves."
            )
        super().settle()
        self._query = None

    def _store(self, rows: slice, index: slice | torch.Tensor, *new: torch.Tensor) -> RowState:
        self._coming = None if self._query is None else pick(self._query[rows], index)
        self._stored = self.states[rows.start].tokens(self.page_tokens)
        stop = self._stored + new[0].shape[2]
        state = super()._store(rows, index, *new)
        self._count_queries(rows, stop)
        self._coming = None
        return state

    def _count_queries(self, rows: slice, tokens: int) -> None:
        """Take the coming queries into the statistics, up to the one that makes the row `tokens` long."""
        count = max(0, tokens - self._stored)
        if self._coming is None or not count:
            return
        self.query_sum[rows] += _magnitudes(self._coming[:, :, :count], self.query_sum.shape[1])
        self._coming = self._coming[:, :, count:]
        self._stored += count
        for row in range(rows.start, rows.stop):
            self.query_count[row] += count

    def importance(self, rows: slice) -> torch.Tensor:
        """`I_d`, the mean |query| of each key channel, float64 [rows, heads, dim]; ones where no query was seen."""
        count = torch.tensor(self.query_count[rows], dtype=torch.float64, device=self.device)[:, None, None]
        mean = self.query_sum[rows] / (2**_FRACTION_BITS * count)
        return torch.where(count == 0, 1.0, mean)

    def _tiers(self, rows: slice, keys: torch.Tensor, state: RowState) -> torch.Tensor:
        """Tiers, int64 [rows, heads, dim], of the coming page [rows, heads, page_tokens, dim]."""
        self._count_queries(rows, state.tokens(self.page_tokens) + self.page_tokens)
        salience = self.importance(rows) * self.body.codec.sensitivity(keys)
        if self.config.importance_window == "page":
            self.query_sum[rows] = 0
            self.query_count[rows] = [0] * (rows.stop - rows.start)
        if self.tau is None:
            return tiers_by_target(salience, self.config.key_bits)
        heads = (torch.tensor(t, dtype=torch.float64, device=self.device).reshape(-1, 1) for t in self.tau)
        return tiers_by_threshold(salience, *heads)

    # --- pages ---------------------------------------------------------------------------------------------------

    def _append_pages(self, rows: slice, state: RowState, keys: torch.Tensor, values: torch.Tensor) -> RowState:
        self._reserve(state.pages + keys.shape[2] // self.page_tokens)
        for page in zip(*(x.split(self.page_tokens, dim=2) for x in (keys, values))):
            self.body.write_tiered(rows, state.pages, *page, self._tiers(rows, page[0], state))
            state = dataclasses.replace(state, pages=state.pages + 1)
        return state

    def _packed_part(
        self, rows: slice, state: RowState, mask: torch.Tensor | None, held: torch.Tensor | None = None
    ) -> PackedPart:
        part = super()._packed_part(rows, state, mask, held)
        return TieredPart(**vars(part), codec=self.body.codec, records=self.body.records[rows])

    def tensors(self) -> list[torch.Tensor]:
        return [*super().tensors(), self.query_sum]

    def tier_counts(self) -> torch.Tensor:
        """UINT2, UINT4 and BF16 channels over all pages, rows and heads, [3]."""
        self.settle_idle()
        counts = torch.zeros(3, dtype=torch.int64)
        for row, state in enumerate(self.states):
            used = self.body.records[row].counts(state.pages).long().cpu()
            uint4, bf16 = used.sum((0, 1)).tolist()
            counts += torch.tensor(
                [used.shape[0] * used.shape[1] * self.layout.shape.key_dim - uint4 - bf16, uint4, bf16]
            )
        return counts

    def summary(self) -> dict:
        return {**super().summary(), "channels": dict(zip(("uint2", "uint4", "bf16"), self.tier_counts().tolist()))}

    @torch.inference_mode(False)
    def _select(self, indices: torch.Tensor) -> None:
        if self.is_initialized:
            self.settle()
            self.query_sum = self.query_sum.index_select(0, indices.to(self.device))
            self.query_count = [self.query_count[i] for i in indices.tolist()]
        super()._select(indices)


def _key_codec(layout: LayerLayout) -> TieredKeyCodec:
    keys = layout.keys
    return TieredKeyCodec(keys.heads, keys.tokens, keys.dim, keys.dtype, keys.group_size, keys.byte_order, keys.clip)


def _magnitudes(query: torch.Tensor, heads: int) -> torch.Tensor:
    """Sum over the tokens of the mean |query| of each KV head's query heads, fixed point.

    [rows, query heads, tokens, dim] -> int64 [rows, heads, dim].
    """
    query = query.unflatten(1, (heads, -1))
    sizes = query.abs().double().nan_to_num(0.0).clamp_(max=_LARGEST).mul_(2**_FRACTION_BITS)
    return (sizes.round_().to(torch.int64).sum(2) // query.shape[2]).sum(2)


@dataclass(frozen=True)
class TieredPart(PackedPart):
    """Pages whose keys have a regular part and, row by row, records of the channels with more bits."""

    codec: TieredKeyCodec = None
    records: list[Records] = field(default_factory=list)

    def record_tensors(self) -> list[torch.Tensor]:
        """UINT4 and BF16 channels of each row: low, low_channel, exact, exact_channel, counts."""
        return [r.buffers[name] for r in self.records for name in (*RECORDS, "counts")]

    def decode_keys(self, first: int, last: int) -> torch.Tensor:
        if self.held is not None:
            raise NotStaticError("attention in plain torch goes by where the records of channels with more bits begin")
        dense = self.pages[:, first:last, : self._split]
        rows = [self.codec.decode(r.read(first, last, dense[i])) for i, r in enumerate(self.records)]
        return torch.stack(rows).transpose(1, 2).flatten(2, 3)
