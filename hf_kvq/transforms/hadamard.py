# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Hadamard rotation: spreads outliers over the channels of a group (QuaRot, RotateKV)."""

from __future__ import annotations

import math

import torch


class HadamardRotation:
    """Orthonormal, symmetric rotation of the last dimension, so it is its own inverse and its own dual.

    A head_dim that is no power of two is rotated in blocks: 96 = 3 blocks of 32, 80 = 5 blocks of 16.
    """

    def __init__(self, dim: int):
        self.block = dim & -dim
        self._matrices: dict[torch.device, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate `x` ([..., dim], any float dtype) in float32."""
        blocks = x.float().unflatten(-1, (-1, self.block))
        return (blocks @ self._matrix(x.device)).flatten(-2)

    inverse = forward

    def _matrix(self, device: torch.device) -> torch.Tensor:
        if device not in self._matrices:
            matrix = torch.ones(1, 1)
            while matrix.shape[0] < self.block:
                matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
            self._matrices[device] = (matrix / math.sqrt(self.block)).to(device)
        return self._matrices[device]
