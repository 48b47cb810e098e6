# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""The files of a report, all made from results.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..hub.files import replace_file
from .plots import bits_chart, fidelity_chart, layers_chart
from .report import answers, beaten, bits_by_metric, by_position, facts, flat_rows, overview, to_csv
from .run import to_json


_WHEN = (
    'at the end ("close" where the intervals overlap)',
    "averaged over time (`pmkvq` holds its whole budget from the first token on)",
)


def charts(report: dict[str, Any]) -> dict[str, str]:
    """SVG files by name, as far as there are results for them."""
    makers = {
        "fidelity": ("text", fidelity_chart),
        "bits": ("text", bits_chart),
        "layers": ("attention", layers_chart),
    }
    return {name: make(report) for name, (task, make) in makers.items() if task in report["tasks"]}


def section(report: dict[str, Any], prefix: str = "") -> str:
    """Markdown about a report: where ours are beaten first, then the tables and the plots.

    Args:
        report: what `evaluate` returned.
        prefix: of the files of the plots.
    """
    parts = [facts(report) + "."]
    for over_time in (False, True):
        lines = [f"* {line}" for line in beaten(report, over_time)] or ["* nowhere"]
        parts.append("\n".join([f"Ours beaten by baselines that hold no more bytes {_WHEN[over_time]}:\n", *lines]))
    parts += [overview(report), "True bits at the end of each metric:", bits_by_metric(report)]
    if "text" in report["tasks"]:
        parts += ["Perplexity by position:", by_position(report, "perplexity")]
        parts += ["KL by position:", by_position(report, "kl")]
    if table := answers(report):
        parts += ["Answers generated freely:", table]
    parts += [f"![{name}]({prefix}{name}.svg)" for name in charts(report)]
    return "\n\n".join(parts) + "\n"


def write_report(report: dict[str, Any], folder: Path | None = None) -> str:
    """Write results.json, results.csv, report.md and the plots into a folder, if there is one.

    Returns:
        The overview, for a terminal.
    """
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        files = {
            "results.json": to_json(report),
            "results.csv": to_csv(flat_rows(report)),
            "report.md": section(report),
            **{f"{name}.svg": text for name, text in charts(report).items()},
        }
        for name, text in files.items():
            replace_file(folder / name, text.encode())
    losses = "\n".join(f"beaten at no more bytes: {line}" for line in beaten(report))
    return "\n\n".join(filter(None, [facts(report), overview(report), answers(report), losses]))
