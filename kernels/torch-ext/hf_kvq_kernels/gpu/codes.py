# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Kernels that make packed codes and narrow them: to the bit what the codecs make, but for the sign of zeros.

Rows and blocks of all arguments lie in strides of their own, in elements for `x` and in bytes for packed blocks. What
differs between the launches of one narrowing is not specialized, so that all of them are one compiled kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl


# Beyond this magnitude (max - min) would leave float32; see the codecs.
_LARGEST = tl.constexpr(2.0**126)


@triton.jit
def locate(blocks, HEADS: tl.constexpr):
    """Row, block and head of this program."""
    place = tl.program_id(0)
    return (place // HEADS // blocks).to(tl.int64), (place // HEADS % blocks).to(tl.int64), place % HEADS


@triton.jit
def tokens_of(TOKENS: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr):
    """Tokens in this program's ROWS words: plane after plane, in each of them two per word."""
    item = tl.arange(0, 8 // BITS * ROWS * 2)
    return item // (2 * ROWS) * (TOKENS * BITS // 8) + tl.program_id(2) * (2 * ROWS) + item % (2 * ROWS)


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
def packed(codes, BITS: tl.constexpr):
    """[planes, words, 2, ...] -> int16 [words, ...]: plane p of byte r lies p * BITS bits up in it."""
    shift = (tl.arange(0, 8 // BITS) * BITS)[:, None] + (tl.arange(0, 2) * 8)[None, :]
    # The bits are disjoint, so that a sum joins them.
    words = tl.sum(tl.sum(codes << shift[:, None, :, None].to(tl.uint32), 2), 0)
    return words.to(tl.uint16).to(tl.int16, bitcast=True)


@triton.jit
def store_codes(words, codes, channels, dim, BITS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr):
    """Codes of `tokens_of`, [tokens, channels], into the words [.., dim] of one head."""
    at = words + (tl.program_id(2) * ROWS + tl.arange(0, ROWS))[:, None] * dim + channels[None, :]
    codes = tl.reshape(codes, [8 // BITS, ROWS, 2, TILE])
    tl.store(at, packed(codes, BITS), mask=(channels < dim)[None, :])


@triton.jit
def load_data(x, row, block, head, tokens, channels, dim, x_row, x_block, x_head, x_token, x_channel):
    """[tokens, channels] of one head of one block."""
    x += row * x_row + block * x_block + head.to(tl.int64) * x_head
    at = (tokens.to(tl.int64) * x_token)[:, None] + (channels.to(tl.int64) * x_channel)[None, :]
    return tl.load(x + at, mask=(channels < dim)[None, :], other=0.0)


@triton.jit
def ranges_of(data, inside, SHAPE: tl.constexpr, AXIS: tl.constexpr, SATURATE: tl.constexpr):
    """Minimum and maximum of each group of float32 data."""
    broken = tl.max(tl.reshape((data != data).to(tl.int32), SHAPE), AXIS) > 0
    low = tl.min(tl.reshape(tl.where(inside, data, float("inf")), SHAPE), AXIS)
    high = tl.max(tl.reshape(tl.where(inside, data, float("-inf")), SHAPE), AXIS)
    if SATURATE:
        low = tl.where(tl.abs(low) == float("inf"), low, tl.minimum(tl.maximum(low, -_LARGEST), _LARGEST))
        high = tl.where(tl.abs(high) == float("inf"), high, tl.minimum(tl.maximum(high, -_LARGEST), _LARGEST))
    return tl.where(broken, float("nan"), low), tl.where(broken, float("nan"), high)


@triton.jit
def codes_of(data, low, high, SHAPE: tl.constexpr, AXIS: tl.constexpr):
    """16-bit codes of grouped float32 data, uint32."""
    scale = tl.div_rn(high - low, tl.full(low.shape, 65535.0, tl.float32))
    grouped = tl.reshape(data, SHAPE) - tl.expand_dims(low, AXIS)
    code = tl.div_rn(grouped, tl.expand_dims(scale, AXIS) + tl.zeros(SHAPE, tl.float32))
    # A constant group divides 0 by 0.
    code = tl.where(code == code, code, 0.0)
    code = tl.minimum(tl.maximum(code, 0.0), 65535.0)
    # Rounds to even, as numbers from 2^23 to 2^24 have no fraction.
    code = (code + 8388608.0) - 8388608.0
    return tl.reshape(code, data.shape).to(tl.uint32)


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """float32 to the nearest number of DTYPE, the even one of two."""
    if DTYPE == tl.bfloat16:
        # As a GPU does it; the interpreter's conversion cuts off.
        bits = x.to(tl.uint32, bitcast=True)
        bits = tl.where(x == x, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FC0)
        return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def to_centers(low, high, DTYPE: tl.constexpr):
    """Minima and maxima, float32, an eighth of their ranges further in."""
    eighth = (high - low) * 0.125
    return rounded(low + eighth, DTYPE), rounded(high - eighth, DTYPE)


@triton.jit(
    do_not_specialize=["blocks"],
    do_not_specialize_on_alignment=["words", "ranges", "out_row", "out_block"],
)
def quantize_kernel(
    x,
    words,
    ranges,
    blocks,
    dim,
    x_row,
    x_block,
    x_head,
    x_token,
    x_channel,
    out_row,
    out_block,
    ITEM: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    BITS: tl.constexpr,
    SATURATE: tl.constexpr,
    CENTERED: tl.constexpr,
):
    """One head of one block, TILE channels of the tokens in ROWS words: codes and every group's (min, max)."""
    row, block, head = locate(blocks, HEADS)
    tokens, channels = tokens_of(TOKENS, BITS, ROWS), tl.program_id(1) * TILE + tl.arange(0, TILE)
    data = load_data(x, row, block, head, tokens, channels, dim, x_row, x_block, x_head, x_token, x_channel)
    data, inside = data.to(tl.float32), (channels < dim)[None, :]
    COUNT: tl.constexpr = 8 // BITS * ROWS * 2
    AXIS: tl.constexpr = 1 if PER_CHANNEL else 2
    SHAPE: tl.constexpr = [COUNT // GROUP, GROUP, TILE] if PER_CHANNEL else [COUNT, TILE // GROUP, GROUP]
    low, high = ranges_of(data, inside, SHAPE, AXIS, SATURATE)
    codes = narrowed(codes_of(data, low, high, SHAPE, AXIS), 16, BITS, CENTERED)
    if CENTERED:
        low, high = to_centers(low, high, ranges.dtype.element_ty)
    at = row * out_row + block * out_block
    head_words = TOKENS * BITS // 16 * dim
    store_codes(words + at // 2 + head * head_words, codes, channels, dim, BITS, ROWS, TILE)
    ranges += at // ITEM + HEADS * head_words * 2 // ITEM
    if PER_CHANNEL:
        GROUPS: tl.constexpr = TOKENS // GROUP
        place = (head * GROUPS + tl.arange(0, GROUPS))[:, None] * dim + channels[None, :]
        tl.store(ranges + place, low, mask=inside)
        tl.store(ranges + HEADS * GROUPS * dim + place, high, mask=inside)
    else:
        groups = (dim + GROUP - 1) // GROUP
        group = tl.program_id(1) * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
        place = (head * TOKENS + tokens)[:, None] * groups + group[None, :]
        tl.store(ranges + place, low, mask=(group < groups)[None, :])
        tl.store(ranges + HEADS * TOKENS * groups + place, high, mask=(group < groups)[None, :])


@triton.jit(do_not_specialize_on_alignment=["words", "ranges", "out_row"])
def tiers_kernel(
    x,
    tiers,
    places,
    words,
    ranges,
    low_words,
    low_channel,
    exact,
    exact_channel,
    dim,
    x_row,
    x_head,
    x_token,
    x_channel,
    out_row,
    ITEM: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    SATURATE: tl.constexpr,
):
    """One head of one row's keys, TILE of its channels, each in its tier; `places` are those of their records."""
    row, block, head = locate(1, HEADS)
    ROWS: tl.constexpr = TOKENS // 8
    tokens, channels = tl.arange(0, TOKENS), tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = channels < dim
    at = (row * HEADS + head) * dim + channels
    tier = tl.load(tiers + at, mask=inside, other=0)
    place = tl.load(places + at, mask=inside, other=0).to(tl.int64)
    raw = load_data(x, row, block, head, tokens, channels, dim, x_row, 0, x_head, x_token, x_channel)
    data = raw.to(tl.float32)
    SHAPE: tl.constexpr = [TOKENS // GROUP, GROUP, TILE]
    low, high = ranges_of(data, inside[None, :], SHAPE, 1, SATURATE)
    fine = narrowed(codes_of(data, low, high, SHAPE, 1), 16, 4, False)
    # The upper bits of a UINT4 channel are `code >> 2`, not its 2-bit code: with the lower ones they are exact.
    codes = tl.where((tier == 1)[None, :], fine >> 2, narrowed(fine, 4, 2, False))
    is_exact = (tier == 2)[None, :]
    codes = tl.where(is_exact, 0, codes)
    head_words = ROWS * dim
    store_codes(words + row * out_row // 2 + head * head_words, codes, channels, dim, 2, ROWS, TILE)
    GROUPS: tl.constexpr = TOKENS // GROUP
    at = (head * GROUPS + tl.arange(0, GROUPS))[:, None] * dim + channels[None, :]
    ranges += row * out_row // ITEM + HEADS * head_words * 2 // ITEM
    tl.store(ranges + at, tl.where(is_exact, 0.0, low), mask=inside[None, :])
    tl.store(ranges + HEADS * GROUPS * dim + at, tl.where(is_exact, 0.0, high), mask=inside[None, :])
    lower = packed(tl.reshape(fine & 3, [4, ROWS, 2, TILE]), 2)
    at = (place * ROWS)[None, :] + tl.arange(0, ROWS)[:, None]
    tl.store(low_words + at, lower, mask=(inside & (tier == 1))[None, :])
    tl.store(low_channel + place, channels.to(tl.uint8), mask=inside & (tier == 1))
    at = (place * TOKENS)[None, :] + tokens[:, None]
    tl.store(exact + at, raw, mask=inside[None, :] & is_exact)
    tl.store(exact_channel + place, channels.to(tl.uint8), mask=inside & (tier == 2))


@triton.jit(
    do_not_specialize=["blocks"],
    do_not_specialize_on_alignment=["old", "new", "old_row", "old_block", "new_row", "new_block"],
)
def shrink_kernel(
    old,
    new,
    blocks,
    dim,
    old_row,
    old_block,
    new_row,
    new_block,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    FROM: tl.constexpr,
    TO: tl.constexpr,
    CENTERED: tl.constexpr,
):
    """One head of one block, TILE of its channels: words of codes of FROM bits to ROWS words of codes of TO bits."""
    row, block, head = locate(blocks, HEADS)
    channels = tl.program_id(1) * TILE + tl.arange(0, TILE)
    WORDS: tl.constexpr = TOKENS * TO // 16
    # RATIO words become one; what they hold in plane P of theirs comes to the planes from RATIO * P on.
    RATIO: tl.constexpr = FROM // TO
    PLANES: tl.constexpr = 8 // FROM
    word = tl.arange(0, RATIO)[:, None] * WORDS + (tl.program_id(2) * ROWS + tl.arange(0, ROWS))[None, :]
    old += (row * old_row + block * old_block) // 2 + head * (TOKENS * FROM // 16 * dim)
    inside = (channels < dim)[None, None, :]
    wide = tl.load(old + word[:, :, None] * dim + channels[None, None, :], mask=inside, other=0)
    wide = wide.to(tl.uint16, bitcast=True).to(tl.uint32)
    shift = (tl.arange(0, PLANES) * FROM)[:, None] + (tl.arange(0, 2) * 8)[None, :]
    wide = tl.reshape(wide, [1, RATIO * ROWS, 1, TILE])
    codes = (wide >> shift[:, None, :, None].to(tl.uint32)) & (2**FROM - 1)
    codes = narrowed(tl.reshape(codes, [8 // TO * ROWS * 2, TILE]), FROM, TO, CENTERED)
    new += (row * new_row + block * new_block) // 2 + head * (WORDS * dim)
    store_codes(new, codes, channels, dim, TO, ROWS, TILE)


@triton.jit(
    do_not_specialize=["blocks"],
    do_not_specialize_on_alignment=["old", "new", "count", "old_row", "old_block", "new_row", "new_block"],
)
def ranges_kernel(
    old,
    new,
    blocks,
    count,
    old_row,
    old_block,
    new_row,
    new_block,
    ITEM: tl.constexpr,
    TILE: tl.constexpr,
    CENTERED: tl.constexpr,
):
    """TILE groups of one block: their (min, max), `count` minima and then as many maxima, to the narrower block."""
    row, block, _ = locate(blocks, 1)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = at < count
    old += (row * old_row + block * old_block) // ITEM
    new += (row * new_row + block * new_block) // ITEM
    low, high = tl.load(old + at, mask=inside), tl.load(old + count + at, mask=inside)
    if CENTERED:
        low, high = to_centers(low.to(tl.float32), high.to(tl.float32), new.dtype.element_ty)
    tl.store(new + at, low, mask=inside)
    tl.store(new + count + at, high, mask=inside)
