# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Key smoothing: large key channels are divided by a factor before quantization, and the query multiplied by it."""

from __future__ import annotations

import torch


class ChannelScale:
    """Division of every channel by its own positive factor λ (PM-KVQ, section 3.3; after SmoothQuant).

    Where a group runs along the channels of a token, large channels no longer widen the range of the small ones.

    Args:
        scale: λ, float32 [heads, dim].
    """

    def __init__(self, scale: torch.Tensor):
        self.scale = scale[:, None]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., heads, tokens, dim] / λ, in float32."""
        return x.float() / self.scale

    def inverse(self, x: torch.Tensor) -> torch.Tensor:
        """[..., heads, tokens, dim] * λ, in float32."""
        return x.float() * self.scale

    def dual(self, query: torch.Tensor) -> torch.Tensor:
        """The query [rows, query heads, queries, dim] whose products with transformed keys are those with plain keys.

        Query heads that share a KV head are neighbours.
        """
        scale = self.scale.repeat_interleave(query.shape[1] // self.scale.shape[0], dim=0)
        return query * scale.to(torch.promote_types(query.dtype, torch.float32))
