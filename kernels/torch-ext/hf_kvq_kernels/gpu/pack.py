# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Quantization of blocks on a GPU, and narrowing of pages in place: to the bit what the codecs do on a CPU."""

from __future__ import annotations

import math

import torch

from ..pages import DTYPES, PageLayout


try:
    import triton

    from .codes import quantize_kernel, ranges_kernel, shrink_kernel, tiers_kernel
except ImportError:
    triton = None


# The order of bytes that the kernels know, by its place in `BYTE_ORDERS`.
_WORDS = 3

# Elements that a program of four warps holds in registers, and (min, max) pairs.
_ELEMENTS = 4096
_RANGES = 1024

# Bytes of the first pages that narrowing takes through a work space.
_WORK_BYTES = 1 << 22


def why_not_packing(x: torch.Tensor, order: int, tokens: int, along: int, group: int) -> str | None:
    """See `hf_kvq_kernels.why_not_packing`."""
    if triton is None:
        return "Triton is not installed"
    if x.dtype not in DTYPES:
        return f"the GPU kernels do not take {x.dtype}"
    if order != _WORDS:
        return "these codes are laid out for another kind of device"
    if tokens < 16 or tokens & (tokens - 1):
        return f"the GPU kernels want pages of 16, 32, 64, 128, ... tokens, got {tokens}"
    if group < along and group & (group - 1):
        return f"the GPU kernels want groups of a power of two or of all {along} elements, got {group}"
    return None


def quantize_(
    x: torch.Tensor, out: torch.Tensor, bits: int, per_channel: bool, group: int, order: int, centered: bool
) -> None:
    """See `hf_kvq_kernels.quantize_`; blocks of `out` begin at multiples of the size of an element of `x`."""
    rows, blocks, heads, tokens, dim = x.shape
    if not x.numel():
        return
    tile, words, group = _tiling(tokens, dim, bits, per_channel, group)
    grid = (rows * blocks * heads, triton.cdiv(dim, tile), tokens * bits // 16 // words)
    with torch.cuda.device_of(x):
        quantize_kernel[grid](
            x, out.view(torch.int16), out.view(x.dtype), blocks, dim, *x.stride(), *out.stride()[:2],
            ITEM=x.element_size(), HEADS=heads, TOKENS=tokens, TILE=tile, ROWS=words, GROUP=group,
            PER_CHANNEL=per_channel, BITS=bits, SATURATE=x.dtype != torch.float16, CENTERED=centered and bits == 2,
            num_warps=4,
        )  # fmt: skip


def quantize_tiers_(
    x: torch.Tensor, tiers: torch.Tensor, out: torch.Tensor, group: int, order: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `hf_kvq_kernels.quantize_tiers_`; blocks of `out` begin at multiples of the size of an element of `x`."""
    blocks, heads, tokens, dim = x.shape
    tiers = tiers.to(torch.uint8).contiguous()
    kinds = [tiers == tier for tier in (1, 2)]
    counts = torch.stack([kind.sum(-1) for kind in kinds], dim=-1)
    # Records are sorted by block, head and channel.
    in_low, in_exact = (kind.flatten().cumsum(0).view_as(kind) for kind in kinds)
    places = torch.where(kinds[1], in_exact, in_low).sub_(1).to(torch.int32)
    # All that the host has to wait for.
    n_low, n_exact = counts.sum((0, 1)).tolist()
    low, low_channel = tiers.new_empty(n_low, tokens // 4), tiers.new_empty(n_low)
    exact, exact_channel = x.new_empty(n_exact, tokens), tiers.new_empty(n_exact)
    tile, _, group = _tiling(tokens, dim, 2, True, group)
    with torch.cuda.device_of(x):
        tiers_kernel[(blocks * heads, triton.cdiv(dim, tile))](
            x, tiers, places, out.view(torch.int16), out.view(x.dtype),
            low.view(torch.int16), low_channel, exact, exact_channel, dim, *x.stride(), out.stride(0),
            ITEM=x.element_size(), HEADS=heads, TOKENS=tokens, TILE=tile, GROUP=group,
            SATURATE=x.dtype != torch.float16, num_warps=4,
        )  # fmt: skip
    return low, low_channel, exact, exact_channel, counts.to(torch.int16)


def shrink_(
    data: torch.Tensor,
    pages: int,
    layout: PageLayout,
    to_bits: int,
    key_order: int,
    value_order: int,
    centered_keys: bool,
) -> None:
    """See `hf_kvq_kernels.shrink_`.

    Programs of a launch run in any order, but launches one after the other. So each launch writes only where nothing
    lies that it, or a later one, has yet to read: with pages of `old` bytes that become `new` ones, pages [i, j) are
    read from i * old on and written up to j * new, which is at most i * old. From i on there is room for i * old / new
    pages, so that few launches do for any number of pages. The first pages would land on themselves; they go
    through a work space, which is all memory that is needed, and is there before anything changes.
    """
    narrow = layout._replace(key_bits=to_bits, value_bits=to_bits)
    old, new = (each.key_bytes() + each.value_bytes() for each in (layout, narrow))
    rows = data.shape[0]
    if not rows or not pages:
        return
    # Enough that there is room for at least one more; tiny groups can make narrower pages that are no smaller.
    least = math.ceil(new / (old - new)) if new < old else pages
    first = min(pages, max(least, _WORK_BYTES // (rows * new)))
    work = data.new_empty(rows, first, new)
    _narrow(_pages(data, 0, first, old), work, layout, narrow, centered_keys)
    _pages(data, 0, first, new).copy_(work)
    while first < pages:
        stop = min(pages, first * old // new)
        _narrow(_pages(data, first, stop, old), _pages(data, first, stop, new), layout, narrow, centered_keys)
        first = stop


def _pages(data: torch.Tensor, first: int, stop: int, size: int) -> torch.Tensor:
    """Pages [first, stop) of uint8 [rows, bytes]: a view, [rows, pages, size]."""
    return data[:, first * size : stop * size].unflatten(1, (-1, size))


def _narrow(old: torch.Tensor, new: torch.Tensor, wide: PageLayout, narrow: PageLayout, centered: bool) -> None:
    """Bring pages to the width of `narrow`, in memory that overlaps none of theirs."""
    sides = (
        (slice(0, wide.key_bytes()), slice(0, narrow.key_bytes()), wide.key_dim, wide.key_per_channel, wide.key_group),
        (slice(wide.key_bytes(), None), slice(narrow.key_bytes(), None), wide.value_dim, 0, wide.value_group),
    )
    counts = wide.key_groups(), wide.value_groups()
    for (old_side, new_side, dim, per_channel, group), groups, is_centered in zip(sides, counts, (centered, False)):
        blocks = old[..., old_side], new[..., new_side]
        if wide.key_bits == 16:
            x = blocks[0].view(DTYPES[wide.dtype]).unflatten(2, (wide.heads, wide.tokens, dim))
            quantize_(x, blocks[1], narrow.key_bits, bool(per_channel), group, _WORDS, is_centered)
        else:
            _shrink_blocks(*blocks, wide, narrow.key_bits, dim, groups, is_centered)


def _shrink_blocks(
    old: torch.Tensor, new: torch.Tensor, layout: PageLayout, bits: int, dim: int, groups: int, centered: bool
) -> None:
    """Blocks uint8 [rows, blocks, bytes], of keys or of values, from the layout's width to `bits`."""
    (rows, blocks, _), heads, tokens, dtype = old.shape, layout.heads, layout.tokens, DTYPES[layout.dtype]
    centered = centered and bits == 2
    tile, words, _ = _tiling(tokens, dim, bits, False, 1)
    strides = *old.stride()[:2], *new.stride()[:2]
    with torch.cuda.device_of(old):
        shrink_kernel[(rows * blocks * heads, triton.cdiv(dim, tile), tokens * bits // 16 // words)](
            old.view(torch.int16), new.view(torch.int16), blocks, dim, *strides,
            HEADS=heads, TOKENS=tokens, TILE=tile, ROWS=words, FROM=layout.key_bits, TO=bits, CENTERED=centered,
            num_warps=4,
        )  # fmt: skip
        ranges = (
            x[..., heads * tokens * width // 8 * dim :].view(dtype)
            for x, width in ((old, layout.key_bits), (new, bits))
        )
        ranges_kernel[(rows * blocks, triton.cdiv(heads * groups, _RANGES))](
            *ranges, blocks, heads * groups, *strides,
            ITEM=dtype.itemsize, TILE=_RANGES, CENTERED=centered, num_warps=4,
        )  # fmt: skip


def _tiling(tokens: int, dim: int, bits: int, per_channel: bool, group: int) -> tuple[int, int, int]:
    """Channels and words of a program, and the group as the kernels take it."""
    words, whole = tokens * bits // 16, triton.next_power_of_2(dim)
    if per_channel:
        return max(1, min(whole, _ELEMENTS // tokens)), words, min(group, tokens)
    group = whole if group >= dim else group
    tile = max(group, min(whole, 128))
    return tile, max(1, min(words, _ELEMENTS // (tile * 16 // bits))), group
