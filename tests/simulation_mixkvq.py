# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""What the MixKVQ and the KIVI layer have to do, said once more: slow, obvious, and sharing no code with hf_kvq.

A row is a list of tokens. Every page keeps its exact tokens, and their 16-bit codes, from which all else follows.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from simulation import LIMIT, clip, cpu_order, dequantize, hadamard, narrow, pack, quantize16, to_numpy


UINT2, UINT4, BF16 = 0, 1, 2
BITS = {UINT2: 2, UINT4: 4, BF16: 16}

#: Magnitudes of queries are counted in millionths, so to say, and never above a million.
ONE = 2**20


@dataclass(frozen=True)
class Rules:
    """One layer: its shape and its options. `key_bits` makes it KIVI's; without, key channels are in tiers."""

    heads: int = 2
    ratio: int = 1
    key_dim: int = 16
    value_dim: int = 16
    dtype: torch.dtype = torch.float32
    residual: int = 32
    group: int = 32
    sink: int = 4
    value_bits: int = 2
    key_bits: int | None = None
    #: (tau_bf16, tau_uint4), each a number or a tuple of one per KV head.
    tau: tuple | None = None
    target_bits: float = 2.5
    importance: str = "query"
    importance_window: str = "all"
    hadamard: bool = False
    clips: tuple[float, float] = (1.0, 1.0)

    def options(self, **more: Any) -> dict[str, Any]:
        """The same as options of `MixKVQConfig` or `KIVIConfig`, for a model of one layer."""
        common = {"residual": self.residual, "group_size": self.group, "sink_tokens": self.sink, **more}
        if self.key_bits is not None:
            return {"bits": self.key_bits, **common}
        if self.tau is None:
            choice = {"target_bits": self.target_bits}
        else:
            taus = ([tau] if isinstance(tau, tuple) else tau for tau in self.tau)
            choice = dict(zip(("tau_bf16", "tau_uint4"), taus))
        windows = {"importance": self.importance, "importance_window": self.importance_window}
        transform = {"transform": "hadamard" if self.hadamard else "none"}
        clips = dict(zip(("key_clip", "value_clip"), self.clips))
        return {"value_bits": self.value_bits, **choice, **windows, **transform, **clips, **common}


def tiers_by_threshold(salience: Iterable[float], tau_bf16: float, tau_uint4: float) -> list[int]:
    """Tier of each channel of one head; BF16 is tested first."""
    return [BF16 if a > tau_bf16 else UINT4 if a > tau_uint4 else UINT2 for a in salience]


def tiers_by_target(salience: Iterable[float], target_bits: float) -> list[int]:
    """Tier of each channel of one head: the best promotions as long as they can be paid for, and none after that.

    With `a` the salience, UINT4 is worth `a` (it costs 2 bits), and then BF16 is worth `a / 12` (it costs 12 more).
    """
    salience = list(salience)
    promotions = [(a, 2, channel) for channel, a in enumerate(salience)]
    promotions += [(a / 12, 12, channel) for channel, a in enumerate(salience)]
    tiers, left = [UINT2] * len(salience), (Fraction(str(target_bits)) - 2) * len(salience)
    for _, cost, channel in sorted(promotions, key=lambda p: (-p[0], p[1], p[2])):
        left -= cost
        if left < 0:
            break
        tiers[channel] += 1
    return tiers


def magnitudes(query: torch.Tensor, heads: int) -> np.ndarray:
    """[query heads, dim] of one token -> int64 [heads, dim]: each |q| in fixed point, their mean rounded down."""
    q = np.abs(query.detach().double().numpy())
    q = np.where(np.isnan(q), 0, np.minimum(q, ONE))
    return np.rint(q * ONE).astype(np.int64).reshape(heads, -1, q.shape[-1]).sum(1) // (len(q) // heads)


class Page:
    """`residual` tokens that were packed together. Later crops hide tokens of it, but it stays what it is."""

    def __init__(self, rules: Rules, tokens: list[tuple[torch.Tensor, torch.Tensor]], importance: np.ndarray):
        self.rules, self.held = rules, len(tokens)
        self.exact_keys, exact_values = (torch.stack(side, dim=1) for side in zip(*tokens))
        keys, values = to_numpy(self.exact_keys), to_numpy(exact_values)
        if rules.key_bits is None:
            low, high = (x.clip(-LIMIT, LIMIT).astype(np.float64) for x in (keys.min(1), keys.max(1)))
            self.salience = importance * ((high - low) / 3)
            self.tiers = np.array([self._tiers(head) for head in range(rules.heads)])
            clipped = clip(keys, rules.clips[0], rules.group, 1, rules.dtype)
            keys = np.where(self.tiers[:, None] == UINT2, clipped, keys)
        if rules.hadamard:
            rotated = values.astype(np.float64) @ hadamard(rules.value_dim)
            values = to_numpy(torch.from_numpy(rotated.astype(np.float32)).to(rules.dtype))
        self.keys = quantize16(keys, rules.group, 1)
        self.values = quantize16(clip(values, rules.clips[1], rules.group, 2, rules.dtype), rules.group, 2)

    def _tiers(self, head: int) -> list[int]:
        salience = self.salience[head].tolist()
        if self.rules.tau is None:
            return tiers_by_target(salience, self.rules.target_bits)
        return tiers_by_threshold(salience, *(t[head] if isinstance(t, tuple) else t for t in self.rules.tau))

    def channels(self, tier: int) -> list[tuple[int, int]]:
        """(head, channel) of all channels in a tier, in order."""
        return [tuple(place) for place in np.argwhere(self.tiers == tier).tolist()]

    def regular(self) -> torch.Tensor:
        """The bytes that every page has: keys' codes, minima, maxima, then the values'."""
        code16, low, high = self.keys
        if self.rules.key_bits is None:
            code4, tiers = narrow(code16, 4), self.tiers[:, None]
            codes = np.where(tiers == UINT4, code4 >> 2, narrow(code16, 2))
            key_sides, key_bits = [np.where(tiers == BF16, 0, x) for x in (codes, low, high)], 2
        else:
            key_sides, key_bits = [narrow(code16, self.rules.key_bits), low, high], self.rules.key_bits
        code16, low, high = self.values
        value_bits = self.rules.key_bits or self.rules.value_bits
        pieces = []
        value_sides = narrow(code16, value_bits), low, high
        for is_value, ((codes, *ranges), bits) in enumerate(((key_sides, key_bits), (value_sides, value_bits))):
            pieces.append(torch.from_numpy(cpu_order(pack(codes, bits, axis=1), is_value).copy()).flatten())
            pieces += [torch.from_numpy(x).to(self.rules.dtype).flatten().view(torch.uint8) for x in ranges]
        return torch.cat(pieces)

    def records(self) -> dict[str, torch.Tensor]:
        """What the page has beyond its regular part."""
        code4, uint4, bf16 = narrow(self.keys[0], 4), self.channels(UINT4), self.channels(BF16)
        low = [pack(code4[head, :, channel] & 3, 2, axis=0) for head, channel in uint4]
        exact = [self.exact_keys[head, :, channel] for head, channel in bf16]
        tokens, dtype = self.rules.residual, self.rules.dtype
        return {
            "counts": torch.tensor([[(t == UINT4).sum(), (t == BF16).sum()] for t in self.tiers]).to(torch.int16),
            "low": torch.from_numpy(np.array(low, np.uint8).reshape(-1, tokens // 4)),
            "low_channel": torch.tensor([channel for _, channel in uint4], dtype=torch.uint8),
            "exact": torch.stack(exact) if exact else torch.empty(0, tokens, dtype=dtype),
            "exact_channel": torch.tensor([channel for _, channel in bf16], dtype=torch.uint8),
        }

    def visible(self) -> list[torch.Tensor]:
        """Keys and values as attention sees them, [heads, held, dim]."""
        dtype, group = self.rules.dtype, self.rules.group
        code16, low, high = self.keys

        def keys(bits: int) -> torch.Tensor:
            return torch.from_numpy(dequantize(narrow(code16, bits), low, high, bits, group, 1)).to(dtype)

        if self.rules.key_bits is None:
            tiers = torch.from_numpy(self.tiers)[:, None]
            visible = torch.where(tiers == BF16, self.exact_keys, torch.where(tiers == UINT4, keys(4), keys(2)))
        else:
            visible = keys(self.rules.key_bits)
        code16, low, high = self.values
        bits = self.rules.key_bits or self.rules.value_bits
        values = dequantize(narrow(code16, bits), low, high, bits, group, 2)
        if self.rules.hadamard:
            values = (values.astype(np.float64) @ hadamard(self.rules.value_dim)).astype(np.float32)
        values = torch.from_numpy(values).to(dtype)
        return [visible[:, : self.held], values[:, : self.held]]


class Row:
    """One row of a batch, without its padding: lists of tokens, each a pair (key, value) of [heads, dim]."""

    def __init__(self, rules: Rules):
        self.rules = rules
        self.sink, self.pages, self.recent = [], [], []
        self.forget_queries()

    def forget_queries(self) -> None:
        self.query_sum, self.query_count = np.zeros((self.rules.heads, self.rules.key_dim), np.int64), 0

    def __len__(self) -> int:
        return len(self.sink) + sum(page.held for page in self.pages) + len(self.recent)

    def append(self, key: torch.Tensor, value: torch.Tensor, query: torch.Tensor | None) -> None:
        """One token: key and value of [heads, dim], and the queries of [query heads, dim] if they are seen."""
        token = (key.detach().to(self.rules.dtype), value.detach().to(self.rules.dtype))
        if query is not None and self.rules.importance == "query" and self.rules.key_bits is None:
            self.query_sum = self.query_sum + magnitudes(query, self.rules.heads)
            self.query_count += 1
        if len(self.sink) < self.rules.sink:
            self.sink.append(token)
            return
        self.recent.append(token)
        if len(self.recent) == self.rules.residual:
            importance = self.query_sum / (ONE * float(self.query_count)) if self.query_count else np.ones(1)
            self.pages.append(Page(self.rules, self.recent, importance))
            self.recent = []
            if self.rules.importance_window == "page":
                self.forget_queries()

    def crop(self, tokens: int) -> None:
        """Remove the last `tokens` tokens; queries that were seen stay seen."""
        for _ in range(min(tokens, len(self))):
            if self.recent:
                self.recent.pop()
            elif self.pages:
                self.pages[-1].held -= 1
                if not self.pages[-1].held:
                    self.pages.pop()
            else:
                self.sink.pop()

    def state(self) -> dict[str, Any]:
        held = [page.held for page in self.pages]
        return {
            "bits": self.rules.key_bits or 2,
            "sink": len(self.sink),
            "pages": len(self.pages),
            "recent": len(self.recent),
            "short": {i: n for i, n in enumerate(held) if n < self.rules.residual},
        }

    def visible(self) -> list[torch.Tensor]:
        """Keys and values, [heads, tokens, dim]."""
        out = []
        for side, dim in enumerate((self.rules.key_dim, self.rules.value_dim)):
            pieces = [torch.zeros(self.rules.heads, 0, dim, dtype=self.rules.dtype)]
            pieces += [token[side][:, None] for token in self.sink]
            pieces += [page.visible()[side] for page in self.pages]
            pieces += [token[side][:, None] for token in self.recent]
            out.append(torch.cat(pieces, dim=1))
        return out


class Simulation:
    """One layer: rows, and which columns of each are padding."""

    def __init__(self, rules: Rules, batch: int = 1):
        self.rules = rules
        self.rows = [Row(rules) for _ in range(batch)]
        self.valid: list[list[bool]] = [[] for _ in range(batch)]

    def update(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        queries: torch.Tensor | None = None,
        valid: torch.Tensor | None = None,
    ) -> None:
        """[batch, heads, n, dim] each, [batch, query heads, n, dim], and [batch, n] that is false for padding."""
        for r, row in enumerate(self.rows):
            for t in range(keys.shape[2]):
                is_token = valid is None or bool(valid[r, t])
                self.valid[r].append(is_token)
                if is_token:
                    row.append(keys[r, :, t], values[r, :, t], None if queries is None else queries[r, :, t])

    def crop(self, columns: int) -> None:
        """Remove the last `columns` columns."""
        for row, valid in zip(self.rows, self.valid):
            kept = max(0, len(valid) - columns)
            row.crop(sum(valid[kept:]))
            del valid[kept:]

    def select(self, indices: list[int]) -> None:
        self.rows = [copy.deepcopy(self.rows[i]) for i in indices]
        self.valid = [list(self.valid[i]) for i in indices]

    def visible(self) -> list[torch.Tensor]:
        """Keys and values, [batch, heads, columns, dim]; padding is zero."""
        out = []
        for side, dim in enumerate((self.rules.key_dim, self.rules.value_dim)):
            full = torch.zeros(len(self.rows), self.rules.heads, len(self.valid[0]), dim, dtype=self.rules.dtype)
            for r, row in enumerate(self.rows):
                full[r][:, torch.tensor(self.valid[r], dtype=torch.bool)] = row.visible()[side]
            out.append(full)
        return out

    def attend(self, query: torch.Tensor, scaling: float) -> torch.Tensor:
        """Attention of the newest token over everything, float64; [batch, query heads, 1, dim] -> the same."""
        keys, values = (x.double().repeat_interleave(self.rules.ratio, dim=1) for x in self.visible())
        scores = query.double() @ keys.transpose(-1, -2) * scaling
        padding = ~torch.tensor(self.valid, dtype=torch.bool)[:, None, None]
        return scores.masked_fill(padding, float("-inf")).softmax(-1) @ values

    def nominal_bits(self) -> float:
        """Bits of a packed key element, counted channel by channel."""
        tiers = [tier for row in self.rows for page in row.pages for tier in page.tiers.flatten().tolist()]
        return sum(BITS[tier] for tier in tiers) / len(tiers) if tiers else float("nan")


def queries(rules: Rules, tokens: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    """Random queries, [batch, query heads, tokens, dim], some channels of which are much larger than others."""
    g = torch.Generator().manual_seed(1000 + seed)
    x = torch.randn(batch, rules.heads * rules.ratio, tokens, rules.key_dim, generator=g)
    return (x * torch.randn(rules.key_dim, generator=g).mul(1.5).exp()).to(rules.dtype)


def feed(
    cache: Any,
    data: list[torch.Tensor],
    cuts: Iterable[int] | None = None,
    simulations: Iterable[Simulation] = (),
    valid: torch.Tensor | None = None,
) -> None:
    """Update all layers of a cache with keys, values and, if given, queries, in calls that end at `cuts`.

    The simulations get the same. `valid` marks what is no padding, among all columns the cache then holds.
    """
    start = 0
    for stop in cuts if cuts is not None else [data[0].shape[2]]:
        keys, values, *query = (x[:, :, start:stop] for x in data)
        if valid is not None:
            length = cache.get_seq_length()
            cache.observe_padding(valid[:, : length + stop - start], stop - start)
        for i, layer in enumerate(cache.layers):
            cache.update(keys, values, i)
            if query:
                layer.observe_query(query[0])
            layer.settle()
        for simulation in simulations:
            columns = len(simulation.valid[0])
            new = None if valid is None else valid[:, columns : columns + stop - start]
            simulation.update(keys, values, query[0] if query else None, new)
        start = stop


def assert_equal(layer: Any, simulation: Simulation) -> None:
    """A layer of hf_kvq holds what the simulation holds: states, statistics, every byte, and what attention sees."""
    rules = simulation.rules
    got = [
        {"bits": s.bits, "sink": s.sink, "pages": s.pages, "recent": s.recent, "short": s.short} for s in layer.states
    ]
    assert got == [row.state() for row in simulation.rows]
    assert layer.get_seq_length() == len(simulation.valid[0])
    for r, row in enumerate(simulation.rows):
        if rules.key_bits is None:
            assert layer.query_count[r] == row.query_count
            assert np.array_equal(layer.query_sum[r].numpy(), row.query_sum)
        if row.pages:
            got = packed(layer, r)
            wanted = {"regular": torch.stack([page.regular() for page in row.pages])}
            if rules.key_bits is None:
                pages = [page.records() for page in row.pages]
                wanted["counts"] = torch.stack([page.pop("counts") for page in pages])
                wanted |= {name: torch.cat([page[name] for page in pages]) for name in pages[0]}
            assert got.keys() == wanted.keys()
            for name, x in wanted.items():
                assert got[name].dtype == x.dtype and torch.equal(got[name], x), name
    for got, wanted in zip((layer.keys, layer.values), simulation.visible()):
        assert got.dtype == wanted.dtype
        # The last bit of the dtype is free, and steps of the decoder may be fused or not.
        rtol = max(torch.finfo(got.dtype).eps, 1e-5)
        largest = float(wanted.abs().max()) if wanted.numel() else 0
        torch.testing.assert_close(got, wanted, rtol=rtol, atol=1e-6 * largest)
    for r, row in enumerate(simulation.rows):
        columns = [c for c, valid in enumerate(simulation.valid[r]) if valid]
        exact = columns[: len(row.sink)] + columns[len(columns) - len(row.recent) :]
        for side, got in enumerate((layer.keys, layer.values)):
            wanted = [token[side] for token in (*row.sink, *row.recent)]
            assert not wanted or torch.equal(got[r][:, exact], torch.stack(wanted, dim=1))


def packed(layer: Any, row: int) -> dict[str, torch.Tensor]:
    """All that is packed of one row, copied."""
    pages = layer.states[row].pages
    regular = layer.body.pages(slice(row, row + 1), layer.states[row].bits)[0, :pages].clone()
    if not hasattr(layer.body, "records"):
        return {"regular": regular}
    block = vars(layer.body.records[row].read(0, pages, regular))
    return {"regular": regular, **{name: x.clone() for name, x in block.items() if name != "dense"}}
