# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""All metrics for all methods: same items, same seeds, same run."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..calibration.samples import model_fingerprint
from ..hub.facts import BaseModel
from ..hub.files import replace_file
from ..version import __version__
from .attention import attention_errors
from .estimates import Estimate, bootstrap, over_tokens, share
from .forced import Forced, teacher_forced
from .methods import EXACT, Method, check_labels
from .tasks import (
    RECALL_LEAD,
    Items,
    common_words,
    copy_items,
    generated_items,
    phone_book_items,
    recall_items,
    text_items,
)


#: Bump when the meaning of a number changes.
FORMAT = 1

#: Tokens per forward where the order of events matters, instead of one by one.
_FINE_CHUNK = 16

_BUCKETS = 4

Results = dict[str, dict[str, Estimate]]


@dataclass(frozen=True)
class Settings:
    """How much is measured.

    Args:
        tokens: of the text.
        chunk: tokens per forward.
        rows: sequences of every other metric.
        prompt, new_tokens: tokens of text that the exact model continues, and of its continuation.
        copy_words: words that are listed twice.
        recall_words, recall_distance: words to recall, and tokens of text between them and themselves.
        entries: lines of a phone book.
        seed: of everything that is drawn.
    """

    tokens: int = 2048
    chunk: int = 128
    rows: int = 4
    prompt: int = 320
    new_tokens: int = 96
    copy_words: int = 160
    recall_words: int = 32
    recall_distance: int = 448
    entries: int = 24
    seed: int = 0

    @property
    def text_tokens(self) -> int:
        """First tokens of the text that are read at all."""
        return self.tokens + self.rows * max(self.prompt, RECALL_LEAD + self.recall_distance)


@dataclass
class Bench:
    """What every metric needs."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    text: str
    methods: Sequence[Method]
    settings: Settings
    progress: bool = True

    def forced(self, name: str, items: Items, chunk: int | None = None) -> dict[str, Forced]:
        """Read items through fresh caches of all methods; the exact one is among the results."""
        caches = {method.label: self.build(method, items.ids.shape[1]) for method in self.methods}
        desc = name if self.progress else None
        found = teacher_forced(
            self.model,
            items.ids,
            caches,
            items.start,
            items.prefill,
            chunk or self.settings.chunk,
            items.mask,
            desc=desc,
        )
        return {EXACT if label is None else label: result for label, result in found.items()}

    def build(self, method: Method, max_length: int) -> Any:
        """An empty cache, or an error that says whose it is."""
        try:
            return method.build(self.model, max_length)
        except (ValueError, TypeError, ImportError, RuntimeError) as error:
            raise ValueError(f"{method.label}: {error}") from error

    def filler(self) -> torch.Tensor:
        """Text that is not that of the text metric, [rows, tokens], long enough for all metrics."""
        s = self.settings
        return text_items(self.text, self.tokenizer, s.text_tokens).ids[0, s.tokens :].view(s.rows, -1)


def text_metric(bench: Bench) -> dict[str, Any]:
    """KL, top-1 agreement and perplexity on text, all of it and by position; bits by position."""
    items = text_items(bench.text, bench.tokenizer, bench.settings.tokens)
    found = bench.forced("text", items)
    edges = [bench.settings.tokens * i // _BUCKETS for i in range(_BUCKETS + 1)]
    results: Results = {}
    for label, forced in found.items():
        results[label] = _fidelity(items, forced)
        for low, high in zip(edges, edges[1:]):
            part = slice(max(low - 1, 0), high - 1)
            results[label][f"perplexity {low}-{high}"] = over_tokens(forced.nll[:, part]).map(math.exp)
            results[label][f"kl {low}-{high}"] = over_tokens(forced.kl[:, part])
    series = {label: [[n, _round(bits)] for n, bits in forced.usage.bits()] for label, forced in found.items()}
    return _task(items, found, results, bits_by_position=series)


def own_metric(bench: Bench) -> dict[str, Any]:
    """Along the exact model's own greedy continuation: KL, top-1 agreement, and tokens before the first that differs.

    Until then greedy decoding through the other cache has the same history, so this is where it would leave.
    """
    s = bench.settings
    items = generated_items(bench.model, bench.filler()[:, : s.prompt], s.new_tokens)
    found = bench.forced("own text", items, _FINE_CHUNK)
    results = {}
    for label, forced in found.items():
        steps = forced.agreed.long().cumprod(-1).sum(-1)
        results[label] = {
            **_fidelity(items, forced),
            "same tokens": bootstrap(steps),
            "never diverged": share(int((steps == s.new_tokens).sum()), len(steps)),
        }
    return _task(items, found, results)


def copy_metric(bench: Bench) -> dict[str, Any]:
    """Accuracy and likelihood of random words, the second time."""
    s = bench.settings
    items = copy_items(common_words(bench.text), bench.tokenizer, s.rows, s.copy_words, s.seed)
    found = bench.forced("copy", items)
    return _task(items, found, {label: _recall(items, forced) for label, forced in found.items()})


def recall_metric(bench: Bench) -> dict[str, Any]:
    """The same after so much text that the words have long been packed."""
    s = bench.settings
    filler = bench.filler()[:, : RECALL_LEAD + s.recall_distance]
    items = recall_items(common_words(bench.text), filler, bench.tokenizer, s.recall_words, s.seed)
    found = bench.forced("recall", items)
    return _task(items, found, {label: _recall(items, forced) for label, forced in found.items()})


def phone_book_metric(bench: Bench) -> dict[str, Any]:
    """Share of the numbers of a phone book that come back whole."""
    s = bench.settings
    items = phone_book_items(common_words(bench.text), bench.tokenizer, s.rows, s.entries, s.seed)
    found = bench.forced("phone book", items)
    results = {}
    for label, forced in found.items():
        right = items.right(forced.hit)
        results[label] = {"accuracy": share(sum(right), len(right)), "nll": over_tokens(forced.nll, items.counts)}
    return _task(items, found, results)


def attention_metric(bench: Bench) -> dict[str, Any]:
    """Relative error of each attention layer's output, on the first half of the text."""
    items = text_items(bench.text, bench.tokenizer, bench.settings.tokens // 2)
    caches = {method.label: bench.build(method, items.ids.shape[1]) for method in bench.methods}
    desc = "attention" if bench.progress else None
    errors = attention_errors(bench.model, items.ids, caches, bench.settings.chunk, desc=desc)
    return {
        "data": items.fingerprint,
        "results": {label: {"relative error": bootstrap(x.mean(1)).to_dict()} for label, x in errors.items()},
        "by_layer": {label: [_round(error) for error in x.mean(1).tolist()] for label, x in errors.items()},
    }


#: By name, the most sensitive per second first.
METRICS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "text": text_metric,
    "own": own_metric,
    "copy": copy_metric,
    "phone": phone_book_metric,
    "recall": recall_metric,
    "attention": attention_metric,
}


def evaluate(
    bench: Bench,
    metrics: Sequence[str] = tuple(METRICS),
    extra: dict[str, Callable[[Bench], dict[str, Any]]] | None = None,
    source: str = "",
    path: Path | None = None,
) -> dict[str, Any]:
    """Measure, and say what it was measured with.

    Args:
        bench: model, text and methods.
        metrics: names of `METRICS`.
        extra: further metrics by name, see `hf_kvq.evaluation.answers`.
        source: what the text is called.
        path: a results.json, written after each metric; one of the same run is gone on with.

    Returns:
        Plain JSON.

    Raises:
        ValueError: a metric is unknown, a method cannot be made, or the text is too short.
    """
    check_metrics(metrics)
    check_labels(bench.methods)
    report = {**_facts(bench, source), "tasks": {}}
    if path is not None and path.exists():
        report["tasks"] = _finished(path, report)
    todo = {**{name: METRICS[name] for name in metrics}, **(extra or {})}
    for name, metric in todo.items():
        if name not in report["tasks"]:
            report["tasks"][name] = metric(bench)
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                replace_file(path, to_json(report).encode())
    return report


def check_metrics(names: Sequence[str]) -> None:
    """Raise `ValueError` if one of them is no metric."""
    if unknown := [name for name in names if name not in METRICS]:
        raise ValueError(f"unknown metric {unknown[0]!r}; there are {', '.join(METRICS)}")


def to_json(report: dict[str, Any]) -> str:
    """The file's text: the same for the same results."""
    return json.dumps(report, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _facts(bench: Bench, source: str) -> dict[str, Any]:
    model = bench.model
    return {
        "format": FORMAT,
        "versions": {
            "hf_kvq": __version__,
            **{name: importlib.metadata.version(name) for name in ("torch", "transformers")},
        },
        "model": {
            **BaseModel.of(model.config).to_dict(),
            "dtype": str(model.dtype).removeprefix("torch."),
            "weights": model_fingerprint(model),
        },
        "device": {"type": model.device.type, "threads": torch.get_num_threads()},
        "text": {"source": source, "sha256": hashlib.sha256(bench.text.encode()).hexdigest()},
        "settings": asdict(bench.settings),
        "methods": [method.to_dict() for method in bench.methods],
    }


def _finished(path: Path, report: dict[str, Any]) -> dict[str, Any]:
    """Tasks of an earlier, interrupted run with the same facts."""
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return {}
    same = all(before.get(key) == json.loads(json.dumps(value)) for key, value in report.items() if key != "tasks")
    return before["tasks"] if same else {}


def _fidelity(items: Items, forced: Forced) -> dict[str, Estimate]:
    return {
        "kl": over_tokens(forced.kl, items.counts),
        "top1": over_tokens(forced.agreed.double(), items.counts),
        "perplexity": over_tokens(forced.nll, items.counts).map(math.exp),
    }


def _recall(items: Items, forced: Forced) -> dict[str, Estimate]:
    return {
        "accuracy": over_tokens(forced.hit.double(), items.counts),
        "nll": over_tokens(forced.nll, items.counts),
        "kl": over_tokens(forced.kl, items.counts),
    }


def _task(items: Items, found: dict[str, Forced], results: Results, **more: Any) -> dict[str, Any]:
    usage = {label: [_round(f.usage.last_bits), _round(f.usage.mean_bits)] for label, f in found.items()}
    plain = {label: {name: x.to_dict() for name, x in by_name.items()} for label, by_name in results.items()}
    return {"data": items.fingerprint, "bits": usage, "results": plain, **more}


def _round(value: float) -> float:
    return float(f"{value:.4g}")
