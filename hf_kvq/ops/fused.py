# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Attention over parts by fused kernels: packed codes go in as they are, and one softmax covers all parts."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from hf_kvq_kernels import DTYPES, PageLayout

from ..codecs import BlockCodec
from .parts import ExactPart, PackedPart, Part


# `hf_kvq_kernels.attend`, or something with its arguments
Kernel = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def attend(
    query: torch.Tensor,
    parts: list[Part],
    scaling: float,
    kernel: Kernel,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(query @ K^T * scaling + mask) @ V; see `hf_kvq.ops.naive.attend`."""
    exact = [part for part in parts if isinstance(part, ExactPart)]
    packed = next((part for part in parts if isinstance(part, PackedPart)), None)

    def call(exact: list[ExactPart], packed: PackedPart | None) -> tuple[torch.Tensor, torch.Tensor]:
        q = query if packed is None else packed.adapt(query)
        names = "keys", "values", "mask", "held"
        keys, values, masks, held = ([getattr(part, name) for part in exact] for name in names)
        body = (None, None, None, [], None)
        if packed is not None:
            layout = page_layout(packed.keys, packed.values, packed.bits)
            body = (packed.pages, packed.mask, _starts(packed), packed.record_tensors(), layout)
        page_held = None if packed is None else packed.held
        out, lse = kernel(q, keys, values, masks, *body, scaling, softcap or 0.0, page_held, held)
        return (out if packed is None else packed.restore(out)), lse

    # Transformed keys want another query, and what comes out of transformed values must be brought back before it is
    # added to other values.
    if packed is not None and packed.is_transformed and exact:
        out, lse = _merged([call(exact, None), call([], packed)])
    else:
        out, lse = call(exact, packed)
    if sinks is not None:
        out = out * torch.sigmoid(lse - sinks.to(lse)[:, None])[..., None]
    return out.to(query.dtype)


def _merged(results: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """One softmax out of several, each (out, log of the sum of exp)."""
    lse = torch.stack([lse for _, lse in results])
    total = lse.logsumexp(0)
    # A query that sees nothing anywhere has no part with a weight.
    shares = (lse - total).exp().masked_fill(lse == float("-inf"), 0.0)
    return sum(share[..., None] * out for share, (out, _) in zip(shares, results)), total


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
