# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""The query-aware mixed-precision cache, MixKVQ, and KIVI, which it builds on."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers import PretrainedConfig

from ..codecs.tiered import TIER_BITS
from ..config import BOUNDARY_FBIT, KIVIConfig, MixKVQConfig, is_boundary
from .base import KVQCache, stock_layers
from .fixed import FixedLayer
from .padding import Padding
from .sharding import HeadShard
from .tiered import TieredLayer


class NominalBits(NamedTuple):
    """Bits per element of the packed body as papers count them: without (min, max), lists, sinks and residual."""

    keys: float
    values: float
    mean: float


class MixKVQCache(KVQCache):
    """Key channels at BF16, UINT4 or UINT2, ranked by query magnitude x quantization difficulty; values at 2 bits.

    Args:
        model_config: the model's config.
        config: options, as an object or a dict of them (left as it is).
        max_length: not used; this cache grows with its tokens.

    Raises:
        ValueError: an option is impossible, or goes not with this model.
    """

    config_class = MixKVQConfig

    def __init__(
        self,
        model_config: PretrainedConfig,
        config: MixKVQConfig | dict[str, Any] | None = None,
        max_length: int | None = None,
    ):
        config, _ = self.options_of(model_config, config)
        self.config = config
        layers, full_attention = stock_layers(model_config.get_text_config(decoder=True), may_be_none=True)
        padding, shard = Padding(), HeadShard.of(model_config)
        for i in full_attention:
            tau = config.layer_tau(i, len(layers))
            mine = tau and tuple(shard.pick(x) if isinstance(x, tuple) else x for x in tau)
            layers[i] = growing_layer(config, i, len(layers), padding, mine)
        super().__init__(layers, padding, model_config)

    def nominal_bits(self) -> NominalBits:
        """Bits as the paper counts them (2.3-3.4 there), to compare with it; NaN while no page is packed."""
        tiered = [layer for layer in self.quantized_layers if isinstance(layer, TieredLayer)]
        counts = sum((layer.tier_counts() for layer in tiered), torch.zeros(3, dtype=torch.int64))
        keys = (counts.double() @ torch.tensor(TIER_BITS).double() / counts.sum()).item()
        return NominalBits(keys, float(self.config.value_bits), (keys + self.config.value_bits) / 2)


class KIVICache(KVQCache):
    """Keys per channel, values per token, at one width.

    Args:
        model_config: the model's config.
        config: options, as an object or a dict of them (left as it is).
        max_length: not used; this cache grows with its tokens.
    """

    config_class = KIVIConfig

    def __init__(
        self,
        model_config: PretrainedConfig,
        config: KIVIConfig | dict[str, Any] | None = None,
        max_length: int | None = None,
    ):
        config, _ = self.options_of(model_config, config)
        self.config = config
        layers, full_attention = stock_layers(model_config.get_text_config(decoder=True), may_be_none=True)
        padding = Padding()
        for i in full_attention:
            layers[i] = growing_layer(config, i, len(layers), padding)
        super().__init__(layers, padding, model_config)


def growing_layer(
    config: KIVIConfig | MixKVQConfig, layer: int, num_layers: int, padding: Padding, tau: tuple | None = None
) -> FixedLayer:
    """One layer of `num_layers` as `config` has it; `tau` are this layer's thresholds."""
    is_edge = is_boundary(layer, num_layers, config.boundary_layers)
    if isinstance(config, MixKVQConfig) and not is_edge:
        return TieredLayer(config, tau, padding)
    bits = BOUNDARY_FBIT if is_edge else config.bits
    return FixedLayer(bits, bits, config.residual, config.group_size, config.sink_tokens, config.kernel, padding)
