# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Quantization of pages on a GPU, and narrowing of their codes: bit for bit what the codecs do on a CPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..pages import DTYPES, PageLayout


# Beyond this magnitude (max - min) would leave float32; see the codecs.
_LARGEST = tl.constexpr(2.0**126)


@triton.jit
def narrowed(codes, FROM: tl.constexpr, TO: tl.constexpr, CENTERED: tl.constexpr):
    """Unsigned codes of FROM bits at TO bits, by equivalent right shifts, but for 2 bits where CENTERED."""
    if FROM >= 16 and TO <= 8:
        codes = ((codes + 128) * 65281) >> 24
    if FROM >= 8 and TO <= 4:
        codes = ((codes + 8) * 241) >> 12
    if FROM >= 4 and TO <= 2:
        codes = (codes if CENTERED else (codes + 2) * 13 >> 4) >> 2
    return codes


@triton.jit
def store_codes(words, codes, channels, dim, TOKENS: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr):
    """[tokens, channels] -> words [tokens * bits / 16, dim]: token 2 w + r + p * m in byte r, plane p of word w."""
    PLANES: tl.constexpr = 8 // BITS
    ROWS: tl.constexpr = TOKENS // PLANES // 2
    codes = tl.reshape(codes, [PLANES, ROWS, 2, TILE])
    shift = (tl.arange(0, PLANES) * BITS)[:, None] + (tl.arange(0, 2) * 8)[None, :]
    # The bits are disjoint, so that a sum joins them.
    packed = tl.sum(tl.sum(codes << shift[:, None, :, None].to(tl.uint32), 2), 0)
    at = words + tl.arange(0, ROWS)[:, None] * dim + channels[None, :]
    tl.store(at, packed.to(tl.uint16).to(tl.int16, bitcast=True), mask=(channels < dim)[None, :])


@triton.jit
def quantize_kernel(
    x,
    words,
    ranges,
    dim,
    words_block,
    ranges_block,
    ranges_start,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    BITS: tl.constexpr,
    SATURATE: tl.constexpr,
    CENTERED: tl.constexpr,
):
    """One head of one block, TILE of its channels: codes and every group's (min, max)."""
    block = (tl.program_id(0) // HEADS).to(tl.int64)
    head = tl.program_id(0) % HEADS
    tokens = tl.arange(0, TOKENS)
    channels = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (channels < dim)[None, :]
    at = x + tl.program_id(0).to(tl.int64) * TOKENS * dim + tokens[:, None] * dim + channels[None, :]
    data = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    AXIS: tl.constexpr = 1 if PER_CHANNEL else 2
    SHAPE: tl.constexpr = [TOKENS // GROUP, GROUP, TILE] if PER_CHANNEL else [TOKENS, TILE // GROUP, GROUP]
    broken = tl.max(tl.reshape((data != data).to(tl.int32), SHAPE), AXIS) > 0
    low = tl.min(tl.reshape(tl.where(inside, data, float("inf")), SHAPE), AXIS)
    high = tl.max(tl.reshape(tl.where(inside, data, float("-inf")), SHAPE), AXIS)
    if SATURATE:
        low = tl.where(tl.abs(low) == float("inf"), low, tl.minimum(tl.maximum(low, -_LARGEST), _LARGEST))
        high = tl.where(tl.abs(high) == float("inf"), high, tl.minimum(tl.maximum(high, -_LARGEST), _LARGEST))
    low = tl.where(broken, float("nan"), low)
    high = tl.where(broken, float("nan"), high)

    grouped = tl.reshape(data, SHAPE)
    scale = tl.div_rn(high - low, tl.full(low.shape, 65535.0, tl.float32))
    code = tl.div_rn(grouped - tl.expand_dims(low, AXIS), tl.expand_dims(scale, AXIS) + tl.zeros(SHAPE, tl.float32))
    # A constant group divides 0 by 0.
    code = tl.where(code == code, code, 0.0)
    code = tl.minimum(tl.maximum(code, 0.0), 65535.0)
    # Rounds to even, as numbers from 2^23 to 2^24 have no fraction.
    code = (code + 8388608.0) - 8388608.0
    code = narrowed(tl.reshape(code, [TOKENS, TILE]).to(tl.uint32), 16, BITS, CENTERED)
    words += block * words_block + head * (TOKENS * BITS // 16 * dim)
    store_codes(words, code, channels, dim, TOKENS, TILE, BITS)

    ranges += block * ranges_block + ranges_start
    if PER_CHANNEL:
        GROUPS: tl.constexpr = TOKENS // GROUP
        group = tl.arange(0, GROUPS)
        at = (head * GROUPS + group)[:, None] * dim + channels[None, :]
        tl.store(ranges + at, low, mask=inside)
        tl.store(ranges + HEADS * GROUPS * dim + at, high, mask=inside)
    else:
        groups = (dim + GROUP - 1) // GROUP
        group = tl.program_id(1) * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
        at = (head * TOKENS + tokens)[:, None] * groups + group[None, :]
        tl.store(ranges + at, low, mask=(group < groups)[None, :])
        tl.store(ranges + HEADS * TOKENS * groups + at, high, mask=(group < groups)[None, :])


@triton.jit
def shrink_kernel(
    old,
    new,
    dim,
    old_block,
    new_block,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    FROM: tl.constexpr,
    TO: tl.constexpr,
    CENTERED: tl.constexpr,
):
    """One head of one block, TILE of its channels: codes of FROM bits, as bytes, to words of codes of TO bits."""
    block = (tl.program_id(0) // HEADS).to(tl.int64)
    head = tl.program_id(0) % HEADS
    channels = tl.program_id(1) * TILE + tl.arange(0, TILE)
    token = tl.arange(0, TOKENS)
    BYTES: tl.constexpr = TOKENS * FROM // 8
    byte = token % BYTES
    at = ((byte // 2)[:, None] * dim + channels[None, :]) * 2 + (byte % 2)[:, None]
    old += block * old_block + head * (BYTES * dim)
    codes = tl.load(old + at, mask=(channels < dim)[None, :], other=0).to(tl.uint32)
    codes = (codes >> (token // BYTES * FROM)[:, None].to(tl.uint32)) & (2**FROM - 1)
    new += block * new_block + head * (TOKENS * TO // 16 * dim)
    store_codes(new, narrowed(codes, FROM, TO, CENTERED), channels, dim, TOKENS, TILE, TO)


def quantize_block(x: torch.Tensor, bits: int, axis: str, group: int, centered: bool = False) -> torch.Tensor:
    """[.., heads, tokens, dim] -> uint8 [.., bytes]: packed codes, then every group's minimum, then the maxima.

    Args:
        x: floating point; tokens a power of two.
        bits: 8, 4 or 2.
        axis: "channel" for groups along the tokens of a channel, "token" for groups along the channels of a token.
        group: elements per group, a power of two unless it covers everything.
        centered: at 2 bits, codes stand for the centers of the quarters of their groups' ranges.
    """
    heads, tokens, dim = x.shape[-3:]
    data = x.contiguous().view(-1, heads, tokens, dim)
    per_channel = axis == "channel"
    group = min(group, tokens) if per_channel else min(group, triton.next_power_of_2(dim))
    if group & (group - 1) or tokens & (tokens - 1) or tokens < 16:
        raise ValueError(f"groups and tokens must be powers of two, got group={group} and {tokens} tokens")
    groups = tokens // group * dim if per_channel else tokens * -(-dim // group)
    codes, size = heads * tokens * bits // 8 * dim, x.element_size()
    out = torch.empty(data.shape[0], codes + 2 * heads * groups * size, dtype=torch.uint8, device=x.device)
    tile = max(32, group) if not per_channel else 32
    quantize_kernel[(data.shape[0] * heads, -(-dim // tile))](
        data, out.view(torch.int16), out.view(x.dtype), dim, out.shape[1] // 2, out.shape[1] // size, codes // size,
        HEADS=heads, TOKENS=tokens, TILE=tile, GROUP=group, PER_CHANNEL=per_channel, BITS=bits,
        SATURATE=x.dtype != torch.float16, CENTERED=centered, num_warps=4,
    )  # fmt: skip
    if centered and bits == 2:
        out[:, codes:] = _to_centers(out[:, codes:], x.dtype)
    return out.view(*x.shape[:-3], -1)


def shrink_page(
    pages: torch.Tensor, from_bits: int, to_bits: int, layout: PageLayout, centered_keys: bool = False
) -> torch.Tensor:
    """Pages uint8 [.., bytes] whose keys and values have `from_bits`, at `to_bits`; `layout` says everything else."""
    old, new = (layout._replace(key_bits=bits, value_bits=bits) for bits in (from_bits, to_bits))
    blocks = pages.reshape(-1, pages.shape[-1])
    split, key_axis = old.key_bytes(), "channel" if layout.key_per_channel else "token"
    parts = [
        (blocks[:, :split], layout.key_dim, key_axis, layout.key_group, centered_keys),
        (blocks[:, split : split + old.value_bytes()], layout.value_dim, "token", layout.value_group, False),
    ]
    out = [_shrink(part.contiguous(), *how, old, new) for part, *how in parts]
    return torch.cat(out, dim=-1).view(*pages.shape[:-1], -1)


def _shrink(
    blocks: torch.Tensor, dim: int, axis: str, group: int, centered: bool, old: PageLayout, new: PageLayout
) -> torch.Tensor:
    n, heads, tokens, dtype = blocks.shape[0], old.heads, old.tokens, DTYPES[old.dtype]
    if old.key_bits == 16:
        data = blocks.view(dtype).view(n, heads, tokens, dim)
        return quantize_block(data, new.key_bits, axis, group, centered)
    codes = [heads * tokens * bits // 8 * dim for bits in (old.key_bits, new.key_bits)]
    out = torch.empty(n, blocks.shape[1] - codes[0] + codes[1], dtype=torch.uint8, device=blocks.device)
    ranges = blocks[:, codes[0] :]
    out[:, codes[1] :] = _to_centers(ranges, dtype) if centered and new.key_bits == 2 else ranges
    shrink_kernel[(n * heads, -(-dim // 32))](
        blocks, out.view(torch.int16), dim, blocks.shape[1], out.shape[1] // 2,
        HEADS=heads, TOKENS=tokens, TILE=32, FROM=old.key_bits, TO=new.key_bits, CENTERED=centered, num_warps=4,
    )  # fmt: skip
    return out


def _to_centers(ranges: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Minima and then maxima, as bytes, an eighth of their ranges further in."""
    low, high = ranges.contiguous().view(dtype).float().chunk(2, dim=1)
    eighth = (high - low) / 8
    return torch.cat([low + eighth, high - eighth], dim=1).to(dtype).view(torch.uint8)
