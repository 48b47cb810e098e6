# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""The packed body of one layer: whole pages in one allocation, narrowed in place when they no longer fit."""

from __future__ import annotations

import torch

from .layout import LayerLayout


# Tokens converted at once; bounds the working memory of a shrink and of a long prompt.
_TOKENS_AT_ONCE = 2048


class PagedBody:
    """Pages of every row, in `row_bytes` bytes per row that are allocated once (the arena).

    At width `bits` page `i` of a row lies at `i * page_bytes(bits)`. A narrower page never lies behind its wider
    self, so walking upwards narrows a whole row in place, and each halving doubles the capacity.
    """

    def __init__(self, layout: LayerLayout, row_bytes: int, batch: int, device: torch.device):
        self.layout = layout
        self.data = torch.empty(batch, row_bytes, dtype=torch.uint8, device=device)

    @property
    def row_bytes(self) -> int:
        """Bytes per row."""
        return self.data.shape[1]

    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.data.nbytes

    @property
    def _step(self) -> int:
        return max(1, _TOKENS_AT_ONCE // self.layout.page_tokens)

    def pages(self, rows: slice, bits: int) -> torch.Tensor:
        """View of all page slots of `rows` at `bits`: uint8 [rows, capacity, page_bytes(bits)]."""
        size = self.layout.page_bytes(bits)
        capacity = self.row_bytes // size
        return self.data[rows, : capacity * size].unflatten(1, (capacity, size))

    def write(self, rows: slice, first: int, bits: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Encode [rows, heads, n * page_tokens, dim] into the pages from `first` on."""
        slots = self.pages(rows, bits)[:, first:]
        blocks = [x.unflatten(2, (-1, self.layout.page_tokens)).transpose(1, 2) for x in (keys, values)]
        for i in range(0, blocks[0].shape[1], self._step):
            k, v = (x[:, i : i + self._step] for x in blocks)
            key_bits, value_bits = self.layout.widths(bits)
            page = torch.cat([self.layout.keys.encode(k, key_bits), self.layout.values.encode(v, value_bits)], dim=-1)
            slots[:, i : i + page.shape[1]] = page

    def narrow(self, rows: slice, count: int, bits: int, target_bits: int) -> None:
        """Bring the first `count` pages of `rows` from `bits` to `target_bits`, in place."""
        source, target = self.pages(rows, bits), self.pages(rows, target_bits)
        for i in range(0, count, self._step):
            stop = min(i + self._step, count)
            page, width = source[:, i:stop], bits
            while width > target_bits:
                split = self.layout.keys.nbytes(width)
                keys, values, width = page[..., :split], page[..., split:], width // 2
                page = torch.cat([self.layout.keys.shrink(keys, width), self.layout.values.shrink(values, width)], -1)
            target[:, i:stop] = page

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
