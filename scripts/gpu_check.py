# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Check the Triton kernels on a real GPU and measure them: `python scripts/gpu_check.py --out results.csv`.

Correctness first (`gpu_checks.py`), then decode attention of one layer of the shape of Llama 3 8B, against attention
over 16-bit keys and values and against the card's own copy bandwidth, and last tokens per second of a model of 7B's
shape in nearly all of the memory (`bench_batch.py`). Needs the repository, in a few minutes of one GPU.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch


ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "kernels" / "torch-ext"), str(ROOT / "tests" / "kernels"), str(ROOT)]

HEADS, GROUP, DIM, PAGE = 8, 4, 128, 128
CONTEXTS = (2048, 8192, 32768, 131072)
BATCHES = (1, 8, 32)
# (keys, values, tokens per key group and channels per value group, records)
FORMATS = {
    "k8v8 g128": (8, 8, 128),
    "k4v4 g128": (4, 4, 128),
    "k2v2 g128": (2, 2, 128),
    "k2v2 g32": (2, 2, 32),
}
COLUMNS = ("card", "kernel", "batch", "context", "ms", "megabytes", "gb_per_s", "percent_of_copy", "times_best_16_bit")
# Time and memory that one call of this script may take.
SECONDS = 200
MEMORY_SHARE = 0.6


class Measured(NamedTuple):
    """One kernel at one size; `ms` is a median."""

    kernel: str
    batch: int
    context: int
    ms: float
    bytes: int


def sizes() -> Iterator[tuple[int, int]]:
    """(batch, context), the small ones first."""
    yield from sorted(((b, c) for b in BATCHES for c in CONTEXTS), key=lambda size: (size[0] * size[1], size))


def page_layout(name: str) -> Any:
    from hf_kvq_kernels.pages import DTYPES, PageLayout

    keys, values, group = FORMATS[name]
    return PageLayout(HEADS, PAGE, DIM, DIM, keys, values, 1, group, group, DTYPES.index(torch.bfloat16))


def rows_of(results: list[Measured], card: str, copy_gb_per_s: float) -> list[dict[str, Any]]:
    """CSV rows; ratios are to the fastest kernel over 16-bit keys and values at the same size."""
    rows = []
    for r in results:
        exact = [o.ms for o in results if o[1:3] == r[1:3] and o.kernel.startswith("16-bit")]
        rate = r.bytes / r.ms / 1e6
        values = (card, r.kernel, r.batch, r.context, round(r.ms, 4), round(r.bytes / 1e6, 1), round(rate, 1))
        ratio = round(min(exact) / r.ms, 2) if exact else ""
        rows.append(dict(zip(COLUMNS, (*values, round(100 * rate / copy_gb_per_s, 1), ratio))))
    return rows


def median_ms(function: Callable[[], Any], repeat: int = 20) -> float:
    """Median time of a call, by events, with the cache cleared of what a call before left."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    for _ in range(3):
        function()
    pairs = []
    for _ in range(repeat):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) for start, end in pairs)[repeat // 2]


def copy_bandwidth() -> float:
    """GB/s of a plain copy, read and written bytes together."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_ms(lambda: target.copy_(source)) / 1e6


def bench_exact(batch: int, context: int) -> Iterator[Measured]:
    """Kernels over contiguous 16-bit keys and values."""
    shape = batch, HEADS, context, DIM
    k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    q = torch.randn(batch, HEADS * GROUP, 1, DIM, device="cuda", dtype=torch.bfloat16)
    packed = q.view(batch, HEADS, GROUP, DIM)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    attend = importlib.import_module("hf_kvq_kernels.gpu.attend").attend
    contenders = {
        "16-bit sdpa enable_gqa": lambda: sdpa(q, k, v, enable_gqa=True),
        "16-bit sdpa packed query": lambda: sdpa(packed, k, v),
        "exact segments": lambda: attend(q, [k], [v], [None], None, None, None, [], None, DIM**-0.5, 0.0),
    }
    try:
        from flash_attn import flash_attn_with_kvcache
    except ImportError:
        pass
    else:
        by_token = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
        contenders["16-bit flash_attn"] = lambda: flash_attn_with_kvcache(*by_token)
    for name, function in contenders.items():
        yield Measured(name, batch, context, median_ms(function), k.nbytes + v.nbytes)


def bench_packed(name: str, batch: int, context: int) -> Measured:
    """The kernel over pages, with random codes and ranges."""
    layout = page_layout(name)
    attend = importlib.import_module("hf_kvq_kernels.gpu.attend").attend
    pages = torch.randint(
        0, 256, (batch, context // PAGE, layout.key_bytes() + layout.value_bytes()), dtype=torch.uint8, device="cuda"
    )
    # Any bytes are codes; minima and maxima must be numbers.
    for block, codes in (
        (pages[..., : layout.key_bytes()], HEADS * PAGE * layout.key_bits // 8 * DIM),
        (pages[..., layout.key_bytes() :], HEADS * PAGE * layout.value_bits // 8 * DIM),
    ):
        ranges = block[..., codes:].view(torch.bfloat16)
        half = ranges.shape[-1] // 2
        ranges[..., :half], ranges[..., half:] = -1.0, 1.0
    q = torch.randn(batch, HEADS * GROUP, 1, DIM, device="cuda", dtype=torch.bfloat16)
    ms = median_ms(lambda: attend(q, [], [], [], pages, None, None, [], layout, DIM**-0.5, 0.0))
    return Measured(name, batch, context, ms, pages.nbytes)


def benchmark(card: str, started: float) -> list[dict[str, Any]]:
    bandwidth = copy_bandwidth()
    print(f"copy: {bandwidth:.0f} GB/s")
    results: list[Measured] = []
    for batch, context in sizes():
        needed = 3 * batch * context * HEADS * DIM * 2 * 2
        if needed > MEMORY_SHARE * torch.cuda.mem_get_info()[0]:
            print(f"left out for memory: batch {batch}, context {context}")
            continue
        if time.time() - started > SECONDS:
            print(f"left out for time: batch {batch}, context {context}")
            continue
        results += bench_exact(batch, context)
        results += [bench_packed(name, batch, context) for name in FORMATS]
        torch.cuda.empty_cache()
    return rows_of(results, card, bandwidth)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu_check.csv"), help="where the measurements go")
    parser.add_argument("--only-check", action="store_true", help="no measurements")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("gpu_check needs a GPU, and torch sees none here.", file=sys.stderr)
        return 2
    started, card = time.time(), torch.cuda.get_device_name()
    print(f"card: {card}, torch {torch.__version__}")
    from gpu_checks import check

    wrong = check("cuda")
    if not options.only_check:
        rows = benchmark(card, started)
        with options.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
        for row in rows:
            print(*(str(row[name]) for name in COLUMNS[1:]), sep="\t")
        if time.time() - started < SECONDS:
            import bench_batch

            batch_csv = options.out.with_name(f"{options.out.stem}_batch.csv")
            bench_batch.main(["--model", "7b", "--context", "32768", "--csv", str(batch_csv)])
    print(f"{time.time() - started:.0f} s" + (f"; WRONG: {', '.join(wrong)}" if wrong else ""))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
