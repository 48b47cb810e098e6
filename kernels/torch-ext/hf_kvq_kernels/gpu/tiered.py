# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""What the UINT4 and BF16 channels of tiered keys add to the scores of their page's regular part.

Sixteen channels at a time, as one more inner product: their part of the query is gathered, their records lie densely.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import codes


@triton.jit
def records_before(counts, place):
    """Number of UINT4 and BF16 records before page and head `place`; `counts` has both in one int32."""
    low = 0
    exact = 0
    for start in range(0, place, 1024):
        at = start + tl.arange(0, 1024)
        pair = tl.load(counts + at, mask=at < place, other=0)
        low += tl.sum(pair & 0xFFFF, 0)
        exact += tl.sum(pair >> 16, 0)
    return low, exact


@triton.jit
def records_to_next_page(counts, place, places, HEADS: tl.constexpr):
    """Number of UINT4 and BF16 records from page and head `place` to the same head of the next page."""
    HEADS_TILE: tl.constexpr = triton.next_power_of_2(HEADS)
    head = tl.arange(0, HEADS_TILE)
    pair = tl.load(counts + place + head, mask=(head < HEADS) & (place + head < places), other=0)
    return tl.sum(pair & 0xFFFF, 0), tl.sum(pair >> 16, 0)


@triton.jit
def gather_query(query, offsets, channel, held, inside, inverse):
    """Channels of the query in fp32, [channels, queries]; 0 for those that are not there."""
    mask = held[:, None] & inside[None, :]
    q = tl.load(query + (offsets[None, :] + channel[:, None]), mask=mask, other=0.0)
    return q.to(tl.float32) * inverse[None, :]


@triton.jit
def add_low_bits(
    scores,
    query,
    offsets,
    inside,
    inverse,
    low,
    channels,
    count,
    key_words,
    key_ranges,
    KEY_DIM: tl.constexpr,
    KEY_GROUP: tl.constexpr,
    RANGES: tl.constexpr,
    MATH: tl.constexpr,
    ASM: tl.constexpr,
):
    """UINT4 channels: min + (4 * upper + lower) * range / 15, of which the regular part has min + upper * range / 3.

    So what is missing is (lower - upper) * range / 15. RANGES is the distance from a minimum to its maximum.
    """
    word = tl.arange(0, 16)
    for start in range(0, count, 16):
        record = start + tl.arange(0, 16)
        held = record < count
        channel = tl.load(channels + record, mask=held, other=0).to(tl.int32)
        q = gather_query(query, offsets, channel, held, inside, inverse)
        lower = tl.load(low + record[None, :] * 16 + word[:, None], mask=held[None, :], other=0)
        upper = tl.load(key_words + word[:, None] * KEY_DIM + channel[None, :], mask=held[None, :], other=0)
        added = ()
        for j in tl.static_range(4):
            if (32 * j) % KEY_GROUP == 0:
                at = key_ranges + (32 * j // KEY_GROUP) * KEY_DIM + channel
                low_end = tl.load(at, mask=held, other=0.0).to(tl.float32)
                high_end = tl.load(at + RANGES, mask=held, other=0.0).to(tl.float32)
                q_step = (q * ((high_end - low_end) * (1.0 / 15))[:, None]).to(MATH)
            for r in tl.static_range(2):
                missing = codes(lower, 2, j, r, MATH, ASM) - codes(upper, 2, j, r, MATH, ASM)
                added = added + (tl.dot(missing, q_step, scores[2 * j + r], input_precision="ieee"),)
        scores = added
    return scores


@triton.jit
def add_exact(scores, query, offsets, inside, inverse, exact, channels, count, EXACT: tl.constexpr):
    """BF16 channels, of which the regular part has nothing."""
    word = tl.arange(0, 16)
    for start in range(0, count, 16):
        record = start + tl.arange(0, 16)
        held = record < count
        channel = tl.load(channels + record, mask=held, other=0).to(tl.int32)
        q = gather_query(query, offsets, channel, held, inside, inverse).to(EXACT)
        added = ()
        for j in tl.static_range(4):
            for r in tl.static_range(2):
                at = exact + record[None, :] * 128 + (32 * j + r + 2 * word)[:, None]
                k = tl.load(at, mask=held[None, :], other=0.0).to(EXACT)
                added = added + (tl.dot(k, q, scores[2 * j + r], input_precision="ieee"),)
        scores = added
    return scores
