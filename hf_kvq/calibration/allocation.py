# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Which layer gets which width: the integer program of PM-KVQ, in the bytes that the cache then holds."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..cache.layout import LayerLayout, LayerShape
from ..config import PMKVQConfig


_UNITS = {"b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}

# Solvers compare in absolute terms, so the objective is scaled up to far above their tolerances.
_OBJECTIVE_SCALE = 1e6


def layer_costs(
    shapes: Sequence[LayerShape], max_length: int, widths: Sequence[int], config: PMKVQConfig | None = None
) -> list[list[int]]:
    """Bytes that each layer holds for a request of `max_length` tokens at each width, by the cache's own formula.

    Args:
        shapes: what each quantized layer caches.
        max_length: tokens per request.
        widths: candidates for the final width.
        config: the cache's other options.

    Returns:
        [layers][widths]
    """
    layouts = [LayerLayout.of(config or PMKVQConfig(), shape) for shape in shapes]
    return [[layout.bytes_for(max_length, bits) for bits in widths] for layout in layouts]


def parse_budget(budget: int | str, shapes: Sequence[LayerShape], max_length: int) -> int:
    """Bytes that a budget stands for.

    Args:
        budget: bytes, as an integer; or text such as "512MiB", "1.5GiB", or "2.25bits", the average over all numbers
            of K and V of a request, everything counted.
        shapes: what each quantized layer caches.
        max_length: tokens per request.

    Raises:
        ValueError: the text is no budget, or not a positive one.
        TypeError: it is neither text nor an integer.
    """
    if isinstance(budget, bool) or not isinstance(budget, (int, str)):
        raise TypeError(f"a budget is a number of bytes or text such as '512MiB' or '2.25bits'; got {budget!r}")
    match = re.fullmatch(r"([0-9]*\.?[0-9]+) *([a-z]*)", str(budget).strip().lower())
    number, unit = match.groups() if match else ("0", "")
    if unit in ("bit", "bits"):
        elements = max_length * sum(shape.heads * (shape.key_dim + shape.value_dim) for shape in shapes)
        size = int(float(number) * elements / 8)
    else:
        size = int(float(number) * _UNITS.get(unit or "b", 0))
    if size < 1:
        raise ValueError(
            f"a budget is a positive number of bytes, '512MiB' (B, KiB ... TiB) or '2.25bits'; got {budget!r}"
        )
    return size


def allocate(
    sensitivity: Sequence[Sequence[float]] | Any, nbytes: Sequence[Sequence[int]], budget: int, widths: Sequence[int]
) -> tuple[int, ...]:
    """One width per layer: the least total sensitivity whose bytes fit the budget.

    minimise sum_i s[i, b_i] subject to sum_i bytes[i, b_i] <= budget. Solved to optimality by HiGHS through CVXPY; the
    same input always gives the same answer, and no layer has a width that costs more than another without helping.

    Args:
        sensitivity: [layers][widths], s of each layer at each width; 0 where it stays exact.
        nbytes: [layers][widths], bytes of each layer at each width.
        budget: bytes of all layers together.
        widths: what the columns stand for.

    Returns:
        The width of each layer.

    Raises:
        ImportError: cvxpy is not installed.
        ValueError: the matrices do not go together or are not finite, or the budget is too small; the message says
            what the smallest feasible one is.
    """
    s, cost = np.asarray(sensitivity, dtype=np.float64), np.asarray(nbytes, dtype=np.int64)
    if s.ndim != 2 or s.shape != cost.shape or s.shape[1] != len(widths) or not s.size:
        raise ValueError(
            f"sensitivity and nbytes must be [layers][widths] with {len(widths)} widths; got shapes {s.shape} and "
            f"{cost.shape}"
        )
    if not np.isfinite(s).all() or (s < 0).any():
        raise ValueError("sensitivities must be finite and not negative; was the model run in a dtype that overflows?")
    require_feasible(nbytes, budget)
    chosen = _solve(s, cost, budget)
    if cost[np.arange(len(s)), chosen].sum() > budget:
        raise RuntimeError("the solver broke the budget; please report the matrices that it was given")
    return tuple(int(widths[j]) for j in chosen)


def require_feasible(nbytes: Sequence[Sequence[int]], budget: int) -> None:
    """Raise `ValueError` if not even the smallest width of every layer fits the budget; it says what would."""
    smallest = sum(int(min(row)) for row in nbytes)
    if smallest > budget:
        raise ValueError(
            f"a budget of {budget} bytes is too small for {len(nbytes)} layers; the smallest feasible one is "
            f"{smallest} bytes"
        )


def require_cvxpy() -> Any:
    """The module; `ImportError` tells how to install it."""
    try:
        import cvxpy
    except ImportError as error:
        raise ImportError("allocation needs cvxpy; run: pip install 'hf-kvq[calibrate]'") from error
    return cvxpy


def _solve(s: np.ndarray, cost: np.ndarray, budget: int) -> np.ndarray:
    """Index of the chosen column of each row."""
    cp = require_cvxpy()
    # What a layer takes anyway is of no interest, and small integers are exact in a solver's floating point.
    extra, room = cost - cost.min(axis=1, keepdims=True), budget - int(cost.min(axis=1).sum())
    unit = max(1, math.gcd(*extra.ravel().tolist()))
    extra, room = extra // unit, room // unit
    gain = (s - s.min(axis=1, keepdims=True)) / max(s.max() - s.min(), np.finfo(np.float64).tiny)
    chosen = cp.Variable(s.shape, boolean=True)
    useful = ~_dominated(s, cost)
    problem = cp.Problem(
        cp.Minimize(cp.sum(cp.multiply(_OBJECTIVE_SCALE * gain, chosen))),
        [cp.sum(chosen, axis=1) == 1, cp.sum(cp.multiply(extra, chosen)) <= room, chosen <= useful],
    )
    problem.solve(solver=cp.SCIPY, scipy_options={"mip_rel_gap": 0.0})
    return chosen.value.argmax(axis=1)


def _dominated(s: np.ndarray, cost: np.ndarray) -> np.ndarray:
    """Whether another column of the row is no worse in both respects, and better or further left; bool, like `s`."""
    better = (s[:, None, :] <= s[:, :, None]) & (cost[:, None, :] <= cost[:, :, None])
    equal = (s[:, None, :] == s[:, :, None]) & (cost[:, None, :] == cost[:, :, None])
    further_left = np.tri(s.shape[1], k=-1, dtype=bool)
    return (better & (~equal | further_left)).any(axis=2)
