# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""`hf_kvq_kernels.attend` said once more, in float64 and with a bound on what a kernel on a CPU may be off by.

Pages are read here as `PageLayout` describes them; nothing of hf_kvq's decoders or attention is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hf_kvq_kernels import DTYPES, PageLayout


# What a kernel multiplies codes with is rounded to so many steps of its largest magnitude.
CODE_STEPS = 32512
# One rounding of float32.
ULP = 2.0**-24


@dataclass
class Result:
    """Output and log-sum-exp, float64, and how far a kernel may be away from each."""

    out: torch.Tensor
    lse: torch.Tensor
    out_bound: torch.Tensor
    lse_bound: torch.Tensor


@dataclass
class Codes:
    """One side of all pages, each [rows, heads, tokens of all pages, dim]: `low + code * step`, and each one's group.

    `group` numbers the groups of one head that share what is rounded together.
    """

    code: torch.Tensor
    low: torch.Tensor
    step: torch.Tensor

    @property
    def data(self) -> torch.Tensor:
        return self.low + self.code * self.step


def rounding(terms: int) -> float:
    """Relative error of a float32 sum of so many terms, in at least four lanes."""
    return ULP * (8 + terms / 4)


def typed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.contiguous().clone().view(dtype).double()


def read_pages(pages: torch.Tensor, layout: PageLayout, value: bool) -> Codes:
    """Keys or values of uint8 [rows, pages, bytes], in all tokens of all pages."""
    heads, tokens, dtype = layout.heads, layout.tokens, DTYPES[layout.dtype]
    dim, bits = (layout.value_dim, layout.value_bits) if value else (layout.key_dim, layout.key_bits)
    start = layout.key_bytes() if value else 0
    block = pages[:, :, start : start + (layout.value_bytes() if value else layout.key_bytes())]

    def in_order(x: torch.Tensor) -> torch.Tensor:
        return x.permute(0, 2, 1, 3, 4).flatten(2, 3)

    if bits == 16:
        data = in_order(typed(block, dtype).unflatten(-1, (heads, tokens, dim)))
        return Codes(torch.zeros_like(data), data, torch.zeros_like(data))
    lines = tokens * bits // 8
    packed = block[:, :, : heads * lines * dim].int()
    if value:
        packed = packed.unflatten(-1, (heads, lines // 4, dim, 4)).transpose(-1, -2).flatten(-3, -2)
    else:
        packed = packed.unflatten(-1, (heads, dim // 4, lines, 4)).transpose(-3, -2).flatten(-2, -1)
    code = torch.cat([packed >> shift & 2**bits - 1 for shift in range(0, 8, bits)], dim=-2)
    group = layout.value_group if value else layout.key_group
    low, high = typed(block[:, :, heads * lines * dim :], dtype).unflatten(-1, (2, heads, -1)).unbind(2)
    if value or not layout.key_per_channel:
        along = torch.arange(dim) // group
        low, high = (x.unflatten(-1, (tokens, -1))[..., along] for x in (low, high))
    else:
        along = torch.arange(tokens) // group
        low, high = (x.unflatten(-1, (-1, dim))[..., along, :] for x in (low, high))
    return Codes(*(in_order(x) for x in (code.double(), low, (high - low) / (2**bits - 1))))


def add_tiers(keys: Codes, records: list[torch.Tensor], layout: PageLayout, n_pages: int) -> torch.Tensor:
    """Put the channels with more bits into the keys; returns what does not count as a code, in the same shape."""
    extra = torch.zeros_like(keys.code)
    for row in range(len(records) // 5):
        low, low_channel, exact, exact_channel, counts = records[5 * row : 5 * row + 5]
        n_low = n_exact = 0
        for page in range(n_pages):
            span = slice(page * layout.tokens, (page + 1) * layout.tokens)
            for head in range(layout.heads):
                for _ in range(int(counts[page, head, 0])):
                    channel = int(low_channel[n_low])
                    at = row, head, span, channel
                    keys.step[at] *= 3 / 15 * 4
                    bits = torch.cat([low[n_low].int() >> shift & 3 for shift in range(0, 8, 2)])
                    extra[at] = bits * keys.step[at] / 4
                    n_low += 1
                for _ in range(int(counts[page, head, 1])):
                    at = row, head, span, int(exact_channel[n_exact])
                    extra[at] = exact[n_exact].double()
                    n_exact += 1
    return extra


def key_error(query: torch.Tensor, keys: Codes, layout: PageLayout) -> torch.Tensor:
    """How far scores [rows, heads, queries, tokens] may be off because of rounded coefficients.

    Each coefficient by half a step, and then times its code.
    """
    if layout.key_per_channel:
        largest = (query.abs()[:, :, :, None] * keys.step[:, :, None]).amax(-1)
        return largest * keys.code.sum(-1)[:, :, None] / 2 / CODE_STEPS
    error = 0
    for some in torch.arange(layout.key_dim).split(layout.key_group):
        largest = query[..., some].abs().amax(-1)[..., None] * keys.step[..., some[0]][:, :, None]
        error = error + largest * keys.code[..., some].sum(-1)[:, :, None] / 2 / CODE_STEPS
    return error


def value_error(weights: torch.Tensor, values: Codes, held: list[list[int]], layout: PageLayout) -> torch.Tensor:
    """The same for outputs, [rows, heads, queries, value_dim]; a page's weights are rounded together."""
    error = torch.zeros(())
    for page in filter(None, held):
        largest = (weights[..., page, None] * values.step[:, :, None, page]).amax(-2)
        error = error + largest * values.code[:, :, page].sum(-2)[:, :, None] / 2 / CODE_STEPS
    return error


def oracle(
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
    restore: torch.Tensor | None = None,
) -> Result:
    """The arguments are those of `attend`; `restore` is a matrix that values in pages are multiplied with."""
    rows, query_heads, queries, key_dim = query.shape
    heads = layout.heads if layout else keys[0].shape[1]
    shape = rows, query_heads, queries
    q = query.double().reshape(rows, heads, -1, key_dim) * scaling
    scores, errors, data, held = [], [], [], []

    def take(key: torch.Tensor, size: torch.Tensor, error: torch.Tensor | float, mask: torch.Tensor | None) -> None:
        score = q @ key.transpose(-1, -2)
        error = error + rounding(key_dim) * (q.abs() @ size.transpose(-1, -2)) + 1e-28
        if softcap:
            score = softcap * (score / softcap).tanh()
            error = error + 8 * ULP * softcap
        error = error + 4 * ULP * score.abs()
        score, error = (x.reshape(*shape, -1) for x in (score, error))
        if mask is not None and mask.dtype == torch.bool:
            score = score.masked_fill(~mask, float("-inf"))
        elif mask is not None:
            score = score + mask.double()
            error = error + 4 * ULP * mask.double().nan_to_num(neginf=0.0).abs()
        scores.append(score)
        errors.append(error)

    if pages is not None:
        starts = range(0, (pages.shape[1] + 1) * layout.tokens, layout.tokens)
        starts = starts if page_starts is None else page_starts.tolist()
        there = [
            list(range(i * layout.tokens, i * layout.tokens + stop - start))
            for i, (start, stop) in enumerate(zip(starts, starts[1:]))
        ]
        keep = sum(there, [])
        held = [list(range(start, stop)) for start, stop in zip(starts, starts[1:])]
        packed, packed_values = (read_pages(pages, layout, value) for value in (False, True))
        extra = add_tiers(packed, records, layout, pages.shape[1])[:, :, keep]
        packed, packed_values = (
            Codes(*(x[:, :, keep] for x in (side.code, side.low, side.step))) for side in (packed, packed_values)
        )
        size = packed.low.abs() + packed.code * packed.step + extra.abs()
        take(packed.data + extra, size, key_error(q, packed, layout), page_mask)
        data.append(packed_values.data if restore is None else packed_values.data @ restore)
    for key, value, mask in zip(keys, values, masks):
        take(key.double(), key.double().abs(), 0.0, mask)
        data.append(value.double())

    score, error = (
        torch.cat(x, dim=-1).reshape(rows, heads, q.shape[2], sum(y.shape[2] for y in data)) for x in (scores, errors)
    )
    value, tokens = torch.cat(data, dim=2), score.shape[-1]
    weights = score.softmax(-1) if tokens else score
    sees = ((score != float("-inf")).any(-1, keepdim=True)).expand(*score.shape[:-1], 1)
    weights = torch.where(sees, weights, 0.0)
    out, lse = weights @ value, score.logsumexp(-1) if tokens else score.new_full(score.shape[:-1], float("-inf"))

    # To first order: each weight times its score's error, times how far its value is from the mean.
    error = torch.where(weights > 0, error, 0.0)
    grown = (2 * error.amax(-1, keepdim=True)).exp() if tokens else torch.ones_like(sees)
    moved = weights * (error + rounding(8) + rounding(tokens))
    lse_bound = (grown * moved.sum(-1, keepdim=True))[..., 0] + 4 * ULP * lse.nan_to_num(neginf=0.0).abs()
    out_bound = torch.zeros_like(out)
    for start in range(0, tokens, 64):
        some = slice(start, start + 64)
        out_bound += (moved[..., some, None] * (value[:, :, None, some] - out[..., None, :]).abs()).sum(-2)
    rounded = weights @ value.abs()
    if pages is not None:
        own = weights[..., : len(keep)]
        off = value_error(own, packed_values, held, layout) if layout.value_bits < 16 else torch.zeros_like(out)
        size = own @ (packed_values.low.abs() + packed_values.code * packed_values.step)
        off, size = (x if restore is None else x @ restore.abs() for x in (off, size))
        out_bound, rounded = out_bound + off, rounded + size * (1 if restore is None else 16)
    out_bound = grown * out_bound + rounding(tokens) * rounded
    # Weights below exp(-87) are taken for zero.
    out_bound = out_bound + 1e-37 * value.abs().nan_to_num(0.0).sum(-2)[:, :, None] + 1e-30
    return Result(out.view(*shape, -1), lse.view(shape), out_bound.view(*shape, -1), lse_bound.view(shape))


def assert_within(got: torch.Tensor, wanted: torch.Tensor, bound: torch.Tensor, what: str) -> None:
    """Each number is finite where it has to be, and within its bound."""
    got = got.double()
    assert got.shape == wanted.shape, f"{what}: {tuple(got.shape)} instead of {tuple(wanted.shape)}"
    same = (got == wanted) | ((got - wanted).abs() <= bound)
    if not bool(same.all()):
        worst = torch.where(same, 0.0, ((got - wanted).abs() / bound).nan_to_num(float("inf"))).argmax()
        at = tuple(int(i) for i in torch.unravel_index(worst, got.shape))
        raise AssertionError(
            f"{what}: {int((~same).sum())} of {same.numel()} are off; at {at} {float(got[at])!r} instead of "
            f"{float(wanted[at])!r}, which may be off by {float(bound[at]):.2e}"
        )


def check(attend: Any, arguments: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """What `attend` gives for these arguments, once it is found right."""
    out, lse = attend(**arguments)
    wanted = oracle(**arguments)
    assert out.dtype == lse.dtype == torch.float32
    assert_within(lse, wanted.lse, wanted.lse_bound, "lse")
    assert_within(out, wanted.out, wanted.out_bound, "output")
    return out, lse
