# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Kernels that are compiled on a device nobody tested must show once that they are right there."""

from __future__ import annotations

import functools

import torch

import hf_kvq_kernels

from ..codecs import BlockCodec
from . import fused, naive
from .parts import ExactPart, PackedPart


_WIDTHS = (16, 8, 4, 2)
# Far above rounding (bfloat16 data, fp16 products), far below what a wrong code or scale makes.
_TOLERANCE = 0.02


def check_parts(
    device: torch.device, bits: int, orders: tuple[tuple[int, int] | None, tuple[int, int] | None]
) -> tuple[torch.Tensor, list[ExactPart | PackedPart]]:
    """A small problem: queries, two pages of `bits`, and a few exact tokens."""
    heads, tokens, dim = 2, 128, 64
    generator = torch.Generator().manual_seed(bits)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, torch.bfloat16)

    common = (heads, tokens, dim, torch.bfloat16)
    codecs = [BlockCodec(*common, axis, tokens, byte_order=order) for axis, order in zip(("channel", "token"), orders)]
    pages = torch.cat([codec.encode(random(1, 2, heads, tokens, dim), bits) for codec in codecs], dim=-1)
    exact = ExactPart(random(1, heads, 70, dim), random(1, heads, 70, dim))
    return random(1, 2 * heads, 1, dim), [PackedPart(pages, *codecs, (bits, bits)), exact]


@functools.cache
def failure(device: torch.device, kernel: fused.Kernel, orders: tuple) -> str | None:
    """What is wrong with what `kernel` computes on `device`, or None; found out once per process."""
    for bits in _WIDTHS:
        query, parts = check_parts(device, bits, orders)
        wanted = naive.attend(query, parts, 0.2)
        try:
            got = fused.attend(query, parts, 0.2, kernel)
        except Exception as error:  # A compiler or a driver may raise anything.
            return f"they fail on this device ({type(error).__name__}: {error})"
        if not torch.allclose(got.float(), wanted.float(), rtol=0, atol=_TOLERANCE):
            return f"their results at {bits} bits are wrong on this device; please report it"
    return None


@functools.cache
def packing_failure(device: torch.device, orders: tuple) -> str | None:
    """What is wrong with how kernels pack and narrow on `device`, or None; found out once per process."""
    heads, tokens, dim, rows, pages = 2, 32, 32, 2, 5
    common = (heads, tokens, dim, torch.bfloat16)
    codecs = [
        BlockCodec(*common, axis, 16, byte_order=order, centered=axis == "channel")
        for axis, order in zip(("channel", "token"), orders)
    ]
    generator = torch.Generator().manual_seed(0)
    data = [torch.randn(rows, pages, *common[:3], generator=generator).to(torch.bfloat16) for _ in codecs]
    # The codecs' bytes as a CPU makes them.
    wide, narrow = (torch.cat([c.encode(x, bits) for c, x in zip(codecs, data)], dim=-1) for bits in (8, 2))
    places = [hf_kvq_kernels.BYTE_ORDERS.index(order) for order in orders]
    try:
        arena = torch.zeros_like(wide, device=device)
        sides = arena.tensor_split([codecs[0].nbytes(8)], dim=-1)
        for codec, x, side, place in zip(codecs, data, sides, places):
            hf_kvq_kernels.quantize_(x.to(device), side, 8, codec.axis == "channel", 16, place)
        if not torch.equal(arena.cpu(), wide):
            return "what they pack is wrong on this device; please report it"
        arena, layout = arena.flatten(1), fused.page_layout(*codecs, (8, 8))
        hf_kvq_kernels.shrink_(arena, pages, layout, 2, *places, True)
        narrowed = arena[:, : narrow[0].numel()].cpu().view_as(narrow)
    except Exception as error:  # A compiler or a driver may raise anything.
        return f"they fail on this device ({type(error).__name__}: {error})"
    return None if torch.equal(narrowed, narrow) else "what they narrow is wrong on this device; please report it"
