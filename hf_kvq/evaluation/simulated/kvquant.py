# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""KVQuant (arXiv 2401.18079), as far as it makes sense inside a cache.

Follows the paper: keys per channel, rotated back to what they were before RoPE; values per token, over all heads;
levels that are not evenly spaced; the most extreme 1 % of each group exact; the first token exact. Leaves out: ranges
and levels learned offline from sensitivities. Ranges are each group's own, levels come from k-means over a row's first
page. A page waits in a window, as in our caches. Only for models with plain RoPE over the whole head.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch

from ...cache.rows import RowState
from ...ops import PackedPart
from .base import SimulatedCache, SimulatedLayer, SimulatedPart


_STEPS = 20

Pair = tuple[torch.Tensor, torch.Tensor]


def rotate(keys: torch.Tensor, start: int, theta: float, inverse: bool = False) -> torch.Tensor:
    """RoPE on keys [..., tokens, dim] of the positions from `start` on, or its inverse; float32."""
    tokens, dim = keys.shape[-2:]
    frequencies = theta ** -(torch.arange(0, dim, 2, device=keys.device).float() / dim)
    angles = (torch.arange(start, start + tokens, device=keys.device).float()[:, None] * frequencies).repeat(1, 2)
    first, second = keys.float().chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return keys.float() * angles.cos() + turned * (-angles.sin() if inverse else angles.sin())


def outliers(x: torch.Tensor, share: float) -> torch.Tensor:
    """The share of each group, [..., n], that is farthest from its mean, at least one element; bool."""
    distance = (x - x.mean(-1, keepdim=True)).abs()
    best = distance.topk(outlier_count(x.shape[-1], share), dim=-1).indices
    return torch.zeros_like(x, dtype=torch.bool).scatter_(-1, best, True)


def outlier_count(size: int, share: float) -> int:
    """Outliers of a group of `size`."""
    return max(1, round(share * size)) if share else 0


def k_means(x: torch.Tensor, count: int) -> torch.Tensor:
    """`count` ascending levels for each row of [rows, n] in 0 to 1."""
    levels = torch.linspace(0, 1, count, device=x.device).repeat(x.shape[0], 1)
    for _ in range(_STEPS):
        near = nearest(x, levels)
        totals = torch.zeros_like(levels).scatter_add_(1, near, x)
        held = torch.zeros_like(levels).scatter_add_(1, near, torch.ones_like(x))
        levels = torch.where(held > 0, totals / held.clamp(min=1), levels)
    return levels


def nearest(x: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """Index of the level nearest to each of [rows, n]."""
    return torch.searchsorted((levels[:, 1:] + levels[:, :-1]).div(2).contiguous(), x.contiguous())


def scaled(x: torch.Tensor, share: float) -> tuple[torch.Tensor, ...]:
    """Groups [rows, groups, n] brought to 0 to 1 within each group's range without outliers.

    Returns:
        These; the ranges' low and high ends, [rows, groups, 1]; and which elements are outliers, bool. All float32.
    """
    exact = outliers(x, share)
    inside = [x.masked_fill(exact, sign * float("inf")) for sign in (1, -1)]
    low, high = (
        inside[0].amin(-1, keepdim=True).bfloat16().float(),
        inside[1].amax(-1, keepdim=True).bfloat16().float(),
    )
    return ((x - low) / (high - low).clamp(min=1e-12)).clamp(0, 1), low, high, exact


def fit_levels(x: torch.Tensor, bits: int, share: float) -> torch.Tensor:
    """Levels for groups like those of `x`, float32 [rows, groups, n]: [rows, 2^bits], as they are stored."""
    return k_means(scaled(x, share)[0].flatten(1), 2**bits).bfloat16().float()


def simulate(x: torch.Tensor, levels: torch.Tensor, share: float) -> torch.Tensor:
    """Groups, float32 [rows, groups, n], as they come back from codes of `levels`, [rows, 2^bits]."""
    unit, low, high, exact = scaled(x, share)
    unit = unit.flatten(1)
    back = levels.gather(1, nearest(unit, levels)).view_as(x) * (high - low) + low
    return torch.where(exact, x, back)


def key_groups(keys: torch.Tensor, page: int) -> torch.Tensor:
    """Keys [rows, heads, tokens, dim] as groups of a channel's tokens in a page: [rows, groups, page]."""
    return keys.unflatten(2, (-1, page)).permute(0, 2, 1, 4, 3).flatten(1, 3)


def from_key_groups(groups: torch.Tensor, heads: int, dim: int) -> torch.Tensor:
    """Inverse of `key_groups`."""
    return groups.unflatten(1, (-1, heads, dim)).permute(0, 2, 1, 4, 3).flatten(2, 3)


class KVQuantLayer(SimulatedLayer):
    """A layer of pre-RoPE keys per channel and values per token, with outliers. Each page is simulated once."""

    def reset(self) -> None:
        super().reset()
        self._forget()

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        self._forget()

    def _select(self, indices: torch.Tensor) -> None:
        super()._select(indices)
        self._forget()

    def _forget(self) -> None:
        """Simulate pages anew, as they may be others from now on; else they only become more."""
        #: By rows and widths: levels, and what has been simulated so far, each of keys and of values.
        self._known: dict[tuple, tuple[Pair, Pair]] = {}

    def _packed_part(self, rows: slice, state: RowState, mask: torch.Tensor | None) -> PackedPart:
        part = super()._packed_part(rows, state, mask)
        key, page = (rows.start, rows.stop, part.bits), self.page_tokens
        levels, held = self._known.get(key, (None, None))
        done = 0 if held is None else held[0].shape[2]
        if done < state.pages * page:
            keys, values = (x[:, :, done:] for x in self._exact_pages(rows, state))
            levels, new = self._simulated(keys, values, state.sink + done, part.bits, levels)
            held = new if held is None else tuple(torch.cat(pair, dim=2) for pair in zip(held, new))
            self._known[key] = levels, held
        return SimulatedPart(part.pages, part.keys, part.values, part.bits, part.mask, part.short, content=held)

    def _simulated(
        self, keys: torch.Tensor, values: torch.Tensor, start: int, bits: tuple[int, int], levels: Pair | None
    ) -> tuple[Pair, Pair]:
        """Levels, those of the first page unless they are given, and pages from position `start` as they come back."""
        share, theta, page = self.own["outliers"], self.own["theta"], self.page_tokens
        heads, dim = keys.shape[1], keys.shape[3]
        groups = key_groups(rotate(keys, start, theta, inverse=True), page), values.float().transpose(1, 2).flatten(2)
        if levels is None:
            first = groups[0][:, : heads * dim], groups[1][:, :page]
            levels = tuple(fit_levels(x, width, share) for x, width in zip(first, bits))
        keys, values = (simulate(x, fitted, share) for x, fitted in zip(groups, levels))
        keys = rotate(from_key_groups(keys, heads, dim), start, theta)
        return levels, (keys, values.unflatten(2, (heads, -1)).transpose(1, 2))

    def nbytes(self) -> int:
        """Exact tokens; and per row codes, (min, max) and levels of two bytes, outliers of two and an index of one."""
        if not self.is_initialized:
            return 0
        self.settle_idle()
        shape, page, share = self.layout.shape, self.page_tokens, self.own["outliers"]
        token = shape.heads * shape.value_dim
        channels = shape.heads * shape.key_dim
        index = 1 if max(page, token) <= 256 else 2
        per_page = page * (channels * self.widths[0] + token * self.widths[1]) // 8
        per_page += channels * (4 + outlier_count(page, share) * (2 + index))
        per_page += page * (4 + outlier_count(token, share) * (2 + index))
        levels = sum(2 * 2**bits for bits in self.widths)
        exact = sum(x.nbytes for x in (*self.sink, *self.recent, *(self._pending or ())))
        return exact + sum(state.pages * per_page + levels * bool(state.pages) for state in self.states)


class KVQuantCache(SimulatedCache):
    """Fixed width `fbit`; `outliers` is the share of a group that stays exact."""

    layer_class = KVQuantLayer
    defaults = MappingProxyType({"fbit": 2, "initial_bits": 2, "sink_tokens": 1})
    own_options = MappingProxyType({"outliers": 0.01, "theta": None})

    def __init__(self, model_config: Any, *args: Any, **kwargs: Any):
        super().__init__(model_config, *args, **kwargs)
        if self.config.transform != "none":
            raise ValueError(f"kvquant has no transform; got transform={self.config.transform!r}")
        rope = getattr(model_config.get_text_config(decoder=True), "rope_parameters", None) or {}
        if rope.get("rope_type") != "default" or rope.get("partial_rotary_factor", 1) != 1:
            raise ValueError(f"kvquant is simulated for plain RoPE over whole heads only; this model has {rope}")
        self.own["theta"] = rope["rope_theta"]
