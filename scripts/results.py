# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Write docs/results.md and its plots from the result files in docs/results. The same files give the same bytes.

    python scripts/results.py

`hf-kvq eval MODEL --report out` makes a file of results: keep its results.json as docs/results/eval_NAME.json.
lm-evaluation-harness writes one, too: keep it as docs/results/harness_NAME.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from hf_kvq.evaluation.anchors import anchors
from hf_kvq.evaluation.write import charts, section
from tables import markdown, read_csv


ROOT = Path(__file__).parent.parent
EMPTY = "**Not measured yet.**"

INTRO = """# Results

<!-- Written by scripts/results.py from the files in docs/results. Changes belong there. -->

*True bits*: all bytes that a cache holds × 8, per number held; at the end, and averaged over time (bytes held, summed
over the calls, per number held, summed likewise). Brackets are 95 % confidence intervals: bootstrap over blocks of 64
tokens or over rows, Wilson for shares. Keys and values of float32 models are rounded to bfloat16 in all caches. The
same command with as many threads on the same machine gives the same digits; another order of additions tips codes
over, which moves KL at 2 bits by some per cent, less than the intervals.
"""

COLUMNS = {
    "KL, top-1": "divergence from the exact cache in nats per token, and share of tokens with the same most likely "
    "successor; on given text, or along the exact model's own greedy continuation",
    "copy": "random words listed twice: share of the second pass that is predicted",
    "phone book": "words with four-digit numbers, asked for in another order: share of numbers that come back whole",
    "recall": "copy, with text before the words that is longer than all sinks, and so much text between them that "
    "they have long been packed",
    "same tokens": "tokens of a greedy continuation before the first that differs",
    "attention error": "‖output − exact‖ / ‖exact‖ of attention layers, each fed with the exact model's hidden states",
}

ANCHORS = """### Sanity anchors

What must hold whatever the numbers are; KL on the text. A text that does not outgrow its budget must profit from a
progressive width. PM-KVQ ranks its ways to shrink by results at 4 bits, where that holds here, too. At 2 bits the
modified one wins: its levels lie at the centers of the parts of a group's range, those of the equivalent one at its
ends. So `pmkvq` shifts equivalently down to 4 bits, and centers the 2-bit levels of keys (`key_shrink`). Those of
values stay, whose outliers lie at the ends."""

#: Title, file, what was done to get it.
TABLES = (
    ("Fidelity, 2,048 tokens", "fidelity_2048.csv", "`python scripts/compare_methods.py --length 2048`"),
    ("Fidelity, 8,192 tokens", "fidelity_8192.csv", "`python scripts/compare_methods.py --length 8192 --chunk 256`"),
    ("Calibrated widths, smoothed keys, 2,048 tokens", "calibration_2048.csv", "`python scripts/calibrate_fbits.py`"),
    ("Calibrated widths, smoothed keys, 8,192 tokens", "calibration_8192.csv", "`python scripts/calibrate_fbits.py`"),
    ("Smoothed keys, layer by layer", "smoothing.csv", "`python scripts/calibrate_fbits.py`"),
    ("Thresholds of mixkvq", "thresholds.csv", "`python scripts/calibrate_thresholds.py --trials 16 --length 1024`"),
    ("Cost of calibration, CPU", "calibration_cost.csv", "`python scripts/bench_calibration.py`"),
    ("Attention of one decode step, CPU", "decode_cpu.csv", "`python scripts/bench_decode.py`"),
    ("Tokens per second in equal memory, CPU", "batch_cpu.csv", "`python scripts/bench_batch.py`"),
    ("A whole step of SmolLM2, CPU", "decode_model_cpu.csv", "`python scripts/bench_model.py`"),
    ("Attention of one decode step, GPU", "decode_gpu.csv", "`python scripts/gpu_check.py` on a GPU"),
)

PICTURES = {
    "fidelity_8192.csv": "fidelity.png",
    "calibration_2048.csv": "calibration.png",
    "thresholds.csv": "thresholds.png",
    "calibration_cost.csv": "calibration_cost.png",
    "decode_cpu.csv": "decode_cpu.png",
    "batch_cpu.csv": "batch_cpu.png",
}

#: Reasoning models and long benchmarks, for whoever has a GPU.
WANTED = (
    ("DeepSeek-R1-Distill-Qwen-7B", "aime24, aime25, minerva_math500, gpqa_diamond_cot_zeroshot"),
    ("DeepSeek-R1-Distill-Llama-8B", "aime24, aime25, minerva_math500, gpqa_diamond_cot_zeroshot"),
    ("Llama-3.1-8B-Instruct", "longbench, ifeval"),
)


def evaluations(reports: dict[str, dict[str, Any]]) -> tuple[list[str], dict[str, str]]:
    """A section for each report, and the plots they show."""
    parts, files = [], {}
    for name, report in reports.items():
        prefix = f"eval_{name}_"
        parts.append(f"### {name}\n\n{section(report, f'results/{prefix}')}")
        files |= {f"{prefix}{chart}.svg": text for chart, text in charts(report).items()}
    return parts, files


def harness(folder: Path) -> list[str]:
    """Scores of lm-evaluation-harness, and where there are none yet."""
    lines = []
    for path in sorted(folder.glob("harness_*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        lines += [[path.stem.removeprefix("harness_"), *row] for row in scores(found["results"])]
    parts = [markdown(["run", "task", "metric", "score", "± s. e."], *lines)] if lines else []
    empty = [[model, tasks, "16 bits, pmkvq, mixkvq, kivi", EMPTY] for model, tasks in WANTED]
    parts.append(markdown(["model", "tasks", "caches", "score"], *empty))
    return parts


def scores(results: dict[str, dict[str, Any]]) -> list[list[str]]:
    """(task, metric, score, standard error) of a results file of the harness."""
    rows = []
    for task, values in sorted(results.items()):
        for key, value in values.items():
            name, _, kind = key.partition(",")
            if isinstance(value, float) and not name.endswith("_stderr"):
                error = values.get(f"{name}_stderr,{kind}")
                rows.append([task, key, f"{value:.4f}", f"{error:.4f}" if isinstance(error, float) else "–"])
    return rows


def table(folder: Path, title: str, name: str, how: str) -> str:
    """A CSV file as a table, or a place for it."""
    if not (folder / name).exists():
        return f"### {title}\n\n{EMPTY} {how} measures it; its place is `docs/results/{name}`.\n"
    rows = read_csv(folder / name)
    columns = [column for column in rows[0] if column != "fbit"]  # one number per layer
    text = markdown(columns, *([row[column] or "–" for column in columns] for row in rows))
    picture = f"\n\n![{title}](results/{PICTURES[name]})" if name in PICTURES else ""
    return f"### {title}\n\nBy {how}.\n\n{text}{picture}\n"


def build(folder: Path) -> dict[str, str]:
    """The files to write: `results.md`, which lies next to the folder, and plots, in it."""
    paths = sorted(folder.glob("eval_*.json"))
    reports = {path.stem.removeprefix("eval_"): json.loads(path.read_text(encoding="utf-8")) for path in paths}
    sections, files = evaluations(reports)
    parts = [
        INTRO,
        markdown(["column", "what it is"], *COLUMNS.items()) + "\n",
        "## Caches compared\n\n`hf-kvq eval MODEL --report out`; where ours are beaten comes first.\n",
        *(sections or [f"{EMPTY}\n"]),
        f"{ANCHORS}\n\n{anchors(reports)}\n",
        f"### Larger models, on a GPU\n\n{EMPTY} `hf-kvq eval MODEL --dtype bfloat16 --tokens 32768 --report out`; "
        "the place of results.json is `docs/results/eval_NAME.json`.\n",
        "## Long reasoning\n\nBy `python -m hf_kvq.evaluation.harness`, sampled at temperature 0.6, top-p 0.95; the "
        "place of its results is `docs/results/harness_NAME.json`.\n",
        *(f"{part}\n" for part in harness(folder)),
        "## Tables of the scripts\n",
        *(table(folder, *entry) for entry in TABLES),
    ]
    return {"results.md": "\n".join(parts), **files}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="holds results/, gets results.md")
    args = parser.parse_args()
    folder = args.docs / "results"
    for name, text in build(folder).items():
        path = args.docs / name if name.endswith(".md") else folder / name
        path.write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
