# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""The pieces that attention runs over, without materializing them all at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ..codecs import BlockCodec


class Part(Protocol):
    """Some of the tokens that rows attend to.

    `mask` broadcasts against [rows, query heads, queries, tokens]: bool (true = visible), additive, or None. `held` is
    None, or int64 [rows] on the device: how many of the tokens (of the pages, in a part that has pages) a row holds.
    What lies behind is anything, and is not attended to.
    """

    mask: torch.Tensor | None
    held: torch.Tensor | None
    heads: int
    value_dim: int
    unit: int

    def blocks(self, size: int) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
        """(start, stop, keys, values) of about `size` tokens at a time, [rows, heads, tokens, dim]."""

    def adapt(self, query: torch.Tensor) -> torch.Tensor:
        """Query -> the space of this part's keys."""

    def restore(self, out: torch.Tensor) -> torch.Tensor:
        """Attention output over this part's values -> the values' own space."""


@dataclass(frozen=True)
class ExactPart:
    """Tokens in the model's dtype: keys [rows, heads, tokens, key_dim], values [rows, heads, tokens, value_dim]."""

    keys: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor | None = None
    held: torch.Tensor | None = None

    @property
    def heads(self) -> int:
        return self.keys.shape[1]

    @property
    def unit(self) -> int:
        """Tokens of one of what `held` counts."""
        return 1

    @property
    def value_dim(self) -> int:
        return self.values.shape[-1]

    def blocks(self, size: int) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
        """(start, stop, keys, values) of up to `size` tokens at a time."""
        tokens = self.keys.shape[2]
        for start in range(0, tokens, size):
            stop = min(start + size, tokens)
            yield start, stop, self.keys[:, :, start:stop], self.values[:, :, start:stop]

    def adapt(self, query: torch.Tensor) -> torch.Tensor:
        """Query -> the space of this part's keys."""
        return query

    def restore(self, out: torch.Tensor) -> torch.Tensor:
        """Attention output of this part -> the values' own space."""
        return out


@dataclass(frozen=True)
class PackedPart:
    """Tokens in pages of packed codes: uint8 [rows, pages, page bytes], all at one width.

    `bits` are the keys' and the values' widths. `short` gives the tokens of those pages that are not full.
    """

    pages: torch.Tensor
    keys: BlockCodec
    values: BlockCodec
    bits: tuple[int, int]
    mask: torch.Tensor | None = None
    short: dict[int, int] = field(default_factory=dict)
    held: torch.Tensor | None = None

    @property
    def heads(self) -> int:
        return self.keys.heads

    @property
    def unit(self) -> int:
        """Tokens of one of what `held` counts."""
        return self.keys.tokens

    @property
    def value_dim(self) -> int:
        return self.values.dim

    def blocks(self, size: int) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
        """(start, stop, keys, values) of about `size` tokens, whole pages, at a time; both still transformed."""
        step = max(1, size // self.keys.tokens)
        start = 0
        for first in range(0, self.pages.shape[1], step):
            last = min(first + step, self.pages.shape[1])
            keys, values = self.decode_keys(first, last), self.decode_values(first, last)
            if self.short:
                held = [self.short.get(page, self.keys.tokens) for page in range(first, last)]
                keep = torch.cat([torch.arange(n) + i * self.keys.tokens for i, n in enumerate(held)])
                keys, values = (x.index_select(2, keep.to(x.device)) for x in (keys, values))
            stop = start + keys.shape[2]
            yield start, stop, keys, values
            start = stop

    def decode_keys(self, first: int, last: int) -> torch.Tensor:
        """Keys of the pages `[first, last)`, [rows, heads, tokens, dim], still transformed."""
        return self.keys.decode(self.pages[:, first:last, : self._split], self.bits[0])

    def decode_values(self, first: int, last: int) -> torch.Tensor:
        """Values of the pages `[first, last)`, [rows, heads, tokens, dim], still transformed."""
        return self.values.decode(self.pages[:, first:last, self._split :], self.bits[1])

    def adapt(self, query: torch.Tensor) -> torch.Tensor:
        """Query -> the space of this part's keys."""
        return self.keys.adapt(query, self.bits[0])

    def restore(self, out: torch.Tensor) -> torch.Tensor:
        """Attention output of this part -> the values' own space."""
        return self.values.restore(out, self.bits[1])

    @property
    def is_transformed(self) -> bool:
        """Whether `adapt` or `restore` does anything."""
        codecs = zip((self.keys, self.values), self.bits)
        return any(codec.transform is not None and bits != 16 for codec, bits in codecs)

    def record_tensors(self) -> list[torch.Tensor]:
        """What kernels need beyond the pages."""
        return []

    @property
    def _split(self) -> int:
        return self.keys.nbytes(self.bits[0])
