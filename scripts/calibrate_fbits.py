# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Does calibration pay? Calibrated final widths and key smoothing against simple choices, at equal true bytes.

    python scripts/calibrate_fbits.py

SmolLM2 is calibrated on samples of 2,048 tokens from the first four fifths of the bundled text; caches are compared
on the rest, at every length in one run, a chunk of tokens at a time, and KL is against an ordinary cache fed in the
same way. Keys and values are rounded to bfloat16 in every cache, all else is float32. "fixed" caches have their final
widths from the first page on, so that the text is read through them; "progressive" ones reach them at the end.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import resource
import time
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from hf_kvq import KVQPlan, PMKVQConfig
from hf_kvq.bundled import load_model
from hf_kvq.calibration import (
    Sensitivity,
    fbits_for_budget,
    layer_costs,
    measured_sensitivity,
    sensitivity,
    smooth,
    token_blocks,
)
from hf_kvq.evaluation import Fidelity, compare_fidelity
from hf_kvq.evaluation.methods import Method, exact_cache
from tables import print_table, write_csv
from texts import split_text


#: Schedules by their initial width.
SCHEDULES = {"fixed": 2, "progressive": 16}
WIDTHS = (8, 4, 2)
#: Those that single layers are tried at.
MEASURED_WIDTHS = (4, 2)


class Run(NamedTuple):
    """A cache to compare: what its bytes are those of, how its widths were chosen, and its options."""

    budget: str
    how: str
    options: dict
    schedule: str = "fixed"


def simple_fbits(layers: int, wide: int, how: str) -> tuple[int, ...]:
    """`wide` layers at 4 bits and the others at 2."""
    chosen = {
        "boundary layers": sorted(range(layers), key=lambda i: min(i, layers - 1 - i))[:wide],
        "first layers": range(wide),
        "evenly spread": [i * layers // wide for i in range(wide)],
    }[how]
    return tuple(4 if i in chosen else 2 for i in range(layers))


def allocations(found: dict[str, Sensitivity], length: int) -> list[Run]:
    """All choices of widths; within a budget, all take the same bytes or less."""
    first = next(iter(found.values()))
    layers = len(first.layers)
    costs = dict(zip(WIDTHS, zip(*layer_costs(first.shapes, length, WIDTHS))))

    def calibrated(budget: str, size: int) -> list[Run]:
        return [
            Run(budget, f"calibrated, {name}", {"fbit": fbits_for_budget(sensitivities, length, size).fbit})
            for name, sensitivities in found.items()
        ]

    runs = [Run("all at 2", "uniform", {"fbit": (2,) * layers})]
    for wide in (layers // 4, layers // 2):
        budget = f"{wide} of {layers} at 4"
        for how in ("boundary layers", "first layers", "evenly spread"):
            runs.append(Run(budget, how, {"fbit": simple_fbits(layers, wide, how)}))
        runs += calibrated(budget, sum(costs[bits][0] for bits in runs[-1].options["fbit"]))
    runs.append(Run("all at 4", "uniform", {"fbit": (4,) * layers}))
    runs += calibrated("all at 4", sum(costs[4]))
    progressive = [run for run in runs if run.how not in ("first layers", "boundary layers")]
    return runs + [run._replace(schedule="progressive") for run in progressive]


def smoothings(model: PreTrainedModel, samples: torch.Tensor) -> tuple[list[Run], list[dict]]:
    """Per-token keys without λ, with it, and with it from stretched positions; and a table of the layers."""
    runs, rows = [], []
    for bits in (4, 2):
        budget, config = f"per-token keys at {bits}", PMKVQConfig(fbit=bits, key_codec="token")
        runs.append(Run(budget, "not smoothed", {"fbit": bits, "key_codec": "token"}))
        for stretch in (1, 4):
            found = smooth(model, samples, config, stretch=stretch)
            plan = KVQPlan.of(
                model, dataclasses.replace(config, transform="lambda"), tensors={"key_scale": found.key_scale}
            )
            runs.append(Run(budget, f"smoothed, s = {stretch}", {"plan": plan}))
            for i, layer in enumerate(found.layers):
                row = {"layer": layer, "bits": bits, "stretch": stretch, "alpha": found.alphas[i]}
                row |= {"error": f"{found.plain_error[i]:.4g}", "error, smoothed": f"{found.error[i]:.4g}"}
                rows.append(row)
    return runs, rows


def compare(model: PreTrainedModel, texts: list[torch.Tensor], runs: list[Run], chunk: int) -> list[dict]:
    """All caches on texts of equal length."""
    length = texts[0].shape[1]
    measured: dict[int, list[Fidelity]] = {}
    for number, text in enumerate(texts, 1):
        caches = {
            i: Method("pmkvq", {**run.options, "initial_bits": SCHEDULES[run.schedule]}).build(model, length)
            for i, run in enumerate(runs)
        }
        desc = f"{length} tokens, text {number} of {len(texts)}"
        for i, fidelity in compare_fidelity(model, text, caches, chunk, desc, exact_cache(model)).items():
            measured.setdefault(i, []).append(fidelity)
    rows = []
    for i, run in enumerate(runs):
        fidelity, cache = mean(measured[i]), caches[i]
        rows.append(
            {
                "tokens": length,
                "schedule": run.schedule,
                "bytes of": run.budget,
                "widths": run.how,
                "bytes": cache.nbytes(),
                "true bits": round(cache.true_bits(), 2),
                "perplexity": round(fidelity.perplexity, 2),
                "KL": float(f"{fidelity.kl:.3g}"),
                "KL per text": " ".join(f"{value.kl:.3g}" for value in measured[i]),
                "top-1": round(fidelity.top1, 3),
                "fbit": " ".join(map(str, run.options["fbit"])) if isinstance(run.options.get("fbit"), tuple) else "",
            }
        )
    return rows


def mean(found: list[Fidelity]) -> Fidelity:
    """Over texts of equal length."""
    nll, kl, top1 = (
        sum(values) / len(found) for values in zip(*((math.log(f.perplexity), f.kl, f.top1) for f in found))
    )
    return Fidelity(math.exp(nll), kl, top1, sum(f.tokens for f in found))


def plot(found: dict[str, Sensitivity], runs: list[Run], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.colors import ListedColormap

    chosen = [run for run in runs if run.how.startswith("calibrated") and run.schedule == "fixed"]
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(9, 6.4), sharex=True, height_ratios=(3, 1.6), layout="constrained"
    )
    for (name, values), style in zip(found.items(), ("-", "--")):
        for j, bits in enumerate(values.widths):
            top.plot(values.layers, values.total[:, j], style, color=f"C{j}", label=f"{name}, {bits} bits")
    top.set(yscale="log", ylabel="nats per token", title="SmolLM2-135M-Instruct: sensitivity per layer")
    top.legend(fontsize=8, ncols=2)
    top.grid(alpha=0.3, which="both")
    rows = [[int(math.log2(bits)) for bits in run.options["fbit"]] for run in chosen]
    image = bottom.imshow(
        rows, aspect="auto", vmin=0.5, vmax=4.5, cmap=ListedColormap(["#dbe9f6", "#89bedc", "#2b7bba", "#08306b"])
    )
    labels = [f"{run.budget}, {run.how.removeprefix('calibrated, ')}" for run in chosen]
    bottom.set_yticks(range(len(chosen)), labels, fontsize=8)
    bottom.set(xlabel="layer", title="calibrated final widths, by the bytes they take")
    colors = figure.colorbar(image, ax=bottom, ticks=[1, 2, 3, 4])
    colors.set_ticklabels(["2", "4", "8", "16"])
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=8, help="calibration samples for gradients")
    parser.add_argument("--measured-samples", type=int, default=1, help="those that single layers are tried on")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192], help="tokens of the texts")
    parser.add_argument("--schedules", choices=tuple(SCHEDULES), nargs="+", default=list(SCHEDULES))
    parser.add_argument("--texts", type=int, nargs="+", default=[2, 1], help="how many of each length")
    parser.add_argument("--chunk", type=int, default=128, help="tokens per forward")
    parser.add_argument("--checkpoint", type=Path, help="folder of finished samples, to go on from")
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer = load_model("bundled", dtype=torch.float32)
    to_calibrate_on, to_compare_on = split_text()
    samples = token_blocks(to_calibrate_on, tokenizer, args.samples, 2048)
    ids = tokenizer(to_compare_on, return_tensors="pt").input_ids

    found = {}
    for name, measure, widths, count in (
        ("gradient", sensitivity, WIDTHS, args.samples),
        ("measured", measured_sensitivity, MEASURED_WIDTHS, args.measured_samples),
    ):
        start, kept = time.perf_counter(), args.checkpoint and args.checkpoint / name
        result = measure(model, samples[:count], None, widths, desc=name, checkpoint=kept)
        seconds = (time.perf_counter() - start) / count
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
        print(f"{name}: {seconds:.1f} s per sample, peak of the process so far {peak:.0f} MiB")
        # Caches hold bfloat16, whatever the model's dtype, see `Method.build`.
        shapes = tuple(dataclasses.replace(shape, dtype=torch.bfloat16) for shape in result.shapes)
        found[name] = dataclasses.replace(result, shapes=shapes)
    smoothed, by_bits = smoothings(model, samples[:2])
    write_csv(args.out / "smoothing.csv", by_bits)
    first = next(iter(found.values()))
    by_layer = [
        {"layer": layer}
        | {
            f"{name} at {bits}": f"{values.total[i, j]:.4g}"
            for name, values in found.items()
            for j, bits in enumerate(values.widths)
        }
        for i, layer in enumerate(first.layers)
    ]
    write_csv(args.out / "sensitivity.csv", by_layer)
    for length, count in zip(args.lengths, args.texts, strict=True):
        runs = [run for run in allocations(found, length) if run.schedule in args.schedules]
        if length == args.lengths[0]:
            plot(found, runs, args.out / "calibration.png")
        texts = [ids[:, i * length : (i + 1) * length] for i in range(count)]
        rows = compare(model, texts, runs + smoothed, args.chunk)
        write_csv(args.out / f"calibration_{length}.csv", rows)
        print_table(rows, "fbit")


if __name__ == "__main__":
    main()
