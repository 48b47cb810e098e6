# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""The packed body of one layer: whole pages in one allocation, narrowed in place when they no longer fit."""

from __future__ import annotations

import torch

from ..ops import encode_blocks, shrink_pages
from .layout import LayerLayout


class PagedBody:
    """Pages of every row, in `row_bytes` bytes per row that are allocated once (the arena).

    At width `bits` page `i` of a row lies at `i * page_bytes(bits)`. A narrower page never lies behind its wider
    self, so walking upwards narrows a whole row in place, and each halving doubles the capacity.
    """

    def __init__(self, layout: LayerLayout, row_bytes: int, batch: int, device: torch.device, kernel: str):
        self.layout, self.kernel = layout, kernel
        self.data = torch.empty(batch, row_bytes, dtype=torch.uint8, device=device)

    @property
    def row_bytes(self) -> int:
        """Bytes per row."""
        return self.data.shape[1]

    def tensors(self) -> list[torch.Tensor]:
        """All memory that attention reads."""
        return [self.data]

    def pages(self, rows: slice, bits: int, count: int | None = None) -> torch.Tensor:
        """View of the first `count` or all page slots of `rows` at `bits`: uint8 [rows, slots, page_bytes(bits)]."""
        size, data = self.layout.page_bytes(bits), self.data.narrow(0, rows.start, rows.stop - rows.start)
        count = self.row_bytes // size if count is None else count
        return data.as_strided((data.shape[0], count, size), (self.row_bytes, size, 1))

    def write(self, rows: slice, first: int, bits: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Encode [rows, heads, n * page_tokens, dim] into the pages from `first` on."""
        blocks = [x.unflatten(2, (-1, self.layout.page_tokens)).transpose(1, 2) for x in (keys, values)]
        slots = self.pages(rows, bits)[:, first : first + blocks[0].shape[1]]
        key_bits, value_bits = self.layout.widths(bits)
        split = self.layout.keys.nbytes(key_bits)
        encode_blocks(self.layout.keys, blocks[0], key_bits, slots[..., :split], self.kernel)
        encode_blocks(self.layout.values, blocks[1], value_bits, slots[..., split:], self.kernel)

    def narrow(self, rows: slice, count: int, bits: int, target_bits: int) -> None:
        """Bring the first `count` pages of `rows` from `bits` to `target_bits`, in place."""
        codecs = (self.layout.keys, self.layout.values)
        shrink_pages(self.data[rows], count, codecs, bits, target_bits, self.kernel, self.layout.floors)

    def resize(self, row_bytes: int) -> None:
        """Give every row at least `row_bytes` bytes."""
        if row_bytes <= self.row_bytes:
            return
        with torch.inference_mode(False):
            data = self.data.new_empty(self.data.shape[0], row_bytes)
        data[:, : self.row_bytes] = self.data
        self.data = data

    def select(self, indices: torch.Tensor) -> None:
        """Keep, repeat or reorder rows."""
        self.data = self.data.index_select(0, indices)


def with_reserve(needed: int, held: int) -> int:
    """Room to make where `needed` exceeds the `held` so far: a sixteenth more, so that copies stay rare."""
    return max(needed, held + held // 16)
