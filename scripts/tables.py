# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Results of the benchmarks, as CSV and as Markdown: a list of rows, each a dict by column."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_kvq.evaluation.report import markdown


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """The columns are those of the first row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def print_table(rows: Sequence[dict[str, Any]], *without: str) -> None:
    """Print rows as Markdown, but for some columns."""
    columns = [name for name in rows[0] if name not in without]
    print(markdown(columns, *([row[name] for name in columns] for row in rows)))
