# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Fused attention on a CPU: C, compiled for the processor at hand, called through ctypes."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import struct
from collections.abc import Sequence

import torch

from ..pages import DTYPES, PageLayout
from .build import cached_library, installed_library


# Orders of bytes that the C code knows, by their place in `BYTE_ORDERS`.
_ORDERS = (0, 1, 2)

# Tokens, widths and so on of pages that are not there.
_NO_PAGES = (16, 16, 16, 0, 1, 1, 0)


@functools.cache
def _library() -> ctypes.CDLL | str:
    """The loaded library, or why there is none."""
    library = None
    if installed := installed_library():
        # Made elsewhere, it may lack what it needs here.
        with contextlib.suppress(OSError):
            library = ctypes.CDLL(str(installed))
    try:
        library = library or ctypes.CDLL(str(cached_library()))
    except (RuntimeError, OSError) as error:
        return str(error)
    for function in (library.kvq_attend, library.kvq_quantize, library.kvq_shrink):
        function.argtypes = [ctypes.c_char_p]
    return library


def why_not(query: torch.Tensor, layout: PageLayout | None) -> str | None:
    """Why these kernels cannot attend with `query` over such pages, or None if they can."""
    if query.device.type != "cpu":
        return f"the CPU kernels cannot run on {query.device.type}"
    if query.dtype not in DTYPES:
        return f"the CPU kernels do not take {query.dtype}"
    if torch.is_grad_enabled() and query.requires_grad:
        return "the CPU kernels have no gradients"
    return _build_error() or (None if layout is None else _why_not_layout(layout))


def why_not_packing(x: torch.Tensor, *orders: int) -> str | None:
    """Why these kernels cannot pack such keys or values in these orders of bytes, or None if they can."""
    if x.dtype not in DTYPES:
        return f"the CPU kernels do not take {x.dtype}"
    if any(order not in _ORDERS for order in orders):
        return "these codes are laid out for another kind of device"
    return _build_error()


def _build_error() -> str | None:
    library = _library()
    return f"the CPU kernels could not be built: {library}" if isinstance(library, str) else None


@functools.cache
def _why_not_layout(layout: PageLayout) -> str | None:
    if (layout.key_bits == 16) != (layout.value_bits == 16):
        return "the CPU kernels want keys and values both at 16 bits, or both below"
    if layout.key_dim % 4 or (not layout.key_per_channel and layout.key_group % 4):
        return "the CPU kernels want key channels, and groups of them, in multiples of 4"
    if layout.tokens % 16:
        return "the CPU kernels want pages of a multiple of 16 tokens"
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
    """See `hf_kvq_kernels.attend`."""
    if page_held is not None or any(count is not None for count in held):
        body = pages, page_mask, page_starts, records, layout
        return _attend_by_row(query, keys, values, masks, *body, scaling, softcap, page_held, held)
    rows, query_heads, queries, key_dim = query.shape
    heads = layout.heads if pages is not None else keys[0].shape[1]
    value_dim = layout.value_dim if pages is not None else values[0].shape[3]
    query = query.contiguous()
    out = query.new_empty(rows, query_heads, queries, value_dim, dtype=torch.float32)
    lse = out.new_empty(rows, query_heads, queries)
    # What C reads must live until it has returned.
    alive: list[torch.Tensor] = []
    head = (query.data_ptr(), out.data_ptr(), lse.data_ptr(), rows, heads, query_heads // heads, queries, key_dim,
            value_dim, DTYPES.index(query.dtype))  # fmt: skip
    if pages is None:
        body = (0, 0, 0, 0, 0, *_NO_PAGES)
    else:
        pages = _with_dense_last(pages, alive)
        starts = 0 if page_starts is None else page_starts.data_ptr()
        body = (pages.data_ptr(), pages.shape[1], pages.stride(0), pages.stride(1), starts, layout.tokens, *layout[4:])
    numbers = list(_mask(page_mask, alive))
    numbers += (len(records) // 5, len(keys))
    numbers += [x.data_ptr() for x in records]
    for key, value, mask in zip(keys, values, masks):
        key, value = _with_dense_last(key, alive), _with_dense_last(value, alive)
        numbers += (key.data_ptr(), value.data_ptr(), key.shape[2], DTYPES.index(key.dtype))
        numbers += (*key.stride()[:3], *value.stride()[:3])
        numbers += _mask(mask, alive)
    problem = struct.pack(
        f"={len(head)}q2d{1 + len(body) + len(numbers)}q",
        *head, scaling, softcap, torch.get_num_threads(), *body, *numbers,
    )  # fmt: skip
    if _library().kvq_attend(problem):
        raise MemoryError("attention over a quantized cache: no memory for its work space")
    return out, lse


def _attend_by_row(
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
    page_held: torch.Tensor | None,
    held: Sequence[torch.Tensor | None],
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attend` where rows hold less than there is room for: each row with what it holds."""
    results = []
    for row in range(query.shape[0]):
        tokens = [None if count is None else int(count[row]) for count in held] or [None] * len(keys)
        n_pages = columns = None if page_held is None else int(page_held[row])
        if n_pages is not None:
            columns = n_pages * layout.tokens if page_starts is None else int(page_starts[n_pages])
        exact = (
            [_first(x, row, n, dim) for x, n in zip(xs, tokens)] for xs, dim in ((keys, 2), (values, 2), (masks, 3))
        )
        body = _first(pages, row, n_pages, 1), _first(page_mask, row, columns, 3), page_starts
        own = records[5 * row : 5 * row + 5]
        results.append(attend(query[row : row + 1], *exact, *body, own, layout, scaling, softcap))
    return tuple(torch.cat(parts) for parts in zip(*results))


def _first(x: torch.Tensor | None, row: int, count: int | None, dim: int) -> torch.Tensor | None:
    """A row of `x`, or the only one, up to `count` along `dim`."""
    if x is None:
        return None
    x = x if x.shape[0] == 1 else x[row : row + 1]
    return x if count is None else x.narrow(dim, 0, min(count, x.shape[dim]))


def quantize_(
    x: torch.Tensor, out: torch.Tensor, bits: int, per_channel: bool, group: int, order: int, centered: bool
) -> None:
    """See `hf_kvq_kernels.quantize_`."""
    _quantize(x, out, bits, per_channel, group, order, centered, ())


def quantize_tiers_(
    x: torch.Tensor, tiers: torch.Tensor, out: torch.Tensor, group: int, order: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `hf_kvq_kernels.quantize_tiers_`."""
    tokens, tiers = x.shape[2], tiers.to(torch.uint8).contiguous()
    counts = torch.stack([(tiers == tier).sum(-1) for tier in (1, 2)], dim=-1).to(torch.int16)
    n_low, n_exact = counts.sum((0, 1)).tolist()
    records = (
        tiers.new_empty(n_low, tokens // 4),
        tiers.new_empty(n_low),
        x.new_empty(n_exact, tokens),
        tiers.new_empty(n_exact),
        counts,
    )
    _quantize(x[:, None], out[:, None], 2, True, group, order, False, (tiers, *records))
    return records


def _quantize(
    x: torch.Tensor,
    out: torch.Tensor,
    bits: int,
    per_channel: bool,
    group: int,
    order: int,
    centered: bool,
    tensors: tuple[torch.Tensor, ...],
) -> None:
    alive: list[torch.Tensor] = []
    x = _with_dense_last(x, alive)
    rows, blocks, heads, tokens, dim = x.shape
    strides = (x.element_size() * stride for stride in x.stride()[:4])
    pointers = [tensor.data_ptr() for tensor in tensors] or [0] * 6
    problem = struct.pack(
        "=26q", x.data_ptr(), out.data_ptr(), rows, blocks, heads, tokens, dim, DTYPES.index(x.dtype), *strides,
        out.stride(0), out.stride(1), bits, per_channel, group, order, centered, torch.get_num_threads(), *pointers,
    )  # fmt: skip
    if _library().kvq_quantize(problem):
        raise MemoryError("packing keys and values: no memory for the work space")


def shrink_(
    data: torch.Tensor,
    pages: int,
    layout: PageLayout,
    to_bits: int,
    key_order: int,
    value_order: int,
    centered_keys: bool,
) -> None:
    """See `hf_kvq_kernels.shrink_`."""
    problem = struct.pack(
        "=18q", data.data_ptr(), data.shape[0], data.stride(0), pages, layout.key_bits, to_bits, layout.heads,
        layout.tokens, layout.dtype, torch.get_num_threads(), layout.key_dim, layout.key_per_channel,
        layout.key_group, key_order, centered_keys, layout.value_dim, layout.value_group, value_order,
    )  # fmt: skip
    if _library().kvq_shrink(problem):
        raise MemoryError("narrowing a quantized cache: no memory for the work space; the cache is as it was")


def _with_dense_last(x: torch.Tensor, alive: list[torch.Tensor]) -> torch.Tensor:
    """`x`, or a copy of it whose last dimension is contiguous."""
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        x = x.contiguous()
        alive.append(x)
    return x


def _mask(mask: torch.Tensor | None, alive: list[torch.Tensor]) -> tuple[int, ...]:
    """Pointer, kind and strides; 0 where the mask broadcasts."""
    if mask is None:
        return (0,) * 6
    kind = 1 if mask.dtype == torch.bool else 2
    if kind == 2 and mask.dtype != torch.float32:
        mask = mask.float()
        alive.append(mask)
    mask = mask[(None,) * (4 - mask.ndim)]
    strides = (0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride()))
    return mask.data_ptr(), kind, *strides
