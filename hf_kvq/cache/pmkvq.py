# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""The progressive cache, PM-KVQ."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from ..config import PMKVQConfig
from .base import KVQCache, stock_layers
from .padding import Padding
from .progressive import ProgressiveLayer


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
        self.config = config = self.options_of(model_config, config, max_length)
        model_config = model_config.get_text_config(decoder=True)
        max_length = config.max_length or max_length or getattr(model_config, "max_position_embeddings", None)
        if max_length is None and config.budget_bytes is None:
            raise ValueError(
                f"{type(model_config).__name__} does not say how long inputs can be; give max_length or budget_bytes"
            )
        layers, full_attention = stock_layers(model_config)
        fbits = config.layer_fbits(len(layers), full_attention)
        padding = Padding()
        for i, fbit in zip(full_attention, fbits):
            layers[i] = ProgressiveLayer(config, fbit, fbits, max_length, padding)
        super().__init__(layers, padding)
