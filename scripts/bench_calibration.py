# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""What calibration costs: time and memory of each phase, and how they grow with samples, tokens and layers.

    python scripts/bench_calibration.py

Models have SmolLM2's shape with fewer or more layers, and random weights, as time does not depend on them. Each phase
is also given in units of a forward pass over its samples ("forwards"), which carries over to others:

    seconds = forwards * samples * tokens * (seconds of a forward pass per token)

Seconds are CPU time on a CPU. The measured sensitivity takes layers x widths passes, of which a batch runs several.
Memory is what the process grew by at its peak, beyond the model; on a GPU, what PyTorch allocated there.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_kvq import PMKVQConfig
from hf_kvq.bundled import bundled_model_path
from hf_kvq.calibration import (
    fbits_for_budget,
    load_texts,
    measured_sensitivity,
    sensitivity,
    token_blocks,
    tune_thresholds,
)
from hf_kvq.calibration.smoothing import smooth
from tables import print_table, write_csv


T = TypeVar("T")


#: What is doubled, from the smallest to the largest; the others stay at `BASE`.
BASE = {"samples": 1, "tokens": 512, "layers": 4}
GRID = {"samples": (1, 2, 4), "tokens": (512, 1024, 2048), "layers": (4, 8, 16)}
WIDTHS = (4, 2)
PHASES = ("forward", "sensitivity", "measured sensitivity", "smoothing", "thresholds trial")


def model_of(layers: int, device: torch.device) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(bundled_model_path())
    config.num_hidden_layers = layers
    # Each class of configs has its own way of listing layers, which has to go with their number.
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"] * layers
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False).to(device)


class Peak:
    """Memory that a piece of work needs at its peak, in MiB; NaN where the system does not tell."""

    def __init__(self, device: torch.device):
        self.device = device

    def __enter__(self) -> Peak:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self.before = torch.cuda.memory_allocated(self.device)
        else:
            self._give_back()
            self.before = self._resident("VmRSS")
            try:
                Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
            except OSError:
                self.before = math.nan
        return self

    def __exit__(self, *error: object) -> None:
        is_cuda = self.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(self.device) if is_cuda else self._resident("VmHWM")
        self.mib = (peak - self.before) / 2**20

    @staticmethod
    def _give_back() -> None:
        """Return freed memory to the system, so that using it again counts."""
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)

    @staticmethod
    def _resident(name: str) -> float:
        try:
            lines = Path("/proc/self/status").read_text().splitlines()
        except OSError:
            return math.nan
        return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith(name))


def cost(device: torch.device, work: Callable[..., T], *args: Any, **kwargs: Any) -> tuple[T, tuple[float, float]]:
    """What the work returns, and (seconds, MiB at the peak)."""
    # On a CPU that others use as well, only the process's own time tells something.
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    with Peak(device) as peak:
        start = clock()
        result = work(*args, **kwargs)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = clock() - start
    return result, (seconds, peak.mib)


@torch.no_grad()
def forward(model: PreTrainedModel, samples: torch.Tensor) -> None:
    for ids in samples:
        model(input_ids=ids[None].to(model.device))


def measure_phases(model: PreTrainedModel, samples: torch.Tensor, without: set[str]) -> dict[str, tuple[float, float]]:
    """(seconds, MiB) of every phase that runs the model."""
    smoothed = PMKVQConfig(key_codec="token", transform="lambda")
    work = {
        "forward": (forward, {}),
        "sensitivity": (sensitivity, {"desc": None}),
        "measured sensitivity": (measured_sensitivity, {"widths": WIDTHS, "desc": None}),
        "smoothing": (smooth, {"config": smoothed, "desc": None}),
        "thresholds trial": (tune_thresholds, {"max_length": 8192, "n_trials": 1, "desc": None}),
    }
    return {
        name: cost(model.device, function, model, samples, **options)[1]
        for name, (function, options) in work.items()
        if name not in without
    }


def plot(rows: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, len(GRID), figsize=(11, 6.4), sharey="row", sharex="col", layout="constrained")
    for column, (name, sizes) in zip(axes.T, GRID.items()):
        for phase in PHASES:
            points = sorted(
                (row[name], row["seconds"], row["peak MiB"])
                for row in rows
                if row["phase"] == phase and all(row[k] == v for k, v in BASE.items() if k != name)
            )
            for ax, values in zip(column, list(zip(*points))[1:]):
                ax.plot([point[0] for point in points], values, marker="o", label=phase)
        for ax in column:
            ax.set(xscale="log", yscale="log", xticks=sizes, xticklabels=sizes)
            ax.minorticks_off()
            ax.grid(alpha=0.3)
        column[1].set_xlabel(f"{name} (others: {', '.join(f'{v} {k}' for k, v in BASE.items() if k != name)})")
    axes[0][0].set_ylabel("seconds")
    axes[1][0].set_ylabel("MiB beyond the model")
    axes[0][0].legend(fontsize=8)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--without", action="append", default=[], choices=PHASES[1:], help="leave out a phase")
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    parser.add_argument("--device", default="cpu", type=torch.device)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(bundled_model_path())

    points = {tuple({**BASE, name: size}.values()) for name, sizes in GRID.items() for size in sizes}
    rows, models = [], {}
    for n, tokens, layers in sorted(points):
        if layers not in models:
            models = {layers: model_of(layers, args.device)}
        model = models[layers]
        shared = {"samples": n, "tokens": tokens, "layers": layers}
        found = {}
        texts, found["reading text"] = cost(args.device, load_texts)
        samples, found["tokens"] = cost(args.device, token_blocks, texts, tokenizer, n, tokens)
        # The first pass of a process or of a length pays for what later ones find ready.
        forward(model, samples[:1])
        found |= measure_phases(model, samples, set(args.without))
        measured = sensitivity(model, samples[:1], desc=None)
        _, found["allocation"] = cost(args.device, fbits_for_budget, measured, 32768, "3bits")
        for phase, (seconds, peak) in found.items():
            row = {"phase": phase, **shared, "seconds": float(f"{seconds:.3g}"), "peak MiB": round(max(peak, 0.0), 1)}
            rows.append({**row, "forwards": float(f"{seconds / found['forward'][0]:.3g}")})
        print(f"{shared}: {sum(seconds for seconds, _ in found.values()):.1f} s", flush=True)
    write_csv(args.out / "calibration_cost.csv", rows)
    print_table([row for row in rows if all(row[k] == v for k, v in BASE.items())])
    for phase in PHASES:
        mine = [row for row in rows if row["phase"] == phase]
        if mine:
            low, high = (f(row["forwards"] for row in mine) for f in (min, max))
            each = [row["seconds"] / (row["samples"] * row["tokens"] * row["layers"]) for row in mine]
            print(
                f"{phase}: {low:.3g} to {high:.3g} forwards; {1e6 * min(each):.3g} to {1e6 * max(each):.3g} "
                "microseconds per token and layer"
            )
    plot(rows, args.out / "calibration_cost.png")


if __name__ == "__main__":
    main()
