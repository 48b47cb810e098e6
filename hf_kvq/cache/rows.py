# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Where one row of a batch stands: how many of its tokens are exact, how many are packed, and how wide."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RowState:
    """A row's tokens, in order: `sink` exact ones, `pages` packed pages of `bits`, `recent` exact ones.

    `short` gives the tokens of those pages that are not full, which only `crop` leaves behind.
    """

    bits: int
    sink: int = 0
    pages: int = 0
    recent: int = 0
    short: dict[int, int] = field(default_factory=dict)

    def body(self, page_tokens: int) -> int:
        """Packed tokens."""
        return self.pages * page_tokens - sum(page_tokens - held for held in self.short.values())

    def tokens(self, page_tokens: int) -> int:
        return self.sink + self.body(page_tokens) + self.recent

    def cropped(self, tokens: int, page_tokens: int, initial_bits: int) -> RowState:
        """The state with only the first `tokens` tokens; without pages the width starts anew."""
        in_body = tokens - min(tokens, self.sink)
        if in_body >= self.body(page_tokens):
            return dataclasses.replace(self, sink=min(tokens, self.sink), recent=in_body - self.body(page_tokens))
        pages, short = 0, {}
        while in_body > 0:
            held = min(self.short.get(pages, page_tokens), in_body)
            if held < page_tokens:
                short[pages] = held
            pages, in_body = pages + 1, in_body - held
        return RowState(self.bits if pages else initial_bits, min(tokens, self.sink), pages, 0, short)


def runs(count: int, key: Callable[[int], Any]) -> Iterator[slice]:
    """Slices of consecutive rows with equal keys: what can be handled together, as views."""
    start = 0
    for row in range(1, count + 1):
        if row == count or key(row) != key(start):
            yield slice(start, row)
            start = row
