# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Attention over packed pages and exact segments on a GPU: every part split over programs, one softmax over all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..pages import DTYPES, PageLayout


try:
    import triton
    import triton.language as tl

    from .exact import exact_kernel, reduce_kernel
    from .pages import pages_kernel
except ImportError:
    triton = None


PAGE_TOKENS = 128
MAX_QUERIES = 16

# Merging more partial results than this costs more than the parallelism they bring.
_MAX_SPLITS = 256
# Programs of one warp with all registers of it that one multiprocessor holds at a time.
_PROGRAMS_PER_PROCESSOR = 8
EXACT_TOKENS = 64
# Pages whose words are on their way while one is worked on, and that one.
_STAGES = 2


def interpreted() -> bool:
    """Whether Triton runs its kernels in Python, on tensors of any device."""
    return triton is not None and not isinstance(pages_kernel, triton.JITFunction)


def why_not(query: torch.Tensor, layout: PageLayout | None) -> str | None:
    """Why these kernels cannot run for this query and these pages, or None if they can."""
    if triton is None:
        return "Triton is not installed"
    if query.device.type != "cuda" and not interpreted():
        return f"Triton's kernels run on a GPU, and the query is on {query.device.type!r}"
    if query.dtype not in DTYPES:
        return f"queries are float32, bfloat16 or float16, not {query.dtype}"
    if query.shape[2] > MAX_QUERIES:
        return f"up to {MAX_QUERIES} queries at a time, got {query.shape[2]}"
    if layout is None:
        return None
    if layout.tokens != PAGE_TOKENS:
        return f"pages of {PAGE_TOKENS} tokens, got {layout.tokens}"
    if max(layout.key_dim, layout.value_dim) > 256:
        return f"head_dim up to 256, got {max(layout.key_dim, layout.value_dim)}"
    if layout.key_bits < 16 and layout.key_per_channel and min(layout.key_group, PAGE_TOKENS) not in (32, 64, 128):
        return f"key groups of 32, 64 or at least 128 tokens, got {layout.key_group}"
    rows = [(layout.value_bits, layout.value_group, layout.value_dim)]
    if not layout.key_per_channel:
        rows.append((layout.key_bits, layout.key_group, layout.key_dim))
    for bits, group, dim in rows:
        if bits < 16 and group < dim and (group < 16 or group & (group - 1)):
            return f"groups along head_dim of 16, 32, 64, 128 or all channels, got {group}"
    return None


def attend(
    query: torch.Tensor,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    masks: list[torch.Tensor | None],
    pages: torch.Tensor | None,
    page_mask: torch.Tensor | None,
    page_starts: torch.Tensor | None,
    records: list[torch.Tensor],
    layout: PageLayout | None,
    scaling: float,
    softcap: float,
    page_held: torch.Tensor | None = None,
    held: Sequence[torch.Tensor | None] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax over all parts of query @ K^T * scaling, times V, and the log-sum-exp of the scores.

    Args:
        query: [rows, query_heads, queries, key_dim], up to 16 queries; heads of one KV head are neighbours.
        keys, values: exact segments, [rows, heads, n, dim] each.
        masks: for each segment None, bool (true = visible) or additive, of four dimensions that broadcast against
            [rows, query_heads, queries, n].
        pages: uint8 [rows, n_pages, page_bytes] as `layout` says, or None.
        page_mask: as `masks`, over the tokens that the pages hold.
        page_starts: None if all pages are full, or int32 [n_pages + 1] on the device: page `i` holds the mask's
            columns [page_starts[i], page_starts[i + 1]), in its first tokens.
        records: for tiered keys low, low_channel, exact, exact_channel and counts of every row, in this order.
        scaling: factor on the inner products.
        softcap: if positive, scores become softcap * tanh(scores / softcap), before the mask.

        page_held, held: for the pages, and for each segment, None or int64 [rows] on the device: how many of them a
            row holds. What is behind them is not looked at.

    Returns:
        float32 [rows, query_heads, queries, value_dim] and [rows, query_heads, queries]; for a query that sees
        nothing 0 and -inf.
    """
    # Triton launches on the current device.
    with torch.cuda.device_of(query):
        body = pages, page_mask, page_starts, records, layout
        return _attend(query, keys, values, masks, *body, scaling, softcap, page_held, held)


def _attend(
    query: torch.Tensor,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    masks: list[torch.Tensor | None],
    pages: torch.Tensor | None,
    page_mask: torch.Tensor | None,
    page_starts: torch.Tensor | None,
    records: list[torch.Tensor],
    layout: PageLayout | None,
    scaling: float,
    softcap: float,
    page_held: torch.Tensor | None = None,
    held: Sequence[torch.Tensor | None] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    if query.stride(-1) != 1:
        query = query.contiguous()
    segments = [s for s in zip(keys, values, masks, held or [None] * len(keys)) if s[0].shape[2]]
    if pages is not None and not pages.shape[1]:
        pages = None
    rows, query_heads, queries, _ = query.shape
    if pages is not None:
        heads, value_dim = layout.heads, layout.value_dim
    else:
        heads, value_dim = keys[0].shape[1], values[0].shape[-1]
    count = query_heads // heads * queries
    tile = 8 if count <= 8 else 16
    common = {"HEADS": heads, "GROUP": query_heads // heads, "QUERIES": tile, "SOFTCAP": softcap > 0}
    blocks = -(-count // tile)
    # Splits of each part: as many as keep the device busy.
    places = rows * heads * blocks
    page_step, page_splits = _split(pages.shape[1], 1, places, query.device) if pages is not None else (1, 0)
    steps = [_split(k.shape[2], EXACT_TOKENS, places, query.device) for k, *_ in segments]
    slots = page_splits + sum(n for _, n in steps)
    out = query.new_empty(rows, query_heads, queries, value_dim, dtype=torch.float32)
    lse = query.new_empty(rows, query_heads, queries, dtype=torch.float32)
    if not slots:
        return out.zero_(), lse.fill_(float("-inf"))
    partial = query.new_empty(rows, heads, slots, count, value_dim, dtype=torch.float32)
    partial_lse = query.new_empty(rows, heads, slots, count, dtype=torch.float32)
    if pages is not None:
        options = {**page_constants(layout, query.dtype, bool(records)), **common}
        ends = (page_step, slots, queries, scaling, softcap)
        grid = (heads, page_splits, blocks)
        sources = (query, pages, page_mask, page_held, page_starts, partial, partial_lse)
        if not records:
            _launch_pages((rows * heads, *grid[1:]), *sources, [None] * 5, layout, ends, options)
        else:
            # Every row has buffers of its own.
            if page_mask is not None:
                sources = (*sources[:2], page_mask.expand(rows, *[-1] * 3), *sources[3:])
            for row in range(rows):
                of_row = [x if x is None else x[row : row + 1] for x in sources[:4]]
                own = (page_starts, partial[row:], partial_lse[row:])
                _launch_pages(grid, *of_row, *own, records[5 * row : 5 * row + 5], layout, ends, options)
    first = page_splits
    for (k, v, mask, row_tokens), (step, splits) in zip(segments, steps):
        k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
        mask, strides, kind = _mask_arguments(mask, query)
        dtype = torch.promote_types(torch.promote_types(query.dtype, k.dtype), v.dtype)
        exact_kernel[(rows * heads, splits, blocks)](
            query, k, v, mask, row_tokens, partial, partial_lse,
            *query.stride()[:3], *k.stride()[:3], *v.stride()[:3], *strides,
            k.shape[2], step, first, slots, queries, scaling, softcap,
            KEY_DIM=k.shape[-1], VALUE_DIM=value_dim, KEY_TILE=_tile(k.shape[-1]), VALUE_TILE=_tile(value_dim),
            TOKENS=EXACT_TOKENS // 2 if dtype == torch.float32 else EXACT_TOKENS,
            MASK=kind, HELD=row_tokens is not None, EXACT=_exact_math(dtype), **common, num_warps=4, num_stages=2,
        )  # fmt: skip
        first += splits
    reduce_kernel[(rows * heads, count)](
        partial, partial_lse, out, lse, slots, count,
        VALUE_DIM=value_dim, VALUE_TILE=_tile(value_dim), SLOTS=16, num_warps=4,
    )  # fmt: skip
    return out, lse


def page_constants(layout: PageLayout, query_dtype: torch.dtype, tiered: bool) -> dict[str, Any]:
    """What the kernel over pages is compiled for, and how, as far as the layout decides."""
    size = DTYPES[layout.dtype].itemsize
    key_codes = layout.heads * layout.tokens * layout.key_bits // 8 * layout.key_dim
    value_codes = layout.heads * layout.tokens * layout.value_bits // 8 * layout.value_dim
    whole, exact_values = layout.key_bits == 16 or layout.key_per_channel, layout.value_bits == 16
    exact = torch.promote_types(query_dtype, DTYPES[layout.dtype])
    packed = torch.float32 if query_dtype == torch.float32 else torch.float16
    return {
        "KEY_DIM": layout.key_dim,
        "VALUE_DIM": layout.value_dim,
        "KEY_BITS": layout.key_bits,
        "VALUE_BITS": layout.value_bits,
        "PER_CHANNEL": bool(layout.key_per_channel),
        "KEY_GROUP": min(layout.key_group, PAGE_TOKENS) if layout.key_per_channel else layout.key_group,
        "KEY_TILE": _tile(layout.key_dim) if whole else _tile(min(layout.key_group, layout.key_dim)),
        "VALUE_TILE": _tile(layout.value_dim if exact_values else min(layout.value_group, layout.value_dim)),
        "KEY_RANGES": key_codes // size,
        "VALUE_BLOCK": layout.key_bytes() // 2,
        "VALUE_RANGES": (layout.key_bytes() + value_codes) // size,
        "ITEM_WORDS": size // 2,
        "TIERED": tiered,
        "MATH": _math(packed),
        "EXACT": _exact_math(exact),
        "STAGES": _STAGES,
        "ASM": packed == torch.float16 and not interpreted() and torch.version.hip is None,
    }


def page_warps(options: dict[str, Any]) -> int:
    """Warps per program: tiles that do not fit the registers of one are shared by two or four."""
    return (1 + (max(options["KEY_DIM"], options["VALUE_DIM"]) > 128)) * options["QUERIES"] // 8


def _launch_pages(
    grid: tuple[int, int, int],
    query: torch.Tensor,
    pages: torch.Tensor,
    mask: torch.Tensor | None,
    row_pages: torch.Tensor | None,
    starts: torch.Tensor | None,
    partial: torch.Tensor,
    partial_lse: torch.Tensor,
    records: list[torch.Tensor | None],
    layout: PageLayout,
    ends: tuple,
    options: dict[str, Any],
) -> None:
    dtype = DTYPES[layout.dtype]
    where = (pages.storage_offset(), *pages.stride()[:2])
    if pages.stride(-1) != 1 or any(n % dtype.itemsize for n in where):
        # Words must not begin at an odd address.
        pages = pages.clone(memory_format=torch.contiguous_format)
    mask, strides, kind = _mask_arguments(mask, query)
    low, low_channel, exact, exact_channel, counts = records
    if counts is not None:
        # Tokens 2 w and 2 w + 1 in one element, as in the pages' words; the counts of both tiers in one.
        low, counts = low.view(torch.int16), counts.view(torch.int32)
    pages_kernel[grid](
        query, pages.view(torch.int16), pages.view(dtype), mask, starts, row_pages,
        counts, low, low_channel, exact, exact_channel, partial, partial_lse,
        *query.stride()[:3], pages.stride(0) // 2, pages.stride(1) // 2, *strides, pages.shape[1], *ends,
        MASK=kind, SHORT=starts is not None, HELD=row_pages is not None, **options, num_warps=page_warps(options),
    )  # fmt: skip


def _mask_arguments(
    mask: torch.Tensor | None, query: torch.Tensor
) -> tuple[torch.Tensor | None, tuple[int, ...], int]:
    """The mask as kernels take it, its strides (0 where it broadcasts), and its kind: none, bool or additive."""
    if mask is None:
        return None, (0, 0, 0, 0), 0
    strides = tuple(0 if n == 1 else stride for n, stride in zip(mask.shape, mask.stride()))
    if mask.dtype == torch.bool:
        return mask.view(torch.int8), strides, 1
    return mask, strides, 2


def _split(size: int, unit: int, places: int, device: torch.device) -> tuple[int, int]:
    """How many of `size` each program takes, in multiples of `unit`, and the number of programs."""
    units = -(-size // unit)
    programs = max(1, min(units, _MAX_SPLITS, -(-_programs(device) // places)))
    step = -(-units // programs)
    return step * unit, -(-units // step)


def _programs(device: torch.device) -> int:
    """How many programs keep a device busy."""
    if device.type != "cuda":
        return 1
    return _PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count


def _tile(dim: int) -> int:
    return max(16, 1 << (dim - 1).bit_length())


def _math(dtype: torch.dtype) -> Any:
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]


def _exact_math(dtype: torch.dtype) -> Any:
    # The interpreter's arithmetic in bfloat16 is wrong.
    return tl.float32 if dtype == torch.bfloat16 and interpreted() else _math(dtype)
