# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Results as tables: rows for CSV, Markdown for people."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

from .methods import EXACT


#: Caches that this package is about; everything else is a baseline.
OURS = ("pmkvq", "mixkvq", "kvq")

#: Columns of the overview: head, metric, value, digits.
_COLUMNS = (
    ("KL, text", "text", "kl", ".3g"),
    ("top-1, text", "text", "top1", ".3f"),
    ("perplexity", "text", "perplexity", ".2f"),
    ("KL, own text", "own", "kl", ".3g"),
    ("copy", "copy", "accuracy", ".3f"),
    ("phone book", "phone", "accuracy", ".3f"),
    ("recall", "recall", "accuracy", ".3f"),
    ("same tokens", "own", "same tokens", ".1f"),
    ("attention error", "attention", "relative error", ".3f"),
)


def flat_rows(report: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per metric, method and value."""
    return [
        {"metric": task, "method": label, "value": name, **estimate}
        for task, found in report["tasks"].items()
        for label, values in found["results"].items()
        for name, estimate in values.items()
    ]


def to_csv(rows: Sequence[dict[str, Any]]) -> str:
    """The columns are those of the first row."""
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def overview(report: dict[str, Any]) -> str:
    """A Markdown table: a line per method, from the most bits down; intervals in brackets."""
    tasks = report["tasks"]
    columns = [c for c in _COLUMNS if c[1] in tasks]
    bits = _bits(report)
    labels = sorted({label for found in tasks.values() for label in found["results"]}, key=_order(report, bits))
    head = ["cache", *(("true bits, end", "true bits, mean") if bits else ()), *(c[0] for c in columns)]
    lines = []
    for label in labels:
        cells = [label, *(f"{x:.2f}" for x in bits.get(label, ()))] if bits else [label]
        cells += [
            _cell(tasks[task]["results"].get(label, {}).get(value), digits) for _, task, value, digits in columns
        ]
        lines.append(cells)
    return markdown(head, *lines)


def beaten(report: dict[str, Any], over_time: bool = False) -> list[str]:
    """Where a baseline diverges less than one of ours that holds as many bytes or more, in words, for every metric.

    Args:
        report: what `evaluate` returned.
        over_time: compare bytes averaged over time instead of those at the end.
    """
    ours = [method["label"] for method in report["methods"] if method["cache"] in OURS]
    lines = []
    for task, found in report["tasks"].items():
        if "bits" not in found:
            continue
        bits = {label: pair[over_time] for label, pair in found["bits"].items()}
        name = "kl" if "kl" in found["results"][EXACT] else "nll"
        values = {label: estimates[name] for label, estimates in found["results"].items()}
        for mine in ours:
            better = []
            for other, value in values.items():
                if other not in (*ours, EXACT) and bits[other] <= bits[mine] and value["mean"] < values[mine]["mean"]:
                    mark = "" if _is_below(value, values[mine]) else ", close"
                    better.append(f"{other} ({bits[other]:.2f}, {value['mean']:.3g}{mark})")
            if better:
                here = f"{mine} ({bits[mine]:.2f} true bits, {name.upper()} {values[mine]['mean']:.3g})"
                lines.append(f"{task}: {here} by {', '.join(better)}")
    return lines


def bits_by_metric(report: dict[str, Any]) -> str:
    """A Markdown table of true bits at the end: where items are short, exact windows and sinks weigh more."""
    tasks = {name: found["bits"] for name, found in report["tasks"].items() if "bits" in found}
    order = _order(report, _bits(report))
    labels = sorted({label for bits in tasks.values() for label in bits}, key=order)
    return markdown(["cache", *tasks], *([k, *(f"{bits[k][0]:.2f}" for bits in tasks.values())] for k in labels))


def by_position(report: dict[str, Any], value: str) -> str:
    """A Markdown table of a value of the text metric by position."""
    results = report["tasks"]["text"]["results"]
    names = [name for name in results[EXACT] if name.startswith(f"{value} ")]
    head = ["cache", *(name.removeprefix(f"{value} ") for name in names)]
    digits = ".2f" if value == "perplexity" else ".3g"
    order = _order(report, _bits(report))
    lines = [[label, *(_cell(results[label][name], digits) for name in names)] for label in sorted(results, key=order)]
    return markdown(head, *lines)


def answers(report: dict[str, Any]) -> str:
    """A Markdown table of the metrics that generated freely; empty if there are none."""
    tasks = {name: found for name, found in report["tasks"].items() if "sampling" in found}
    columns = (("pass@1", ".3f"), ("majority vote", ".3f"), ("answer tokens", ".0f"), ("cut at the limit", ".2f"))
    lines = [
        [task, label, *(_cell(values[name], digits) for name, digits in columns)]
        for task, found in tasks.items()
        for label, values in found["results"].items()
    ]
    return markdown(["task", "cache", *(name for name, _ in columns)], *lines) if lines else ""


def facts(report: dict[str, Any]) -> str:
    """What it was measured with, in one line."""
    model, versions, device = report["model"], report["versions"], report["device"]
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    return (
        f"{model['architecture'] or model['model_type']}, {model['layers']} layers, {model['dtype']}; {named}; "
        f"{device['type']}, {device['threads']} thread{'s' if device['threads'] > 1 else ''}; seed "
        f"{report['settings']['seed']}"
    )


def markdown(head: Sequence[str], *lines: Iterable[Any]) -> str:
    """A table of lines of cells."""
    rows = ["| " + " | ".join(map(str, line)) + " |" for line in (head, *lines)]
    return "\n".join([rows[0], "|" + "---|" * len(head), *rows[1:]])


def _bits(report: dict[str, Any]) -> dict[str, list[float]]:
    """(end, mean) true bits by method, on the text, or on the first metric that has them."""
    tasks = report["tasks"]
    ordered = sorted(tasks, key=lambda name: name != "text")
    return next((tasks[name]["bits"] for name in ordered if "bits" in tasks[name]), {})


def _order(report: dict[str, Any], bits: dict[str, list[float]]) -> Any:
    places = {label: i for i, label in enumerate([EXACT, *(m["label"] for m in report["methods"])])}
    return lambda label: (-bits.get(label, [99.0])[0], places[label])


def _is_below(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether the intervals are apart."""
    return None not in (one["high"], other["low"]) and one["high"] < other["low"]


def _cell(estimate: dict[str, Any] | None, digits: str) -> str:
    if estimate is None or estimate["mean"] is None:
        return "–"
    text = format(estimate["mean"], digits)
    if estimate["low"] is None:
        return text
    return f"{text} [{estimate['low']:{digits}}, {estimate['high']:{digits}}]"
