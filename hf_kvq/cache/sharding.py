# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Tensor parallelism: which of a model's KV heads this process caches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from transformers import PretrainedConfig


T = TypeVar("T", tuple, torch.Tensor)

# Projections that make keys, alone or together with others; transformers splits KV heads where one of them is split.
_KEY_PROJECTIONS = ("k_proj", "qkv_proj", "query_key_value")


@dataclass(frozen=True)
class HeadShard:
    """The `rank`-th of `size` equal parts of all KV heads."""

    rank: int = 0
    size: int = 1

    @classmethod
    def of(cls, model_config: PretrainedConfig) -> HeadShard:
        """The part of a model that `from_pretrained` split by a `tp_plan`; all heads of any other model."""
        distributed = getattr(model_config, "distributed_config", None)
        size = getattr(distributed, "tp_size", None) or 1
        if size == 1 or not torch.distributed.is_initialized():
            return cls()
        plan = _plan(model_config, distributed)
        if not any(n.rpartition(".")[2] in _KEY_PROJECTIONS and style == "colwise" for n, style in plan.items()):
            return cls()
        # Tensor parallelism is the innermost dimension of transformers' device meshes.
        return cls(torch.distributed.get_rank() % size, size)

    def pick(self, heads: T) -> T:
        """The part of something that has an entry per KV head of the model, a tuple or a tensor's first dimension.

        Raises:
            ValueError: the heads cannot be shared out evenly.
        """
        if len(heads) % self.size:
            raise ValueError(f"{len(heads)} KV heads cannot be shared out to {self.size} processes")
        count = len(heads) // self.size
        return heads[self.rank * count : (self.rank + 1) * count]


def _plan(model_config: PretrainedConfig, distributed: Any) -> dict[str, str]:
    """How `from_pretrained` split each kind of module."""
    given = getattr(distributed, "tp_plan", None)
    if isinstance(given, dict):
        return given
    return getattr(model_config.get_text_config(decoder=True), "base_model_tp_plan", None) or {}
