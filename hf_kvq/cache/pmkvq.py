# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""The progressive cache, PM-KVQ."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from transformers import PretrainedConfig

from ..config import PMKVQConfig
from .base import KVQCache, stock_layers
from .padding import Padding
from .progressive import ProgressiveLayer
from .sharding import HeadShard


#: Name of a plan's tensor with λ, float32 [quantized layers, KV heads, head_dim].
KEY_SCALE = "key_scale"


class PMKVQCache(KVQCache):
    """Progressive mixed-precision cache: lossless until its budget binds, then 8, 4, 2 bits in place.

    Args:
        model_config: the model's config.
        config: options, as an object or a dict of them (left as it is).
        max_length: tokens per request, where `config` leaves it open; the default is the model's
            `max_position_embeddings`.

    Raises:
        ValueError: an option is impossible, or goes not with this model.

    Example:

    ```python
    >>> cache = PMKVQCache(model.config, PMKVQConfig(fbit=4, max_length=32768))
    >>> model.generate(**inputs, past_key_values=cache)
    >>> cache.true_bits()
    ```
    """

    config_class = PMKVQConfig

    def __init__(
        self,
        model_config: PretrainedConfig,
        config: PMKVQConfig | dict[str, Any] | None = None,
        max_length: int | None = None,
    ):
        config, tensors = self.options_of(model_config, config, max_length)
        self.config = config
        text_config = model_config.get_text_config(decoder=True)
        max_length = config.max_length or max_length or getattr(text_config, "max_position_embeddings", None)
        if max_length is None and config.budget_bytes is None:
            raise ValueError(
                f"{type(text_config).__name__} does not say how long inputs can be; give max_length or budget_bytes"
            )
        layers, full_attention = stock_layers(text_config, may_be_none=True)
        widths = config.layer_widths(len(layers), full_attention)
        #: λ of all quantized layers and all KV heads of the model, as in the plan.
        self.key_scale = self._key_scales(tensors)
        shard = HeadShard.of(model_config)
        if config.budget_bytes is not None:
            config = dataclasses.replace(config, budget_bytes=config.budget_bytes // shard.size)
        scales = [None] * len(full_attention) if self.key_scale is None else map(shard.pick, self.key_scale)
        padding = Padding()
        for i, pair, scale in zip(full_attention, widths, scales):
            layers[i] = ProgressiveLayer(config, pair, widths, max_length, padding, scale)
        super().__init__(layers, padding, model_config)

    def _key_scales(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor | None:
        """λ, float32 [quantized layers, heads, head_dim], where the options ask for it."""
        if self.config.transform != "lambda":
            return None
        if (scale := tensors.get(KEY_SCALE)) is None:
            raise ValueError(
                "transform='lambda' needs the factors of a plan: give one that `hf-kvq calibrate` made with this "
                "transform, as plan=, or leave the transform out"
            )
        return scale.float()
