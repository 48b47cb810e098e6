# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Suites that calibrate first: the ablations of PM-KVQ (arXiv 2505.18610) that are about how a plan is made.

They take few and short samples, so that a small model needs a few minutes of one core. That is enough to tell ways to
calibrate apart; for plans to keep there is `hf-kvq calibrate`. What is finished stays in the report's folder, from
which an interrupted run goes on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..bundled import bundled_text
from ..calibration import allocate, fingerprint, layer_costs, measured_sensitivity, sensitivity, smooth, token_blocks
from ..calibration.allocation import require_cvxpy
from ..calibration.samples import model_fingerprint
from ..config import PMKVQConfig
from ..hub import KVQPlan, PlanError, PlanUnavailableError
from ..version import __version__
from .methods import Method


#: The paper's candidates for most models, and its distances of positions.
WIDTHS = (4, 2)
STRETCHES = (1, 4, 16)

#: Samples, as long as the paper's: what gradients find depends on that.
_SAMPLES, _LENGTH = 2, 2048
#: Tokens of the one on which single layers are tried, which takes long.
_TRIED = 512

_PLANS = "plans"

Suite = Callable[[PreTrainedModel, PreTrainedTokenizerBase, Path], list[Method]]


def calibration_text() -> str:
    """The last fifth of the bundled text; an evaluation reads it from its beginning."""
    text = bundled_text()
    return text[len(text) * 4 // 5 :]


def calibration_samples(tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """Token ids of it, [samples, tokens]."""
    return token_blocks(calibration_text(), tokenizer, _SAMPLES, _LENGTH)


def require_apart(text: str, tokenizer: PreTrainedTokenizerBase, tokens: int) -> None:
    """Raise `ValueError` if the first `tokens` tokens of a text are not before what these suites calibrate on."""
    start = text.find(calibration_text())
    if start >= 0 and (room := len(tokenizer(text[:start], verbose=False).input_ids)) < tokens:
        raise ValueError(
            f"{tokens} tokens of the bundled text would be measured, but this suite calibrates on what comes after "
            f"its first {room}; lower --tokens or --rows, or give other text"
        )


def allocation_suite(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> list[Method]:
    """Half of the layers at 4 bits and half at 2, chosen in three ways, between all at 2 and all at 4.

    Args:
        model: a causal language model.
        tokenizer: the model's tokenizer.
        folder: where finished samples are kept.

    Raises:
        ImportError: cvxpy is not installed.
        ValueError: the model cannot be calibrated.
    """
    # Better now than after the long part.
    require_cvxpy()
    samples, plans = calibration_samples(tokenizer), folder / _PLANS
    found = {
        "measured": measured_sensitivity(model, samples[:1, :_TRIED], widths=WIDTHS, checkpoint=plans / "measured"),
        "by gradient": sensitivity(model, samples, widths=WIDTHS, checkpoint=plans / "gradient"),
    }
    shapes = found["measured"].shapes
    costs = layer_costs(shapes, _LENGTH, WIDTHS)
    spread = evenly_spread(len(shapes))
    budget = sum(row[WIDTHS.index(bits)] for row, bits in zip(costs, spread))
    widths = {
        "all layers at 4": (4,) * len(shapes),
        **{f"half at 4, {how}": allocate(by_layer.total, costs, budget, WIDTHS) for how, by_layer in found.items()},
        "half at 4, evenly spread": spread,
        "all layers at 2": (2,) * len(shapes),
    }
    return [
        Method("pmkvq", {"fbit": list(fbit), **schedule}, f"{how}, {name}")
        for name, schedule in {"fixed": {"initial_bits": min(WIDTHS)}, "progressive": {}}.items()
        for how, fbit in widths.items()
    ]


def positions_suite(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> list[Method]:
    """Keys per token, smoothed by maxima over positions that are 1, 4 and 16 apart, and not smoothed; fixed widths.

    Args:
        model: a causal language model with rotary embeddings.
        tokenizer: the model's tokenizer.
        folder: where the plans are kept.

    Raises:
        ValueError: the model cannot be calibrated.
    """
    samples, methods = calibration_samples(tokenizer)[:1], []
    for bits in WIDTHS:
        options = {"fbit": bits, "initial_bits": bits, "key_codec": "token"}
        methods.append(Method("pmkvq", options, f"keys per token, {bits} bits, not smoothed"))
        for stretch in STRETCHES:
            name = f"{_PLANS}/{bits}bits-s{stretch}"
            _smoothing_plan(model, samples, PMKVQConfig(**options), stretch, folder / name)
            methods.append(Method("pmkvq", {"plan": name}, f"keys per token, {bits} bits, s = {stretch}", folder))
    return methods


#: By name; each takes the folder of the report, and names its plans relative to it.
CALIBRATED: dict[str, Suite] = {"paper-allocation": allocation_suite, "paper-positions": positions_suite}


def evenly_spread(layers: int) -> tuple[int, ...]:
    """Widths of layers, half of them at 4 bits."""
    wide = {i * layers // (layers // 2) for i in range(layers // 2)}
    return tuple(4 if i in wide else 2 for i in range(layers))


def _smoothing_plan(
    model: PreTrainedModel, samples: torch.Tensor, config: PMKVQConfig, stretch: int, folder: Path
) -> None:
    """Save a plan with λ, unless the folder has one that was made from the same."""
    facts = {
        "dataset": "bundled",
        "n_samples": len(samples),
        "seq_len": samples.shape[1],
        "fingerprint": fingerprint(samples),
        "stretch": stretch,
        "weights": model_fingerprint(model),
    }
    smoothed = dataclasses.replace(config, transform="lambda")
    if not _is_made_from(folder, smoothed, facts):
        found = smooth(model, samples, config, stretch, desc=f"{config.fbit} bits, s = {stretch}")
        facts["alphas"] = list(found.alphas)
        plan = KVQPlan.of(model, smoothed, calibration=facts, tensors={"key_scale": found.key_scale})
        plan.save_pretrained(folder)


def _is_made_from(folder: Path, config: PMKVQConfig, facts: dict[str, Any]) -> bool:
    """Whether a folder has a plan of this version with these options that was made from these."""
    try:
        plan = KVQPlan.from_pretrained(folder)
    except (PlanError, PlanUnavailableError):
        return False
    return (plan.hf_kvq_version, plan.config) == (__version__, config) and facts.items() <= plan.calibration.items()
