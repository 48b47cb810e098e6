# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Put the tables of docs/results into the README, each between `<!-- table:NAME -->` and `<!-- /table -->`.

python scripts/readme_tables.py
"""

from __future__ import annotations

from pathlib import Path

from tables import markdown, read_csv


ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"


def fidelity() -> str:
    columns = ("true bits", "perplexity", "KL")
    found = {
        length: {row["cache"]: row for row in read_csv(RESULTS / f"fidelity_{length}.csv")} for length in (2048, 8192)
    }
    rows = [
        ["16 bits for ever" if name == "exact" else name]
        + [by_name[name][column] for by_name in found.values() for column in columns]
        for name in found[2048]
    ]
    heads = [["", "2,048 tokens", "", "", "8,192 tokens", "", ""], [f"**{c}**" for c in ("cache", *columns, *columns)]]
    return markdown(*heads, *rows)


def decode(batch: str = "1") -> str:
    rows = [row for row in read_csv(RESULTS / "decode_cpu.csv") if row["batch"] == batch]
    contexts = sorted({row["context"] for row in rows}, key=int)
    by_name: dict[str, dict[str, dict[str, str]]] = {}
    for row in rows:
        by_name.setdefault(row["cache"], {})[row["context"]] = row
    ratios = {
        "x dynamic": "× ordinary",
        "x packed-q": "× fast 16-bit",
        "x fused 16-bit": "× our 16-bit",
        "x quantized": "× transformers' quantized",
    }
    # Ratios at 8k, where every cache was measured.
    head = ["cache", *(f"{int(c) // 1024}k" for c in contexts), *ratios.values(), "slowest step", "MiB"]
    lines = [
        [name, *(found[c]["ms"] for c in contexts), *(found["8192"][r] for r in (*ratios, "flush ms", "MiB"))]
        for name, found in by_name.items()
    ]
    return markdown(head, *([cell or "–" for cell in line] for line in lines))


def model() -> str:
    rows = read_csv(RESULTS / "decode_model_cpu.csv")
    return markdown(list(rows[0]), *([cell or "–" for cell in row.values()] for row in rows))


def batch() -> str:
    rows = read_csv(RESULTS / "batch_cpu.csv")
    columns = [name for name in rows[0] if name not in ("device", "model", "context", "GiB")]
    return markdown(columns, *([row[name] for name in columns] for row in rows))


def main() -> None:
    path = ROOT / "README.md"
    text = path.read_text(encoding="utf-8")
    for make in (fidelity, decode, model, batch):
        mark, end = f"<!-- table:{make.__name__} -->\n", "\n<!-- /table -->"
        before, found, rest = text.partition(mark)
        if not found or end not in rest:
            raise SystemExit(f"{path.name} has no {mark.strip()} ... {end.strip()}")
        text = before + mark + make() + rest[rest.index(end) :]
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
