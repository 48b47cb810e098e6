# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Attention over a quantized cache, behind one function; the implementation is chosen here."""

from __future__ import annotations

import torch

from . import naive
from .parts import ExactPart, PackedPart, Part


__all__ = ["ExactPart", "PackedPart", "Part", "attend", "byte_orders", "require_kernel"]

_IMPLEMENTATIONS = {"torch": naive.attend}


def byte_orders(device_type: str, key_dim: int) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
    """How the packed codes [tokens, dim] of keys and of values are interleaved on a device, as (dim, count).

    CPUs multiply four bytes at a time along what an inner product sums over: channels for keys, tokens for values.
    GPUs take 16-bit words whose planes are tokens.
    """
    if device_type != "cpu":
        return (-2, 2), (-2, 2)
    return (-1, 4) if key_dim % 4 == 0 else None, (-2, 4)


def require_kernel(kernel: str) -> str:
    """The implementation that `kernel` stands for.

    Raises:
        RuntimeError: a kernel asked for by name cannot run; `"auto"` never raises.
    """
    if kernel == "auto":
        return "torch"
    if kernel not in _IMPLEMENTATIONS:
        raise RuntimeError(
            f"kernel={kernel!r} is not part of this version of hf_kvq, which has {', '.join(_IMPLEMENTATIONS)}; use "
            "kernel='auto' to take the best one that runs here"
        )
    return kernel


def attend(query: torch.Tensor, parts: list[Part], scaling: float, kernel: str = "torch") -> torch.Tensor:
    """softmax(query @ K^T * scaling + mask) @ V; see `hf_kvq.ops.naive.attend` for shapes."""
    return _IMPLEMENTATIONS[kernel](query, parts, scaling)
