# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Are searched thresholds of MixKVQ worth the search? Against `target_bits`, at equal true bytes, on other text.

    python scripts/calibrate_thresholds.py

SmolLM2's thresholds are searched on the first four fifths of the bundled text. The front, and caches that go by
`target_bits`, are then measured on the rest, fed a chunk of tokens at a time. Bytes are those of a request of
`--max-length` tokens, everything counted. With `--storage` the search goes on where it was interrupted.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from hf_kvq import MixKVQCache, MixKVQConfig
from hf_kvq.bundled import load_model
from hf_kvq.calibration import pareto_front, token_blocks, tune_thresholds, write_trials
from hf_kvq.calibration.thresholds import numbers_per_token, request_bytes
from hf_kvq.evaluation import compare_fidelity
from tables import print_table, write_csv
from texts import split_text


TARGETS = (2.0, 2.25, 2.5, 3.0, 4.0)


def plot(rows: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(6.2, 4.6), layout="constrained")
    for how, marker in (("target_bits", "s"), ("searched", "o")):
        points = sorted((row["true bits"], row["KL"]) for row in rows if row["how"] == how)
        ax.plot(*zip(*points), marker=marker, label=how)
    ax.set(
        title="SmolLM2-135M-Instruct, text not searched on",
        xlabel="true bits per element, everything counted",
        ylabel="KL to the exact cache, nats per token",
        yscale="log",
    )
    ax.grid(alpha=0.3, which="both")
    ax.legend()
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--samples", type=int, default=1, help="samples to search on")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sample and of the text to compare on")
    parser.add_argument("--max-length", type=int, default=8192, help="tokens of the request whose bytes are counted")
    parser.add_argument("--storage", help="where trials are kept: a file, or a URL of Optuna")
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer = load_model("bundled", dtype=torch.float32)
    to_search_on, to_compare_on = split_text()
    samples = token_blocks(to_search_on, tokenizer, args.samples, args.length)
    ids = tokenizer(to_compare_on, return_tensors="pt").input_ids[:, : args.length]

    trials = tune_thresholds(model, samples, args.max_length, n_trials=args.trials, storage=args.storage)
    write_trials(trials, args.out / "thresholds_trials.csv")
    front = pareto_front(trials)
    configs = {("target_bits", f"target {bits:g}"): MixKVQConfig(target_bits=bits) for bits in TARGETS}
    for trial in front:
        configs["searched", f"{trial.tau_bf16:.3g}, {trial.tau_uint4:.3g}"] = trial.config()
    caches = {name: MixKVQCache(model.config, config) for name, config in configs.items()}
    measured = compare_fidelity(model, ids, caches, desc="text not searched on")
    rows = []
    for (how, name), cache in caches.items():
        found, nbytes = measured[how, name], request_bytes(cache, args.max_length)
        rows.append(
            {
                "how": how,
                "thresholds": name,
                "true bits": round(8 * nbytes / (args.max_length * numbers_per_token(cache)), 3),
                "nominal K bits": round(cache.nominal_bits().keys, 3),
                "perplexity": round(found.perplexity, 2),
                "KL": float(f"{found.kl:.3g}"),
                "top-1": round(found.top1, 3),
            }
        )
    rows.sort(key=lambda row: (row["how"], row["true bits"]))
    write_csv(args.out / "thresholds.csv", rows)
    print_table(rows)
    plot(rows, args.out / "thresholds.png")


if __name__ == "__main__":
    main()
