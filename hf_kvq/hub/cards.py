# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Model cards: the whole page of a plan's own repository, or tags on the page of somebody's model."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
import yaml
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.repocard import metadata_load, metadata_save
from transformers.utils import logging

from . import measures, plots
from .checks import KEY_SCALE


if TYPE_CHECKING:
    from .plan import KVQPlan

logger = logging.get_logger(__name__)

#: A README with this line is ours, and written anew at each push.
MARKER = "<!-- hf_kvq writes this page anew at each push; delete this line to keep a page of your own. -->"

README = "README.md"
PLOT = "kvq_widths.svg"
BENCHMARKS = ".eval_results/hf_kvq.yaml"

_TEMPLATE = Path(__file__).with_name("model_cards") / "plan.md.jinja"
# Options that have a section of their own.
_OF_LAYERS = ("fbit", "value_fbit")
_TENSORS = {KEY_SCALE: "λ: keys are divided by it before they are quantized, and queries multiplied"}


def tags(plan: KVQPlan) -> list[str]:
    """What a repository with this plan can be found by."""
    return ["hf-kvq", "kv-cache", "kv-cache-quantization", plan.method]


def page(plan: KVQPlan, repo_id: str) -> dict[str, bytes]:
    """The files about a plan in a repository of its own: the model card, its picture, and results of benchmarks."""
    files = {README: _render(plan, repo_id).encode()}
    if _has_plot(plan):
        base = plan.base_model
        files[PLOT] = plots.layer_widths(base.quantized_layers, plan.layer_widths(), base.layers)
    bits = plan.fidelity.get("true_bits")
    notes = f"KV cache quantized by hf_kvq, {plan.method}" + (f", {bits} bits per number" if bits else "")
    if (results := measures.benchmark_results(plan.fidelity, notes)) is not None:
        files[BENCHMARKS] = results
    return files


def changes(plan: KVQPlan, repo_id: str, readme: bytes | None, is_own: bool) -> dict[str, bytes | None]:
    """Files about the plan, by path: what they have to become, or None for those that must not be there any more.

    Args:
        readme: what README.md is now, if there is one.
        is_own: the repository holds nothing but the plan.
    """
    if is_own and (readme is None or MARKER.encode() in readme):
        return {PLOT: None, BENCHMARKS: None, **page(plan, repo_id)}
    tagged = None if readme is None else _tagged(readme, tags(plan))
    return {} if tagged is None else {README: tagged}


def summary(plan: KVQPlan) -> str:
    """A plan in a few lines of plain text."""
    config, calibration = (
        ", ".join(
            f"{key}={value}" for key, value in sorted(values.items()) if value is not None and key not in _OF_LAYERS
        )
        for values in (plan.to_dict()["config"], plan.calibration)
    )
    total = len(plan.base_model.quantized_layers)
    paragraphs = {
        "method": [plan.method],
        "model": [str(plan.base_model)],
        "bits": [
            (f"{keys}" if keys == values else f"{keys} of keys, {values} of values,")
            + f" in layers {layers} ({number} of {total})"
            for keys, values, layers, number in _widths(plan)
        ],
        "config": [config],
        "calibration": [calibration],
        "fidelity": [
            f"{what}: {value}" + (f" (16-bit cache: {exact})" if exact is not None else "")
            for what, exact, value in measures.rows(plan.fidelity)
        ],
        "tensors": [f"{name} {shape}: {what}" for name, shape, what in _tensor_rows(plan.tensors)],
        "made by": [f"hf_kvq {plan.hf_kvq_version}"],
    }
    return "\n".join(
        f"{'' if i else name:<13}{_line(line)}"
        for name, lines in paragraphs.items()
        for i, line in enumerate(lines)
        if line
    )


def _render(plan: KVQPlan, repo_id: str) -> str:
    """The model card of a plan in a repository of its own."""
    dataset = plan.calibration.get("dataset")
    data = ModelCardData(
        base_model=plan.base_model.id,
        base_model_relation="quantized" if plan.base_model.id else None,
        library_name="hf-kvq",
        pipeline_tag="text-generation",
        tags=tags(plan),
        datasets=[dataset] if isinstance(dataset, str) and measures.HUB_ID.fullmatch(dataset) else None,
        model_name=repo_id.rpartition("/")[2],
        eval_results=measures.eval_results(plan.fidelity) or None,
    )
    widths = _widths(plan)
    card = ModelCard.from_template(
        data,
        template_str=_TEMPLATE.read_text(encoding="utf-8"),
        marker=MARKER,
        repo_id=repo_id,
        plan=plan,
        widths=widths,
        plot=PLOT if _has_plot(plan) else None,
        description=plots.describe(plan.layer_widths(), plan.base_model.layers) if widths else None,
        option_rows=_rows({key: value for key, value in plan.to_dict()["config"].items() if key not in _OF_LAYERS}),
        calibration_rows=_rows(plan.calibration),
        fidelity_rows=[tuple(map(_cell, row)) for row in measures.rows(plan.fidelity)],
        tensor_rows=[tuple(map(_cell, row)) for row in _tensor_rows(plan.tensors)],
    )
    # Parts that are left out leave their blank lines behind.
    return re.sub(r"\n{3,}", "\n\n", f"{card}\n")


def _tagged(present: bytes, wanted: list[str]) -> bytes | None:
    """A README with more tags and the same text; None if it has them all, or cannot be understood."""
    with TemporaryDirectory() as scratch:
        path = Path(scratch, "README.md")
        path.write_bytes(present)
        try:
            data: dict[str, Any] = metadata_load(path) or {}
            old = data.get("tags") or []
            old = [old] if isinstance(old, str) else list(old)
        except (TypeError, ValueError, yaml.YAMLError) as error:
            logger.warning(f"README.md gets no tags, as its metadata cannot be read: {error}")
            return None
        if not (new := [tag for tag in wanted if tag not in old]):
            return None
        metadata_save(path, {**data, "tags": old + new})
        return path.read_bytes()


def _has_plot(plan: KVQPlan) -> bool:
    """One width for all layers is nothing to look at."""
    return len(set(plan.layer_widths() or ())) > 1


def _widths(plan: KVQPlan) -> list[tuple[int, int, str, int]]:
    """(bits of keys, of values, layers, number of layers) from the widest on, such as (4, 2, "1-3, 5", 4)."""
    layers: dict[tuple[int, int], list[int]] = {}
    for layer, widths in zip(plan.base_model.quantized_layers, plan.layer_widths() or ()):
        layers.setdefault(widths, []).append(layer)
    return [(*widths, _ranges(found), len(found)) for widths, found in sorted(layers.items(), reverse=True)]


def _ranges(numbers: list[int]) -> str:
    """Ascending numbers, with neighbours taken together: "1-3, 5"."""
    # Within a run of neighbours, a number and its place grow alike.
    grouped = itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    runs = [[x for _, x in run] for _, run in grouped]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _tensor_rows(tensors: dict[str, torch.Tensor]) -> list[tuple[str, str, str]]:
    """(name, dtype and shape, what it is)."""
    rows = []
    for name, x in sorted(tensors.items()):
        what = _TENSORS.get(name, "not used by this version of hf_kvq")
        between = f"; {x.min().item():.3g} to {x.max().item():.3g}" if name in _TENSORS else ""
        rows.append((name, f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}", what + between))
    return rows


def _rows(values: dict[str, Any]) -> list[tuple[str, str]]:
    return [(_cell(key), _cell(value)) for key, value in sorted(values.items()) if value is not None]


def _cell(value: Any) -> str:
    """Of a table; text is kept from being read as Markdown."""
    text = f"{value:.6g}" if isinstance(value, float) else "" if value is None else str(value)
    return re.sub(r"([\\`*_|<>\[\]])", r"\\\1", _line(text)[:200])


def _line(text: str) -> str:
    """Nothing that ends a line, moves a cursor, or cannot be encoded."""
    return "".join(x if x.isprintable() else "\ufffd" for x in " ".join(text.split()))
