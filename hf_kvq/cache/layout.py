# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Byte formula of one layer: how many bytes tokens take, and how many tokens bytes hold."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..codecs import WIDTHS, BlockCodec
from ..codecs.block import Axis
from ..config import PMKVQConfig
from ..ops import byte_orders
from ..transforms import ChannelScale, HadamardRotation, Transform


#: Tokens that leave the window together where the codec does not dictate it.
PAGE_TOKENS = 128


@dataclass(frozen=True)
class LayerShape:
    """What one layer caches per token: `heads` KV heads of `key_dim` + `value_dim` channels in `dtype`."""

    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of one exact token."""
        return self.heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


@dataclass(frozen=True)
class LayerLayout:
    """Sizes of one layer of one request: exact sink, body in pages of `page_tokens`, exact recent tokens.

    A page is the keys' block followed by the values' block. The body takes whole pages; the recent part holds the
    window and up to `page_tokens - 1` tokens that wait for their page to fill. `floors` are the least widths of keys
    and of values: a page of width `bits` holds either at `bits`, unless its floor is higher.
    """

    shape: LayerShape
    sink_tokens: int
    window: int
    keys: BlockCodec
    values: BlockCodec
    floors: tuple[int, int] = (2, 2)

    @classmethod
    def of(
        cls,
        config: PMKVQConfig,
        shape: LayerShape,
        device_type: str = "cpu",
        key_scale: torch.Tensor | None = None,
        floors: tuple[int, int] = (2, 2),
    ) -> LayerLayout:
        """The layout that `config` gives a layer.

        Args:
            config: the cache's options.
            shape: what the layer caches.
            device_type: where.
            key_scale: λ, float32 [heads, key_dim], where there is one.
            floors: final widths of the layer's keys and values.
        """
        page = config.group_size if config.key_codec == "channel" else PAGE_TOKENS
        keys = HadamardRotation(shape.key_dim) if config.transform == "hadamard_kv" else None
        values = HadamardRotation(shape.value_dim) if config.transform.startswith("hadamard") else None
        transforms = (keys if key_scale is None else ChannelScale(key_scale)), values
        clips = (config.key_clip, config.value_clip)
        centered = config.key_shrink == "centered"
        codecs = block_codecs(
            shape, page, config.key_codec, config.group_size, transforms, device_type, clips, centered
        )
        return cls(shape, config.sink_tokens, config.window, *codecs, floors)

    @property
    def page_tokens(self) -> int:
        return self.keys.tokens

    def widths(self, bits: int) -> tuple[int, int]:
        """Bits of the keys and of the values of a page of width `bits`."""
        return max(bits, self.floors[0]), max(bits, self.floors[1])

    def page_bytes(self, bits: int) -> int:
        return self._page_bytes[bits]

    @functools.cached_property
    def _page_bytes(self) -> dict[int, int]:
        widths = {bits: self.widths(bits) for bits in WIDTHS}
        return {bits: self.keys.nbytes(pair[0]) + self.values.nbytes(pair[1]) for bits, pair in widths.items()}

    def split(self, length: int) -> tuple[int, int, int]:
        """Sink tokens, body pages and room for recent tokens that a request of up to `length` tokens needs."""
        sink = min(length, self.sink_tokens)
        pages = max(0, (length - sink - self.window) // self.page_tokens)
        return sink, pages, min(length - sink, self.window + self.page_tokens - 1)

    def bytes_for(self, length: int, bits: int) -> int:
        """Bytes that `length` tokens take with the body at `bits`; codes, (min, max), sink and window are counted."""
        sink, pages, recent = self.split(length)
        return (sink + recent) * self.shape.token_bytes + pages * self.page_bytes(bits)

    def bits_for(self, pages: int, body_bytes: int, fbit: int, bits: int = 16) -> int:
        """The width that `pages` pages must have to fit `body_bytes`, from `bits` downwards, at least `fbit`."""
        while bits > fbit and pages * self.page_bytes(bits) > body_bytes:
            bits //= 2
        return bits


def block_codecs(
    shape: LayerShape,
    tokens: int,
    key_axis: Axis,
    group_size: int,
    transforms: tuple[Transform | None, Transform | None],
    device_type: str,
    clips: tuple[float, float] = (1.0, 1.0),
    centered_keys: bool = False,
) -> tuple[BlockCodec, BlockCodec]:
    """Codecs of keys and of values, per token, whose bytes lie as the kernels of `device_type` want them."""
    orders = byte_orders(device_type, shape.key_dim)
    sides = ((shape.key_dim, key_axis, centered_keys), (shape.value_dim, "token", False))
    return tuple(
        BlockCodec(shape.heads, tokens, dim, shape.dtype, axis, group_size, transform, order, clip, centered)
        for (dim, axis, centered), transform, order, clip in zip(sides, transforms, orders, clips)
    )


def length_for_budget(layout: LayerLayout, floors: Sequence[tuple[int, int]], budget_bytes: int) -> int:
    """Most tokens for which layers of this layout with these final widths fit `budget_bytes` together.

    Raises:
        ValueError: not even the sink, the window and one page fit; the message says what the least budget is.
    """

    layouts = [dataclasses.replace(layout, floors=pair) for pair in floors]

    def total(length: int) -> int:
        return sum(each.bytes_for(length, min(each.floors)) for each in layouts)

    least = layout.sink_tokens + layout.window + layout.page_tokens
    if total(least) > budget_bytes:
        raise ValueError(
            f"budget_bytes={budget_bytes} is too small: {len(floors)} layers with {layout.sink_tokens} sink tokens, a "
            f"window of {layout.window} and one page of {layout.page_tokens} tokens take {total(least)} bytes"
        )
    low, high = least, least + 1
    while total(high) <= budget_bytes:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if total(middle) <= budget_bytes else (low, middle)
    return low
