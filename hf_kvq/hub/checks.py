# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Whether the options and the tensors of a plan go with each other, and with the model that it is for."""

from __future__ import annotations

import torch

from ..cache.pmkvq import KEY_SCALE
from ..config import MixKVQConfig, Options, PMKVQConfig
from .errors import PlanError
from .facts import BaseModel


def check_config(config: Options, base: BaseModel) -> None:
    """Lists of the options have to be as long as the model has layers.

    Raises:
        PlanError: one of them is not, or the model's own facts contradict each other.
    """
    if list(base.quantized_layers) != sorted({i for i in base.quantized_layers if i < base.layers}):
        raise PlanError(f"base_model.quantized_layers must be ascending indices below {base.layers}")
    try:
        if isinstance(config, PMKVQConfig):
            config.layer_widths(base.layers, base.quantized_layers)
        if isinstance(config, MixKVQConfig):
            for i in base.quantized_layers:
                for tau in config.layer_tau(i, base.layers) or ():
                    if isinstance(tau, tuple) and base.kv_heads and len(tau) != base.kv_heads:
                        raise ValueError(f"a threshold lists {len(tau)} KV heads of {base.kv_heads}")
    except ValueError as error:
        raise PlanError(f"config: {error}") from error


def check_tensors(config: Options, base: BaseModel, tensors: dict[str, torch.Tensor]) -> None:
    """A plan has the factors of the keys if, and only if, its options ask for them; other tensors are free.

    Raises:
        PlanError: they are missing, without use, or of a wrong dtype or shape, or not positive.
    """
    is_wanted, scale = getattr(config, "transform", None) == "lambda", tensors.get(KEY_SCALE)
    if scale is None:
        if is_wanted:
            raise PlanError(f"transform='lambda' needs the tensor {KEY_SCALE!r} with the factors, and there is none")
        return
    if not is_wanted:
        raise PlanError(f"tensor {KEY_SCALE!r} is of use only with transform='lambda'; drop it, or choose that")
    wanted = (len(base.quantized_layers), base.kv_heads, base.head_dim)
    # A model's config does not always say how many heads there are, or how wide they are.
    agrees = all(size in (None, found) for size, found in zip(wanted, scale.shape))
    if scale.dtype != torch.float32 or scale.ndim != 3 or scale.numel() == 0 or not agrees:
        shape = ", ".join("any" if size is None else str(size) for size in wanted)
        raise PlanError(
            f"tensor {KEY_SCALE!r} must be torch.float32 [{shape}] (quantized layers, KV heads, head_dim); got "
            f"{scale.dtype} {list(scale.shape)}"
        )
    if not bool((scale > 0).all()):
        raise PlanError(f"tensor {KEY_SCALE!r} must hold positive factors; the least is {scale.min().item():g}")
