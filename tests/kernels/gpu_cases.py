# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Inputs for the GPU kernels of every kind, and what must come out: a float64 softmax over decoded keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hf_kvq.codecs import BlockCodec
from hf_kvq.codecs.tiered import TieredBlock, TieredKeyCodec
from hf_kvq.ops import byte_orders
from hf_kvq_kernels.pages import DTYPES, PageLayout


TOKENS = 128


@dataclass(frozen=True)
class Case:
    """One call. `held` are the tokens of each page; `exact` the lengths of the exact segments."""

    bits: tuple[int, int] = (4, 4)
    rows: int = 1
    heads: int = 1
    group: int = 2
    queries: int = 1
    dims: tuple[int, int] = (64, 64)
    axis: str = "channel"
    groups: tuple[int, int] = (128, 128)
    dtype: torch.dtype = torch.float16
    query_dtype: torch.dtype | None = None
    held: tuple[int, ...] = (128, 128)
    exact: tuple[int, ...] = ()
    mask: str = "none"
    softcap: float = 0.0
    #: UINT4 and BF16 channels per page and head, if keys are tiered.
    tiers: tuple[int, int] | None = None
    #: Bytes between pages, and between rows, beyond what they need.
    gap: int = 16
    scaling: float = 0.2
    #: For each row how many pages, and tokens of each exact segment, it holds; all of them if None.
    row_held: tuple[tuple[int, ...], ...] | None = None

    def layout(self) -> PageLayout:
        return PageLayout(
            self.heads, TOKENS, *self.dims, *self.bits, int(self.axis == "channel"), *self.groups,
            DTYPES.index(self.dtype),
        )  # fmt: skip


def build(case: Case, device: str = "cpu", seed: int = 0) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
    """(arguments of `attend`, expected output, expected log-sum-exp); unused memory holds NaN bytes."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    layout, pages = case.layout(), len(case.held)
    keys = random(case.rows, pages, case.heads, TOKENS, case.dims[0], dtype=case.dtype)
    # Channels differ in size and offset, as keys' do.
    keys = keys * (0.3 + random(case.dims[0]).abs()).to(case.dtype) + random(case.dims[0]).to(case.dtype)
    values = random(case.rows, pages, case.heads, TOKENS, case.dims[1], dtype=case.dtype) + 0.5
    shape = case.heads, TOKENS
    orders = byte_orders("cuda", case.dims[0])
    key_codec = BlockCodec(*shape, case.dims[0], case.dtype, case.axis, case.groups[0], byte_order=orders[0])
    value_codec = BlockCodec(*shape, case.dims[1], case.dtype, "token", case.groups[1], byte_order=orders[1])

    records: list[torch.Tensor] = []
    if case.tiers is None:
        key_bytes = key_codec.encode(keys, case.bits[0])
        decoded_keys = key_codec.decode(key_bytes, case.bits[0])
    else:
        codec = TieredKeyCodec(*shape, case.dims[0], case.dtype, case.groups[0], byte_order=orders[0])
        blocks = []
        for row in keys:
            order = torch.rand(pages, case.heads, case.dims[0], generator=generator).argsort(-1)
            # Not the same number everywhere, and none at all in the first page.
            spread = torch.arange(pages)[:, None, None] + torch.arange(case.heads)[:, None]
            low, exact = (n * spread // max(1, int(spread.max())) for n in case.tiers)
            tiers = torch.where(order < low + exact, 1, 0)
            tiers[order < exact] = 2
            blocks.append(codec.encode(row, tiers))
            records += _records(blocks[-1])
        key_bytes = torch.stack([block.dense for block in blocks])
        decoded_keys = torch.stack([codec.decode(block).transpose(0, 1).flatten(1, 2) for block in blocks])
    value_bytes = value_codec.encode(values, case.bits[1])
    decoded_values = value_codec.decode(value_bytes, case.bits[1])

    kept = torch.cat([torch.arange(n) + i * TOKENS for i, n in enumerate(case.held)] or [torch.arange(0)])
    parts = [(decoded_keys[:, :, kept], decoded_values[:, :, kept])]
    full = all(n == TOKENS for n in case.held)
    if not full:
        _poison(key_bytes, value_bytes, layout, case)
    size = layout.key_bytes() + layout.value_bytes()
    storage = torch.full((case.rows + 1, pages + 1, size + case.gap), 255, dtype=torch.uint8)
    packed = storage[: case.rows, :pages, :size]
    packed.copy_(torch.cat([key_bytes, value_bytes], dim=-1))

    query = random(case.rows, case.heads * case.group, case.queries, case.dims[0] + 8) * 2
    query = query.to(case.query_dtype or case.dtype)[..., : case.dims[0]]
    segments = []
    for n in case.exact:
        # Rows, heads and tokens lie apart, with NaN between.
        k, v = (torch.full((case.rows, n, case.heads + 1, d), torch.nan, dtype=case.dtype) for d in case.dims)
        k, v = (x.transpose(1, 2)[:, : case.heads] for x in (k, v))
        k.copy_(random(*k.shape))
        v.copy_(random(*v.shape))
        segments.append((k, v))
    masks = [_mask(case, n, random) for n in (len(kept), *case.exact)]
    hidden = _hidden(case, (len(kept), *case.exact))
    expected = _attend(case, query, [*parts, *segments], masks, hidden)
    counts = [None] * (1 + len(segments))
    if case.row_held is not None:
        counts = [torch.tensor(column) for column in zip(*case.row_held)]
        for row, (n_pages, *tokens) in enumerate(case.row_held):
            storage[row, n_pages:] = 255
            for (k, v), n in zip(segments, tokens):
                k[row, :, n:] = v[row, :, n:] = torch.nan

    starts = None if full else torch.tensor([0, *case.held]).cumsum(0).to(torch.int32)
    arguments = {
        "query": query,
        "keys": [k for k, _ in segments],
        "values": [v for _, v in segments],
        "masks": masks[1:],
        "pages": storage.to(device)[: case.rows, :pages, :size] if pages else None,
        "page_mask": masks[0] if pages else None,
        "page_starts": starts,
        "records": records,
        "layout": layout if pages else None,
        "scaling": case.scaling,
        "softcap": case.softcap,
        "page_held": counts[0] if pages else None,
        "held": counts[1:],
    }
    return {name: _to(x, device) for name, x in arguments.items()}, *expected


def _records(block: TieredBlock) -> list[torch.Tensor]:
    """Buffers longer than what is in them, as in a cache."""
    names = "low", "low_channel", "exact", "exact_channel", "counts"
    buffers = []
    for name in names:
        used = getattr(block, name)
        buffer = torch.full((len(used) + 3, *used.shape[1:]), 255 if used.dtype == torch.uint8 else 99).to(used.dtype)
        if used.dtype.is_floating_point:
            buffer.fill_(torch.nan)
        buffer[: len(used)] = used
        buffers.append(buffer)
    return buffers


def _poison(key_bytes: torch.Tensor, value_bytes: torch.Tensor, layout: PageLayout, case: Case) -> None:
    """NaN where a page holds no token."""
    for bits, dim, per_channel, block, group in (
        (layout.key_bits, layout.key_dim, layout.key_per_channel, key_bytes, layout.key_group),
        (layout.value_bits, layout.value_dim, False, value_bytes, layout.value_group),
    ):
        for page, n in enumerate(case.held):
            if bits == 16:
                data = block[:, page].view(case.dtype).view(case.rows, case.heads, TOKENS, dim)
                data[:, :, n:] = torch.nan
                continue
            codes = case.heads * TOKENS * bits // 8 * dim
            ranges = (
                block[:, page, codes:].view(case.dtype).view(case.rows, 2, case.heads, -1, dim if per_channel else 1)
            )
            if per_channel:
                ranges[:, :, :, -(-n // min(group, TOKENS)) :] = torch.nan
            else:
                ranges.view(case.rows, 2, case.heads, TOKENS, -1)[:, :, :, n:] = torch.nan


def _mask(case: Case, tokens: int, random) -> torch.Tensor | None:
    if case.mask == "none":
        return None
    if case.mask == "bool":
        # Broadcasts over heads; the last query of the first row sees nothing.
        mask = random(case.rows, 1, case.queries, tokens) > -0.5
        mask[0, :, -1] = False
        return mask
    if case.mask == "wide":
        # A view with a stride along the tokens, and no row of its own.
        return (random(1, case.heads * case.group, case.queries, 2 * tokens) > 0)[..., ::2]
    if case.mask == "additive":
        mask = random(case.rows, 1, 1, tokens, dtype=case.dtype)
        return mask.masked_fill(random(case.rows, 1, 1, tokens) > 1, float("-inf")).to(case.dtype)
    raise ValueError(case.mask)


def _hidden(case: Case, tokens: tuple[int, ...]) -> list[torch.Tensor]:
    """Which tokens of each part no query of a row sees, as it does not hold them: bool [rows, 1, 1, tokens]."""
    if case.row_held is None:
        return [torch.zeros(1, 1, 1, n, dtype=torch.bool) for n in tokens]
    ends = [0, *torch.tensor(case.held).cumsum(0).tolist()]
    held = [[ends[n_pages], *others] for n_pages, *others in case.row_held]
    return [torch.arange(n) >= torch.tensor(column)[:, None, None, None] for n, column in zip(tokens, zip(*held))]


def _attend(
    case: Case, query: torch.Tensor, parts: list, masks: list, hidden: list
) -> tuple[torch.Tensor, torch.Tensor]:
    scores, values = [], []
    for (k, v), mask, behind in zip(parts, masks, hidden):
        k, v = (x.double().repeat_interleave(case.group, dim=1) for x in (k, v))
        s = query.double() @ k.transpose(-1, -2) * case.scaling
        if case.softcap:
            s = case.softcap * (s / case.softcap).tanh()
        if mask is not None:
            s = s.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else s + mask.double()
        scores.append(s.masked_fill(behind, float("-inf")))
        values.append(v)
    scores, values = torch.cat(scores, -1), torch.cat(values, -2)
    return scores.softmax(-1).nan_to_num(0.0) @ values, scores.logsumexp(-1)


def _to(x: Any, device: str) -> Any:
    if isinstance(x, list):
        return [_to(y, device) for y in x]
    return x.to(device) if isinstance(x, torch.Tensor) else x


#: Largest error, relative to the largest output.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 5e-3}
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16

CASES = {
    # Widths and axes.
    "k4v4": Case(),
    "k2v2": Case(bits=(2, 2), dtype=BF16, rows=2),
    "k8v8": Case(bits=(8, 8), heads=2),
    "k2v4": Case(bits=(2, 4), group=3, dims=(80, 64)),
    "k8v2": Case(bits=(8, 2), dtype=BF16),
    "k16v4": Case(bits=(16, 4), dtype=BF16),
    "k4v16": Case(bits=(4, 16), dims=(64, 96)),
    "k16v16": Case(bits=(16, 16), dtype=BF16, held=(128, 37)),
    "k4v4 token": Case(axis="token", dims=(128, 64), heads=2),
    "k2v2 token g32": Case(bits=(2, 2), axis="token", groups=(32, 32), dims=(80, 112), dtype=BF16),
    "k8v4 token g64": Case(bits=(8, 4), axis="token", groups=(64, 64), dims=(128, 80)),
    "k2v2 g32": Case(bits=(2, 2), groups=(32, 32)),
    "k4v4 g32": Case(groups=(32, 32), dims=(96, 64), dtype=BF16),
    "k4v4 g64": Case(groups=(64, 64), dims=(64, 128)),
    "dim 256": Case(bits=(4, 2), dims=(256, 256), held=(128,)),
    "fp32": Case(dtype=FP32, groups=(32, 32), held=(128, 60)),
    "fp32 token": Case(bits=(2, 8), axis="token", dtype=FP32),
    "fp32 query": Case(bits=(16, 4), dtype=BF16, query_dtype=FP32, exact=(5,)),
    "bf16 query": Case(bits=(4, 4), dtype=FP16, query_dtype=BF16, exact=(5,)),
    # Queries, masks, lengths.
    "mha": Case(group=1, heads=3),
    "gqa 8": Case(group=8, exact=(3,)),
    "gqa 3, 5 queries": Case(group=3, queries=5, mask="bool", exact=(4, 0, 33)),
    "gqa 4, 16 queries": Case(group=4, queries=16, mask="bool", held=(128,), exact=(16,)),
    "bool mask": Case(rows=2, queries=2, mask="bool", exact=(70,), dtype=BF16),
    "strided mask": Case(rows=2, queries=2, heads=2, mask="wide", exact=(9,)),
    "additive mask": Case(rows=2, mask="additive", exact=(65,), dtype=BF16),
    "short pages": Case(bits=(2, 2), held=(128, 1, 77), exact=(2,)),
    "short pages g32": Case(groups=(32, 32), held=(33, 100), dtype=BF16),
    "short pages, mask": Case(rows=2, queries=2, held=(50, 128), mask="bool", axis="token"),
    "softcap": Case(softcap=3.0, exact=(20,)),
    "softcap, mask": Case(softcap=3.0, exact=(20,), mask="additive", dtype=BF16),
    "exact only": Case(held=(), exact=(130, 1), heads=2, dtype=BF16),
    "exact only fp32": Case(held=(), exact=(70,), dtype=FP32, dims=(80, 48), mask="bool", queries=3),
    "odd strides": Case(gap=2, rows=2),
    "odd bytes": Case(gap=1, rows=2, dtype=FP32),
    # Rows that hold less than there is room for.
    "held": Case(rows=3, heads=2, held=(128,) * 3, exact=(70, 9), row_held=((2, 65, 9), (0, 1, 0), (3, 70, 4))),
    "held, mask": Case(
        bits=(2, 2),
        rows=2,
        queries=2,
        held=(128,) * 3,
        exact=(20,),
        mask="bool",
        dtype=BF16,
        row_held=((1, 0), (3, 20)),
    ),
    "held, short pages": Case(rows=2, held=(128, 3, 50), exact=(130,), row_held=((2, 129), (1, 64))),
    "held, exact only": Case(rows=2, held=(), exact=(150,), mask="additive", row_held=((0, 149), (0, 0))),
}
TIERED = {
    "tiered": Case(bits=(2, 2), groups=(32, 32), tiers=(20, 3), heads=2, held=(128,) * 3, dtype=BF16, rows=2),
    "tiered v4 g128": Case(bits=(2, 4), tiers=(5, 17), held=(128,) * 3, exact=(3,), rows=1),
    "tiered none": Case(bits=(2, 2), groups=(32, 64), tiers=(0, 0), dims=(80, 64)),
    "tiered masks": Case(bits=(2, 2), groups=(32, 32), tiers=(9, 2), rows=2, mask="bool", queries=3, exact=(5,)),
    "tiered held": Case(
        bits=(2, 2),
        groups=(32, 32),
        tiers=(20, 3),
        heads=2,
        held=(128,) * 3,
        rows=2,
        exact=(5,),
        row_held=((2, 5), (0, 3)),
    ),
    "tiered fp32": Case(bits=(2, 2), groups=(64, 32), tiers=(16, 16), dtype=FP32, dims=(80, 64)),
}
CASES |= TIERED
