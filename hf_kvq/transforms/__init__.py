# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Transforms: what happens to K or V before the codec, and is undone on the query or the output."""

from __future__ import annotations

from typing import Protocol

import torch

from .hadamard import HadamardRotation
from .scaling import ChannelScale


__all__ = ["ChannelScale", "HadamardRotation", "Transform"]


class Transform(Protocol):
    """An invertible linear map of the channels of each head ([..., heads, tokens, head_dim], computed in float32)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor: ...

    def inverse(self, x: torch.Tensor) -> torch.Tensor: ...

    def dual(self, query: torch.Tensor) -> torch.Tensor:
        """What becomes of queries where keys are transformed: inner products stay as they were."""
