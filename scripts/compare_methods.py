# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Fidelity of all caches against their true bits, on real English, in one run: table, CSV and plot.

    python scripts/compare_methods.py --length 2048
    python scripts/compare_methods.py --length 8192 --chunk 256

Every cache reads the same text, a chunk of tokens at a time; KL is against an ordinary cache fed in the same way.
"true bits" is everything a cache holds at the end, the exact sinks and windows included, per element. Keys and values
are rounded to bfloat16 in every cache, as in a bfloat16 model; all else is float32, whose noise is far below what is
measured.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import torch

from hf_kvq import KVQCache, MixKVQCache
from hf_kvq.bundled import bundled_text, load_model
from hf_kvq.evaluation import compare_fidelity
from hf_kvq.evaluation.methods import Method, exact_cache
from tables import print_table, read_csv, write_csv


_BITS = (2.25, 2.5, 3.0)

#: By family, a line in the plot.
RUNS: dict[str, list[Method]] = {
    "pmkvq, progressive": [Method("pmkvq", {"fbit": n}, f"pmkvq, progressive to {n}") for n in (8, 4, 2)],
    "pmkvq, fixed": [
        *(Method("pmkvq", {"fbit": n, "initial_bits": n}, f"pmkvq, fixed {n}") for n in (8, 4, 2)),
        Method("pmkvq", {"fbit": 2, "initial_bits": 2, "group_size": 32}, "pmkvq, fixed 2, groups of 32"),
    ],
    "pmkvq, keys 4, values 2": [
        Method("pmkvq", {"fbit": 4, "value_fbit": 2, **more}, f"pmkvq, {way} keys 4, values 2")
        for way, more in (("progressive to", {}), ("fixed", {"initial_bits": 2}))
    ],
    "pmkvq, equivalent shift": [
        Method("pmkvq", {"fbit": 2, "key_shrink": "equivalent", **more}, f"pmkvq, {way} 2, equivalent shift")
        for way, more in (("progressive to", {}), ("fixed", {"initial_bits": 2}))
    ],
    "pmkvq, per-token keys": [
        Method("pmkvq", {"fbit": n, "initial_bits": n, "key_codec": "token"}, f"pmkvq, per-token keys, fixed {n}")
        for n in (4, 2)
    ],
    "kivi": [Method("kivi", {"bits": n}, f"kivi-{n}") for n in (2, 4)],
    "kivi, 32 sinks": [Method("kivi", {"bits": n, "sink_tokens": 32}, f"kivi-{n}, 32 sinks") for n in (2, 4)],
    "mixkvq": [
        *(Method("mixkvq", {"target_bits": n}, f"mixkvq, target {n:g}") for n in _BITS),
        Method("mixkvq", {"target_bits": 4.0, "value_bits": 4}, "mixkvq, target 4, values 4"),
    ],
    "kvq": [
        *(Method("kvq", {"target_bits": n}, f"kvq, target {n:g}") for n in _BITS),
        Method("kvq", {"value_bits": 4, "value_clip": 1.0}, "kvq, target 2.5, values 4"),
    ],
    "rotatekv": [Method("rotatekv", {"fbit": n, "initial_bits": n}, f"rotatekv-{n}") for n in (2, 4)],
    "mixkvq, error only": [
        Method("mixkvq", {"target_bits": n, "importance": "none"}, f"mixkvq, target {n:g}, error only") for n in _BITS
    ],
}


def query_key_correlation(cache: MixKVQCache) -> list[float]:
    """Pearson correlation over the channels of mean |query| and mean key range, per layer, averaged over the heads.

    `cache` must have all channels at 2 bits, as the ranges of others are not stored.
    """
    per_layer = []
    for layer in cache.quantized_layers:
        queries = layer.query_sum[0].double()
        pages = layer.body.pages(slice(0, 1), 2)[0, : layer.states[0].pages]
        codec = layer.body.codec.dense
        _, low, high = codec.fields(pages[:, : codec.nbytes(2)], 2)
        ranges = (high - low).double().mean(dim=(0, 2))
        per_head = [torch.corrcoef(torch.stack(pair))[0, 1] for pair in zip(queries, ranges)]
        per_layer.append(torch.stack(per_head).mean().item())
    return per_layer


def plot(rows: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in rows if row["family"] != "exact"]
    lengths = sorted({row["tokens"] for row in rows}, key=int)
    families = list(dict.fromkeys(row["family"] for row in rows))
    figure, axes = plt.subplots(1, len(lengths), figsize=(6.2 * len(lengths), 4.6), sharey=True, squeeze=False)
    for ax, length in zip(axes[0], lengths):
        for family, marker in zip(families, "osD^vPX*<>hp"):
            points = sorted(
                (float(row["true bits"]), float(row["KL"]))
                for row in rows
                if (row["family"], row["tokens"]) == (family, length)
            )
            if points:
                ax.plot(*zip(*points), marker=marker, label=family)
        ax.set(title=f"SmolLM2-135M-Instruct, {length} tokens", xlabel="true bits per element, everything counted")
        ax.set_yscale("log")
        ax.grid(alpha=0.3, which="both")
    axes[0][0].set_ylabel("KL to the exact cache, nats per token")
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=2048, help="tokens of text")
    parser.add_argument("--chunk", type=int, default=128, help="tokens per forward")
    parser.add_argument("--without", default="(?!)", metavar="REGEX", help="leave out the caches whose label matches")
    parser.add_argument(
        "--out", type=Path, default=Path("docs/results"), help="the plot shows all lengths found there"
    )
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer = load_model("bundled", dtype=torch.float32)
    ids = tokenizer(bundled_text(), return_tensors="pt").input_ids
    families = {"exact": "exact"}
    methods = [Method("pmkvq", {"fbit": 16}, "exact"), Method("mixkvq", {"target_bits": 2.0}, "all at 2")]
    for family, runs in RUNS.items():
        chosen = [method for method in runs if not re.search(args.without, method.label)]
        families |= {method.label: family for method in chosen}
        methods += chosen
    caches: dict[str, KVQCache] = {method.label: method.build(model, args.length) for method in methods}
    exact = exact_cache(model)
    measured = compare_fidelity(model, ids[:, : args.length], caches, args.chunk, f"{args.length} tokens", exact)
    rows = []
    for label, family in families.items():
        cache, found = caches[label], measured[label]
        rows.append(
            {
                "tokens": args.length,
                "cache": label,
                "family": family,
                "true bits": round(cache.true_bits(), 2),
                "perplexity": round(found.perplexity, 2),
                "KL": float(f"{found.kl:.3g}"),
                "top-1": round(found.top1, 3),
                "nominal K bits": round(cache.nominal_bits().keys, 2) if isinstance(cache, MixKVQCache) else "",
            }
        )
    write_csv(args.out / f"fidelity_{args.length}.csv", rows)
    print_table(rows, "family")

    correlation = query_key_correlation(caches["all at 2"])
    by_layer = [{"layer": i, "pearson": round(r, 3)} for i, r in enumerate(correlation)]
    write_csv(args.out / f"query_key_correlation_{args.length}.csv", by_layer)
    mean = sum(correlation) / len(correlation)
    print(f"\nPearson |Q| to key range: mean {mean:.2f}, layers {min(correlation):.2f} to {max(correlation):.2f}")
    plot([row for path in args.out.glob("fidelity_*.csv") for row in read_csv(path)], args.out / "fidelity.png")


if __name__ == "__main__":
    main()
