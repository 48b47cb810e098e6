# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Model cards: the whole page of a plan's own repository, or tags on the page of somebody's model."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import yaml
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.repocard import metadata_load, metadata_save
from transformers.utils import logging


if TYPE_CHECKING:
    from .plan import KVQPlan

logger = logging.get_logger(__name__)

#: A README with this line is ours, and written anew at each push.
MARKER = "<!-- hf_kvq writes this page anew at each push; delete this line to keep a page of your own. -->"

_TEMPLATE = Path(__file__).with_name("model_cards") / "plan.md.jinja"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)


def tags(plan: KVQPlan) -> list[str]:
    """What a repository with this plan can be found by."""
    return ["hf-kvq", "kv-cache", "kv-cache-quantization", plan.method]


def render(plan: KVQPlan, repo_id: str) -> str:
    """The model card of a plan in a repository of its own."""
    dataset = plan.calibration.get("dataset")
    data = ModelCardData(
        base_model=plan.base_model.id,
        base_model_relation="quantized" if plan.base_model.id else None,
        library_name="hf-kvq",
        pipeline_tag="text-generation",
        tags=tags(plan),
        datasets=[dataset] if isinstance(dataset, str) and _HUB_ID.fullmatch(dataset) else None,
    )
    fbits = plan.layer_fbits()
    card = ModelCard.from_template(
        data,
        template_str=_TEMPLATE.read_text(encoding="utf-8"),
        marker=MARKER,
        repo_id=repo_id,
        plan=plan,
        fbits=_runs(plan.base_model.quantized_layers, fbits) if fbits else [],
        options=_rows({key: value for key, value in plan.to_dict()["config"].items() if key != "fbit"}),
        calibration_rows=_rows(plan.calibration),
        fidelity_rows=_rows(plan.fidelity),
    )
    return str(card)


def summary(plan: KVQPlan) -> str:
    """A plan in a few lines of plain text."""
    base, values = plan.base_model, plan.to_dict()
    lines = [("method", plan.method), ("model", str(base))]
    fbits = plan.layer_fbits()
    lines += [
        ("bits", ", ".join(f"{bits} in layers {run}" for run, bits in _runs(base.quantized_layers, fbits or ())))
    ]
    for name in ("config", "calibration", "fidelity"):
        shown = {key: value for key, value in values[name].items() if value is not None and key != "fbit"}
        lines.append((name, ", ".join(f"{key}={value}" for key, value in sorted(shown.items()))))
    lines.append(("tensors", ", ".join(f"{name} {list(x.shape)}" for name, x in sorted(plan.tensors.items()))))
    lines.append(("made by", f"hf_kvq {plan.hf_kvq_version}"))
    return "\n".join(f"{name:<13}{text}" for name, text in lines if text)


def readme(plan: KVQPlan, repo_id: str, present: bytes | None, is_own: bool) -> bytes | None:
    """What README.md has to become; None to leave it.

    Args:
        present: what it is now, if there is one.
        is_own: the repository holds nothing but the plan.
    """
    if is_own and (present is None or MARKER.encode() in present):
        page = render(plan, repo_id).encode()
        return None if page == present else page
    return None if present is None else _tagged(present, tags(plan))


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


def _runs(layers: tuple[int, ...], fbits: tuple[int, ...]) -> list[tuple[str, int]]:
    """(layers, width) of neighbours with the same width, such as ("0-3", 8)."""
    rows = []
    for bits, run in itertools.groupby(zip(layers, fbits), key=lambda pair: pair[1]):
        first, *_, last = indices if len(indices := [layer for layer, _ in run]) > 1 else indices * 2
        rows.append((f"{first}-{last}" if last != first else str(first), bits))
    return rows


def _rows(values: dict[str, Any]) -> list[tuple[str, str]]:
    """Cells of a table; text is kept from being read as Markdown."""
    return [(_cell(key), _cell(value)) for key, value in sorted(values.items()) if value is not None]


def _cell(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return re.sub(r"([\\`*_|<>\[\]])", r"\\\1", " ".join(text.split())[:200])
