# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""What all quantized caches share: layers of one model, padding, byte accounting."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from transformers import Cache, DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer

from ..config import Options
from .layer import KVQLayer
from .padding import Padding


class KVQCache(Cache):
    """A `transformers.Cache` whose full-attention layers are quantized; all others are the stock ones.

    A subclass takes (model_config, config, max_length) and names its options in `config_class`.

    Args:
        layers: all layers of the model; the quantized ones share `padding`.
        padding: the padding columns of the batch.
    """

    config_class: type[Options]

    def __init__(self, layers: list[Any], padding: Padding):
        super().__init__(layers=layers)
        self.padding = padding
        self.quantized_layers = [layer for layer in layers if isinstance(layer, KVQLayer)]

    def __repr__(self) -> str:
        widths = Counter(self.layer_bits())
        layers = ", ".join(f"{n} at {bits} bits" for bits, n in sorted(widths.items(), reverse=True))
        rows = len(self.quantized_layers[0].states)
        if not rows:
            return f"{type(self).__name__}(empty, {len(self.layers)} layers)"
        return (
            f"{type(self).__name__}({rows} x {self.get_seq_length()} tokens, {len(self.layers)} layers: {layers}; "
            f"{self.nbytes() / 2**20:.2f} MiB held, {self.exact_nbytes() / 2**20:.2f} MiB in an ordinary cache, "
            f"{self.true_bits():.2f} true bits)"
        )

    @classmethod
    def options_of(
        cls, model_config: PretrainedConfig, given: Any, max_length: int | None = None
    ) -> tuple[Any, dict[str, torch.Tensor]]:
        """The options, as an object of `config_class`, that a user gave, and tensors of their plan.

        See `hf_kvq.hub.options.resolve`.
        """
        from ..hub.options import resolve  # here, as plans build on the caches

        return resolve(cls.config_class, model_config, given, max_length)

    # --- filling ---------------------------------------------------------------------------------------------------

    def observe_padding(self, attention_mask: torch.Tensor | None, new_columns: int) -> None:
        """Learn from a 2D attention mask, [batch, columns], which of the coming `new_columns` columns are padding."""
        start = self.get_seq_length()
        if attention_mask is None:
            return
        valid = attention_mask[:, start : start + new_columns].bool()
        # As in transformers, columns that a mask is too short for are masked.
        missing = new_columns - valid.shape[1]
        self.padding.observe(start, torch.nn.functional.pad(valid, (0, missing)))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take in new tokens of one layer; see `KVQLayer.update`.

        The layer before is stored now at the latest, so that no two layers hold a prompt's exact K and V.
        """
        self._settle()
        held = self.layers[layer_idx].get_seq_length()
        coming = [layer for layer in self.quantized_layers if layer.columns == held]
        try:
            # All layers or none: an overflow must not leave the layers at different lengths.
            for layer in coming:
                layer.check_room(key_states.shape[0], key_states.shape[2])
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        except Exception:
            if len(coming) == len(self.quantized_layers):
                # No layer took these columns in, so their padding is not to be remembered.
                self.padding.crop(held)
            raise

    def _settle(self) -> None:
        for layer in self.quantized_layers:
            layer.settle()

    # --- looking ---------------------------------------------------------------------------------------------------

    def nbytes(self) -> int:
        """Bytes of all storages that the cache holds: codes, (min, max), sink, window, reserved room."""
        return sum(layer_bytes(layer) for layer in self.layers)

    def exact_nbytes(self) -> int:
        """Bytes that the same tokens take in an ordinary 16-bit (or 32-bit) cache."""
        return sum(layer.exact_nbytes() for layer in self.quantized_layers) + sum(
            layer_bytes(layer) for layer in self.layers if not isinstance(layer, KVQLayer)
        )

    def true_bits(self) -> float:
        """All bytes held, per element of the tokens held, in bits; NaN while the cache is empty."""
        elements = sum(layer.elements() for layer in self.quantized_layers)
        held = sum(layer.nbytes() for layer in self.quantized_layers)
        return 8 * held / elements if elements else float("nan")

    def layer_bits(self) -> list[int]:
        """Width of each layer's body now, the narrowest row's where rows differ; 16 for layers that stay exact."""
        return [layer.bits() if isinstance(layer, KVQLayer) else 16 for layer in self.layers]

    def dequantize(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer as attention sees them, [batch, heads, columns, head_dim]."""
        layer = self.layers[layer_idx]
        return layer.keys, layer.values

    def summary(self) -> list[dict[str, Any]]:
        """One dict per layer: what it is, how wide, how many tokens where, how many bytes."""
        return [
            {"layer": i, **layer.summary()}
            if isinstance(layer, KVQLayer)
            else {"layer": i, "kind": type(layer).__name__, "bits": 16, "nbytes": layer_bytes(layer)}
            for i, layer in enumerate(self.layers)
        ]

    # --- operations on all layers ------------------------------------------------------------------------------------

    def reset(self) -> None:
        super().reset()
        self.padding.crop(0)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` columns; see `KVQLayer.crop`."""
        self._settle()
        super().crop(tokens_to_remove)
        self.padding.crop(self.get_seq_length())

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._settle()
        super().reorder_cache(beam_idx)
        self.padding.select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._settle()
        super().batch_repeat_interleave(repeats)
        self.padding.select([row for row in range(len(self.padding.rows)) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._settle()
        super().batch_select_indices(indices)
        self.padding.select((indices.nonzero().flatten() if indices.dtype == torch.bool else indices).tolist())


def stock_layers(model_config: PretrainedConfig) -> tuple[list[Any], list[int]]:
    """The layers of an ordinary cache for this model, and the indices of those that can be quantized.

    Raises:
        ValueError: the model has no full-attention layer.
    """
    layers = DynamicCache(config=model_config).layers
    full_attention = [i for i, layer in enumerate(layers) if type(layer) is DynamicLayer]
    if not full_attention:
        kinds = ", ".join(sorted({type(layer).__name__ for layer in layers})) or "no cache layers"
        raise ValueError(
            f"{type(model_config).__name__} has nothing to quantize: only full-attention layers are, and this model "
            f"has {kinds}. Use its ordinary cache"
        )
    return layers, full_attention


def layer_bytes(layer: Any) -> int:
    """Bytes of all storages that a layer, ours or a stock one, holds."""
    if isinstance(layer, KVQLayer):
        return layer.nbytes()
    held = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors_of(vars(layer))}
    return sum(held.values())


def tensors_of(value: Any) -> list[torch.Tensor]:
    """All tensors in nested containers."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [x for item in value for x in tensors_of(item)] if isinstance(value, (list, tuple)) else []
