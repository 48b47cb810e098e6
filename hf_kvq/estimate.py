# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""What a model's cache costs, from its config alone: shapes of its layers, and bytes by the cache's own formula."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DynamicCache,
    PretrainedConfig,
    PreTrainedModel,
)

from .cache.base import stock_layers, tensors_of
from .cache.layout import LayerLayout, LayerShape
from .cache.mixkvq import growing_layer
from .cache.padding import Padding
from .config import KIVIConfig, MixKVQConfig, PMKVQConfig
from .registration import cache_argument


@dataclass(frozen=True)
class ExactLayer:
    """A layer that is not quantized: what it holds per token, for at most `limit` tokens, and what it holds anyway.

    Args:
        kind: class of the stock cache layer.
        token_bytes: bytes of one token.
        state_bytes: bytes that do not depend on the number of tokens.
        limit: tokens after which it grows no more; None if it always grows.
    """

    kind: str
    token_bytes: int
    state_bytes: int = 0
    limit: int | None = None

    def bytes_for(self, length: int) -> int:
        """Bytes that this layer of one request holds after `length` tokens."""
        return self.state_bytes + self.token_bytes * (length if self.limit is None else min(length, self.limit))


def model_shapes(config: PretrainedConfig, dtype: torch.dtype | None = None) -> list[LayerShape | ExactLayer]:
    """What every layer of a model caches; `LayerShape` for those that are quantized.

    Configs name the same thing in many ways, so the model itself is asked: it runs on torch's "meta" device, where
    tensors have shapes but no data. No weights are read, none are allocated.

    Args:
        config: the model's config.
        dtype: dtype of the model; the default is the config's, else bfloat16.

    Raises:
        ValueError: the model has no layer that could be quantized, or it cannot run without weights.
    """
    if config.is_encoder_decoder:
        raise ValueError(f"{type(config).__name__} describes an encoder-decoder model; only decoders can be estimated")
    quantized = set(stock_layers(config.get_text_config(decoder=True))[1])
    try:
        model = _without_weights(config, dtype or config_dtype(config))
        one, two = (_filled_layers(model, tokens) for tokens in (1, 2))
        return [
            LayerShape(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3], layer.keys.dtype)
            if i in quantized
            else _exact_layer(layer, more)
            for i, (layer, more) in enumerate(zip(one, two))
        ]
    except Exception as error:
        # Any model code may run here, and fail in its own way.
        raise ValueError(f"cannot run {type(config).__name__} without weights: {error}") from error


def config_dtype(config: PretrainedConfig) -> torch.dtype:
    """The dtype that a config names, else bfloat16."""
    return config.get_text_config(decoder=True).dtype or config.dtype or torch.bfloat16


def weight_bytes(config: PretrainedConfig, dtype: torch.dtype | None = None) -> int:
    """Bytes of a decoder's weights in `dtype`, by default the config's, as if they were not quantized.

    Raises:
        ValueError: transformers has no such model, or cannot build it.
    """
    try:
        model = _without_weights(config, dtype or config_dtype(config))
    except Exception as error:
        # As above.
        raise ValueError(f"cannot build {type(config).__name__}: {error}") from error
    return sum(x.nbytes for x in model.parameters())


def cache_bytes(
    shapes: Sequence[LayerShape | ExactLayer],
    length: int,
    bits: int,
    config: PMKVQConfig | None = None,
    batch: int = 1,
) -> int:
    """Bytes that a `PMKVQCache` holds for `batch` requests of `length` tokens with the final width `bits`.

    Args:
        shapes: the model's layers, from `model_shapes`.
        length: tokens per request; also what the cache's budget is made for.
        bits: final width of every layer, instead of `config.fbit`.
        config: the cache's other options.
        batch: number of requests.
    """
    return method_bytes(shapes, length, dataclasses.replace(config or PMKVQConfig(), fbit=bits), batch)


def method_bytes(
    shapes: Sequence[LayerShape | ExactLayer],
    length: int,
    config: PMKVQConfig | MixKVQConfig | KIVIConfig,
    batch: int = 1,
) -> int:
    """Bytes that the cache with these options holds for `batch` requests of `length` tokens.

    A `PMKVQCache` gets a budget for that length. The others grow page by page, with a sixteenth in reserve; where
    channels have tiers, it is the most that they can take, a little more than they do.

    Args:
        shapes: the model's layers, from `model_shapes`.
        length: tokens per request.
        config: options of the cache; `max_length` and `budget_bytes` do not count.
        batch: number of requests.

    Raises:
        ValueError: the bytes depend on the keys, as the options are thresholds.
    """
    if isinstance(config, PMKVQConfig):
        widths = config.layer_widths(len(shapes))

        def layer_bytes(i: int, shape: LayerShape) -> int:
            return LayerLayout.of(config, shape, floors=widths[i]).bytes_for(length, min(widths[i]))
    else:

        def layer_bytes(i: int, shape: LayerShape) -> int:
            return growing_layer(config, i, len(shapes), Padding()).bytes_for(shape, length)

    return batch * sum(
        shape.bytes_for(length) if isinstance(shape, ExactLayer) else layer_bytes(i, shape)
        for i, shape in enumerate(shapes)
    )


def ordinary_bytes(shapes: Sequence[LayerShape | ExactLayer], length: int, batch: int = 1) -> int:
    """Bytes that transformers' default cache holds for `batch` requests of `length` tokens."""
    return batch * sum(
        layer.bytes_for(length) if isinstance(layer, ExactLayer) else layer.token_bytes * length for layer in shapes
    )


def _without_weights(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    config = copy.deepcopy(config)
    with torch.device("meta"):
        try:
            model = AutoModelForCausalLM.from_config(config.get_text_config(decoder=True), dtype=dtype)
        except ValueError:
            model = AutoModelForImageTextToText.from_config(config, dtype=dtype)
    # Models that know a padding token look for it among the input ids, which have no data here.
    model.config.pad_token_id = None
    return model


@torch.no_grad()
def _filled_layers(model: PreTrainedModel, tokens: int) -> list[Any]:
    """The layers of an ordinary cache after a prompt of `tokens` tokens."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    input_ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    model.eval()(input_ids=input_ids, use_cache=True, **{cache_argument(model): cache})
    return cache.layers


def _exact_layer(one: Any, two: Any) -> ExactLayer:
    """The layer that holds `one` after one token and `two` after two."""
    first, second = (sum(x.nbytes for x in tensors_of(vars(layer))) for layer in (one, two))
    return ExactLayer(type(one).__name__, second - first, 2 * first - second, getattr(one, "sliding_window", None))
