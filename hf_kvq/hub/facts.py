# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Which model a plan was made for, and whether another one is alike."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from ..cache.base import stock_layers


_REPO_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)
# What has to agree before a plan is used.
_SHAPE = ("model_type", "layers", "quantized_layers", "kv_heads", "head_dim")


@dataclass(frozen=True)
class BaseModel:
    """The model that a plan was made for.

    Args:
        model_type: of its text decoder, as in its config.
        layers: all layers of the decoder.
        quantized_layers: indices of those with full attention.
        kv_heads, head_dim: as in its config; None where that says nothing, or not one number for all layers.
        id: its repository on the Hub; None if it was a local folder.
        revision: commit of the repository.
        architecture: class of the model.
    """

    model_type: str
    layers: int
    quantized_layers: tuple[int, ...]
    kv_heads: int | None = None
    head_dim: int | None = None
    id: str | None = None
    revision: str | None = None
    architecture: str | None = None

    @classmethod
    def of(cls, config: PretrainedConfig) -> BaseModel:
        """Look at a model's config; nothing is read or run.

        Raises:
            ValueError: the model has nothing to quantize.
        """
        text = config.get_text_config(decoder=True)
        layers, quantized = stock_layers(text)
        heads, hidden = _number(text, "num_attention_heads"), _number(text, "hidden_size")
        head_dim = _number(text, "head_dim") or (hidden // heads if heads and hidden else None)
        name = getattr(config, "_name_or_path", None) or ""
        is_hub = bool(_REPO_ID.fullmatch(name)) and not Path(name).exists()
        return cls(
            model_type=text.model_type,
            layers=len(layers),
            quantized_layers=tuple(quantized),
            kv_heads=_number(text, "num_key_value_heads") or heads,
            head_dim=head_dim,
            id=name if is_hub else None,
            revision=getattr(config, "_commit_hash", None) if is_hub else None,
            architecture=next(iter(getattr(config, "architectures", None) or []), None),
        )

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "quantized_layers": list(self.quantized_layers)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> BaseModel:
        return cls(**{**values, "quantized_layers": tuple(values["quantized_layers"])})

    def differences(self, other: BaseModel) -> list[str]:
        """Such as "layers: 30 against 24"; facts that either side does not know are not compared."""
        pairs = [(name, getattr(self, name), getattr(other, name)) for name in _SHAPE]
        return [
            f"{name}: {_brief(mine)} against {_brief(its)}"
            for name, mine, its in pairs
            if None not in (mine, its) and mine != its
        ]

    def __str__(self) -> str:
        where = f" at {self.revision[:12]}" if self.id and self.revision else ""
        return f"{self.id or 'a local model'}{where} ({self.architecture or self.model_type}, {self.layers} layers)"


def _number(config: PretrainedConfig, name: str) -> int | None:
    """An option of a config; None if it has no such option, or not one for all layers."""
    try:
        value = getattr(config, name, None)
    except RuntimeError:  # layers differ in it
        return None
    return value if type(value) is int and value > 0 else None


def _brief(value: Any) -> str:
    if not isinstance(value, tuple):
        return str(value)
    listed = ", ".join(map(str, value[:6]))
    return f"{len(value)} ({listed}{', ...' if len(value) > 6 else ''})"
