# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""A filled cache as one safetensors file: to continue from a long prefix later, elsewhere, on another device."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from transformers import PretrainedConfig, PreTrainedModel

from ..hub.facts import BaseModel
from ..hub.files import replacement
from ..hub.plan import KVQPlan
from ..registration import CACHES
from .pmkvq import KEY_SCALE
from .sharding import HeadShard
from .state import layer_state, restore_layer


if TYPE_CHECKING:
    from .base import KVQCache


FORMAT_VERSION = 1

_METADATA, _CHECKSUM = "hf_kvq_cache", "hf_kvq_sha256"


def save_cache(cache: KVQCache, path: str | os.PathLike) -> None:
    """Write a filled cache; see `KVQCache.save`."""
    columns = {layer.get_seq_length() for layer in cache.quantized_layers}
    if not columns:
        raise ValueError("none of this cache's layers is quantized, and ordinary ones alone are not saved")
    if columns == {0}:
        raise ValueError("this cache is empty; fill it with a prompt before you save it")
    if len(columns) > 1:
        raise ValueError("this cache is in the middle of a forward pass; save it behind that")
    states = [layer_state(layer) for layer in cache.layers]
    tensors = {f"layers.{i}.{name}": x.cpu() for i, (_, named) in enumerate(states) for name, x in named.items()}
    method = next(name for name, kind in CACHES.items() if kind is type(cache))
    first = cache.quantized_layers[0]
    scale = getattr(cache, KEY_SCALE, None)
    shared = {} if scale is None else {KEY_SCALE: scale.cpu()}
    tensors |= shared
    facts = {
        "format_version": FORMAT_VERSION,
        "plan": KVQPlan(method, cache.config, cache.base_model, tensors=shared).to_dict(),
        "dtype": str(first.layout.shape.dtype).removeprefix("torch."),
        "batch": len(first.states),
        "columns": columns.pop(),
        "shard": [cache.shard.rank, cache.shard.size],
        "max_length": getattr(first, "max_length", None),
        "exact_nbytes": cache.exact_nbytes(),
        "layer_bits": cache.layer_bits(),
        "padding": cache.padding.rows,
        "layers": [values for values, _ in states],
    }
    text = json.dumps(facts, allow_nan=False)
    metadata = {"format": "pt", _METADATA: text, _CHECKSUM: _checksum(text, tensors)}
    with replacement(Path(path)) as scratch:
        safetensors.torch.save_file(tensors, scratch, metadata)


def load_cache(
    path: str | os.PathLike,
    model: PreTrainedModel | PretrainedConfig,
    device: torch.device | str | None = None,
    kernel: str = "auto",
    kind: type[KVQCache] | None = None,
) -> KVQCache:
    """Read a cache that `save_cache` wrote; see `KVQCache.load`."""
    # A model in a wrapper, as adapters are, is no PreTrainedModel.
    config, dtype = (model.config, model.dtype) if isinstance(model, torch.nn.Module) else (model, None)
    device = torch.device(device or getattr(model, "device", "cpu"))
    facts, plan = read_facts(path)
    try:
        refusal = _refusal(facts, plan, config, dtype, kind)
    except Exception as error:
        raise ValueError(f"{os.fspath(path)} cannot be used: {error!r}") from error
    if refusal:
        raise ValueError(f"{os.fspath(path)} {refusal}")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata()
        if _checksum(metadata[_METADATA], tensors) != metadata[_CHECKSUM]:
            raise ValueError("its checksum is another one, so the file is damaged; save it anew")
        return _cache_of(facts, plan, tensors, config, device, kernel)
    except Exception as error:  # whatever a damaged or hostile file may lead to
        raise ValueError(f"{os.fspath(path)} cannot be used: {error}") from error


def read_facts(path: str | os.PathLike) -> tuple[dict[str, Any], KVQPlan]:
    """What a cache file says about itself, from its header alone, and the plan that its cache follows.

    Raises:
        OSError: there is no such file.
        ValueError: it is no cache file, damaged, or of a newer format.
    """
    with Path(path).open("rb"):
        pass
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(_METADATA)
            shared = {name: file.get_tensor(name) for name in (KEY_SCALE,) if name in file.keys()}  # noqa: SIM118
        if text is None:
            raise ValueError("it is a safetensors file, but holds no cache of hf_kvq")
        facts = json.loads(text)
        if (version := facts["format_version"]) != FORMAT_VERSION:
            writer = facts.get("plan", {}).get("hf_kvq_version")
            raise ValueError(
                f"it has format version {version!r:.20}, written by hf_kvq {writer!r:.20}, and this one reads version "
                f"{FORMAT_VERSION}; run: pip install -U hf-kvq"
            )
        return facts, KVQPlan.from_dict(facts["plan"], shared)
    except Exception as error:  # the reader's own kinds of error are not documented
        raise ValueError(f"{os.fspath(path)} cannot be used: {error}") from error


def _refusal(
    facts: dict[str, Any],
    plan: KVQPlan,
    config: PretrainedConfig,
    dtype: torch.dtype | None,
    kind: type[KVQCache] | None,
) -> str | None:
    """Why a file is not for this model, dtype, kind of cache or process; None if it is."""
    if kind in CACHES.values() and kind is not CACHES[plan.method]:
        return f"holds a {plan.method} cache, not one for {kind.__name__}; use {CACHES[plan.method].__name__}.load"
    if dtype is not None and facts["dtype"] != (name := str(dtype).removeprefix("torch.")):
        return f"holds a cache in {facts['dtype']}, and the model computes in {name}; load the model with that dtype"
    its, other = plan.base_model, BaseModel.of(config)
    differences = its.differences(other)
    if its.id and other.id and its.id != other.id:
        differences.insert(0, "name")
    if differences:
        return (
            f"was made by {its}, and the model is {other}; they differ in {'; '.join(differences)}. Keys and values "
            "of one model mean nothing to another one"
        )
    shard, (rank, size) = HeadShard.of(config), facts["shard"]
    if (rank, size) != (shard.rank, shard.size):
        return (
            f"holds part {rank} of {size} of the KV heads, and this process has part {shard.rank} of {shard.size}; "
            "each process reads the file that it wrote"
        )
    return None


def _cache_of(
    facts: dict[str, Any],
    plan: KVQPlan,
    tensors: dict[str, torch.Tensor],
    config: PretrainedConfig,
    device: torch.device,
    kernel: str,
) -> KVQCache:
    tensors.pop(KEY_SCALE, None)  # the plan has it
    max_length = facts["max_length"]
    if max_length is not None and not (type(max_length) is int and 0 < max_length < 2**48):
        raise ValueError("its max_length is impossible")
    given = getattr(plan.config, "max_length", None)
    cache = CACHES[plan.method](config, {"plan": plan, "kernel": kernel}, None if given else max_length)
    batch, columns, padding = (facts[name] for name in ("batch", "columns", "padding"))
    cache.padding.rows = [tuple((low, high) for low, high in row) for row in padding]
    _check_padding(cache.padding.rows, batch, columns)
    if len(facts["layers"]) != len(cache.layers):
        raise ValueError(f"it holds {len(facts['layers'])} layers instead of {len(cache.layers)}")
    for i, (layer, values) in enumerate(zip(cache.layers, facts["layers"])):
        prefix = f"layers.{i}."
        own = {name.removeprefix(prefix): tensors.pop(name) for name in [*tensors] if name.startswith(prefix)}
        restore_layer(layer, (values, own), device, batch, columns)
    if tensors:
        raise ValueError(f"nobody knows its tensor {next(iter(tensors))!r:.60}")
    return cache


def _check_padding(rows: list[tuple[tuple[int, int], ...]], batch: int, columns: int) -> None:
    if type(batch) is not int or type(columns) is not int or batch < 1 or columns < 1 or len(rows) not in (0, batch):
        raise ValueError("its number of rows or columns is impossible")
    for row in rows:
        ends = [0, *(end for run in row for end in run), columns]
        if any(type(end) is not int for end in ends) or ends != sorted(ends) or any(low == high for low, high in row):
            raise ValueError("its padding is impossible")


def _checksum(text: str, tensors: dict[str, torch.Tensor]) -> str:
    """sha256 over everything that a file holds: against damage, not against forgery."""
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
