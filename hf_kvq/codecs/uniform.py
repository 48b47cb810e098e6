# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Asymmetric uniform quantization whose widths nest: 16 -> 8 -> 4 -> 2 bits by exact integer shifts."""

from __future__ import annotations

import torch


#: Widths a stored element can have; 16 is the code every narrower width is derived from.
WIDTHS = (16, 8, 4, 2)

# Beyond this magnitude (max - min) would leave float32; such extremes saturate instead of becoming inf.
_LARGEST = 2.0**126


def group_range(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Minimum and maximum of each group, in `x.dtype`, with `dim` kept at size 1.

    Finite extremes saturate at 2**126; NaN and inf are kept, so that a broken group stays visibly broken.
    """
    low, high = torch.aminmax(x, dim=dim, keepdim=True)
    if torch.finfo(x.dtype).max > _LARGEST:
        low, high = (torch.where(r.isinf(), r, r.clamp(-_LARGEST, _LARGEST)) for r in (low, high))
    return low, high


def clip_groups(x: torch.Tensor, share: float, group_size: int, dim: int) -> torch.Tensor:
    """Bring what lies outside the middle `share` of its group's range to the edge of that (after SKVQ, 2405.06219).

    A narrower range has finer steps: at 2 bits this gains more than the few clipped elements lose.

    Args:
        x: floating point tensor.
        share: between 0 and 1.
        group_size, dim: see `quantize`.
    """

    def clipped(chunk: torch.Tensor) -> torch.Tensor:
        low, high = (r.float() for r in group_range(chunk, dim))
        middle, half = (low + high) / 2, (high - low) * (share / 2)
        return chunk.clamp((middle - half).to(x.dtype), (middle + half).to(x.dtype))

    return torch.cat([clipped(chunk) for chunk in x.split(group_size, dim=dim)], dim=dim)


def scale_of(low: torch.Tensor, high: torch.Tensor, bits: int) -> torch.Tensor:
    """Step between two neighbouring codes, `(max - min) / (2^bits - 1)`, float32.

    Derived from (min, max) whenever it is needed: after a shrink `scale_b = (2^b + 1) * scale_2b` holds by itself.
    """
    return (high.float() - low.float()) / (2**bits - 1)


def encode(x: torch.Tensor, low: torch.Tensor, high: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of `x` given its groups' ranges; int32, in `[0, 2^bits - 1]`.

    The 16-bit code is formed first, in float32, and narrowed by integer arithmetic only. So the result does not
    depend on the widths an element went through before (PM-KVQ, equivalent right shift).
    """
    codes = (x.float() - low.float()) / scale_of(low, high, 16)
    # A constant group divides 0 by 0; what its code is does not matter, as its scale is 0.
    codes = codes.nan_to_num(nan=0.0).round_().clamp_(0, 65535).to(torch.int32)
    return narrow(codes, 16, bits)


def equivalent_right_shift(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Halve the width of codes: `2 * bits` -> `bits`, integers only (PM-KVQ, section 3.2).

    Equals dequantizing and quantizing again with the same (min, max), for every code of every width.

    Args:
        codes: integer tensor with values in `[0, 2^(2 * bits) - 1]`.
        bits: the width to reach, one of 8, 4, 2.

    Returns:
        int32 tensor with values in `[0, 2^bits - 1]`.
    """
    if bits not in (8, 4, 2):
        raise ValueError(f"equivalent_right_shift reaches 8, 4 or 2 bits, got bits={bits!r}")
    # For bits=8 the product needs 32 unsigned bits; the mask undoes the sign that int32 sees in the top one.
    return (
        (codes.to(torch.int32) + 2 ** (bits - 1))
        .mul_(2 ** (2 * bits) - 2**bits + 1)
        .bitwise_right_shift_(3 * bits)
        .bitwise_and_(2**bits - 1)
    )


def centered_right_shift(
    codes: torch.Tensor, low: torch.Tensor, high: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """4-bit codes brought to the quarter of their group's range that they lie in, whose center stands for them.

    The four levels lie at 1/8, 3/8, 5/8 and 7/8 of the range, not at its ends, where few elements are. So that they
    are evenly spread between minimum and maximum as any codes are, (min, max) move an eighth of the range inwards.

    Args:
        codes: integer tensor with values in `[0, 15]`.
        low, high: extremes of the groups.

    Returns:
        The 2-bit codes, and (min, max) that go with them, in the dtype of `low`.
    """
    eighth = (high.float() - low.float()) / 8
    return codes >> 2, (low.float() + eighth).to(low.dtype), (high.float() - eighth).to(high.dtype)


def narrow(codes: torch.Tensor, bits: int, target_bits: int) -> torch.Tensor:
    """Codes of width `bits` brought to `target_bits` by repeated equivalent right shifts."""
    while bits > target_bits:
        bits //= 2
        codes = equivalent_right_shift(codes, bits)
    return codes


def quantize(
    x: torch.Tensor, bits: int, group_size: int = 128, dim: int = -1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize `x` in groups of `group_size` consecutive elements along `dim`; the last group may be shorter.

    Args:
        x: floating point tensor (float16, bfloat16 or float32).
        bits: 16, 8, 4 or 2.
        group_size: elements that share one (min, max) pair.
        dim: the dimension that groups run along.

    Returns:
        `codes` (int32, the shape of `x`) and the groups' `low` and `high` (`x.dtype`, the shape of `x` with `dim`
        of size `ceil(n / group_size)`). A constant group comes back exactly; finite input never gives NaN or inf.

    Raises:
        ValueError: `bits` or `group_size` is not a possible one.
    """
    _check(bits, group_size)
    parts = [(chunk, *group_range(chunk, dim)) for chunk in x.split(group_size, dim=dim)]
    codes = torch.cat([encode(chunk, low, high, bits) for chunk, low, high in parts], dim=dim)
    return codes, torch.cat([low for _, low, _ in parts], dim=dim), torch.cat([high for *_, high in parts], dim=dim)


def dequantize(
    codes: torch.Tensor, low: torch.Tensor, high: torch.Tensor, bits: int, group_size: int = 128, dim: int = -1
) -> torch.Tensor:
    """Inverse of `quantize`: the values that the codes stand for, in the dtype of `low`."""
    _check(bits, group_size)
    return decode_groups(codes, low, scale_of(low, high, bits), group_size, dim).to(low.dtype)


def decode_groups(
    codes: torch.Tensor, low: torch.Tensor, scale: torch.Tensor, group_size: int, dim: int
) -> torch.Tensor:
    """`low + code * scale`, float32, with one `low` and `scale` per group of `group_size` elements along `dim`."""
    dim, n = dim % codes.ndim - codes.ndim, codes.shape[dim]
    low, codes = low.float(), codes.float()
    if low.shape[dim] == 1:
        return torch.addcmul(low, codes, scale)
    if n % group_size:
        # The last group is shorter, so that groups are no dimension of their own.
        low, scale = (x.repeat_interleave(group_size, dim=dim).narrow(dim, 0, n) for x in (low, scale))
        return torch.addcmul(low, codes, scale)
    values = torch.addcmul(low.unsqueeze(dim), codes.unflatten(dim, (-1, group_size)), scale.unsqueeze(dim))
    return values.flatten(dim - 1, dim)


def _check(bits: int, group_size: int) -> None:
    if bits not in WIDTHS:
        raise ValueError(f"bits must be one of {WIDTHS}, got {bits!r}")
    if group_size < 1:
        raise ValueError(f"group_size must be at least 1, got {group_size!r}")
