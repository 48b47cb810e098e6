# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Does it matter which layers get the bits? Calibrated final widths against simple ones, at equal true bytes.

    python scripts/calibrate_fbits.py

SmolLM2 is calibrated on the first four fifths of the bundled text; the caches are compared on the rest, a chunk of
tokens at a time, and KL is against an ordinary cache fed in the same way. Keys and values are rounded to bfloat16 in
every cache, all else is float32. "fixed" caches have their final widths from the first page on, so that the text is
read through them; "progressive" ones reach them at the end.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import resource
import time
from pathlib import Path

import torch
from compare_methods import RoundedDynamicCache, build
from tables import print_table, write_csv

from hf_kvq import PMKVQCache, PMKVQConfig
from hf_kvq.bundled import bundled_text, load_model
from hf_kvq.calibration import Sensitivity, fbits_for_budget, fingerprint, layer_costs, sensitivity, token_blocks
from hf_kvq.evaluation import Fidelity, compare_fidelity


#: Schedules by their initial width, and what is compared under each.
SCHEDULES = {
    "fixed": (2, ("uniform", "boundary layers", "first layers", "evenly spread", "least sensitive", "calibrated")),
    "progressive": (16, ("uniform", "boundary layers", "calibrated")),
}


def simple_fbits(layers: int, wide: int, how: str, ranking: list[int]) -> tuple[int, ...]:
    """`wide` layers at 4 bits and the others at 2. `ranking` has the layers, the most sensitive one first."""
    outside_in = sorted(range(layers), key=lambda i: min(i, layers - 1 - i))
    chosen = {
        "boundary layers": outside_in[:wide],
        "first layers": range(wide),
        "evenly spread": [i * layers // wide for i in range(wide)],
        "least sensitive": ranking[-wide:],
    }[how]
    return tuple(4 if i in chosen else 2 for i in range(layers))


def allocations(found: Sensitivity, length: int) -> list[tuple[str, str, tuple[int, ...]]]:
    """(budget, how, final widths) of everything that is compared; within a budget, all take the same bytes."""
    layers = len(found.layers)
    costs = dict(zip((8, 4, 2), zip(*layer_costs(found.shapes, length, (8, 4, 2)))))
    ranking = found.total[:, -1].argsort(descending=True).tolist()
    runs = [("all at 2", "uniform", (2,) * layers)]
    for wide in (layers // 4, layers // 2):
        name = f"{wide} of {layers} at 4"
        for how in ("boundary layers", "first layers", "evenly spread", "least sensitive"):
            runs.append((name, how, simple_fbits(layers, wide, how, ranking)))
        budget = sum(costs[bits][0] for bits in runs[-1][2])
        runs.append((name, "calibrated", fbits_for_budget(found, length, budget).fbit))
    boundary = PMKVQConfig(fbit=2, boundary_layers=2).layer_fbits(layers)
    runs.append(("4 boundary layers at 8", "boundary layers", boundary))
    budget = sum(costs[bits][0] for bits in boundary)
    runs.append(("4 boundary layers at 8", "calibrated", fbits_for_budget(found, length, budget).fbit))
    runs.append(("all at 4", "uniform", (4,) * layers))
    runs.append(("all at 4", "calibrated", fbits_for_budget(found, length, sum(costs[4])).fbit))
    return runs


def mean(found: list[Fidelity]) -> Fidelity:
    """Over texts of equal length."""
    nll, kl, top1 = (
        sum(values) / len(found) for values in zip(*((math.log(f.perplexity), f.kl, f.top1) for f in found))
    )
    return Fidelity(math.exp(nll), kl, top1, sum(f.tokens for f in found))


def plot(found: Sensitivity, runs: list[tuple[str, str, tuple[int, ...]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.colors import ListedColormap

    chosen = [(budget, fbits) for budget, how, fbits in runs if how == "calibrated"]
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(9, 6), sharex=True, height_ratios=(3, 1.3), layout="constrained"
    )
    for j, bits in enumerate(found.widths):
        for side, style in (("keys", "-"), ("values", "--")):
            top.plot(found.layers, getattr(found, side)[:, j], style, color=f"C{j}", label=f"{side} at {bits} bits")
    top.set(yscale="log", ylabel="‖G ∘ (X − Q(X))‖₁, nats", title="SmolLM2-135M-Instruct: sensitivity per layer")
    top.legend(fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 0.42))
    top.grid(alpha=0.3, which="both")
    rows = [[int(math.log2(bits)) for bits in fbits] for _, fbits in chosen]
    image = bottom.imshow(
        rows, aspect="auto", vmin=0.5, vmax=4.5, cmap=ListedColormap(["#dbe9f6", "#89bedc", "#2b7bba", "#08306b"])
    )
    bottom.set_yticks(range(len(chosen)), [f"bytes of {budget}" for budget, _ in chosen], fontsize=8)
    bottom.set(xlabel="layer", title="calibrated final widths")
    colors = figure.colorbar(image, ax=bottom, ticks=[1, 2, 3, 4])
    colors.set_ticklabels(["2", "4", "8", "16"])
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=8, help="calibration samples")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sample and of a text to compare on")
    parser.add_argument("--texts", type=int, default=2, help="texts to compare on")
    parser.add_argument("--chunk", type=int, default=128, help="tokens per forward")
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer = load_model("bundled", dtype=torch.float32)
    text = bundled_text()
    split = len(text) * 4 // 5
    samples = token_blocks(text[:split], tokenizer, args.samples, args.length)
    ids = tokenizer(text[split:], return_tensors="pt").input_ids

    start = time.perf_counter()
    found = sensitivity(model, samples)
    seconds = (time.perf_counter() - start) / len(samples)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    print(
        f"{len(samples)} samples {fingerprint(samples)[:12]}: {seconds:.1f} s each, peak of the process {peak:.0f} MiB"
    )
    # Caches hold bfloat16, whatever the model's dtype, see `build`.
    shapes = tuple(dataclasses.replace(shape, dtype=torch.bfloat16) for shape in found.shapes)
    found = dataclasses.replace(found, shapes=shapes)
    start = time.perf_counter()
    runs = allocations(found, args.length)
    print(f"allocations: {time.perf_counter() - start:.2f} s")
    by_layer = [
        {
            "layer": layer,
            **{
                f"{side} at {bits}": f"{getattr(found, side)[i, j]:.4g}"
                for side in ("keys", "values")
                for j, bits in enumerate(found.widths)
            },
        }
        for i, layer in enumerate(found.layers)
    ]
    write_csv(args.out / "sensitivity.csv", by_layer)
    plot(found, runs, args.out / "calibration.png")

    compared = [
        (schedule, initial_bits, *run)
        for schedule, (initial_bits, ways) in SCHEDULES.items()
        for run in runs
        if run[1] in ways
    ]
    measured: dict[tuple[str, tuple[int, ...]], list[Fidelity]] = {}
    for i in range(args.texts):
        part = ids[:, i * args.length : (i + 1) * args.length]
        caches = {
            (schedule, fbits): build(PMKVQCache, model, {"fbit": fbits, "initial_bits": initial_bits}, args.length)
            for schedule, initial_bits, _, _, fbits in compared
        }
        exact = RoundedDynamicCache(config=model.config)
        fidelity = compare_fidelity(model, part, caches, args.chunk, f"text {i + 1} of {args.texts}", exact)
        for key, value in fidelity.items():
            measured.setdefault(key, []).append(value)
    rows = []
    for schedule, _, budget, how, fbits in compared:
        values, cache = measured[schedule, fbits], caches[schedule, fbits]
        fidelity = mean(values)
        rows.append(
            {
                "schedule": schedule,
                "bytes of": budget,
                "widths": how,
                "bytes": cache.nbytes(),
                "true bits": round(cache.true_bits(), 2),
                "perplexity": round(fidelity.perplexity, 2),
                "KL": float(f"{fidelity.kl:.3g}"),
                "KL per text": " ".join(f"{value.kl:.3g}" for value in values),
                "top-1": round(fidelity.top1, 3),
                "fbit": " ".join(map(str, fbits)),
            }
        )
    write_csv(args.out / f"calibration_{args.length}.csv", rows)
    print_table(rows, "fbit")


if __name__ == "__main__":
    main()
