# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""What a layer of transformers' own holds, as plain values and tensors: its attributes, whatever they are called."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from .checks import DTYPES, require


# What a layer sets when the first tokens come.
_SET_LATE = ("device", "dtype", "indexer_device", "indexer_dtype")


def stock_state(layer: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """See `hf_kvq.cache.state.layer_state`."""
    tensors: dict[str, torch.Tensor] = {}
    return {name: _described(layer, name, value, tensors) for name, value in vars(layer).items()}, tensors


def _described(layer: Any, name: str, value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """A value as JSON has it; tensors go into `tensors`."""
    if isinstance(value, torch.Tensor):
        tensors[name] = value.detach().clone(memory_format=torch.contiguous_format)
        return {"tensor": name}
    if isinstance(value, dict):
        return {"items": [[key, _described(layer, f"{name}.{key}", item, tensors)] for key, item in value.items()]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": None}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(
        f"a {type(layer).__name__} holds a {type(value).__name__}, which can be neither saved nor moved; fill the "
        "cache anew instead"
    )


def restore_stock(
    layer: Any,
    facts: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    device: torch.device,
    batch: int,
    columns: int,
) -> None:
    """See `hf_kvq.cache.state.restore_layer`."""
    fresh, kind = vars(layer), type(layer).__name__
    values = {name: _restored(value, tensors, device) for name, value in facts.items()}
    for name, value in values.items():
        require(name in fresh or name in _SET_LATE, f"a {kind} has no {name!r:.40}")
        require(_may_become(name, fresh.get(name), value), f"{name} of a {kind} cannot be {value!r:.40}")
    fresh.update(values)
    for name in ("conv_states", "recurrent_states"):
        held = {key: x is not None for key, x in fresh.get(name, {}).items()}
        require(fresh.get(f"is_{name}_initialized", {}) == held, f"{name} of a {kind} are not what it says")
    if isinstance(layer, CacheLayerMixin):
        _check_stock_tokens(layer, kind, batch)
    if "cumulative_length" in fresh:
        length = layer.get_seq_length()
        require(length == columns, f"a {kind} holds {length} tokens instead of {columns}")


def _may_become(name: str, old: Any, new: Any) -> bool:
    """Whether an attribute of an empty layer may get this value."""
    if name in _SET_LATE:
        return new is None or isinstance(new, (torch.device, torch.dtype))
    if isinstance(old, dict):
        return isinstance(new, dict) and old.keys() == new.keys() and all(_may_become("", old[k], new[k]) for k in old)
    if isinstance(old, torch.Tensor):
        return isinstance(new, torch.Tensor) and new.shape == old.shape
    if old is None:
        return new is None or isinstance(new, torch.Tensor) or name == "" and type(new) is int
    # Numbers are options, but for the one that counts tokens.
    return type(old) is type(new) and (old == new or type(old) is bool or name == "cumulative_length")


def _check_stock_tokens(layer: Any, kind: str, batch: int) -> None:
    keys, values = layer.keys, layer.values
    held = [x is not None for x in (keys, values)]
    require(held == [layer.is_initialized] * 2, f"keys and values of a {kind} are not what it says")
    if keys is not None and keys.numel():
        fits = keys.ndim == values.ndim == 4 and keys.shape[:3] == values.shape[:3] and keys.dtype == values.dtype
        require(fits and keys.shape[0] == batch, f"keys and values of a {kind} are impossible")


def _restored(value: Any, tensors: dict[str, torch.Tensor], device: torch.device) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "tensor":
        return tensors[inner].to(device)
    if kind == "items":
        return {key: _restored(item, tensors, device) for key, item in inner}
    return device if kind == "device" else DTYPES[inner]
