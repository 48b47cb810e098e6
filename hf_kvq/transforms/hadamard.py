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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate `x` ([..., dim], any float dtype) in float32.

        By sums and differences, not by a matrix product: that may round differently from one number of tokens to the
        next, and codes must not depend on how tokens were cut into calls.
        """
        x = x.float().unflatten(-1, (-1, self.block))
        width = 1
        while width < self.block:
            first, second = x.unflatten(-1, (-1, 2, width)).unbind(-2)
            x = torch.stack([first + second, first - second], dim=-2).flatten(-3)
            width *= 2
        return x.flatten(-2) / math.sqrt(self.block)

    inverse = dual = forward
