# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Checks of what comes from outside."""

from __future__ import annotations

import torch


#: Dtypes of keys and values by name.
DTYPES = {str(x).removeprefix("torch."): x for x in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}


def require(condition: bool, message: str) -> None:
    """Raise `ValueError` unless the condition holds."""
    if not condition:
        raise ValueError(message)


def expect(tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], name: str) -> None:
    """Raise `ValueError` unless a tensor is of this dtype and shape."""
    require(
        tensor.dtype == dtype and tuple(tensor.shape) == shape,
        f"{name} is {tensor.dtype} {list(tensor.shape)} instead of {dtype} {list(shape)}",
    )
