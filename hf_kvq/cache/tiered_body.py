# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""The packed body of a MixKVQ layer: regular pages, and a few records more for the channels with more bits."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import torch

from ..codecs.tiered import TieredBlock, TieredKeyCodec
from ..ops import encode_blocks, encode_tiers
from .body import PagedBody, with_reserve
from .layout import LayerLayout


#: Names of the records' buffers, beside "counts".
RECORDS = ("low", "low_channel", "exact", "exact_channel")


@dataclass
class Records:
    """What one row's pages have beyond the regular part, in buffers that grow by a sixteenth when they are full."""

    buffers: dict[str, torch.Tensor]
    #: Number of UINT4 and of BF16 records before each page, and behind the last one.
    before: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])

    @classmethod
    def empty(cls, codec: TieredKeyCodec, device: torch.device) -> Records:
        def buffer(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
            return torch.empty(0, *shape, dtype=dtype, device=device)

        return cls(
            {
                "counts": buffer(codec.heads, 2, dtype=torch.int16),
                "low": buffer(codec.low_bytes),
                "low_channel": buffer(),
                "exact": buffer(codec.tokens, dtype=codec.dtype),
                "exact_channel": buffer(),
            }
        )

    def write(self, page: int, block: TieredBlock) -> None:
        """Put the records of one page behind those of the pages before; what was there goes."""
        del self.before[page + 1 :]
        low, exact = self.before[page]
        self._put("counts", page, block.counts)
        for name, start in zip(RECORDS, (low, low, exact, exact)):
            self._put(name, start, getattr(block, name))
        self.before.append((low + len(block.low), exact + len(block.exact)))

    def read(self, first: int, last: int, dense: torch.Tensor) -> TieredBlock:
        """Pages `[first, last)`, whose regular part is `dense`; all views."""
        (low, exact), (low_end, exact_end) = self.before[first], self.before[last]
        spans = {"low": (low, low_end), "exact": (exact, exact_end)}
        records = {name: self.buffers[name][slice(*spans[name.split("_")[0]])] for name in RECORDS}
        return TieredBlock(dense, self.buffers["counts"][first:last], **records)

    def counts(self, pages: int) -> torch.Tensor:
        """int16 [pages, heads, 2], see `TieredBlock`."""
        return self.buffers["counts"][:pages]

    def _put(self, name: str, start: int, new: torch.Tensor) -> None:
        buffer, stop = self.buffers[name], start + len(new)
        if stop > len(buffer):
            with torch.inference_mode(False):
                grown = buffer.new_empty(with_reserve(stop, start), *buffer.shape[1:])
            grown[:start] = buffer[:start]
            self.buffers[name] = buffer = grown
        buffer[start:stop] = new


class TieredBody(PagedBody):
    """Pages of every row: the dense keys and the values in one allocation, each row's records beside."""

    def __init__(self, layout: LayerLayout, codec: TieredKeyCodec, batch: int, device: torch.device, kernel: str):
        super().__init__(layout, 0, batch, device, kernel)
        self.codec = codec
        self.records = [Records.empty(codec, device) for _ in range(batch)]

    def write_tiered(
        self, rows: slice, page: int, keys: torch.Tensor, values: torch.Tensor, tiers: torch.Tensor
    ) -> None:
        """Encode [rows, heads, page_tokens, dim] into a page each; `tiers` are their channels', [rows, heads, dim]."""
        slots = self.pages(rows, 2)[:, page]
        split = self.layout.keys.nbytes(2)
        value_bits = self.layout.widths(2)[1]
        encode_blocks(self.layout.values, values[:, None], value_bits, slots[:, None, split:], self.kernel)
        block = encode_tiers(self.codec, keys, tiers, slots[:, :split], self.kernel)
        for records, own in zip(self.records[rows], _one_by_one(block)):
            records.write(page, own)

    def tensors(self) -> list[torch.Tensor]:
        return [*super().tensors(), *(x for records in self.records for x in records.buffers.values())]

    def select(self, indices: torch.Tensor) -> None:
        super().select(indices)
        self.records = [copy.deepcopy(self.records[i]) for i in indices.tolist()]


def _one_by_one(block: TieredBlock) -> list[TieredBlock]:
    """Each page of a block as a block of its own; all views."""
    # The only thing that has to come from the device, for all pages at once.
    low, exact = zip(*block.counts.sum(1).tolist())
    sizes = {"dense": 1, "counts": 1, "low": low, "low_channel": low, "exact": exact, "exact_channel": exact}
    parts = [getattr(block, name).split(size) for name, size in sizes.items()]
    return [TieredBlock(*page) for page in zip(*parts)]
