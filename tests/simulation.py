# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""What the progressive cache has to do, said once more: slow, obvious, and sharing no code with hf_kvq.

Arithmetic is numpy float32 (one rounding per operation, as the rules have it); torch only converts dtypes.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


WIDTHS = (16, 8, 4, 2)
LIMIT = np.float32(2.0**126)
#: Shorter than the real one, so that tests can be short.
TOKEN_PAGE = 32


def to_numpy(x: torch.Tensor) -> np.ndarray:
    return x.detach().to(torch.float32).numpy()


def split_groups(x: np.ndarray, group: int, axis: int) -> list[np.ndarray]:
    return np.split(x, range(group, x.shape[axis], group), axis=axis)


def quantize16(x: np.ndarray, group: int, axis: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """16-bit codes, and the minimum and maximum of each group of `group` elements along `axis`."""
    codes, lows, highs = [], [], []
    for part in split_groups(x, group, axis):
        low = part.min(axis, keepdims=True).clip(-LIMIT, LIMIT)
        high = part.max(axis, keepdims=True).clip(-LIMIT, LIMIT)
        with np.errstate(all="ignore"):
            code = np.rint((part - low) / ((high - low) / np.float32(65535)))
        code = np.where(np.isnan(code), 0, code).clip(0, 65535)
        codes, lows, highs = [*codes, code.astype(np.int64)], [*lows, low], [*highs, high]
    return np.concatenate(codes, axis), np.concatenate(lows, axis), np.concatenate(highs, axis)


def narrow(code16: np.ndarray, bits: int) -> np.ndarray:
    """Nearest code of width `bits`, from the 16-bit code in one step; 65535 is odd, so there are no ties."""
    return (2 * code16.astype(np.int64) * (2**bits - 1) + 65535) // (2 * 65535)


def centered(code16: np.ndarray, low: np.ndarray, high: np.ndarray, dtype: torch.dtype) -> tuple[np.ndarray, ...]:
    """2-bit codes, each the quarter of the range that its 4-bit code lies in, and (min, max) an eighth further in."""
    eighth = (high - low) / np.float32(8)
    edges = (to_numpy(torch.from_numpy(edge).to(dtype)) for edge in (low + eighth, high - eighth))
    return narrow(code16, 4) // 4, *edges


def dequantize(codes: np.ndarray, low: np.ndarray, high: np.ndarray, bits: int, group: int, axis: int) -> np.ndarray:
    """`min + code * (max - min) / (2^bits - 1)`; the step is float32, the rest is rounded once."""
    step = (high - low) / np.float32(2**bits - 1)
    parts = [
        np.take(low, [i], axis).astype(np.float64) + part * np.take(step, [i], axis).astype(np.float64)
        for i, part in enumerate(split_groups(codes, group, axis))
    ]
    return np.concatenate(parts, axis).astype(np.float32)


def pack(codes: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """Byte `i` of `m` holds the codes `i`, `i + m`, `i + 2m`, ... from its lowest bits upwards."""
    codes = np.moveaxis(codes, axis, 0)
    m = -(-len(codes) * bits // 8)
    out = np.zeros((m, *codes.shape[1:]), np.int64)
    for i, code in enumerate(codes):
        out[i % m] += code << (bits * (i // m))
    return np.moveaxis(out, 0, axis).astype(np.uint8)


def cpu_order(packed: np.ndarray, is_value: bool) -> np.ndarray:
    """Packed codes [heads, bytes, dim] with four channels of a key, or four byte rows of values, side by side."""
    heads, rows, dim = packed.shape
    if is_value:
        return packed.reshape(heads, rows // 4, 4, dim).transpose(0, 1, 3, 2)
    return packed.reshape(heads, rows, dim // 4, 4).transpose(0, 2, 1, 3) if dim % 4 == 0 else packed


def hadamard(dim: int) -> np.ndarray:
    """Block-diagonal Sylvester matrix: entry (i, j) of a block is (-1)^(bits that i and j share), normalized."""
    block = 1
    while dim % (2 * block) == 0:
        block *= 2
    signs = np.array([[(-1.0) ** bin(i & j).count("1") for j in range(block)] for i in range(block)])
    return np.kron(np.eye(dim // block), signs / np.sqrt(block))


def clip(x: np.ndarray, share: float, group: int, axis: int, dtype: torch.dtype) -> np.ndarray:
    """The middle `share` of each group's range, with all that lies outside moved to its edges."""
    parts = []
    for part in split_groups(x, group, axis) if share < 1 else [x]:
        if share < 1:
            low, high = (f(axis, keepdims=True).clip(-LIMIT, LIMIT) for f in (part.min, part.max))
            middle, half = (low + high) / np.float32(2), (high - low) * np.float32(share / 2)
            edges = (to_numpy(torch.from_numpy(edge).to(dtype)) for edge in (middle - half, middle + half))
            part = np.clip(part, *edges)
        parts.append(part)
    return np.concatenate(parts, axis)


@dataclass(frozen=True)
class Rules:
    """One layer: its shape and its options."""

    heads: int = 2
    key_dim: int = 16
    value_dim: int = 16
    dtype: torch.dtype = torch.float32
    fbit: int = 2
    value_fbit: int | None = None
    max_length: int = 128
    sink: int = 1
    window: int = 4
    group: int = 16
    channel: bool = True
    hadamard: bool = False
    hadamard_keys: bool = False
    smooth: bool = False
    clips: tuple[float, float] = (1.0, 1.0)
    centered: bool = True
    initial_bits: int = 16

    def options(self, **more: Any) -> dict[str, Any]:
        """The same as options of `PMKVQConfig`."""
        return {
            "fbit": self.fbit,
            "value_fbit": self.value_fbit,
            "max_length": self.max_length,
            "sink_tokens": self.sink,
            "window": self.window,
            "group_size": self.group,
            "key_codec": "channel" if self.channel else "token",
            "transform": self.transform,
            "key_shrink": "centered" if self.centered else "equivalent",
            "key_clip": self.clips[0],
            "value_clip": self.clips[1],
            "initial_bits": self.initial_bits,
            **more,
        }

    @property
    def transform(self) -> str:
        if self.hadamard:
            return "hadamard_kv" if self.hadamard_keys else "hadamard"
        return "lambda" if self.smooth else "none"

    @property
    def finals(self) -> tuple[int, int]:
        """Final widths of keys and values."""
        return self.fbit, self.value_fbit or self.fbit

    def sides(self, bits: int) -> list[int]:
        """Widths of keys and values when the layer is at `bits`: each stops at its final one."""
        return [max(bits, final) for final in self.finals]

    @property
    def page(self) -> int:
        return self.group if self.channel else TOKEN_PAGE

    @property
    def token_bytes(self) -> int:
        return self.heads * (self.key_dim + self.value_dim) * self.dtype.itemsize

    def page_bytes(self, bits: int) -> int:
        key_groups = self.key_dim if self.channel else self.page * -(-self.key_dim // self.group)
        value_groups = self.page * -(-self.value_dim // self.group)
        total = 0
        for width, dim, groups in zip(self.sides(bits), (self.key_dim, self.value_dim), (key_groups, value_groups)):
            packed = self.page * dim * width // 8 + groups * 2 * self.dtype.itemsize
            total += self.heads * (self.page * dim * self.dtype.itemsize if width == 16 else packed)
        return total

    def pages(self, tokens: int) -> int:
        """Pages that have left the window once `tokens` tokens are there."""
        return max(0, tokens - self.sink - self.window) // self.page

    def bytes_for(self, tokens: int, bits: int) -> int:
        exact = min(tokens, self.sink + self.window + self.page - 1)
        return exact * self.token_bytes + self.pages(tokens) * self.page_bytes(bits)

    @property
    def budget(self) -> int:
        return self.bytes_for(self.max_length, min(self.finals))

    def width(self, pages: int) -> int:
        """The widest width at which `pages` pages fit what the budget leaves for pages; the final one at least."""
        last = min(self.finals)
        room = self.pages(self.max_length) * self.page_bytes(last)
        start = max(self.initial_bits, last)
        return next((b for b in WIDTHS if last <= b <= start and pages * self.page_bytes(b) <= room), last)


def key_scale(rules: Rules) -> np.ndarray:
    """Factors from 1/8 to 5, another one for each channel and head, float32 [heads, key_dim]."""
    heads, channels = np.arange(rules.heads)[:, None], np.arange(rules.key_dim)
    return np.float32((1 + (7 * channels + 3 * heads) % 5) / 2.0 ** ((channels + heads) % 4))


def max_length_for(layers: list[Rules], budget_bytes: int) -> int:
    """Most tokens that fit `budget_bytes` together, by trying."""
    length = 1
    while sum(rules.bytes_for(length + 1, rules.fbit) for rules in layers) <= budget_bytes:
        length += 1
    return length


class Page:
    """Tokens that left the window together. Later crops hide tokens of it, but it stays what it is."""

    def __init__(self, rules: Rules, tokens: list[tuple[torch.Tensor, torch.Tensor]]):
        self.rules, self.held = rules, len(tokens)
        self.exact = [torch.stack(side, dim=1) for side in zip(*tokens)]
        self.sides = []
        for is_value, exact in enumerate(self.exact):
            data, axis = to_numpy(exact), 1 if rules.channel and not is_value else 2
            if rules.smooth and not is_value:
                data = to_numpy(torch.from_numpy(data / key_scale(rules)[:, None]).to(rules.dtype))
            if rules.hadamard and (is_value or rules.hadamard_keys):
                rotated = data.astype(np.float64) @ hadamard(data.shape[-1])
                data = to_numpy(torch.from_numpy(rotated.astype(np.float32)).to(rules.dtype))
            data = clip(data, rules.clips[is_value], rules.group, axis, rules.dtype)
            self.sides.append((*quantize16(data, rules.group, axis), axis))

    def codes(self, is_value: int, width: int) -> tuple[np.ndarray, ...]:
        """Codes, minima and maxima of the keys or the values at a width below 16."""
        code16, low, high, _ = self.sides[is_value]
        if width == 2 and self.rules.centered and not is_value:
            return centered(code16, low, high, self.rules.dtype)
        return narrow(code16, width), low, high

    def content(self, bits: int) -> torch.Tensor:
        """All bytes of this page at `bits`: keys' codes, minima, maxima, then the values', as a CPU wants them."""
        pieces = []
        for is_value, width in enumerate(self.rules.sides(bits)):
            if width == 16:
                pieces.append(self.exact[is_value].contiguous().flatten().view(torch.uint8))
                continue
            codes, low, high = self.codes(is_value, width)
            packed = pack(codes, width, axis=1)
            pieces.append(torch.from_numpy(cpu_order(packed, is_value).copy()).flatten())
            for ranges in (low, high):
                pieces.append(torch.from_numpy(ranges).to(self.rules.dtype).flatten().view(torch.uint8))
        return torch.cat(pieces)

    def visible(self, bits: int) -> list[torch.Tensor]:
        """Keys and values as attention sees them, [heads, held, dim]."""
        out = []
        for is_value, ((*_, axis), width) in enumerate(zip(self.sides, self.rules.sides(bits))):
            if width == 16:
                out.append(self.exact[is_value][:, : self.held])
                continue
            x = dequantize(*self.codes(is_value, width), width, self.rules.group, axis)
            if self.rules.smooth and not is_value:
                x = x * key_scale(self.rules)[:, None]
            if self.rules.hadamard and (is_value or self.rules.hadamard_keys):
                x = (x.astype(np.float64) @ hadamard(x.shape[-1])).astype(np.float32)
            out.append(torch.from_numpy(x).to(self.rules.dtype)[:, : self.held])
        return out


class Row:
    """One row of a batch, without its padding: lists of tokens, each a pair (key, value) of [heads, dim]."""

    def __init__(self, rules: Rules):
        self.rules = rules
        self.sink, self.pages, self.recent = [], [], []
        self.bits = max(rules.initial_bits, min(rules.finals))

    def __len__(self) -> int:
        return len(self.sink) + sum(page.held for page in self.pages) + len(self.recent)

    def append(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """One token, [heads, dim] each."""
        token = (key.detach().to(self.rules.dtype), value.detach().to(self.rules.dtype))
        if len(self.sink) < self.rules.sink:
            self.sink.append(token)
            return
        self.recent.append(token)
        if len(self.recent) == self.rules.window + self.rules.page:
            leaving, self.recent = self.recent[: self.rules.page], self.recent[self.rules.page :]
            self.pages.append(Page(self.rules, leaving))
            self.bits = min(self.bits, self.rules.width(len(self.pages)))

    def crop(self, tokens: int) -> None:
        """Remove the last `tokens` tokens."""
        for _ in range(min(tokens, len(self))):
            if self.recent:
                self.recent.pop()
            elif self.pages:
                self.pages[-1].held -= 1
                if not self.pages[-1].held:
                    self.pages.pop()
            else:
                self.sink.pop()
        if not self.pages:
            self.bits = max(self.rules.initial_bits, min(self.rules.finals))

    def state(self) -> dict[str, Any]:
        held = [page.held for page in self.pages]
        return {
            "bits": self.bits,
            "sink": len(self.sink),
            "pages": len(self.pages),
            "recent": len(self.recent),
            "short": {i: n for i, n in enumerate(held) if n < self.rules.page},
        }

    def visible(self) -> list[torch.Tensor]:
        """Keys and values, [heads, tokens, dim]."""
        out = []
        for side, dim in enumerate((self.rules.key_dim, self.rules.value_dim)):
            pieces = [torch.zeros(self.rules.heads, 0, dim, dtype=self.rules.dtype)]
            pieces += [token[side][:, None] for token in self.sink]
            pieces += [page.visible(self.bits)[side] for page in self.pages]
            pieces += [token[side][:, None] for token in self.recent]
            out.append(torch.cat(pieces, dim=1))
        return out


class Simulation:
    """One layer: rows, and which columns of each are padding."""

    def __init__(self, rules: Rules, batch: int = 1):
        self.rules = rules
        self.rows = [Row(rules) for _ in range(batch)]
        self.valid: list[list[bool]] = [[] for _ in range(batch)]

    def update(self, keys: torch.Tensor, values: torch.Tensor, valid: torch.Tensor | None = None) -> None:
        """[batch, heads, n, dim] each, and [batch, n] that is false for padding."""
        for r, row in enumerate(self.rows):
            for t in range(keys.shape[2]):
                is_token = valid is None or bool(valid[r, t])
                self.valid[r].append(is_token)
                if is_token:
                    row.append(keys[r, :, t], values[r, :, t])

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
        rules, columns = self.rules, len(self.valid[0])
        out = []
        for side, dim in enumerate((rules.key_dim, rules.value_dim)):
            full = torch.zeros(len(self.rows), rules.heads, columns, dim, dtype=rules.dtype)
            for r, row in enumerate(self.rows):
                full[r][:, torch.tensor(self.valid[r], dtype=torch.bool)] = row.visible()[side]
            out.append(full)
        return out


def assert_equal(layer: Any, simulation: Simulation) -> None:
    """A layer of hf_kvq holds what the simulation holds: states, every byte of every page, and what attention sees."""
    got = [
        {"bits": s.bits, "sink": s.sink, "pages": s.pages, "recent": s.recent, "short": s.short} for s in layer.states
    ]
    assert got == [row.state() for row in simulation.rows]
    assert layer.get_seq_length() == len(simulation.valid[0])
    for r, row in enumerate(simulation.rows):
        if row.pages:
            content = layer.body.pages(slice(r, r + 1), row.bits)[0, : len(row.pages)]
            torch.testing.assert_close(content, torch.stack([p.content(row.bits) for p in row.pages]), rtol=0, atol=0)
    for got, wanted in zip((layer.keys, layer.values), simulation.visible()):
        assert got.dtype == wanted.dtype
        if all(row.bits == 16 for row in simulation.rows):
            torch.testing.assert_close(got, wanted, rtol=0, atol=0)
        else:
            # Steps of the decoder may be fused or not, so the last bit of float32 is free.
            rtol = max(torch.finfo(got.dtype).eps, 1e-6)
            largest = float(wanted.abs().max()) if wanted.numel() else 0.0
            torch.testing.assert_close(got, wanted, rtol=rtol, atol=rtol / 2 * largest)
    exact_regions(layer, simulation)


def exact_regions(layer: Any, simulation: Simulation) -> None:
    """Sink and recent tokens are bit-equal, whatever the width."""
    for r, row in enumerate(simulation.rows):
        columns = [c for c, valid in enumerate(simulation.valid[r]) if valid]
        exact = columns[: len(row.sink)] + columns[len(columns) - len(row.recent) :]
        for got, side in zip((layer.keys, layer.values), (0, 1)):
            wanted = [token[side] for token in (*row.sink, *row.recent)]
            if wanted:
                torch.testing.assert_close(got[r][:, exact], torch.stack(wanted, dim=1), rtol=0, atol=0)
