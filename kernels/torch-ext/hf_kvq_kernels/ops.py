# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""The operators, registered with torch so that it can trace them; the device of the query picks the kernel."""

from __future__ import annotations

import torch

from . import cpu
from ._ops import NAMESPACE
from .pages import PageLayout


_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_LIBRARY.define(
    "attend(Tensor query, Tensor[] keys, Tensor[] values, Tensor?[] masks, Tensor? pages, Tensor? page_mask, "
    "Tensor? page_starts, Tensor[] records, int[] layout, float scaling, float softcap) -> (Tensor, Tensor)"
)


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

    Returns:
        Output, float32 [rows, query heads, queries, value_dim], and log(sum(exp(scores))), float32
        [rows, query heads, queries]. A query that sees no token gets 0 and -inf.
    """
    op = getattr(torch.ops, NAMESPACE).attend
    return op(query, keys, values, masks, pages, page_mask, page_starts, records, list(layout or ()), scaling, softcap)


def _attend_cpu(query, keys, values, masks, pages, page_mask, page_starts, records, layout, scaling, softcap):
    layout = PageLayout(*layout) if layout else None
    return cpu.attend(query, keys, values, masks, pages, page_mask, page_starts, records, layout, scaling, softcap)


def _attend_fake(query, keys, values, masks, pages, page_mask, page_starts, records, layout, scaling, softcap):
    dim = PageLayout(*layout).value_dim if layout else values[0].shape[3]
    return (
        query.new_empty(*query.shape[:3], dim, dtype=torch.float32),
        query.new_empty(query.shape[:3], dtype=torch.float32),
    )


_LIBRARY.impl("attend", _attend_cpu, "CPU")
torch.library.register_fake(f"{NAMESPACE}::attend", _attend_fake, lib=_LIBRARY)


def why_not(query: torch.Tensor, layout: PageLayout | None) -> str | None:
    """Why no kernel can attend with `query` over such pages, or None if one can."""
    if query.device.type == "cpu":
        return cpu.why_not(query, layout)
    return f"there are no kernels for {query.device.type}"
