# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Attention over packed and exact parts in plain torch: blocked, one softmax over everything, any device.

This is the definition that faster implementations are measured against.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .parts import ExactPart, Part


# Elements of one block's scores; bounds the working memory whatever the history's length.
_BLOCK_SCORES = 1 << 22
_BLOCK_TOKENS = 1024
_BLOCK_QUERIES = 256


def attend(
    query: torch.Tensor,
    parts: list[Part],
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(query @ K^T * scaling + mask) @ V with K and V in parts; float32 inside.

    Args:
        query: [rows, query heads, queries, key_dim].
        parts: the tokens; their order does not matter.
        scaling: factor on the scores.
        softcap: scores become `softcap * tanh(score / softcap)`, before the mask.
        sinks: [query heads]; logits of one more token per head, whose value is zero.

    Returns:
        [rows, query heads, queries, value_dim] in the query's dtype. A query that sees no token gets zeros.
    """
    if not query.numel():
        return query.new_zeros(*query.shape[:3], parts[0].value_dim)
    parts, outs = _with_exact_joined(parts), []
    for start in range(0, query.shape[2], _BLOCK_QUERIES):
        queries = slice(start, start + _BLOCK_QUERIES)
        outs.append(_attend_block(query[:, :, queries], parts, scaling, queries, softcap, sinks))
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)


def _with_exact_joined(parts: list[Part]) -> list[Part]:
    """The same tokens, with the exact ones in one part."""
    exact = [part for part in parts if isinstance(part, ExactPart)]
    if len(exact) < 2 or any(part.held is not None for part in exact):
        return parts
    masks = [part.mask for part in exact]
    if any(mask is not None for mask in masks):
        # A mask of the other parts' kind for those that have none, and one size for all.
        like = next(mask for mask in masks if mask is not None)
        fill = 1 if like.dtype == torch.bool else 0
        masks = [
            like.new_full((1, 1, 1, part.keys.shape[2]), fill) if mask is None else mask
            for part, mask in zip(exact, masks)
        ]
        shape = torch.broadcast_shapes(*(mask.shape[:3] for mask in masks))
        masks = [mask.expand(*shape, mask.shape[3]) for mask in masks]
    joined = ExactPart(
        torch.cat([part.keys for part in exact], dim=2),
        torch.cat([part.values for part in exact], dim=2),
        None if masks[0] is None else torch.cat(masks, dim=3),
    )
    return [joined, *(part for part in parts if not isinstance(part, ExactPart))]


def _attend_block(
    query: torch.Tensor,
    parts: list[Part],
    scaling: float,
    queries: slice,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    rows, query_heads, n_queries, _ = query.shape
    compute = torch.promote_types(query.dtype, torch.float32)
    total = None
    for part in parts:
        heads = part.heads
        # Query heads that share a KV head become rows of one matrix product.
        q = (part.adapt(query.to(compute)) * scaling).reshape(rows, heads, -1, query.shape[-1])
        partial = None
        for keys, values, mask, behind in _blocks(part, query_heads * n_queries * rows, queries):
            scores = q @ keys.to(compute).transpose(-1, -2)
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if mask is not None:
                scores = _masked(scores.view(rows, query_heads, n_queries, -1), mask).view(scores.shape)
            if behind is not None:
                # There may be anything, NaN too.
                scores = scores.masked_fill(behind[:, None, None], float("-inf"))
                values = values.masked_fill(behind[:, None, :, None], 0.0)
            partial = _merge(partial, _softmax_sums(scores, values.to(compute)))
        if partial is not None:
            peak, weight, out = partial
            total = _merge(total, (peak, weight, part.restore(out)))
    if total is None:
        return query.new_zeros(rows, query_heads, n_queries, parts[0].value_dim)
    if sinks is not None:
        peak = (
            sinks.to(compute).view(1, total[0].shape[1], -1, 1).repeat_interleave(n_queries, dim=2).expand_as(total[0])
        )
        total = _merge(total, (peak, torch.ones_like(peak), torch.zeros_like(total[2])))
    _, weight, out = total
    out = torch.where(weight == 0, 0.0, out / weight)
    return out.reshape(rows, query_heads, n_queries, -1).to(query.dtype)


def _blocks(part: Part, scores_per_token: int, queries: slice) -> Iterator[tuple]:
    """(keys, values, mask, which tokens rows do not hold) of a bounded number of tokens at a time."""
    size = max(1, min(_BLOCK_TOKENS, _BLOCK_SCORES // scores_per_token))
    for start, stop, keys, values in part.blocks(size):
        mask = part.mask
        if mask is not None:
            mask = _span(_span(mask, 2, queries), 3, slice(start, stop))
        behind = None
        if part.held is not None:
            behind = torch.arange(start, stop, device=keys.device) >= part.held[:, None] * part.unit
        yield keys, values, mask, behind


def _span(mask: torch.Tensor, dim: int, span: slice) -> torch.Tensor:
    """A span of a mask along `dim`, where it may have size 1 and broadcast."""
    return mask if mask.shape[dim] == 1 else mask[(slice(None),) * dim + (span,)]


def _masked(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Apply a bool (true = visible) or additive mask that broadcasts against [rows, query heads, queries, tokens]."""
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, float("-inf"))
    return scores + mask


def _softmax_sums(scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Peak score, sum of exp(score - peak), and that weighted sum of the values, per query."""
    peak = scores.amax(-1, keepdim=True)
    # A query that sees nothing here has peak -inf; it must contribute 0, not exp(-inf + inf).
    weights = (scores - peak.masked_fill(peak == float("-inf"), 0.0)).exp_()
    return peak, weights.sum(-1, keepdim=True), weights @ values


def _merge(a: tuple | None, b: tuple) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Softmax sums of the union of two disjoint sets of tokens."""
    if a is None:
        return b
    peak = torch.maximum(a[0], b[0])
    safe = peak.masked_fill(peak == float("-inf"), 0.0)
    scale_a, scale_b = (a[0] - safe).exp(), (b[0] - safe).exp()
    return peak, a[1] * scale_a + b[1] * scale_b, a[2] * scale_a + b[2] * scale_b
