# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""The kernel over pages of packed codes: one program takes a run of pages of one row and KV head."""

from __future__ import annotations

import triton
import triton.language as tl

from .tiered import add_exact, add_low_bits, records_before, records_to_next_page
from .tiles import (
    LOG2E,
    MASK_STRIDES,
    apply_mask,
    atom,
    biased_codes,
    codes,
    columns16,
    computed_once,
    finish_scores,
    load_held,
    load_query,
    power_below,
    query_offsets,
    rows16,
    steps,
    store_partial,
)


# Numbers that grow with the history, for which Triton must not compile again and again.
@triton.jit(do_not_specialize=[*MASK_STRIDES, "n_pages", "pages_per_split", "slots", "n_queries"])
def pages_kernel(
    query,
    words,
    ranges,
    mask,
    starts,
    row_pages,
    counts,
    low,
    low_channel,
    exact,
    exact_channel,
    out,
    lse,
    query_row,
    query_head,
    query_token,
    pages_row,
    pages_page,
    mask_row,
    mask_head,
    mask_query,
    mask_token,
    n_pages,
    pages_per_split,
    slots,
    n_queries,
    scaling,
    softcap,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    KEY_GROUP: tl.constexpr,
    KEY_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    KEY_RANGES: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    VALUE_RANGES: tl.constexpr,
    ITEM_WORDS: tl.constexpr,
    QUERIES: tl.constexpr,
    MASK: tl.constexpr,
    SHORT: tl.constexpr,
    HELD: tl.constexpr,
    TIERED: tl.constexpr,
    STAGES: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MATH: tl.constexpr,
    EXACT: tl.constexpr,
    ASM: tl.constexpr,
):
    """Attention over pages [split * pages_per_split, ..) of one row and KV head, for up to QUERIES query rows.

    `words` and `ranges` are one memory, as 16-bit words and in the model's dtype; KEY_RANGES, VALUE_BLOCK and
    VALUE_RANGES are offsets in a page, in elements of `ranges` but for VALUE_BLOCK, in words. MATH is the type that
    codes are multiplied in, EXACT the one of 16-bit data. HELD: the row has `row_pages[row]` pages, which the programs
    share.
    """
    KEY_GROUPS: tl.constexpr = 128 // KEY_GROUP
    KEY_TILES: tl.constexpr = 1 if PER_CHANNEL else (KEY_DIM + KEY_TILE - 1) // KEY_TILE
    VALUE_TILES: tl.constexpr = (VALUE_DIM + VALUE_TILE - 1) // VALUE_TILE
    KEY_PADDED: tl.constexpr = KEY_DIM % KEY_TILE != 0
    VALUE_PADDED: tl.constexpr = VALUE_DIM % VALUE_TILE != 0
    # Weights are kept 2^SHIFT times too large: times a step of values they would leave fp16 at the small end.
    SHIFT: tl.constexpr = 0 if VALUE_BITS == 16 else VALUE_BITS
    # Minima in their own type need no conversion, but one more copy of the query.
    MINIMA: tl.constexpr = MATH if TIERED or EXACT == tl.float32 else EXACT
    BIAS: tl.constexpr = 0.0 if MATH == tl.float32 else 1024.0

    row = (tl.program_id(0) // HEADS).to(tl.int64)
    head = tl.program_id(0) % HEADS
    split = tl.program_id(1)
    index = tl.program_id(2) * QUERIES + tl.arange(0, QUERIES)
    count = GROUP * n_queries
    atom_rows = tl.arange(0, 16)
    key_columns = tl.arange(0, KEY_TILE)
    value_columns = tl.arange(0, VALUE_TILE)

    query += row * query_row + (head * GROUP).to(tl.int64) * query_head
    offsets = query_offsets(index, query_head, query_token, n_queries)
    raw = ()
    largest = tl.zeros([QUERIES], tl.float32)
    for g in tl.static_range(KEY_TILES):
        raw = raw + (load_query(query, offsets, g * KEY_TILE + key_columns, index < count, KEY_DIM),)
        largest = tl.maximum(largest, tl.max(tl.abs(raw[g]), 0))
    # Queries are brought to about 1 by a power of two, so that their products with steps fit fp16.
    unit = power_below(largest)
    inverse = 1.0 / unit
    q = ()
    q_exact = ()
    q_sum = ()
    for g in tl.static_range(KEY_TILES):
        scaled = raw[g] * inverse[None, :]
        q = q + (scaled.to(MATH),)
        q_exact = q_exact + (scaled.to(EXACT),)
        q_sum = q_sum + (tl.sum(scaled.to(MATH).to(tl.float32), 0),)
    q_minima = q[0] if MINIMA == MATH else q_exact[0]
    factor = unit * scaling
    if SOFTCAP:
        factor = factor * (2.0 / softcap)
        softcap = softcap * LOG2E
    factor = factor * LOG2E

    words += row * pages_row
    if MASK:
        mask += row * mask_row + (index % n_queries).to(tl.int64) * mask_query
        mask += (head * GROUP + index // n_queries).to(tl.int64) * mask_head

    acc = ()
    for _ in tl.static_range(VALUE_TILES):
        acc = acc + (tl.zeros([VALUE_TILE, QUERIES], tl.float32),)
    weight = tl.zeros([16, QUERIES], tl.float32)
    peak = tl.full([QUERIES], float("-inf"), tl.float32)
    if HELD:
        n_pages = tl.load(row_pages + row).to(tl.int32)
        pages_per_split = tl.cdiv(n_pages, tl.num_programs(1))
    first = split * pages_per_split
    last = tl.minimum(first + pages_per_split, n_pages)
    if TIERED:
        before = first * HEADS + head
        if HELD:
            # There are no counts of pages that a row does not hold.
            before = tl.minimum(before, n_pages * HEADS)
        low_at, exact_at = records_before(counts, before)

    page_words = words + first.to(tl.int64) * pages_page
    for page in tl.range(first, last, num_stages=STAGES):
        page_ranges = page_words.to(ranges.dtype, bitcast=True)
        column = page * 128
        held = 128
        if SHORT:
            column = tl.load(starts + page)
            held = tl.load(starts + page + 1) - column

        # Inner products of queries and keys, one tile for each atom.
        scores = ()
        key_words = page_words + head * (KEY_DIM * KEY_BITS * 8)
        key_ranges = page_ranges + KEY_RANGES
        if PER_CHANNEL and KEY_BITS != 16:
            # Row g is what the minima of group g give.
            at = key_ranges + head * (KEY_GROUPS * KEY_DIM)
            inside = (atom_rows < KEY_GROUPS)[:, None] & (key_columns < KEY_DIM)[None, :]
            minima = tl.load(at + (atom_rows[:, None] * KEY_DIM + key_columns[None, :]), mask=inside, other=0.0)
            from_minima = tl.dot(minima.to(MINIMA), q_minima, input_precision="ieee")
        for s in tl.static_range(steps(KEY_BITS)):
            if KEY_BITS != 16:
                tiles = ()
                for g in tl.static_range(KEY_TILES):
                    columns = g * KEY_TILE + key_columns
                    tiles = tiles + (rows16(key_words, 16 * s, 1, KEY_DIM, columns, KEY_DIM, KEY_PADDED),)
            for p in tl.static_range(4 // steps(KEY_BITS)):
                if PER_CHANNEL and KEY_BITS != 16 and ((s == 0 and p == 0) or KEY_GROUP < 128):
                    group = (s + steps(KEY_BITS) * p) * 32 // KEY_GROUP
                    at = key_ranges + (head * KEY_GROUPS + group) * KEY_DIM + key_columns
                    inside = key_columns < KEY_DIM
                    low_end = tl.load(at, mask=inside, other=0.0).to(tl.float32)
                    high_end = tl.load(at + HEADS * KEY_GROUPS * KEY_DIM, mask=inside, other=0.0).to(tl.float32)
                    step = (high_end - low_end) * (1.0 / (2**KEY_BITS - 1))
                    q_step = q[0] * computed_once(step.to(MATH), ASM)[:, None]
                    base = tl.sum(tl.where((atom_rows == group)[:, None], from_minima, 0.0), 0)
                    if BIAS != 0.0:
                        bias = tl.dot(tl.full([16, KEY_TILE], -BIAS, MATH), q_step)
                for r in tl.static_range(2):
                    if KEY_BITS == 16:
                        columns = key_columns
                        data = page_ranges + head * (128 * KEY_DIM)
                        t = tl.zeros([16, QUERIES], tl.float32)
                        for g in tl.static_range(KEY_TILES):
                            columns = g * KEY_TILE + key_columns
                            k = rows16(data, 32 * s + r, 2, KEY_DIM, columns, KEY_DIM, KEY_PADDED)
                            t = tl.dot(k.to(EXACT), q_exact[g], t, input_precision="ieee")
                    elif PER_CHANNEL:
                        if BIAS == 0.0:
                            t = tl.dot(codes(tiles[0], KEY_BITS, p, r, MATH, ASM), q_step, input_precision="ieee")
                            t += base[None, :]
                        else:
                            t = tl.dot(biased_codes(tiles[0], KEY_BITS, p, r, ASM), q_step, bias)
                            t = t * (2.0 ** -(KEY_BITS * p)) + base[None, :]
                    else:
                        token = 32 * (s + steps(KEY_BITS) * p) + r + 2 * atom_rows
                        t = tl.zeros([16, QUERIES], tl.float32)
                        for g in tl.static_range(KEY_TILES):
                            at = key_ranges + (head * 128 + token) * KEY_TILES + g
                            low_end = tl.load(at).to(tl.float32)
                            high_end = tl.load(at + HEADS * 128 * KEY_TILES).to(tl.float32)
                            step = (high_end - low_end) * (1.0 / (2**KEY_BITS - 1))
                            if BIAS == 0.0:
                                u = tl.dot(codes(tiles[g], KEY_BITS, p, r, MATH, ASM), q[g], input_precision="ieee")
                            else:
                                u = tl.dot(biased_codes(tiles[g], KEY_BITS, p, r, ASM), q[g])
                                u -= (BIAS * q_sum[g])[None, :]
                                step *= 2.0 ** -(KEY_BITS * p)
                            t += u * step[:, None] + low_end[:, None] * q_sum[g][None, :]
                    scores = scores + (t,)
        if TIERED:
            pair = tl.load(counts + page * HEADS + head)
            scores = add_low_bits(
                scores,
                query,
                offsets,
                index < count,
                inverse,
                low + low_at.to(tl.int64) * 16,
                low_channel + low_at,
                pair & 0xFFFF,
                key_words,
                key_ranges + head * KEY_GROUPS * KEY_DIM,
                KEY_DIM,
                KEY_GROUP,
                HEADS * KEY_GROUPS * KEY_DIM,
                MATH,
                ASM,
            )
            scores = add_exact(
                scores,
                query,
                offsets,
                index < count,
                inverse,
                exact + exact_at.to(tl.int64) * 128,
                exact_channel + exact_at,
                pair >> 16,
                EXACT,
            )
            more_low, more_exact = records_to_next_page(counts, page * HEADS + head, n_pages * HEADS, HEADS)
            low_at += more_low
            exact_at += more_exact

        # Softmax, still one tile for each atom.
        finished = ()
        top = tl.full([16, QUERIES], float("-inf"), tl.float32)
        for j in tl.static_range(4):
            for r in tl.static_range(2):
                t = finish_scores(scores[atom(j, r, KEY_BITS)], factor, softcap, SOFTCAP)
                if MASK or SHORT:
                    token = 32 * j + r + 2 * atom_rows
                    visible = (token < held)[:, None] & (index < count)[None, :]
                    at = mask
                    if MASK:
                        at = mask[None, :] + (column + token).to(tl.int64)[:, None] * mask_token
                    t = apply_mask(t, at, visible, MASK, SHORT)
                top = tl.maximum(top, t)
                finished = finished + (t,)
        new_peak = tl.maximum(peak, tl.max(top, 0))
        # Where nothing is visible yet, the peak is -inf and must not be subtracted from itself.
        origin = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        rescale = tl.exp2(peak - origin)
        peak = new_peak
        origin = origin - SHIFT
        value_words = page_words + VALUE_BLOCK + head * (VALUE_DIM * VALUE_BITS * 8)
        value_ranges = page_ranges + VALUE_RANGES
        weights = ()
        weight = weight * rescale[None, :]
        minima = (tl.zeros([16, QUERIES], tl.float32),) * VALUE_TILES
        for j in tl.static_range(4):
            for r in tl.static_range(2):
                w = tl.exp2(finished[2 * j + r] - origin[None, :])
                weight += w
                weights = weights + (w.to(EXACT if VALUE_BITS == 16 else MATH),)
                if VALUE_BITS != 16:
                    token = 32 * j + r + 2 * atom_rows
                    added = ()
                    for g in tl.static_range(VALUE_TILES):
                        at = value_ranges + (head * 128 + token) * VALUE_TILES + g
                        low_end = load_held(at, token, held, SHORT)
                        added = added + (minima[g] + w * low_end[:, None],)
                    minima = added

        # Weighted values.
        new_acc = ()
        for g in tl.static_range(VALUE_TILES):
            columns = g * VALUE_TILE + value_columns
            sums = acc[g] * rescale[None, :] + tl.sum(minima[g], 0)[None, :]
            for s in tl.static_range(steps(VALUE_BITS)):
                if VALUE_BITS != 16:
                    tile = columns16(value_words, 16 * s, 1, VALUE_DIM, columns, VALUE_DIM, VALUE_PADDED)
                for p in tl.static_range(4 // steps(VALUE_BITS)):
                    for r in tl.static_range(2):
                        w = weights[2 * (s + steps(VALUE_BITS) * p) + r]
                        token = 32 * (s + steps(VALUE_BITS) * p) + r + 2 * atom_rows
                        if VALUE_BITS == 16:
                            data = page_ranges + VALUE_BLOCK // ITEM_WORDS + head * (128 * VALUE_DIM)
                            v = columns16(data, 32 * s + r, 2, VALUE_DIM, columns, VALUE_DIM, VALUE_PADDED)
                            if SHORT:
                                v = tl.where((token < held)[None, :], v, 0.0)
                            sums = tl.dot(v.to(EXACT), w, sums, input_precision="ieee")
                        else:
                            at = value_ranges + (head * 128 + token) * VALUE_TILES + g
                            low_end = load_held(at, token, held, SHORT)
                            high_end = load_held(at + HEADS * 128 * VALUE_TILES, token, held, SHORT)
                            step = ((high_end - low_end) * (1.0 / (2**VALUE_BITS - 1))).to(MATH)
                            v = codes(tile, VALUE_BITS, p, r, MATH, ASM)
                            sums = tl.dot(v, w * step[:, None], sums, input_precision="ieee")
            new_acc = new_acc + (sums,)
        acc = new_acc
        page_words += pages_page

    slot = tl.program_id(0).to(tl.int64) * slots + split
    for g in tl.static_range(VALUE_TILES):
        store_partial(
            out,
            lse,
            acc[g],
            peak,
            weight,
            slot,
            index,
            g * VALUE_TILE + value_columns,
            count,
            VALUE_DIM,
            SHIFT,
        )
