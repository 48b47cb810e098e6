# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Fused attention on a CPU: C, compiled for the processor at hand, called through ctypes."""

from __future__ import annotations

import ctypes
import functools
import struct

import torch

from ..pages import DTYPES, PageLayout
from .build import cached_library


# Tokens, widths and so on of pages that are not there.
_NO_PAGES = (16, 16, 16, 0, 1, 1, 0)


@functools.cache
def _library() -> ctypes.CDLL | str:
    """The loaded library, or why there is none."""
    try:
        library = ctypes.CDLL(str(cached_library()))
    except (RuntimeError, OSError) as error:
        return str(error)
    library.kvq_attend.argtypes = [ctypes.c_char_p]
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `hf_kvq_kernels.attend`."""
    rows, query_heads, queries, key_dim = query.shape
    heads = layout.heads if pages is not None else keys[0].shape[1]
    value_dim = layout.value_dim if pages is not None else values[0].shape[3]
    query = query.to(torch.float32).contiguous()
    out = query.new_empty(rows, query_heads, queries, value_dim)
    lse = query.new_empty(rows, query_heads, queries)
    # What C reads must live until it has returned.
    alive: list[torch.Tensor] = []
    head = (query.data_ptr(), out.data_ptr(), lse.data_ptr(), rows, heads, query_heads // heads, queries, key_dim,
            value_dim)  # fmt: skip
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
        size = key.element_size()
        numbers += (key.data_ptr(), value.data_ptr(), key.shape[2], DTYPES.index(key.dtype))
        numbers += [size * stride for x in (key, value) for stride in x.stride()[:3]]
        numbers += _mask(mask, alive)
    problem = struct.pack(
        f"={len(head)}q2d{1 + len(body) + len(numbers)}q",
        *head, scaling, softcap, torch.get_num_threads(), *body, *numbers,
    )  # fmt: skip
    if _library().kvq_attend(problem):
        raise MemoryError("attention over a quantized cache: no memory for its work space")
    return out, lse


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
    strides = (0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride()))
    return mask.data_ptr(), kind, *strides
