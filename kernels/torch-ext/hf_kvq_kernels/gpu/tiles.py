# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""What the attention kernels are made of: codes out of words, atoms of tokens, the running softmax.

A page of 128 tokens is handled as eight atoms of 16 tokens. Atom (j, r) holds the tokens 32 j + 2 w + r, w = 0..15. At
every width these are one plane of 16 rows of words, so keys and values of different widths have the same atoms.
A tile of scores is [16 tokens, queries]: tokens are the side of the matrix instruction that is 16 long, queries the
one that can be 8, so that the few queries of a GQA group waste little of it.
"""

from __future__ import annotations

import triton
import triton.language as tl


LOG2E = tl.constexpr(1.4426950408889634)
MASK_STRIDES = ("mask_row", "mask_head", "mask_query")


@triton.constexpr_function
def atom(j, r, bits):
    """Place of atom (j, r) among those that a loop over rows of words, planes and bytes makes, in this order."""
    steps = 4 if bits == 16 else bits // 2
    return 2 * (j % steps * (4 // steps) + j // steps) + r


@triton.constexpr_function
def steps(bits):
    """Tiles of 16 rows of words (of data, at 16 bits) for each byte of a word; the planes are 4 / steps."""
    return 4 if bits == 16 else bits // 2


@triton.constexpr_function
def _extract(bits, plane, byte):
    """PTX: two words in, two fp16 numbers 1024 + 2^(bits * plane) * code out."""
    if bits == 8:
        # A whole byte is moved rather than masked.
        return f"prmt.b32 t, $1, 0x64646464, {0x4341 if byte else 0x4240};"
    lane = ((2**bits - 1) << (bits * plane)) * 0x10001
    if byte:
        return f"shr.b32 t, $1, 8; lop3.b32 t, t, {lane}, 0x64006400, 0xEA;"
    return f"lop3.b32 t, $1, {lane}, 0x64006400, 0xEA;"


@triton.constexpr_function
def _biased_asm(bits, plane, byte):
    return "{ .reg .b32 t; " + _extract(bits, plane, byte) + " mov.b32 $0, t; }"


@triton.constexpr_function
def _exact_asm(bits, plane, byte):
    """As `_extract`, with 1024 and the power of two removed by one fused multiply-add."""
    # 2^-n and -1024 * 2^-n, twice in a register each.
    n = bits * plane
    step, bias = ((15 - n) << 10) * 0x10001, (0x8000 | (25 - n) << 10) * 0x10001
    return (
        "{ .reg .b32 t, a, b; "
        + _extract(bits, plane, byte)
        + f" mov.b32 a, {step}; mov.b32 b, {bias}; fma.rn.f16x2 $0, t, a, b; }}"
    )


@triton.jit
def biased_codes(words, BITS: tl.constexpr, PLANE: tl.constexpr, BYTE: tl.constexpr, ASM: tl.constexpr):
    """1024 + 2^(BITS * PLANE) * code in fp16: the code becomes bits of a mantissa, nothing is converted."""
    if ASM:
        return tl.inline_asm_elementwise(_biased_asm(BITS, PLANE, BYTE), "=r,r", [words], tl.float16, True, 2)
    return (((words >> (8 * BYTE)) & ((2**BITS - 1) << (BITS * PLANE))) | 0x6400).to(tl.float16, bitcast=True)


@triton.jit
def codes(words, BITS: tl.constexpr, PLANE: tl.constexpr, BYTE: tl.constexpr, MATH: tl.constexpr, ASM: tl.constexpr):
    """Codes as numbers of type MATH."""
    if MATH == tl.float32:
        numbers = ((words >> (8 * BYTE + BITS * PLANE)) & (2**BITS - 1)).to(tl.float32)
    elif ASM:
        numbers = tl.inline_asm_elementwise(_exact_asm(BITS, PLANE, BYTE), "=r,r", [words], tl.float16, True, 2)
    else:
        numbers = (biased_codes(words, BITS, PLANE, BYTE, ASM) - 1024.0) * (2.0 ** -(BITS * PLANE))
    return numbers


@triton.jit
def computed_once(x, ASM: tl.constexpr):
    """An fp16 tensor as it is, but opaque: the compiler may move it between threads, and not compute it in many."""
    if ASM:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], tl.float16, False, 2)
    return x


@triton.jit
def rows16(base, first, step, stride, columns, width, PADDED: tl.constexpr):
    """Rows first, first + step, .. of [rows, stride] at the given columns: [16, columns]."""
    at = base + (first + step * tl.arange(0, 16))[:, None] * stride + columns[None, :]
    if PADDED:
        return tl.load(at, mask=(columns < width)[None, :], other=0)
    return tl.load(at)


@triton.jit
def columns16(base, first, step, stride, columns, width, PADDED: tl.constexpr):
    """The transpose of `rows16`, [columns, 16]."""
    at = base + (first + step * tl.arange(0, 16))[None, :] * stride + columns[:, None]
    if PADDED:
        return tl.load(at, mask=(columns < width)[:, None], other=0)
    return tl.load(at)


@triton.jit
def load_held(at, token, held, SHORT: tl.constexpr):
    """What tokens have, in fp32; 0 for those that a short page does not hold."""
    if SHORT:
        return tl.load(at, mask=token < held, other=0.0).to(tl.float32)
    return tl.load(at).to(tl.float32)


@triton.jit
def power_below(x):
    """The largest power of two that is not above x, and 2^-100 at least."""
    bits = tl.maximum(x, 7.888609052210118e-31).to(tl.int32, bitcast=True)
    return (bits & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def finish_scores(scores, factor, softcap, SOFTCAP: tl.constexpr):
    """Inner products -> scores in units of log 2; with a soft cap, `factor` makes them twice the tanh's argument."""
    scores = scores * factor[None, :]
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (1 + exp(2 x)), right at both ends.
        scores = softcap * (1.0 - 2.0 / (1.0 + tl.exp2(scores)))
    return scores


@triton.jit
def apply_mask(scores, at, visible, MASK: tl.constexpr, CHECK: tl.constexpr):
    """MASK: 0 none, 1 bool, 2 additive. `visible` is [tokens, queries]; what is not visible is not looked at."""
    if MASK == 1:
        scores = tl.where(tl.load(at, mask=visible, other=0) != 0, scores, float("-inf"))
    elif MASK == 2:
        scores += tl.load(at, mask=visible, other=0.0).to(tl.float32) * LOG2E
    if CHECK:
        scores = tl.where(visible, scores, float("-inf"))
    return scores


@triton.jit
def query_offsets(index, query_head, query_token, n_queries):
    """Where the queries `index` of one KV head begin, relative to its first one."""
    return index // n_queries * query_head + index % n_queries * query_token


@triton.jit
def load_query(query, offsets, columns, inside, width):
    """Queries of one KV head, [columns, queries] in fp32; what is outside is 0."""
    inside = (columns < width)[:, None] & inside[None, :]
    return tl.load(query + (offsets[None, :] + columns[:, None]), mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_partial(out, lse, acc, peak, weight, slot, index, columns, count, width, SHIFT: tl.constexpr):
    """One split's output and log2-sum-exp2 for one tile of value columns."""
    total = tl.sum(weight, 0)
    # A query that saw nothing gets zeros; NaN stays NaN.
    inverse = tl.where(total == 0, 0.0, 1.0 / total)
    acc = acc * inverse[None, :]
    inside = (columns < width)[:, None] & (index < count)[None, :]
    at = (slot * count + index)[None, :] * width + columns[:, None]
    tl.store(out + at, acc, mask=inside)
    # The logarithm of 0 is -inf, as it should be, but the peak may be too.
    peak = tl.where(total == 0, float("-inf"), peak + tl.log2(total) - SHIFT)
    tl.store(lse + slot * count + index, peak, mask=index < count)
