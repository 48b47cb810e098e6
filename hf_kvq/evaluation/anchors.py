# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Sanity anchors: what must hold in results whatever the numbers are, looked up in the files of results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .methods import EXACT
from .report import markdown


#: Anchor, options that tell its methods apart, and their values from the least divergence expected to the most.
_RANKS: tuple[tuple[str, tuple[str, ...], tuple[tuple, ...]], ...] = (
    ("more bits, no more KL", ("bits",), ((8,), (4,), (2,))),
    ("more bits, no more KL", ("nbits",), ((4,), (2,))),
    ("more bits, no more KL", ("fbit",), ((8,), (4,), (2,))),
    ("more bits, no more KL", ("fbit", "initial_bits"), ((8, 8), (4, 4), (2, 2))),
    ("shrinking: equivalent, modified, direct", ("strategy",), (("equivalent",), ("modified",), ("direct",))),
    ("queries tell channels apart", ("importance",), (("query",), ("none",))),
    ("progressive beats fixed", ("initial_bits",), ((None,), (8,))),
    ("progressive beats fixed", ("initial_bits",), ((None,), (4,))),
    ("progressive beats fixed", ("initial_bits",), ((None,), (2,))),
)


def anchors(reports: Mapping[str, dict[str, Any]]) -> str:
    """A Markdown table of the anchors on KL of the text metric, by what the reports hold.

    Args:
        reports: what `evaluate` returned, by name.
    """
    lines = []
    for name, report in reports.items():
        if "text" in report["tasks"]:
            kl = {label: found["kl"] for label, found in report["tasks"]["text"]["results"].items()}
            holds = "yes" if kl[EXACT]["mean"] == 0 else "no"
            lines.append(["the exact cache has KL 0", name, EXACT, f"{kl[EXACT]['mean']:.3g}", holds])
            lines += [[anchor, name, *_measured(labels, kl)] for anchor, labels in _ranks(report["methods"])]
    found = {line[0] for line in lines}
    missing = [[anchor, "–", "–", "not in these results", "–"] for anchor, *_ in _RANKS if anchor not in found]
    order = ["the exact cache has KL 0", *(anchor for anchor, *_ in _RANKS)]
    unique = {tuple(line): None for line in (*lines, *missing)}
    rows = sorted(unique, key=lambda line: order.index(line[0]))
    return markdown(["anchor", "results", "caches, the least KL expected first", "KL", "holds"], *rows)


def _ranks(methods: list[dict[str, Any]]) -> Iterator[tuple[str, list[str]]]:
    """Anchors, and the labels of methods that differ in nothing but an anchor's options, in the expected order."""
    for anchor, names, values in _RANKS:
        alike: dict[str, dict[tuple, str]] = {}
        for method in methods:
            options = method["options"]
            given = tuple(options.get(name) for name in names)
            rest = {key: value for key, value in options.items() if key not in names}
            if given in values:
                alike.setdefault(repr((method["cache"], sorted(rest.items()))), {})[given] = method["label"]
        for by_value in alike.values():
            if len(by_value) > 1:
                yield anchor, [by_value[value] for value in values if value in by_value]


def _measured(labels: list[str], kl: dict[str, dict[str, Any]]) -> tuple[str, str, str]:
    """The labels, their KL, and whether it rises."""
    found = [kl[label] for label in labels]
    wrong = [(a, b) for a, b in zip(found, found[1:]) if a["mean"] > b["mean"]]
    holds = "yes"
    if wrong:
        apart = any(None not in (a["low"], b["high"]) and a["low"] > b["high"] for a, b in wrong)
        holds = "no: the intervals are apart" if apart else "no, but the intervals overlap"
    return " < ".join(labels), ", ".join(f"{x['mean']:.3g} [{x['low']:.3g}, {x['high']:.3g}]" for x in found), holds
