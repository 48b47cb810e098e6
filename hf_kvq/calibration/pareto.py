# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""What a search for thresholds found: the best divergence at every size, as data, as a file and as a picture."""

from __future__ import annotations

import csv
import dataclasses
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..config import MixKVQConfig
from ..hub.files import replace_file


@dataclass(frozen=True)
class ThresholdTrial:
    """One pair of thresholds, and what it was measured to cost.

    Args:
        tau_bf16, tau_uint4: see `MixKVQConfig`.
        kl: mean KL(exact || this cache), nats per token.
        nbytes: of a request; see `request_bytes`.
        true_bits: the same, in bits per number of K and V.
        key_bits: average bits of a key element as papers count them, (min, max) aside.
    """

    tau_bf16: float
    tau_uint4: float
    kl: float
    nbytes: int
    true_bits: float
    key_bits: float

    def config(self, others: MixKVQConfig | None = None) -> MixKVQConfig:
        """Options of a cache with these thresholds, and with `others`."""
        return dataclasses.replace(others or MixKVQConfig(), tau_bf16=self.tau_bf16, tau_uint4=self.tau_uint4)


def pareto_front(trials: Sequence[ThresholdTrial]) -> tuple[ThresholdTrial, ...]:
    """The trials that no other one beats or equals in both respects, from the smallest on; of equals, the first."""
    front: list[ThresholdTrial] = []
    for trial in sorted(trials, key=lambda t: (t.true_bits, t.kl)):
        if not front or trial.kl < front[-1].kl:
            front.append(trial)
    return tuple(front)


def knee(
    trials: Sequence[ThresholdTrial], target_bits: float | None = None, nbytes: int | None = None
) -> ThresholdTrial:
    """The trial with the least divergence within a size; give one of the two.

    Args:
        trials: of a search.
        target_bits: true bits at most.
        nbytes: bytes of a request at most.

    Raises:
        ValueError: none is that small; the message says what the smallest one takes.
    """
    if (target_bits is None) == (nbytes is None):
        raise TypeError("give either target_bits or nbytes")
    sizes = [trial.true_bits if nbytes is None else trial.nbytes for trial in trials]
    limit = target_bits if nbytes is None else nbytes
    within = [trial for trial, size in zip(trials, sizes) if size <= limit]
    if not within:
        unit = "true bits" if nbytes is None else "bytes"
        raise ValueError(f"no trial is within {limit:,.6g} {unit}; the smallest one takes {min(sizes):,.6g}")
    return min(within, key=lambda trial: (trial.kl, trial.nbytes))


def write_trials(trials: Sequence[ThresholdTrial], path: str | os.PathLike) -> None:
    """All trials as CSV, in their order, the last column telling which ones are on the front."""
    front, file = pareto_front(trials), io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*(field.name for field in dataclasses.fields(ThresholdTrial)), "on_front"])
    writer.writerows([*dataclasses.astuple(trial), int(trial in front)] for trial in trials)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    replace_file(Path(path), file.getvalue().encode())


def plot_trials(trials: Sequence[ThresholdTrial], path: str | os.PathLike, title: str = "") -> None:
    """All trials and their front as a picture.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib; run: pip install matplotlib, or write a .csv file") from error
    figure = Figure(figsize=(6.2, 4.6), layout="constrained")
    ax = figure.subplots()
    front = pareto_front(trials)
    ax.scatter([t.true_bits for t in trials], [t.kl for t in trials], color="C7", s=18, label="trials")
    ax.plot([t.true_bits for t in front], [t.kl for t in front], "o-", color="C0", label="Pareto front")
    ax.set(yscale="log", xlabel="true bits per element, everything counted", ylabel="KL, nats per token", title=title)
    ax.grid(alpha=0.3, which="both")
    ax.legend()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
