# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""The kernel over tokens in the model's dtype, and the one that merges what all programs found."""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import (
    LOG2E,
    MASK_STRIDES,
    apply_mask,
    finish_scores,
    load_query,
    power_below,
    query_offsets,
    store_partial,
)


@triton.jit(do_not_specialize=[*MASK_STRIDES, "n_tokens", "tokens_per_split", "first_slot", "slots", "n_queries"])
def exact_kernel(
    query,
    keys,
    values,
    mask,
    row_tokens,
    out,
    lse,
    query_row,
    query_head,
    query_token,
    keys_row,
    keys_head,
    keys_token,
    values_row,
    values_head,
    values_token,
    mask_row,
    mask_head,
    mask_query,
    mask_token,
    n_tokens,
    tokens_per_split,
    first_slot,
    slots,
    n_queries,
    scaling,
    softcap,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    TOKENS: tl.constexpr,
    QUERIES: tl.constexpr,
    MASK: tl.constexpr,
    HELD: tl.constexpr,
    SOFTCAP: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Attention over tokens [split * tokens_per_split, ..) of one row and KV head; EXACT is the dots' type.

    HELD: the row has `row_tokens[row]` tokens, which the programs share.
    """
    row = (tl.program_id(0) // HEADS).to(tl.int64)
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    split = tl.program_id(1)
    index = tl.program_id(2) * QUERIES + tl.arange(0, QUERIES)
    count = GROUP * n_queries
    key_columns = tl.arange(0, KEY_TILE)
    value_columns = tl.arange(0, VALUE_TILE)

    query += row * query_row + head * GROUP * query_head
    offsets = query_offsets(index, query_head, query_token, n_queries)
    raw = load_query(query, offsets, key_columns, index < count, KEY_DIM)
    unit = power_below(tl.max(tl.abs(raw), 0))
    q = (raw / unit[None, :]).to(EXACT)
    factor = unit * scaling
    if SOFTCAP:
        factor = factor * (2.0 / softcap)
        softcap = softcap * LOG2E
    factor = factor * LOG2E

    keys += row * keys_row + head * keys_head
    values += row * values_row + head * values_head
    if MASK:
        mask += row * mask_row + head * GROUP * mask_head
        mask_offsets = query_offsets(index, mask_head, mask_query, n_queries)

    acc = tl.zeros([VALUE_TILE, QUERIES], tl.float32)
    weight = tl.zeros([TOKENS, QUERIES], tl.float32)
    peak = tl.full([QUERIES], float("-inf"), tl.float32)
    if HELD:
        n_tokens = tl.load(row_tokens + row).to(tl.int32)
        tokens_per_split = tl.cdiv(tl.cdiv(n_tokens, tl.num_programs(1)), TOKENS) * TOKENS
    first = split * tokens_per_split
    last = tl.minimum(first + tokens_per_split, n_tokens)
    for start in range(first, last, TOKENS):
        token = start + tl.arange(0, TOKENS)
        far = token.to(tl.int64)
        held = token < last
        k = tl.load(
            keys + far[:, None] * keys_token + key_columns[None, :],
            mask=held[:, None] & (key_columns < KEY_DIM)[None, :],
            other=0.0,
        )
        scores = finish_scores(tl.dot(k.to(EXACT), q, input_precision="ieee"), factor, softcap, SOFTCAP)
        at = mask
        if MASK:
            at = mask + (mask_offsets[None, :] + far[:, None] * mask_token)
        scores = apply_mask(scores, at, held[:, None] & (index < count)[None, :], MASK, True)

        new_peak = tl.maximum(peak, tl.max(scores, 0))
        # Where nothing is visible yet, the peak is -inf and must not be subtracted from itself.
        origin = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        rescale = tl.exp2(peak - origin)
        peak = new_peak
        weights = tl.exp2(scores - origin[None, :])
        weight = weight * rescale[None, :] + weights
        v = tl.load(
            values + far[None, :] * values_token + value_columns[:, None],
            mask=held[None, :] & (value_columns < VALUE_DIM)[:, None],
            other=0.0,
        )
        acc = tl.dot(v.to(EXACT), weights.to(EXACT), acc * rescale[None, :], input_precision="ieee")

    slot = tl.program_id(0).to(tl.int64) * slots + first_slot + split
    store_partial(out, lse, acc, peak, weight, slot, index, value_columns, count, VALUE_DIM, 0)


@triton.jit(do_not_specialize=["slots", "count"])
def reduce_kernel(
    partial,
    partial_lse,
    out,
    lse,
    slots,
    count,
    VALUE_DIM: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Softmax over all slots of one query: [.., slots, count, VALUE_DIM] and log2 sums -> [.., count, VALUE_DIM]."""
    place = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1)
    columns = tl.arange(0, VALUE_TILE)
    acc = tl.zeros([VALUE_TILE], tl.float32)
    weight = tl.zeros([SLOTS], tl.float32)
    peak = float("-inf")
    for start in range(0, slots, SLOTS):
        slot = start + tl.arange(0, SLOTS)
        at = (place * slots + slot) * count + index
        sums = tl.load(partial_lse + at, mask=slot < slots, other=float("-inf"))
        new_peak = tl.maximum(peak, tl.max(sums, 0))
        origin = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        rescale = tl.exp2(peak - origin)
        peak = new_peak
        weights = tl.exp2(sums - origin)
        inside = (slot < slots)[:, None] & (columns < VALUE_DIM)[None, :]
        parts = tl.load(partial + at[:, None] * VALUE_DIM + columns[None, :], mask=inside, other=0.0)
        acc = acc * rescale + tl.sum(parts * weights[:, None], 0)
        weight = weight * rescale + weights
    total = tl.sum(weight, 0)
    # A query that sees nothing gets zeros, and the logarithm of 0.
    acc = tl.where(total == 0, 0.0, acc / total)
    at = place * count + index
    tl.store(out + at * VALUE_DIM + columns, acc, mask=columns < VALUE_DIM)
    tl.store(lse + at, tl.where(total == 0, float("-inf"), (peak + tl.log2(total)) / LOG2E))
