# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""The caches that are compared: ours, and transformers' own run as they are."""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel, QuantizedCache, cache_utils

from ..cache import KVHandle, KVQCache
from ..cache.base import stock_layers
from ..hub import KVQPlan
from ..presets import resolve
from ..registration import CACHES, NAMES
from .simulated import SIMULATED


#: transformers' quantized caches by backend, and whether they are there: two need a package, one a new transformers.
STOCK = {
    "quanto": importlib.util.find_spec("optimum") is not None,
    "hqq": importlib.util.find_spec("hqq") is not None,
    "fp8": hasattr(cache_utils, "Fp8QuantizedLayer"),
}

EXACT = "exact"


@dataclass(frozen=True)
class Method:
    """A cache to compare.

    Args:
        cache: a cache implementation of hf_kvq or a preset, "quanto", "hqq" or "fp8" for transformers' own, or a name
            of `hf_kvq.evaluation.simulated`.
        options: its options.
        label: what reports call it; the default says the cache and its options.
        folder: what the option `plan` is relative to. Reports do not tell.
    """

    cache: str
    options: dict[str, Any] = field(default_factory=dict)
    label: str = ""
    folder: Path | None = None

    def __post_init__(self):
        known = [*NAMES, *STOCK, *SIMULATED]
        if self.cache not in known:
            near = difflib.get_close_matches(self.cache, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            raise ValueError(f"unknown method {self.cache!r}; {hint}")
        if not self.label:
            given = ", ".join(f"{key}={_brief(value)}" for key, value in self.options.items())
            name = f"{self.cache} (simulated)" if self.cache in SIMULATED else self.cache
            object.__setattr__(self, "label", f"{name}: {given}" if given else name)

    @property
    def is_available(self) -> bool:
        """Whether what it needs is installed."""
        return STOCK.get(self.cache, True)

    @property
    def plan(self) -> str | Path | None:
        """Where its plan is, if it has one."""
        plan = self.options.get("plan")
        return plan if plan is None or self.folder is None else self.folder / plan

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON. Of a plan it has a hash as well, as another one may be in its place later."""
        held = {} if self.plan is None else {"plan": _fingerprint(KVQPlan.from_pretrained(self.plan))}
        return {"label": self.label, "cache": self.cache, "options": self.options, **held}

    def build(self, model: PreTrainedModel, max_length: int) -> Cache:
        """An empty cache for requests of `max_length` tokens.

        Keys and values of a float32 model are rounded to bfloat16 on their way in, as bytes are counted.

        Raises:
            ValueError, TypeError, ImportError, RuntimeError: it cannot be made with these options, or not here.
        """
        config = model.config.get_text_config(decoder=True)
        placed = {} if self.plan is None else {"plan": self.plan}
        name, options = resolve(self.cache, {**self.options, **placed})
        if cache_class := {**CACHES, **SIMULATED}.get(name):
            return _rounding(cache_class, model)(model.config, options, max_length=max_length)
        return _rounding(QuantizedCache, model)(self.cache, config, **self.options)


def exact_cache(model: PreTrainedModel) -> Cache:
    """The ordinary cache that all others are compared with; its keys and values are rounded as theirs."""
    return _rounding(DynamicCache, model)(config=model.config.get_text_config(decoder=True))


def parse_methods(text: str) -> list[Method]:
    """Methods from a list such as "pmkvq:fbit=2,window=64,mixkvq,kivi"; options follow a colon.

    Raises:
        ValueError: a method is unknown, or an option has no value.
    """
    found: list[tuple[str, dict[str, Any]]] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, colon, option = part.partition(":")
        if not colon and "=" in part:
            if not found:
                raise ValueError(f"{part!r} is an option without a method; write it as METHOD:{part}")
            option = part
        else:
            found.append((name.strip(), {}))
        if option:
            key, equals, value = option.partition("=")
            if not equals:
                raise ValueError(f"expected METHOD:option=value, got {part!r}")
            found[-1][1][key.strip()] = _value(value.strip())
    return [Method(name, options) for name, options in found]


def load_methods(path: str | Path) -> list[Method]:
    """Methods from a JSON file: a list of {"cache": ..., "options": {...}, "label": ...}.

    Raises:
        ValueError: the file holds something else, or an unknown method.
        OSError: there is no such file.
    """
    try:
        entries = json.loads(Path(path).read_text(encoding="utf-8"))
        return [Method(**entry) for entry in entries]
    except (TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} must hold a list of {{'cache': ..., 'options': {{...}}}}: {error}") from error


def check_labels(methods: Iterable[Method]) -> None:
    """Raise `ValueError` where two methods have one label."""
    labels = [method.label for method in methods]
    if twice := sorted({label for label in labels if labels.count(label) > 1 or label == EXACT}):
        raise ValueError(f"every method needs a label of its own; {twice[0]!r} is taken")


def held_bytes(cache: Cache, config: Any) -> int:
    """Bytes of all storages behind the full-attention layers of a cache, ours or transformers' own."""
    if isinstance(cache, KVQCache):
        return sum(layer.nbytes() for layer in cache.quantized_layers)
    _, indices = stock_layers(config)
    return sum(_storages(cache.layers[i]) for i in indices)


def token_numbers(cache: Cache, config: Any) -> int:
    """Numbers that a token stands for in the full-attention layers of a filled ordinary cache: keys and values."""
    layers = [cache.layers[i] for i in stock_layers(config)[1]]
    return sum(x.shape[1] * x.shape[3] for layer in layers for x in (layer.keys, layer.values))


def _storages(layer: Any) -> int:
    """Bytes of a stock layer: plain tensors by their storages, those of quanto by the tensors they consist of."""
    held, todo = {}, [vars(layer)]
    while todo:
        x = todo.pop()
        if isinstance(x, torch.Tensor) and hasattr(x, "__tensor_flatten__"):
            todo += [getattr(x, name) for name in x.__tensor_flatten__()[0]]
        elif isinstance(x, torch.Tensor):
            held[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        elif isinstance(x, dict):
            todo += list(x.values())
        elif isinstance(x, (list, tuple)):
            todo += list(x)
    return sum(held.values())


def _rounding(cache_class: type[Cache], model: PreTrainedModel) -> type[Cache]:
    """The class, storing keys and values as bfloat16 where the model computes in float32."""
    return type(cache_class.__name__, (_Rounding, cache_class), {}) if model.dtype == torch.float32 else cache_class


class _Rounding:
    """Mixed into a cache class: keys and values come in as a bfloat16 model's would, and go out as they came."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any):
        states = super().update(key_states.bfloat16(), value_states.bfloat16(), *args, **kwargs)
        return tuple(x if isinstance(x, KVHandle) else x.to(key_states.dtype) for x in states)


def _fingerprint(plan: KVQPlan) -> str:
    """sha256 of a plan's files."""
    return hashlib.sha256(b"".join(data for _, data in sorted(plan.files().items()))).hexdigest()


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _brief(value: Any) -> str:
    text = json.dumps(value, default=str) if not isinstance(value, str) else value
    return text if len(text) <= 24 else f"{text[:21]}..."
