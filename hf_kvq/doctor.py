# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""What will and will not work for a model, here and now, from its config alone."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig

import hf_kvq_kernels

from .cache.base import stock_layers
from .cache.layout import LayerLayout, LayerShape
from .config import MixKVQConfig, PMKVQConfig
from .estimate import config_dtype
from .hub import KVQPlan, PlanError
from .hub.facts import BaseModel
from .hub.schema import PLAN_FILE
from .ops.fused import page_layout
from .registration import CACHES, default_attention
from .version import __version__


# The newest transformers that the tests run on.
_TESTED = "5.24"


@dataclass
class Diagnosis:
    """What was found.

    Args:
        usable: whether quantized caches do anything for this model.
        layers: number of layers by kind; "quantized" ones, and the stock kinds that stay exact.
        attention: implementation that the model gets by default.
        kernel: what kernel="auto" takes, "cpu", "triton" or "torch".
        why_not: why other kernels cannot run, by name.
        plans: what lies next to the weights in a local folder.
        problems: what keeps the model from being used.
        notes: what to know.
    """

    model: str
    usable: bool = True
    model_type: str = ""
    layers: dict[str, int] = field(default_factory=dict)
    kv_heads: int | None = None
    head_dim: int | None = None
    dtype: str = ""
    device: str = ""
    attention: str | None = None
    kernel: str = "torch"
    why_not: dict[str, str] = field(default_factory=dict)
    plans: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    versions: dict[str, str | None] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def diagnose(
    model: str, config: PretrainedConfig, device: torch.device, dtype: torch.dtype | None = None
) -> Diagnosis:
    """Look at a model's config, the machine and the installed packages. Reads no weights and asks no network.

    Args:
        model: what the model is called; plans are looked for if it is a local folder.
        config: its config.
        device: where it is to run.
        dtype: what it is to compute in; the default is the config's.
    """
    text = config.get_text_config(decoder=True)
    found = Diagnosis(model, model_type=config.model_type, device=str(device), versions=versions())
    found.dtype = str(dtype or config_dtype(config)).removeprefix("torch.")
    found.attention = default_attention(config)
    try:
        stock, quantized = stock_layers(text)
    except Exception as error:  # any model's own cache code may run here
        found.usable = False
        found.problems.append(f"{error}")
        return found
    exact = Counter(type(layer).__name__ for i, layer in enumerate(stock) if i not in set(quantized))
    found.layers = {"quantized": len(quantized), **exact}
    base = BaseModel.of(config)
    found.kv_heads, found.head_dim = base.kv_heads, base.head_dim
    latent = getattr(text, "kv_lora_rank", None)
    if latent:
        found.kv_heads, found.head_dim = 1, latent
    _look_at_kernels(found, device)
    _look_at_plans(found, config)
    found.notes += [
        *_about_versions(),
        *_about_layers(found, config),
        *_about_attention(found),
        *_about_sizes(found, bool(latent)),
        *_about_defaults(model),
    ]
    return found


def versions() -> dict[str, str | None]:
    """Of everything that matters to a bug report; None for what is not installed."""
    names = ("torch", "transformers", "huggingface_hub", "safetensors", "triton", "accelerate", "peft")
    return {
        "hf_kvq": __version__,
        "hf_kvq_kernels": str(Path(hf_kvq_kernels.__file__).parent),
        "python": platform.python_version(),
        **{name: _version(name) for name in names},
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _look_at_kernels(found: Diagnosis, device: torch.device) -> None:
    """Which kernels kernel="auto" takes for pages of 4 bits, and why not the others."""
    heads, dim, dtype = found.kv_heads or 1, found.head_dim or 64, getattr(torch, found.dtype)
    name = {"cpu": "cpu", "cuda": "triton"}.get(device.type)
    if name != "triton" and not torch.cuda.is_available():
        found.why_not["triton"] = "there is no GPU"
    if name != "cpu":
        found.why_not["cpu"] = f"the cache is on {device.type}"
    if device.type == "cuda" and not torch.cuda.is_available():
        found.usable = False
        found.problems.append(f"there is no {device} on this machine")
        return
    layout = LayerLayout.of(PMKVQConfig(), LayerShape(heads, dim, dim, dtype), device.type)
    query = torch.empty(1, heads, 1, dim, dtype=dtype, device=device)
    with torch.no_grad():
        reason = hf_kvq_kernels.why_not(query, page_layout(layout.keys, layout.values, (4, 4)))
    if reason is None and name:
        found.kernel = name
    else:
        found.why_not[name or device.type] = reason or f"there are no kernels for {device.type}"


def _look_at_plans(found: Diagnosis, config: PretrainedConfig) -> None:
    folder = Path(found.model)
    if not folder.is_dir():
        return
    for file in (folder / "kvq" / PLAN_FILE, *sorted(folder.glob(f"kvq/*/{PLAN_FILE}"))):
        if not file.is_file():
            continue
        try:
            plan = KVQPlan.from_pretrained(file.parent)
            plan.check_fits(config)
            found.plans.append(f"{file.parent.relative_to(folder).as_posix()}: {plan!r}")
        except (PlanError, OSError) as error:
            # `generate` would find it, and refuse it.
            found.notes.append(f"the plan in {file.parent} cannot be used: {error}")


def _about_versions() -> list[str]:
    release = ".".join(transformers.__version__.split(".")[:2])
    if tuple(map(int, release.split("."))) > tuple(map(int, _TESTED.split("."))):
        return [f"transformers {transformers.__version__} is newer than what this version is tested with, {_TESTED}"]
    return []


def _about_layers(found: Diagnosis, config: PretrainedConfig) -> list[str]:
    notes, others = [], sum(found.layers.values()) - found.layers["quantized"]
    if others:
        kinds = ", ".join(f"{count} {kind}" for kind, count in found.layers.items() if kind != "quantized")
        notes.append(f"{others} of {sum(found.layers.values())} layers keep their ordinary cache, exact: {kinds}")
    if config.is_encoder_decoder:
        notes.append("encoder-decoder: self-attention is quantized, cross-attention keeps its ordinary cache")
    if found.attention is None:
        notes.append(
            f"transformers has no class of its own for {type(config).__name__}: remote code that keeps to its Cache "
            "works, other code is refused when it runs"
        )
    return notes


def _about_attention(found: Diagnosis) -> list[str]:
    if found.attention in (None, "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4"):
        return []
    return [
        f"attn_implementation={found.attention!r} is given each layer's keys and values dequantized, at every step: "
        "right, but slow. Where scores are capped or there are attention sinks, packed codes are read all the same; "
        "elsewhere use 'sdpa', if the model supports it"
    ]


def _about_sizes(found: Diagnosis, is_latent: bool) -> list[str]:
    notes, dim = [], found.head_dim
    if is_latent:
        notes.append(
            "latent attention: latents and rotary parts are cached instead of keys and values, and quantized; what "
            "that does to quality has not been measured"
        )
    if dim is None:
        return notes
    group = MixKVQConfig().group_size
    if dim % group and dim > group:
        notes.append(f"head_dim {dim} is no multiple of mixkvq's groups of {group}: the last one has {dim % group}")
    if dim > 256:
        notes.append(f"mixkvq takes up to 256 channels per head, and here are {dim}: use pmkvq or kivi")
    return notes


def _about_defaults(model: str) -> list[str]:
    file = Path(model) / "generation_config.json"
    try:
        name = json.loads(file.read_bytes()).get("cache_implementation")
    except (OSError, ValueError, AttributeError):
        return []
    if name not in CACHES:
        return []
    return [f"{file} names {name!r}: whoever has not imported hf_kvq cannot load this model any more; take it out"]
