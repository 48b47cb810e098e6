# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Time of one whole decode step of the bundled SmolLM2-135M on a long history, cache against cache, in one run.

    python scripts/bench_model.py --context 8192 --csv docs/results/decode_model_cpu.csv

The caches are filled with the same random keys and values, as what they hold does not change the time of a step. Then
every cache takes one token after the other, in turns, so that a busy machine hits all alike. Reported is the median
of the process's CPU time. "packed-q" is an ordinary cache whose queries are viewed per KV head, which stock attention
does not do by itself.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers import AttentionInterface, Cache, DynamicCache, PreTrainedModel, QuantizedCache

import hf_kvq
from hf_kvq.bundled import load_model
from hf_kvq.registration import cache_argument
from tables import print_table, write_csv


def packed_query_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """SDPA for one query, viewed as several queries of each KV head."""
    packed = query.unflatten(1, (key.shape[1], -1)).squeeze(3)
    out = torch.nn.functional.scaled_dot_product_attention(packed, key, value)
    return out.flatten(1, 2).unsqueeze(1), None


def caches(model: PreTrainedModel, context: int) -> dict[str, tuple[str, Callable[[], Cache]]]:
    """Attention implementation and cache, by name."""
    config = model.config

    def pmkvq(bits: int) -> Callable[[], Cache]:
        options = {"fbit": bits, "initial_bits": bits, "max_length": context + 1024}
        return lambda: hf_kvq.PMKVQCache(config, options)

    found = {"dynamic": ("sdpa", lambda: DynamicCache(config=config))}
    found["dynamic, packed-q"] = ("packed_query", found["dynamic"][1])
    found |= {f"pmkvq {bits}-bit": ("sdpa", pmkvq(bits)) for bits in (16, 8, 4, 2)}
    found["mixkvq"] = ("sdpa", lambda: hf_kvq.MixKVQCache(config))
    found["kivi 2-bit"] = ("sdpa", lambda: hf_kvq.KIVICache(config))
    found["quantized quanto 4-bit"] = (
        "sdpa",
        lambda: QuantizedCache(backend="quanto", config=config, nbits=4),
    )
    return found


def fill(cache: Cache, model: PreTrainedModel, context: int) -> None:
    config, generator = model.config, torch.Generator().manual_seed(0)
    shape = (1, config.num_key_value_heads, context, config.hidden_size // config.num_attention_heads)
    for layer in range(config.num_hidden_layers):
        cache.update(*(torch.randn(shape, generator=generator).to(model.dtype) for _ in range(2)), layer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    AttentionInterface.register("packed_query", packed_query_attention)
    model, _ = load_model("bundled", dtype=getattr(torch, args.dtype))
    name_of_cache, held = cache_argument(model), {}
    with torch.no_grad():
        for name, (attention, make) in tqdm(caches(model, args.context).items(), desc="filling", file=sys.stderr):
            try:
                cache = make()
            except ImportError as error:
                print(f"{name}: left out, {error}", file=sys.stderr)
                continue
            fill(cache, model, args.context)
            held[name] = attention, cache
        held["dynamic, empty"] = "sdpa", DynamicCache(config=model.config)
        times: dict[str, list[float]] = {name: [] for name in held}
        for _ in tqdm(range(args.steps), desc="steps", file=sys.stderr):
            for name, (attention, cache) in held.items():
                model.set_attn_implementation(attention)
                position = torch.tensor([[cache.get_seq_length()]])
                start = time.process_time()
                model(torch.tensor([[7]]), position_ids=position, **{name_of_cache: cache})
                times[name].append(1e3 * (time.process_time() - start))
    medians = {name: statistics.median(t[1:]) for name, t in times.items()}
    rows = [
        {
            "context": args.context,
            "cache": name,
            "ms per token": round(ms, 1),
            "x dynamic": round(medians["dynamic"] / ms, 2),
            "MiB": round(held[name][1].nbytes() / 2**20, 1) if isinstance(held[name][1], hf_kvq.KVQCache) else "",
        }
        for name, ms in medians.items()
    ]
    print_table(rows)
    if args.csv:
        write_csv(args.csv, rows)


if __name__ == "__main__":
    main()
