# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Time of one decode step's attention through the cache object, against transformers' own caches, in one run.

    python scripts/bench_decode.py --contexts 2048 8192 32768 --batches 1 4 --csv docs/results/decode_cpu.csv

Every cache is filled with the same random keys and values; then single tokens are fed, one step of each cache after
the other, so that a busy machine hits all alike. Reported is the median of the process's CPU time per step, which a
neighbour's load does not change, and the slowest of the 128 steps until the next page is packed ("flush ms").
"packed-q" is a 16-bit cache whose queries are viewed per KV head: the fast way to run stock attention on a CPU, which
stock caches do not take without a mask. "x fused 16-bit" compares with our own kernel over 16-bit pages. There is a
plot beside the CSV.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers import Cache, DynamicCache, LlamaConfig, QuantizedCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_kvq
from tables import print_table, write_csv


# [queries, keys, values] -> attention output, for one step of one layer.
Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Attention(torch.nn.Module):
    """What attention functions read off a model's attention module."""

    is_causal = True

    def __init__(self, groups: int):
        super().__init__()
        self.num_key_value_groups = groups


def cache_step(cache: Cache, groups: int) -> Step:
    """A step as a model does it: update the cache, then attend through transformers' attention function."""
    module, attention = Attention(groups).eval(), ALL_ATTENTION_FUNCTIONS["sdpa"]

    def step(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        keys, values = cache.update(key, value, 0)
        return attention(module, query, keys, values, None, scaling=query.shape[-1] ** -0.5)[0]

    return step


def packed_query_step(cache: DynamicCache, groups: int) -> Step:
    def step(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        keys, values = cache.update(key, value, 0)
        query = query.unflatten(1, (-1, groups)).squeeze(3)
        out = torch.nn.functional.scaled_dot_product_attention(query, keys, values)
        return out.flatten(1, 2).unsqueeze(1)

    return step


def caches(config: LlamaConfig, context: int) -> dict[str, Callable[[], Cache]]:
    """The caches to compare, by name; those whose package is not installed are left out with a note."""

    def fixed(bits: int, codec: str) -> Callable[[], Cache]:
        options = {"fbit": bits, "initial_bits": bits, "key_codec": codec, "max_length": context + 1024}
        return lambda: hf_kvq.PMKVQCache(config, options)

    found: dict[str, Callable[[], Cache]] = {"dynamic": lambda: DynamicCache(config=config)}
    found["dynamic, packed-q"] = found["dynamic"]
    found |= {f"pmkvq {bits}-bit": fixed(bits, "channel") for bits in (16, 8, 4, 2)}
    found |= {f"pmkvq {bits}-bit, token keys": fixed(bits, "token") for bits in (4, 2)}
    found["mixkvq"] = lambda: hf_kvq.MixKVQCache(config)
    found["kivi 2-bit"] = lambda: hf_kvq.KIVICache(config)
    for backend, axes in (("quanto", {}), ("hqq", {"axis_key": 1, "axis_value": 1})):
        for bits in (4, 2):
            options = {"backend": backend, "nbits": bits, **axes}
            found[f"quantized {backend} {bits}-bit"] = partial(QuantizedCache, config=config, **options)
    return found


def is_ours(cache: Cache) -> bool:
    return isinstance(cache, hf_kvq.KVQCache)


def slowest_step(step: Step, tokens: Callable[..., torch.Tensor], query_heads: int) -> float:
    """Milliseconds of the slowest of 128 steps, in which a page is packed once or more."""
    slowest = 0.0
    for _ in range(128):
        arguments = tokens(1, query_heads), tokens(1), tokens(1)
        start = time.process_time()
        step(*arguments)
        slowest = max(slowest, 1e3 * (time.process_time() - start))
    return slowest


def measure(args: argparse.Namespace, context: int, batch: int) -> list[dict]:
    heads, groups, dim = args.kv_heads, args.query_groups, args.head_dim
    config = LlamaConfig(
        hidden_size=heads * groups * dim, num_attention_heads=heads * groups, num_key_value_heads=heads,
        num_hidden_layers=1, head_dim=dim, max_position_embeddings=2 * context,
    )  # fmt: skip
    dtype = getattr(torch, args.dtype)

    def tokens(count: int, n_heads: int = heads) -> torch.Tensor:
        return torch.randn(batch, n_heads, count, dim).to(dtype)

    prompt = tokens(context), tokens(context)
    steps: dict[str, Step] = {}
    held: dict[str, Cache] = {}
    makers = {name: make for name, make in caches(config, context).items() if not re.search(args.without, name)}
    for name, make in tqdm(makers.items(), desc=f"filling, {batch} x {context} tokens", file=sys.stderr):
        try:
            cache = make()
        except ImportError as error:
            print(f"{name}: left out, {error}", file=sys.stderr)
            continue
        cache.update(*prompt, 0)
        held[name] = cache
        steps[name] = (packed_query_step if name.endswith("packed-q") else cache_step)(cache, groups)

    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in tqdm(range(args.steps), desc="steps", file=sys.stderr):
        query, key, value = tokens(1, heads * groups), tokens(1), tokens(1)
        for name, step in steps.items():
            start = time.process_time()
            step(query, key, value)
            times[name].append(1e3 * (time.process_time() - start))
    flush = {name: slowest_step(steps[name], tokens, groups * heads) for name in steps if is_ours(held[name])}
    medians = {name: statistics.median(t[args.warmup :]) for name, t in times.items()}
    stock = min((t for name, t in medians.items() if name.startswith("quantized")), default=float("nan"))
    return [
        {
            "context": context,
            "batch": batch,
            "cache": name,
            "ms": round(medians[name], 3),
            "x dynamic": round(medians["dynamic"] / medians[name], 2),
            "x packed-q": round(medians["dynamic, packed-q"] / medians[name], 2),
            "x fused 16-bit": round(medians.get("pmkvq 16-bit", float("nan")) / medians[name], 2),
            "x quantized": round(stock / medians[name], 2),
            "flush ms": round(flush[name], 3) if name in flush else "",
            "MiB": round(held[name].nbytes() / 2**20, 2) if is_ours(held[name]) else "",
        }
        for name in steps
    ]


def plot(rows: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    batches = sorted({row["batch"] for row in rows})
    figure, axes = plt.subplots(1, len(batches), figsize=(6.2 * len(batches), 4.8), sharey=True, squeeze=False)
    for ax, batch in zip(axes[0], batches):
        for i, name in enumerate(dict.fromkeys(row["cache"] for row in rows)):
            points = [(row["context"], row["ms"]) for row in rows if (row["cache"], row["batch"]) == (name, batch)]
            style = "-" if name.startswith(("pmkvq", "mixkvq", "kivi")) else "--"
            ax.plot(*zip(*points), style, color=plt.cm.tab20(i), marker="o", markersize=3, label=name)
        ax.set(title=f"batch {batch}", xlabel="tokens of context", xscale="log", yscale="log")
        ax.set_xticks(contexts := sorted({row["context"] for row in rows}), [f"{c // 1024}k" for c in contexts])
        ax.minorticks_off()
        ax.grid(alpha=0.3)
    axes[0][0].set_ylabel("attention of one decode step, ms of CPU time")
    axes[0][-1].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096])
    parser.add_argument("--batches", type=int, nargs="+", default=[1])
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--query-groups", type=int, default=4, help="query heads per KV head")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--without", default="(?!)", metavar="REGEX", help="leave out the caches whose name matches")
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    with torch.no_grad():
        rows = [row for batch in args.batches for context in args.contexts for row in measure(args, context, batch)]
    print_table(rows)
    if args.csv:
        write_csv(args.csv, rows)
        plot(rows, args.csv.with_suffix(".png"))


if __name__ == "__main__":
    main()
