# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""What a plan was measured to cost: as rows of a table, and as evaluation results in the forms that the Hub reads."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import yaml
from huggingface_hub import EvalResult, EvalResultEntry, eval_result_entries_to_yaml


#: A dataset's id on the Hub; files of texts look the same but for their ends.
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(?<!\.txt)(?<!\.jsonl)(?<!\.parquet)", re.ASCII)

# What the 16-bit cache scored goes by the same name, with this before it.
_EXACT = "exact_"
# A registered benchmark of the Hub and one of its tasks, such as "openai/gsm8k:gsm8k".
_BENCHMARK = re.compile(rf"({HUB_ID.pattern}):([\w.-]+)", re.ASCII)


@dataclass(frozen=True)
class Measure:
    """A number that a plan's `fidelity` may hold.

    Args:
        title: what it is called.
        metric: its type among evaluation results; None if it is none.
        exact: its value for the 16-bit cache; None if that has to be measured, and is called `exact_<name>`.
    """

    title: str
    metric: str | None = None
    exact: float | None = None


#: By their names in `fidelity`, in the order in which they are shown.
MEASURES = {
    "dataset": Measure("text"),
    "tokens": Measure("tokens that were read"),
    "true_bits": Measure("bits per cached number, everything counted", "bits_per_number", 16),
    "perplexity": Measure("perplexity", "perplexity"),
    "kl": Measure("KL divergence from the 16-bit cache, nats per token", "kl_divergence", 0),
    "top1": Measure("share of tokens with the same most likely successor", "top1_agreement", 1),
}


def rows(fidelity: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """(what, value with the 16-bit cache, value with the plan) of everything that was measured; None is unknown."""
    names = [*MEASURES, *sorted(name for name in fidelity if name not in MEASURES and not name.startswith(_EXACT))]
    measures = {name: MEASURES.get(name, Measure(name)) for name in names if fidelity.get(name) is not None}
    return [
        (measure.title, fidelity.get(_EXACT + name, measure.exact), fidelity[name])
        for name, measure in measures.items()
    ]


def eval_results(fidelity: dict[str, Any]) -> list[EvalResult]:
    """For the metadata of a model card (`model-index`): what was measured on a text, which no benchmark is."""
    dataset = " ".join(str(fidelity.get("dataset") or "unknown").split())
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=dataset if HUB_ID.fullmatch(dataset) else "unknown",
            dataset_name=dataset,
            metric_type=measure.metric,
            metric_name=measure.title,
            metric_value=fidelity[name],
        )
        for name, measure in MEASURES.items()
        if measure.metric is not None and _is_number(fidelity.get(name))
    ]


def benchmark_results(fidelity: dict[str, Any], notes: str) -> bytes | None:
    """For `.eval_results/`, which leaderboards are made from: what was measured on benchmarks of the Hub.

    Args:
        fidelity: of a plan; a benchmark is called `<dataset>:<task>`.
        notes: how the evaluation was set up.

    Returns:
        The YAML file; None if there is nothing for it.
    """
    found = {match.groups(): fidelity[name] for name in sorted(fidelity) if (match := _BENCHMARK.fullmatch(name))}
    entries = [
        EvalResultEntry(dataset_id=dataset, task_id=task, value=value, notes=notes)
        for (dataset, task), value in found.items()
        if _is_number(value) and not dataset.startswith(_EXACT)
    ]
    return yaml.safe_dump(eval_result_entries_to_yaml(entries), sort_keys=False).encode() if entries else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
