# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""A layer whose body has one width from the start and grows with the tokens: KIVI, and the base of MixKVQ."""

from __future__ import annotations

import dataclasses

import torch

from ..ops import require_kernel
from ..transforms import HadamardRotation
from .body import PagedBody, with_reserve
from .layer import KVQLayer
from .layout import LayerLayout, LayerShape, block_codecs
from .padding import Padding
from .rows import RowState


class FixedLayer(KVQLayer):
    """Keys per channel, values per token; every `residual` tokens a page is packed and never touched again.

    Args:
        key_bits, value_bits: widths of the body.
        residual: tokens of a page; up to so many newest tokens are exact, and right after a page is packed none.
        group_size: tokens of a key channel, or channels of a value token, that share one (min, max).
        sink_tokens: first tokens of each row, kept exact.
        kernel: implementation of attention.
        padding: the padding columns of the batch, shared by the layers of a cache.
        rotate_values: rotate the values of each head before quantization.
        clips: shares of the groups' ranges that keys and values keep.
    """

    def __init__(
        self,
        key_bits: int,
        value_bits: int,
        residual: int,
        group_size: int,
        sink_tokens: int,
        kernel: str,
        padding: Padding | None = None,
        rotate_values: bool = False,
        clips: tuple[float, float] = (1.0, 1.0),
    ):
        self.rotate_values, self.clips = rotate_values, clips
        self.key_bits, self.value_bits = key_bits, value_bits
        self.page_tokens, self.group_size = residual, group_size
        padding = padding if padding is not None else Padding()
        super().__init__(
            padding, require_kernel(kernel), sink_tokens, window=0, initial_bits=min(key_bits, value_bits)
        )

    def layout_for(self, shape: LayerShape, device_type: str = "cpu") -> LayerLayout:
        """Sizes of this layer where it caches `shape`."""
        transforms = None, HadamardRotation(shape.value_dim) if self.rotate_values else None
        codecs = block_codecs(shape, self.page_tokens, "channel", self.group_size, transforms, device_type, self.clips)
        return LayerLayout(shape, self.sink_tokens, 0, *codecs, (self.key_bits, self.value_bits))

    def bytes_for(self, shape: LayerShape, length: int) -> int:
        """Bytes that this layer of one request holds when `length` tokens have come page by page."""
        layout = self.layout_for(shape)
        pages = max(0, length - self.sink_tokens) // self.page_tokens
        exact = self.sink_tokens + self.page_tokens - 1
        return exact * shape.token_bytes + room_for(pages) * layout.page_bytes(self.initial_bits)

    def _allocate(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        shape = LayerShape(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype)
        self.layout = self.layout_for(shape, keys.device.type)
        batch = keys.shape[0]
        self.body = self._make_body(batch)
        self.sink = self._exact((keys, values), batch, self.sink_tokens)
        self.recent = self._exact((keys, values), batch, self.page_tokens - 1)

    def _make_body(self, batch: int) -> PagedBody:
        return PagedBody(self.layout, 0, batch, self.device, self.kernel)

    def _make_room(self, tokens: int) -> None:
        """Nothing to do: the exact parts have their final size, and the body grows with its pages."""

    def _append_pages(self, rows: slice, state: RowState, keys: torch.Tensor, values: torch.Tensor) -> RowState:
        pages = state.pages + keys.shape[2] // self.page_tokens
        self._reserve(pages)
        self.body.write(rows, state.pages, state.bits, keys, values)
        return dataclasses.replace(state, pages=pages)

    def _reserve(self, pages: int) -> None:
        """Room for `pages` pages per row; a sixteenth more when more is needed, so that copies stay rare."""
        size = self.layout.page_bytes(self.initial_bits)
        held = self.body.row_bytes // size
        if pages > held:
            self.body.resize(with_reserve(pages, held) * size)


def room_for(pages: int, per_page: int = 1) -> int:
    """Room of a buffer with `per_page` records a page after `pages` pages: it grows by a sixteenth when it must."""
    room = 0
    while room < pages * per_page:
        held = room // per_page * per_page
        room = with_reserve(held + per_page, held)
    return room
