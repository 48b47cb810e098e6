# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""The shrink ablation of PM-KVQ (arXiv 2505.18610, table 3): three ways to halve the width of codes.

Follows the authors' definitions: "direct" keeps the top b bits and the zero point, with S_b = (2^b + 1) S_2b;
"modified" keeps the top b bits with S_b = 2^b S_2b, and moves the zero point to the mean of the codes that became one;
"equivalent" is the right shift that `PMKVQCache` does with key_shrink="equivalent". All start at the 16-bit code and
go through every width on the way. Bytes are those of `PMKVQCache`: each way derives scale and zero point from (min,
max). Leaves out the drift of scales that are rounded at each step.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch

from ...cache.rows import RowState
from ...codecs import BlockCodec
from ...codecs.uniform import decode_groups, equivalent_right_shift, quantize, scale_of
from ...ops import PackedPart
from .base import SimulatedCache, SimulatedLayer, SimulatedPart


STRATEGIES = ("direct", "modified", "equivalent")


def shrink(codes: torch.Tensor, bits: int, strategy: str) -> tuple[torch.Tensor, float, float]:
    """16-bit codes brought to `bits` in halves.

    Returns:
        The codes; their scale, as a multiple of the 16-bit one; and how far the zero point moves, in 16-bit steps.
    """
    width, scale, shift = 16, 1.0, 0.0
    while width > bits:
        width //= 2
        codes = equivalent_right_shift(codes, width) if strategy == "equivalent" else codes >> width
        if strategy == "modified":
            shift += scale * (2**width - 1) / 2
        scale *= 2**width if strategy == "modified" else 2**width + 1
    return codes, scale, shift


def simulate(codec: BlockCodec, x: torch.Tensor, bits: int, strategy: str) -> torch.Tensor:
    """What a body's keys or values, [rows, heads, tokens, dim], are once they have shrunk; still transformed."""
    if bits == 16:
        return x
    dim = -1 if codec.axis == "token" else -2
    blocks = codec.prepare(x.unflatten(2, (-1, codec.tokens)).transpose(1, 2)).transpose(1, 2)
    codes, low, high = quantize(blocks, 16, codec.group_size, dim)
    codes, scale, shift = shrink(codes, bits, strategy)
    if strategy == "modified":
        step = scale_of(low, high, 16)
        return decode_groups(codes, low.float() + shift * step, scale * step, codec.group_size, dim).flatten(2, 3)
    return decode_groups(codes, low, scale_of(low, high, bits), codec.group_size, dim).flatten(2, 3)


class ShrinkLayer(SimulatedLayer):
    """A layer whose body has shrunk by one of the strategies."""

    def _packed_part(self, rows: slice, state: RowState, mask: torch.Tensor | None) -> PackedPart:
        part = super()._packed_part(rows, state, mask)
        exact = zip((part.keys, part.values), self._exact_pages(rows, state), part.bits)
        held = tuple(simulate(codec, x, bits, self.own["strategy"]) for codec, x, bits in exact)
        return SimulatedPart(part.pages, part.keys, part.values, part.bits, part.mask, part.short, content=held)


class ShrinkCache(SimulatedCache):
    """`PMKVQCache` with `strategy` "direct", "modified" or "equivalent"."""

    layer_class = ShrinkLayer
    own_options = MappingProxyType({"strategy": "equivalent"})

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.own["strategy"] not in STRATEGIES:
            raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}; got {self.own['strategy']!r}")
