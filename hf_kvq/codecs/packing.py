# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Packing of 8, 4 and 2 bit codes into bytes, in planes: no element ever moves between lanes."""

from __future__ import annotations

import torch


def packed_size(n: int, bits: int) -> int:
    """Bytes that `n` codes of width `bits` take along the packed dimension."""
    return -(-n * bits // 8)


def pack(codes: torch.Tensor, bits: int, dim: int = -1) -> torch.Tensor:
    """Pack integer codes into bytes along `dim`.

    Planes: of `m = packed_size(n, bits)` bytes, byte `i` holds the elements `i`, `i + m`, `i + 2m`, ... from its
    lowest bits upwards. Unpacking is then one shift and one mask per plane, contiguous in memory.

    Args:
        codes: integer tensor with values in `[0, 2^bits - 1]`; its size `n` along `dim` need not divide evenly.
        bits: 8, 4 or 2.

    Returns:
        uint8 tensor with `packed_size(n, bits)` bytes along `dim`.
    """
    _check(bits)
    codes = codes.to(torch.uint8)
    if bits == 8:
        return codes
    dim = dim % codes.ndim
    n, m = codes.shape[dim], packed_size(codes.shape[dim], bits)
    packed = codes.narrow(dim, 0, m).clone()
    for plane in range(1, 8 // bits):
        width = min(m, n - plane * m)
        if width > 0:
            packed.narrow(dim, 0, width).bitwise_or_(codes.narrow(dim, plane * m, width) << (plane * bits))
    return packed


def unpack(packed: torch.Tensor, bits: int, n: int, dim: int = -1) -> torch.Tensor:
    """Inverse of `pack`: the `n` codes along `dim`, uint8."""
    _check(bits)
    if bits == 8:
        return packed
    dim = dim % packed.ndim
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    shifts = shifts.view(-1, *[1] * (packed.ndim - dim))
    planes = (packed.unsqueeze(dim) >> shifts).bitwise_and_(2**bits - 1)
    return planes.flatten(dim, dim + 1).narrow(dim, 0, n)


def interleave(packed: torch.Tensor, dim: int, count: int) -> torch.Tensor:
    """Bring `count` neighbours along `dim` (-1 or -2) next to each other in memory.

    [..., a, b] -> [..., a / count, b, count] for dim -2, [..., b / count, a, count] for dim -1. A kernel whose inner
    product runs along `dim` finds `count` of its factors in one word.
    """
    words = packed.unflatten(dim, (-1, count))
    return words.transpose(-1, -2) if dim == -2 else words.transpose(-3, -2)


def deinterleave(words: torch.Tensor, dim: int) -> torch.Tensor:
    """Inverse of `interleave`."""
    return words.transpose(-1, -2).flatten(-3, -2) if dim == -2 else words.transpose(-3, -2).flatten(-2, -1)


def _check(bits: int) -> None:
    if bits not in (8, 4, 2):
        raise ValueError(f"codes are packed at 8, 4 or 2 bits, got bits={bits!r}")
