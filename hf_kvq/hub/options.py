# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""From what a user gives a cache, a plan included, to the options and tensors it is made with."""

from __future__ import annotations

import os
from typing import Any, TypeVar

import torch
from transformers import PretrainedConfig

from ..config import Options
from .plan import KVQPlan


T = TypeVar("T", bound=Options)

# An option that a user gives also takes away what would contradict it.
_CONTRADICTS = {
    "fbit": ("boundary_layers", "value_fbit"),
    "max_length": ("budget_bytes",),
    "budget_bytes": ("max_length",),
    "target_bits": ("tau_bf16", "tau_uint4"),
    "tau_bf16": ("target_bits",),
    "tau_uint4": ("target_bits",),
}


def resolve(
    config_class: type[T], model_config: PretrainedConfig, given: Any, max_length: int | None = None
) -> tuple[T, dict[str, torch.Tensor]]:
    """The options of a cache, and the tensors that its plan holds.

    Args:
        config_class: the method's options.
        model_config: the model's config; a plan has to fit it.
        given: an object of options, a dict of them, a plan, or a dict with a `plan`, which the rest of it overrules.
        max_length: tokens per request, as `generate` knows it; it comes before the plan's.

    Raises:
        ValueError, TypeError: an option is unknown or impossible, or the plan is of another method or model.
        PlanUnavailableError: the plan cannot be fetched.
    """
    if isinstance(given, KVQPlan):
        given = {"plan": given}
    if not isinstance(given, dict) or "plan" not in given:
        return config_class.of(given), {}
    plan, given = given["plan"], {key: value for key, value in given.items() if key != "plan"}
    if plan is None:
        return config_class.of(given), {}
    if isinstance(plan, (str, os.PathLike)):
        plan = KVQPlan.from_pretrained(plan)
    if not isinstance(plan, KVQPlan):
        raise TypeError(f"plan must be a KVQPlan, a folder or the id of a repository; got {type(plan).__name__}")
    if type(plan.config) is not config_class:
        raise ValueError(f"a {plan.method} plan holds no options of {config_class.__name__}: {plan!r}")
    plan.check_fits(model_config)
    return config_class.of({**_left(plan, given, max_length), **given}), plan.tensors


def _left(plan: KVQPlan, given: dict[str, Any], max_length: int | None) -> dict[str, Any]:
    """The plan's options that nothing overrules."""
    overruled = {"kernel", *given, *(name for key in given for name in _CONTRADICTS.get(key, ()))}
    if max_length is not None:
        overruled.add("max_length")
    return {key: value for key, value in plan.config.to_dict().items() if key not in overruled}
