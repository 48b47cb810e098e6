# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Attention over parts by fused kernels: packed codes go in as they are, and one softmax covers all parts."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from hf_kvq_kernels import DTYPES, PageLayout

from ..codecs import BlockCodec
from .parts import ExactPart, PackedPart, Part


# (query, keys, values, masks, pages, page_mask, page_starts, records, layout, scaling, softcap) -> (out, lse)
Kernel = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def attend(query: torch.Tensor, parts: list[Part], scaling: float, kernel: Kernel) -> torch.Tensor:
    """softmax(query @ K^T * scaling + mask) @ V; see `hf_kvq.ops.naive.attend`."""
    exact = [part for part in parts if isinstance(part, ExactPart)]
    packed = [part for part in parts if isinstance(part, PackedPart)]
    # What comes out of transformed values must be brought back before it is added to other values.
    if packed and packed[0].is_transformed and exact:
        results = [_call(query, exact, None, scaling, kernel), _call(query, [], packed[0], scaling, kernel)]
        results[1] = packed[0].restore(results[1][0]), results[1][1]
        out = _merged(results)
    else:
        out = _call(query, exact, packed[0] if packed else None, scaling, kernel)[0]
        out = packed[0].restore(out) if packed else out
    return out.to(query.dtype)


def _call(
    query: torch.Tensor, exact: list[ExactPart], packed: PackedPart | None, scaling: float, kernel: Kernel
) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values, masks = ([getattr(part, name) for part in exact] for name in ("keys", "values", "mask"))
    if packed is None:
        return kernel(query, keys, values, masks, None, None, None, [], None, scaling, 0.0)
    return kernel(
        query,
        keys,
        values,
        masks,
        packed.pages,
        packed.mask,
        _starts(packed),
        packed.record_tensors(),
        page_layout(packed.keys, packed.values, packed.bits),
        scaling,
        0.0,
    )


def _merged(results: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """One softmax out of several, each (out, log of the sum of exp)."""
    lse = torch.stack([lse for _, lse in results])
    # A query that sees nothing anywhere has no part with a weight.
    shares = (lse - lse.logsumexp(0)).exp().masked_fill(lse == float("-inf"), 0.0)
    return sum(share[..., None] * out for share, (out, _) in zip(shares, results))


def _starts(part: PackedPart) -> torch.Tensor | None:
    """First token of each page, and the end, if there are pages that are not full."""
    if not part.short:
        return None
    held = [part.short.get(page, part.keys.tokens) for page in range(part.pages.shape[1])]
    return torch.tensor([0, *held], device=part.pages.device).cumsum(0).to(torch.int32)


@functools.lru_cache(maxsize=256)
def page_layout(keys: BlockCodec, values: BlockCodec, bits: tuple[int, int]) -> PageLayout:
    """What kernels have to know of the pages that these codecs make."""
    return PageLayout(
        heads=keys.heads,
        tokens=keys.tokens,
        key_dim=keys.dim,
        value_dim=values.dim,
        key_bits=bits[0],
        value_bits=bits[1],
        key_per_channel=int(keys.axis == "channel"),
        key_group=keys.group_size,
        value_group=values.group_size,
        dtype=DTYPES.index(keys.dtype),
    )
