# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Attention over a quantized cache, behind one function; the implementation is chosen here."""

from __future__ import annotations

import torch
from transformers.utils import logging

import hf_kvq_kernels

from . import fused, naive, selfcheck
from .packing import encode_blocks, encode_tiers, shrink_pages
from .parts import ExactPart, PackedPart, Part


__all__ = [
    "ExactPart",
    "PackedPart",
    "Part",
    "attend",
    "byte_orders",
    "encode_blocks",
    "encode_tiers",
    "require_kernel",
    "shrink_pages",
    "why_plain",
]

logger = logging.get_logger(__name__)

# The kind of device that kernels of a name run on.
_DEVICES = {"cpu": "cpu", "triton": "cuda"}


def byte_orders(device_type: str, key_dim: int) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
    """How the packed codes [tokens, dim] of keys and of values are interleaved on a device, as (dim, count).

    CPUs multiply four bytes at a time along what an inner product sums over: channels for keys, tokens for values.
    GPUs take 16-bit words whose planes are tokens.
    """
    if device_type != "cpu":
        return (-2, 2), (-2, 2)
    return (-1, 4) if key_dim % 4 == 0 else None, (-2, 4)


def require_kernel(kernel: str) -> str:
    """`kernel`, unless it is the name of kernels that do not run here at all.

    Raises:
        RuntimeError: it is; `"auto"` and `"torch"` never raise.
    """
    if kernel in _DEVICES:
        device = _DEVICES[kernel]
        if device != "cpu" and not torch.cuda.is_available():
            raise RuntimeError(_refusal(kernel, "there is no GPU"))
        reason = hf_kvq_kernels.why_not(torch.empty(1, 1, 1, 64, device=device), None)
        if reason is not None:
            raise RuntimeError(_refusal(kernel, reason))
    return kernel


def attend(
    query: torch.Tensor,
    parts: list[Part],
    scaling: float,
    kernel: str = "auto",
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(query @ K^T * scaling + mask) @ V; see `hf_kvq.ops.naive.attend` for the other arguments.

    Args:
        kernel: "torch" for plain torch, "cpu" or "triton" for fused kernels, "auto" for fused kernels where they run
            and plain torch elsewhere.

    Raises:
        RuntimeError: the kernels asked for by name cannot do this.
    """
    if kernel == "torch":
        return naive.attend(query, parts, scaling, softcap, sinks)
    reason = why_plain(query, parts, kernel)
    if reason is None:
        return fused.attend(query, parts, scaling, hf_kvq_kernels.attend, softcap, sinks)
    if kernel != "auto":
        raise RuntimeError(_refusal(kernel, reason))
    logger.warning_once(f"attention over the quantized cache runs in plain torch, which is slower: {reason}")
    return naive.attend(query, parts, scaling, softcap, sinks)


def why_plain(query: torch.Tensor, parts: list[Part], kernel: str) -> str | None:
    """Why fused kernels, those called `kernel` or any, cannot attend to these parts; None if they can."""
    if kernel == "torch":
        return "kernel='torch' asks for it"
    if kernel != "auto" and query.device.type != _DEVICES[kernel]:
        return f"the cache is on {query.device.type}"
    dtypes = {(part.keys.dtype, part.values.dtype) for part in parts}
    if any(keys != values or keys not in hf_kvq_kernels.DTYPES for keys, values in dtypes):
        return f"the cache holds keys and values of {', '.join(f'{k} and {v}' for k, v in dtypes)}"
    if torch.is_grad_enabled() and any(
        x.requires_grad for part in parts if isinstance(part, ExactPart) for x in (part.keys, part.values)
    ):
        return "fused kernels have no gradients"
    packed = next((part for part in parts if isinstance(part, PackedPart)), None)
    layout = None
    if packed is not None:
        orders = byte_orders(query.device.type, packed.keys.dim)
        if (packed.keys.byte_order, packed.values.byte_order) != orders:
            return "its codes are laid out for another kind of device"
        layout = fused.page_layout(packed.keys, packed.values, packed.bits)
    reason = hf_kvq_kernels.why_not(query, layout)
    if reason is None and query.device.type != "cpu":
        wrong = selfcheck.failure(query.device, hf_kvq_kernels.attend, byte_orders(query.device.type, 64))
        reason = wrong and f"the fused kernels cannot be used: {wrong}"
    return reason


def _refusal(kernel: str, reason: str) -> str:
    return f"kernel={kernel!r} cannot run: {reason}. Use kernel='auto' to take the best one that can"
