# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""The operators, registered with torch so that it can trace them; the device of the query picks the kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import cpu
from ._ops import NAMESPACE
from .pages import PageLayout


_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_LIBRARY.define(
    "attend(Tensor query, Tensor[] keys, Tensor[] values, Tensor?[] masks, Tensor? pages, Tensor? page_mask, "
    "Tensor? page_starts, Tensor[] records, int[] layout, float scaling, float softcap, Tensor? page_held, "
    "Tensor?[] held) -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "quantize_(Tensor x, Tensor(a!) out, int bits, bool per_channel, int group, int order, bool centered) -> ()"
)
_LIBRARY.define(
    "quantize_tiers_(Tensor x, Tensor tiers, Tensor(a!) out, int group, int order) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "shrink_(Tensor(a!) data, int pages, int[] layout, int to_bits, int key_order, int value_order, "
    "bool centered_keys) -> ()"
)

#: How codes [byte rows, dim] of a block are interleaved, (dim, count), by number.
BYTE_ORDERS = (None, (-1, 4), (-2, 4), (-2, 2))


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
    softcap: float = 0.0,
    page_held: torch.Tensor | None = None,
    held: Sequence[torch.Tensor | None] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over exact tokens and pages of packed ones: one softmax, nothing is dequantized.

    Args:
        query: [rows, query heads, queries, key_dim], float32, bfloat16 or float16. The query heads of a KV head are
            neighbours.
        keys, values: exact tokens in pieces, [rows, heads, tokens, dim].
        masks: for each piece None, or what broadcasts against [rows, query heads, queries, tokens]: bool (true =
            visible) or additive.
        pages: uint8 [rows, pages, bytes], see `PageLayout`.
        page_mask: the same for the tokens in pages.
        page_starts: int32 [pages + 1] if pages are not full: page `i` holds the tokens `[starts[i], starts[i + 1])`.
        records: for keys in tiers, five tensors per row: the lower two bits of UINT4 channels, uint8 [n, tokens / 4],
            and which channels they are, uint8 [n]; BF16 channels, [m, tokens], and which they are, uint8 [m]; how many
            of both each page and head has, int16 [pages, heads, 2]. Sorted by page, head and channel. In the pages a
            UINT4 channel has its upper two bits.
        layout: what a page looks like.
        scaling: factor on the scores.
        softcap: if positive, scores are `softcap * tanh(score / softcap)`; masks come after that.
        page_held, held: for the pages, and for each exact piece, None or int64 [rows] on the query's device: how many
            of them a row holds. What lies behind is not looked at. So a call can be recorded and repeated while the
            numbers change.

    Returns:
        Output, float32 [rows, query heads, queries, value_dim], and log(sum(exp(scores))), float32
        [rows, query heads, queries]. A query that sees no token gets 0 and -inf.
    """
    arguments = query, keys, values, masks, pages, page_mask, page_starts, records
    if query.device.type == "cpu" and not _is_watched(query):
        # The way through the dispatcher takes as long as hundreds of packed tokens.
        return cpu.attend(*arguments, layout, scaling, softcap, page_held, held)
    op = getattr(torch.ops, NAMESPACE).attend
    return op(*arguments, list(layout or ()), scaling, softcap, page_held, held)


def _is_watched(query: torch.Tensor) -> bool:
    """Whether somebody wants to see which operators run: a compiler, or a mode that traces, counts or fakes them."""
    if torch.compiler.is_compiling() or type(query) is not torch.Tensor:
        return True
    return torch._C._len_torch_dispatch_stack() > 0


def quantize_(
    x: torch.Tensor, out: torch.Tensor, bits: int, per_channel: bool, group: int, order: int, centered: bool = False
) -> None:
    """Write blocks of keys or values as packed codes and (min, max), see `PageLayout`.

    Args:
        x: [rows, blocks, heads, tokens, dim], float32, bfloat16 or float16.
        out: uint8 [rows, blocks, bytes], written.
        bits: 8, 4 or 2.
        per_channel: groups run along the tokens of a channel, not along the channels of a token.
        group: elements that share one (min, max).
        order: place in `BYTE_ORDERS`.
        centered: 2-bit codes are the upper halves of 4-bit ones, and (min, max) lie an eighth of the range further in,
            so that codes stand for the centers of its quarters.
    """
    getattr(torch.ops, NAMESPACE).quantize_(x, out, bits, per_channel, group, order, centered)


def quantize_tiers_(
    x: torch.Tensor, tiers: torch.Tensor, out: torch.Tensor, group: int, order: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Write blocks of keys at 2 bits, but for channels that have more.

    Args:
        x: [blocks, heads, tokens, dim], float32, bfloat16 or float16.
        tiers: of the channels, [blocks, heads, dim]: 0 UINT2, 1 UINT4, 2 BF16.
        out: uint8 [blocks, bytes], written.
        group: tokens that share one (min, max).
        order: place in `BYTE_ORDERS`.

    Returns:
        The records of all blocks and their counts, as `attend` takes them.
    """
    return getattr(torch.ops, NAMESPACE).quantize_tiers_(x, tiers, out, group, order)


def shrink_(
    data: torch.Tensor,
    pages: int,
    layout: PageLayout,
    to_bits: int,
    key_order: int,
    value_order: int,
    centered_keys: bool = False,
) -> None:
    """Bring the first pages of uint8 [rows, bytes] from `layout`'s width to `to_bits`, in place and close together.

    `centered_keys` is `quantize_`'s `centered`, of the keys.
    """
    op = getattr(torch.ops, NAMESPACE).shrink_
    op(data, pages, list(layout), to_bits, key_order, value_order, centered_keys)


def _attend_cpu(*arguments):
    return cpu.attend(*_with_layout(arguments))


def _attend_gpu(*arguments):
    from . import gpu

    return gpu.attend(*_with_layout(arguments))


def _with_layout(arguments):
    layout = arguments[8]
    return *arguments[:8], PageLayout(*layout) if layout else None, *arguments[9:]


def _attend_fake(query, keys, values, masks, pages, page_mask, page_starts, records, layout, *options):
    dim = PageLayout(*layout).value_dim if layout else values[0].shape[3]
    return (
        query.new_empty(*query.shape[:3], dim, dtype=torch.float32),
        query.new_empty(query.shape[:3], dtype=torch.float32),
    )


def _quantize_tiers_fake(x, tiers, out, group, order):
    context = torch.library.get_ctx()
    low, exact = context.new_dynamic_size(), context.new_dynamic_size()
    channels = (tiers.new_empty(n, dtype=torch.uint8) for n in (low, exact))
    tokens, counts = x.shape[2], tiers.new_empty(*tiers.shape[:2], 2, dtype=torch.int16)
    lines = tiers.new_empty(low, tokens // 4, dtype=torch.uint8), x.new_empty(exact, tokens)
    return *(part for pair in zip(lines, channels) for part in pair), counts


def _shrink_cpu(data, pages, layout, to_bits, key_order, value_order, centered_keys):
    cpu.shrink_(data, pages, PageLayout(*layout), to_bits, key_order, value_order, centered_keys)


def _quantize_gpu(*arguments):
    from .gpu import pack

    pack.quantize_(*arguments)


def _quantize_tiers_gpu(*arguments):
    from .gpu import pack

    return pack.quantize_tiers_(*arguments)


def _shrink_gpu(data, pages, layout, to_bits, key_order, value_order, centered_keys):
    from .gpu import pack

    pack.shrink_(data, pages, PageLayout(*layout), to_bits, key_order, value_order, centered_keys)


_LIBRARY.impl("attend", _attend_cpu, "CPU")
_LIBRARY.impl("attend", _attend_gpu, "CUDA")
_LIBRARY.impl("quantize_", cpu.quantize_, "CPU")
_LIBRARY.impl("quantize_", _quantize_gpu, "CUDA")
_LIBRARY.impl("quantize_tiers_", cpu.quantize_tiers_, "CPU")
_LIBRARY.impl("quantize_tiers_", _quantize_tiers_gpu, "CUDA")
_LIBRARY.impl("shrink_", _shrink_cpu, "CPU")
_LIBRARY.impl("shrink_", _shrink_gpu, "CUDA")
for _name, _fake in {
    "attend": _attend_fake,
    "quantize_": lambda *arguments: None,
    "quantize_tiers_": _quantize_tiers_fake,
    "shrink_": lambda *arguments: None,
}.items():
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _fake, lib=_LIBRARY)


def why_not(query: torch.Tensor, layout: PageLayout | None) -> str | None:
    """Why no kernel can attend with `query` over such pages, or None if one can."""
    if query.device.type == "cpu":
        return cpu.why_not(query, layout)
    if query.device.type == "cuda":
        # Triton is imported where there is a GPU, not everywhere.
        from . import gpu

        return gpu.why_not(query, layout)
    return f"there are no kernels for {query.device.type}"


def why_not_packing(
    x: torch.Tensor, order: int = 0, tokens: int = 128, along: int = 128, group: int = 128
) -> str | None:
    """Why no kernel can pack such keys or values, or None if one can.

    Args:
        x: of their dtype and on their device.
        order: place in `BYTE_ORDERS`.
        tokens: of a block.
        along: tokens or channels that groups run along.
        group: elements that share one (min, max).
    """
    if x.device.type == "cpu":
        return cpu.why_not_packing(x, order)
    if x.device.type == "cuda":
        from .gpu import pack

        return pack.why_not_packing(x, order, tokens, along, group)
    return f"there are no kernels for {x.device.type}"
