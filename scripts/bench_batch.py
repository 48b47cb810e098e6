# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Tokens per second that one amount of memory allows: each cache takes as many requests as fit, and decodes them.

    python scripts/bench_batch.py --context 8192 --gib 1 --csv docs/results/batch_cpu.csv
    python scripts/bench_batch.py --model 7b --context 32768                # on a GPU, in nearly all of its memory

Caches are filled with random keys and values, the same for all requests of a batch, as what they hold does not change
the time of a step. `7b` has the shapes of Qwen2.5 7B and random weights. Reported is the median time of a step: the
process's CPU time on a CPU, else the time until the device is done. On a GPU our steps are replayed as CUDA graphs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from tqdm.auto import tqdm
from transformers import AttentionInterface, AutoModelForCausalLM, Cache, DynamicCache, PreTrainedModel, Qwen2Config

import hf_kvq
from bench_model import packed_query_attention
from hf_kvq.bundled import load_model
from hf_kvq.cache.base import layer_bytes
from hf_kvq.capture import CapturedSteps
from hf_kvq.registration import cache_argument
from tables import print_table, write_csv


# Tokens that come at once while a cache is filled.
_CHUNK = 2048
# Tokens that a budget leaves for the steps.
_STEPS_ROOM = 64


def load(name: str, device: torch.device) -> PreTrainedModel:
    if name != "7b":
        return load_model(name, dtype=torch.bfloat16)[0].to(device)
    config = Qwen2Config(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        max_position_embeddings=131072,
    )
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def caches(model: PreTrainedModel, context: int) -> dict[str, tuple[str, Callable[[], Cache]]]:
    """Attention implementation and cache, by name; the first one is what the others are compared with."""
    config = model.config

    def pmkvq(bits: int) -> Callable[[], Cache]:
        options = {"fbit": bits, "initial_bits": bits, "max_length": context + _STEPS_ROOM}
        return lambda: hf_kvq.PMKVQCache(config, options)

    found = {"dynamic": ("sdpa", lambda: DynamicCache(config=config))}
    found["dynamic, packed-q"] = ("packed_query", found["dynamic"][1])
    found |= {f"pmkvq {bits}-bit": ("sdpa", pmkvq(bits)) for bits in (16, 8, 4, 2)}
    found["mixkvq"] = ("sdpa", lambda: hf_kvq.MixKVQCache(config))
    return found


def filled(cache: Cache, model: PreTrainedModel, batch: int, context: int) -> Cache:
    """The cache with `context` random tokens in each of `batch` rows."""
    config, generator = model.config, torch.Generator(model.device).manual_seed(0)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for layer in range(config.num_hidden_layers):
        for start in range(0, context, _CHUNK):
            shape = 1, config.num_key_value_heads, min(_CHUNK, context - start), dim
            new = (torch.randn(shape, generator=generator, device=model.device).to(model.dtype) for _ in range(2))
            cache.update(*(x.expand(batch, -1, -1, -1) for x in new), layer)
    return cache


def nbytes(cache: Cache) -> int:
    return cache.nbytes() if isinstance(cache, hf_kvq.KVQCache) else sum(map(layer_bytes, cache.layers))


def step_ms(model: PreTrainedModel, cache: Cache, batch: int, steps: int) -> float:
    """Median time of a step, of which the first two only prepare."""
    name, times = cache_argument(model), []
    is_cpu = model.device.type == "cpu"
    call = CapturedSteps(model, name) if isinstance(cache, hf_kvq.KVQCache) and not is_cpu else model
    ids = torch.full((batch, 1), 7, device=model.device)
    for _ in range(steps + 2):
        position = torch.full_like(ids, cache.get_seq_length())
        if not is_cpu:
            torch.accelerator.synchronize()
        clock = time.process_time if is_cpu else time.perf_counter
        start = clock()
        call(input_ids=ids, position_ids=position, use_cache=True, **{name: cache})
        if not is_cpu:
            torch.accelerator.synchronize()
        times.append(1e3 * (clock() - start))
    return statistics.median(times[2:])


def measure(model: PreTrainedModel, context: int, budget: int, steps: int) -> list[dict]:
    """A row for each cache."""
    rows = []
    for name, (attention, make) in tqdm(caches(model, context).items(), desc="caches", file=sys.stderr):
        model.set_attn_implementation(attention)
        one = nbytes(filled(make(), model, 1, context))
        batch = budget // one
        if not batch:
            print(f"{name}: left out, one request takes {one / 2**30:.2f} GiB", file=sys.stderr)
            continue
        ms = step_ms(model, filled(make(), model, batch, context), batch, steps)
        rows.append({"cache": name, "MiB per request": round(one / 2**20, 1), "requests": batch, "ms per step": ms})
        rows[-1]["tokens per s"] = 1e3 * batch / ms
    for row in rows:
        row["x dynamic"] = round(row["tokens per s"] / rows[0]["tokens per s"], 1)
        row |= {name: round(row[name], 1) for name in ("ms per step", "tokens per s")}
    return rows


def plot(rows: list[dict], title: str, path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.2), sharey=True, layout="constrained")
    names = [row["cache"] for row in rows][::-1]
    for ax, column, color in zip(axes, ("requests", "tokens per s"), ("tab:blue", "tab:green")):
        bars = ax.barh(names, [row[column] for row in rows][::-1], color=color)
        ax.bar_label(bars, padding=3)
        ax.set_xlabel(column)
        ax.margins(x=0.15)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled", help="a model, or '7b'")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument(
        "--gib", type=float, help="memory of the cache (default: 80 %% of what a GPU has left, else 1)"
    )
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--csv", type=Path, help="where the results go; a plot goes beside")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    AttentionInterface.register("packed_query", packed_query_attention)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load(args.model, device)
    gib = args.gib or (0.8 * torch.cuda.mem_get_info()[0] / 2**30 if device.type == "cuda" else 1.0)
    with torch.no_grad():
        rows = measure(model, args.context, int(gib * 2**30), args.steps)
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {args.threads} thread"
    rows = [{"device": where, "model": args.model, "context": args.context, "GiB": round(gib, 2), **r} for r in rows]
    print_table(rows, "device", "model", "context", "GiB")
    if args.csv:
        write_csv(args.csv, rows)
        title = f"{args.model}, {args.context} tokens per request, {gib:.3g} GiB of cache; {where}"
        plot(rows, title, args.csv.with_suffix(".png"))


if __name__ == "__main__":
    main()
