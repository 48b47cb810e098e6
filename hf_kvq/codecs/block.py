# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Codec of one block: a fixed number of tokens of K (or V), all heads, as one run of bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import torch

from ..transforms import Transform
from .packing import deinterleave, interleave, pack, packed_size, unpack
from .uniform import centered_right_shift, clip_groups, decode_groups, equivalent_right_shift, quantize, scale_of


Axis = Literal["token", "channel"]


@dataclass(frozen=True)
class BlockCodec:
    """How `tokens` consecutive tokens of K or V ([heads, tokens, dim]) become bytes and come back.

    At 16 bits the block is the model's own data, untouched. Below, its bytes are the packed codes, in planes along the
    tokens, followed by every group's minimum and then every group's maximum in the model's dtype. `byte_order` says
    how the bytes of codes lie: it suits the device's kernels and changes nothing else.

    Args:
        heads: KV heads.
        tokens: tokens per block, a multiple of 16.
        dim: head_dim.
        dtype: the model's dtype.
        axis: "token" for groups along the channels of one token, "channel" for groups along the tokens of one channel.
        group_size: elements that share one (min, max); the last group may be shorter.
        transform: applied before quantization; codes stand for transformed data.
        byte_order: (dim, count) of `hf_kvq.codecs.packing.interleave` for packed codes [tokens, dim], or None for
            [tokens, dim] itself.
        clip: share of each group's range that is kept, around its middle; see `clip_groups`.
        centered: 2-bit codes come from 4-bit ones by `centered_right_shift`, not by the equivalent one.
    """

    heads: int
    tokens: int
    dim: int
    dtype: torch.dtype
    axis: Axis
    group_size: int
    transform: Transform | None = field(default=None, compare=False)
    byte_order: tuple[int, int] | None = None
    clip: float = 1.0
    centered: bool = False

    @property
    def groups(self) -> tuple[int, int]:
        """Groups per head, as (along the tokens, along the channels)."""
        if self.axis == "token":
            return self.tokens, math.ceil(self.dim / self.group_size)
        return math.ceil(self.tokens / self.group_size), self.dim

    def code_bytes(self, bits: int) -> int:
        return self.heads * packed_size(self.tokens, bits) * self.dim

    def nbytes(self, bits: int) -> int:
        """Bytes of one block at `bits`, (min, max) included."""
        if bits == 16:
            return self.heads * self.tokens * self.dim * self.dtype.itemsize
        return self.code_bytes(bits) + 2 * self.heads * math.prod(self.groups) * self.dtype.itemsize

    def encode(self, x: torch.Tensor, bits: int) -> torch.Tensor:
        """[..., heads, tokens, dim] -> uint8 [..., nbytes(bits)]."""
        x = x.to(self.dtype)
        if bits == 16:
            return _as_bytes(x, 3)
        if self.is_centered(bits):
            codes, low, high = centered_right_shift(*quantize(self.prepare(x), 4, self.group_size, self._dim))
        else:
            codes, low, high = quantize(self.prepare(x), bits, self.group_size, self._dim)
        return self.join(pack(codes, bits, dim=-2), low, high)

    @property
    def is_plain(self) -> bool:
        """Whether `prepare` changes nothing."""
        return self.transform is None and self.clip == 1

    def is_centered(self, bits: int) -> bool:
        """Whether codes of this width stand for the centers of quarters of their groups' ranges."""
        return self.centered and bits == 2

    def prepare(self, x: torch.Tensor) -> torch.Tensor:
        """[..., heads, tokens, dim] as it is quantized: transformed, then clipped."""
        if self.transform is not None:
            x = self.transform.forward(x).to(self.dtype)
        return x if self.clip == 1 else clip_groups(x, self.clip, self.group_size, self._dim)

    def decode(self, blocks: torch.Tensor, bits: int) -> torch.Tensor:
        """uint8 [rows, blocks, nbytes(bits)] -> [rows, heads, blocks * tokens, dim].

        Below 16 bits the result is float32 and still transformed; at 16 bits it is the stored data.
        """
        if bits == 16:
            x = blocks.view(self.dtype).unflatten(-1, (self.heads, self.tokens, self.dim))
            return x.transpose(1, 2).flatten(2, 3)
        codes, low, high = self.fields(blocks, bits)
        # Sorting the few packed bytes by head is cheaper than sorting what they unpack to.
        codes = unpack(codes.transpose(1, 2).contiguous(), bits, self.tokens, dim=-2)
        low, high = low.transpose(1, 2), high.transpose(1, 2)
        return decode_groups(codes, low, scale_of(low, high, bits), self.group_size, self._dim).flatten(2, 3)

    def shrink(self, blocks: torch.Tensor, bits: int) -> torch.Tensor:
        """Blocks of width `2 * bits` at width `bits`: uint8 [..., nbytes(2 * bits)] -> [..., nbytes(bits)].

        Leaving 16 bits is the one quantization: from there on integers are shifted. (min, max) stay as they are, but
        for a centered shift. The bytes are those that `encode` makes, whatever the widths in between.
        """
        if bits == 8:
            return self.encode(blocks.view(self.dtype).unflatten(-1, (self.heads, self.tokens, self.dim)), bits)
        codes, low, high = self.fields(blocks, 2 * bits)
        codes = unpack(codes, 2 * bits, self.tokens, dim=-2)
        if self.is_centered(bits):
            codes, low, high = centered_right_shift(codes, low, high)
        else:
            codes = equivalent_right_shift(codes, bits)
        return self.join(pack(codes, bits, dim=-2), low, high)

    def restore(self, x: torch.Tensor, bits: int) -> torch.Tensor:
        """Undo the transform on decoded data ([..., dim])."""
        return x if bits == 16 or self.transform is None else self.transform.inverse(x)

    def adapt(self, query: torch.Tensor, bits: int) -> torch.Tensor:
        """The query for decoded keys, [..., dim], which are still transformed."""
        return query if bits == 16 or self.transform is None else self.transform.dual(query)

    def join(self, codes: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        """The block's bytes, given its packed codes [..., heads, bytes, dim] and its groups' (min, max)."""
        if self.byte_order is not None:
            codes = interleave(codes, *self.byte_order).flatten(-2)
        ranges = torch.stack([low, high], dim=-4)
        return torch.cat([codes.flatten(-3), _as_bytes(ranges, 4)], dim=-1)

    def fields(self, blocks: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Inverse of `join`; (min, max) are views."""
        n = self.code_bytes(bits)
        ranges = blocks[..., n:].view(self.dtype).unflatten(-1, (2, self.heads, *self.groups))
        codes = blocks[..., :n].unflatten(-1, (self.heads, -1))
        if self.byte_order is None:
            return codes.unflatten(-1, (-1, self.dim)), *ranges.unbind(-4)
        dim, count = self.byte_order
        lines = self.dim if dim == -2 else n // self.heads // self.dim
        return deinterleave(codes.unflatten(-1, (-1, lines, count)), dim), *ranges.unbind(-4)

    @property
    def _dim(self) -> int:
        return -1 if self.axis == "token" else -2


def _as_bytes(x: torch.Tensor, dims: int) -> torch.Tensor:
    """The last `dims` dimensions of `x` as one run of bytes."""
    return x.contiguous().flatten(-dims).view(torch.uint8)
