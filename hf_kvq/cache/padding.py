# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Which columns of a padded batch are padding. Padding is never stored, so a row is what it is alone."""

from __future__ import annotations

import torch


class Padding:
    """Padding columns of each row, as sorted half-open intervals. Shared by the layers of a cache.

    A *column* is a position of the padded batch; a *token* is a column that is no padding.
    """

    def __init__(self):
        self.rows: list[tuple[tuple[int, int], ...]] = []

    def observe(self, start: int, valid: torch.Tensor) -> None:
        """Record the padding of columns `start`, `start + 1`, ...; `valid` is bool [batch, columns].

        Idempotent: columns from `start` on that were recorded before are recorded anew.
        """
        self.crop(start)
        if bool(valid.all()):
            return
        if not self.rows:
            self.rows = [()] * valid.shape[0]
        if len(self.rows) != valid.shape[0]:
            raise ValueError(f"the attention mask has {valid.shape[0]} rows, but the cache holds {len(self.rows)}")
        self.rows = [old + tuple(_runs(row, start)) for old, row in zip(self.rows, (~valid).tolist())]

    def of(self, row: int) -> tuple[tuple[int, int], ...]:
        return self.rows[row] if self.rows else ()

    def tokens(self, row: int, start: int, stop: int) -> slice | torch.Tensor:
        """Index of the tokens among the columns `[start, stop)`, relative to `start`; a slice if they are adjacent."""
        free, at = [], start
        for low, high in (*self.of(row), (stop, stop)):
            low = min(max(low, at), stop)
            if low > at:
                free.append((at - start, low - start))
            at = max(at, min(high, stop))
        if len(free) <= 1:
            return slice(*(free[0] if free else (0, 0)))
        return torch.cat([torch.arange(*run) for run in free])

    def select(self, indices: list[int]) -> None:
        """Keep, repeat or reorder rows."""
        self.rows = [self.rows[i] for i in indices] if self.rows else []

    def crop(self, length: int) -> None:
        """Forget everything from column `length` on."""
        self.rows = [
            tuple((low, min(high, length)) for low, high in row if low < length) for row in self.rows
        ]  # fmt: skip
        if not any(self.rows):
            self.rows = []


def _runs(flags: list[bool], start: int) -> list[tuple[int, int]]:
    """Half-open intervals of consecutive true flags, shifted by `start`."""
    runs: list[tuple[int, int]] = []
    for i, flag in enumerate(flags, start):
        if flag and runs and runs[-1][1] == i:
            runs[-1] = (runs[-1][0], i + 1)
        elif flag:
            runs.append((i, i + 1))
    return runs
