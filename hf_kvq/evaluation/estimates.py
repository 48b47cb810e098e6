# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""How sure a measured mean is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch


#: Tokens of a text are not independent of their neighbours: so many together count as one observation.
BLOCK = 64

_LEVEL = 0.95
_RESAMPLES = 2000
_Z = 1.959964


@dataclass(frozen=True)
class Estimate:
    """A mean and its 95 % confidence interval.

    Args:
        mean: what was measured; NaN if nothing was.
        low, high: the interval; NaN where a single observation tells nothing about it.
        n: number of observations.
    """

    mean: float
    low: float
    high: float
    n: int

    def map(self, function: Callable[[float], float]) -> Estimate:
        """The estimate of an increasing function of the mean, such as exp."""
        return replace(self, mean=function(self.mean), low=function(self.low), high=function(self.high))

    def to_dict(self, digits: int = 4) -> dict[str, float | int | None]:
        """Plain JSON with so many significant digits; NaN becomes None."""
        values = {"mean": self.mean, "low": self.low, "high": self.high}
        rounded = {k: None if math.isnan(v) else float(f"{v:.{digits}g}") for k, v in values.items()}
        return {**rounded, "n": self.n}


def bootstrap(
    sums: torch.Tensor | Sequence[float], counts: torch.Tensor | Sequence[float] | None = None, seed: int = 0
) -> Estimate:
    """Mean over observations, with the percentile bootstrap's interval.

    Args:
        sums: [n], what was observed, summed within each observation.
        counts: [n], how many values each sum has; the default is 1. The mean is of the values.
        seed: of the resampling.
    """
    sums = torch.as_tensor(sums, dtype=torch.float64).cpu()
    counts = torch.ones_like(sums) if counts is None else torch.as_tensor(counts, dtype=torch.float64).cpu()
    n = len(sums)
    mean = (sums.sum() / counts.sum()).item() if n else math.nan
    if n < 2:
        return Estimate(mean, math.nan, math.nan, n)
    drawn = torch.randint(n, (_RESAMPLES, n), generator=torch.Generator().manual_seed(seed))
    means = sums[drawn].sum(1) / counts[drawn].sum(1)
    tail = (1 - _LEVEL) / 2
    low, high = torch.quantile(means, torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return Estimate(mean, low, high, n)


def over_tokens(values: torch.Tensor, counts: torch.Tensor | None = None, seed: int = 0) -> Estimate:
    """Mean of a value per token. Observations are blocks of tokens of a row.

    Args:
        values: [rows, tokens].
        counts: bool [rows, tokens], which tokens count; None if all do.
        seed: see `bootstrap`.
    """
    values = values.double()
    weights = torch.ones_like(values) if counts is None else counts.double()
    sums, counts = (torch.cat([part.sum(-1) for part in x.split(BLOCK, dim=-1)]) for x in (values * weights, weights))
    return bootstrap(sums[counts > 0], counts[counts > 0], seed)


def share(hits: int, n: int) -> Estimate:
    """A share of independent trials, with Wilson's interval, which is right at 0 and at 1 too."""
    if not n:
        return Estimate(math.nan, math.nan, math.nan, 0)
    p, z2 = hits / n, _Z * _Z / n
    centre = (p + z2 / 2) / (1 + z2)
    half = _Z * math.sqrt(p * (1 - p) / n + z2 / (4 * n)) / (1 + z2)
    # At the ends rounding would leave the mean outside.
    return Estimate(p, min(p, max(0.0, centre - half)), max(p, min(1.0, centre + half)), n)
