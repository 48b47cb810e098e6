# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""What all quantized caches share: layers of one model, padding, byte accounting."""

from __future__ import annotations

import copy
import os
from collections import Counter
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from transformers import Cache, DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.utils import logging

from ..config import Options
from .layer import KVQLayer
from .padding import Padding
from .sharding import HeadShard
from .static import NotStaticError, static_step


logger = logging.get_logger(__name__)

T = TypeVar("T", bound="KVQCache")


# Members that caches had before transformers 5, and what to use now.
_REMOVED = {
    "key_cache": "dequantize(layer_idx)[0]",
    "value_cache": "dequantize(layer_idx)[1]",
    "to_legacy_cache": "dequantize(layer_idx)",
    "seen_tokens": "get_seq_length()",
    "_seen_tokens": "get_seq_length()",
    "get_usable_length": "get_seq_length()",
}


class KVQCache(Cache):
    """A `transformers.Cache` whose full-attention layers are quantized; all others are the stock ones.

    A subclass takes (model_config, config, max_length) and names its options in `config_class`.

    Args:
        layers: all layers of the model; the quantized ones share `padding`.
        padding: the padding columns of the batch.
        model_config: the model's config.
    """

    config_class: type[Options]

    def __init__(self, layers: list[Any], padding: Padding, model_config: PretrainedConfig):
        from ..hub.facts import BaseModel  # here, as plans build on the caches

        super().__init__(layers=layers)
        self.padding = padding
        self.quantized_layers = [layer for layer in layers if isinstance(layer, KVQLayer)]
        #: The model that the cache is for; None if it has nothing to quantize.
        self.base_model = BaseModel.of(model_config) if self.quantized_layers else None
        self.shard = HeadShard.of(model_config)
        if self.quantized_layers and getattr(model_config.get_text_config(decoder=True), "num_kv_shared_layers", 0):
            # Layers without keys of their own use those of the last layer of their kind that has some.
            self.quantized_layers[-1].is_shared = True

    def __repr__(self) -> str:
        widths = Counter(self.layer_bits())
        layers = ", ".join(f"{n} at {bits} bits" for bits, n in sorted(widths.items(), reverse=True))
        if not self.quantized_layers:
            return f"{type(self).__name__}(nothing to quantize, {len(self.layers)} ordinary layers)"
        rows = len(self.quantized_layers[0].states)
        if not rows:
            return f"{type(self).__name__}(empty, {len(self.layers)} layers)"
        return (
            f"{type(self).__name__}({rows} x {self.get_seq_length()} tokens, {len(self.layers)} layers: {layers}; "
            f"{self.nbytes() / 2**20:.2f} MiB held, {self.exact_nbytes() / 2**20:.2f} MiB in an ordinary cache, "
            f"{self.true_bits():.2f} true bits)"
        )

    def __getattr__(self, name: str) -> Any:
        hint = f"; use {_REMOVED[name]}, or a newer version of the model's code" if name in _REMOVED else ""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")

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

    # Compiled models leave their graph here: what a cache does depends on what it holds.
    @torch.compiler.disable
    def observe_padding(self, attention_mask: torch.Tensor | None, new_columns: int) -> None:
        """Learn from a 2D attention mask, [batch, columns], which of the coming `new_columns` columns are padding."""
        start = self.get_seq_length()
        if attention_mask is None:
            return
        valid = attention_mask[:, start : start + new_columns].bool()
        # As in transformers, columns that a mask is too short for are masked.
        missing = new_columns - valid.shape[1]
        self.padding.observe(start, torch.nn.functional.pad(valid, (0, missing)))

    @torch.compiler.disable
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take in new tokens of one layer; see `KVQLayer.update`.

        The layer before is stored now at the latest, so that no two layers hold a prompt's exact K and V.
        """
        layer = self.layers[layer_idx]
        if isinstance(layer, KVQLayer) and layer.static.is_open:
            return layer.update(key_states, value_states)
        for other in self.quantized_layers:
            other.settle_attended()
        if layer.is_initialized and getattr(layer, "device", key_states.device) != key_states.device:
            from .state import move_layer

            # Filled elsewhere: a cache file, or a model that has been moved since.
            move_layer(layer, key_states.device)
        held = layer.get_seq_length()
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

    def static_step(self) -> AbstractContextManager[tuple[int, ...]]:
        """Within it the model takes one more column, in shapes and at addresses that do not change from step to step.

        What the model then does on the device may be recorded, and repeated in a later such step that yields an equal
        key; see `hf_kvq.capture`. The step must not be given a mask: padding is not in the cache anyway.

        Raises:
            NotStaticError: an ordinary step is needed; the cache holds what it held before.
            BudgetExceededError: the budget forbids another column; the same.
        """
        if len(self.quantized_layers) < len(self.layers):
            raise NotStaticError("the model has layers that are not quantized, whose caches change their shapes")
        column = self.get_seq_length()
        if any(low <= column < high for row in self.padding.rows for low, high in row):
            raise NotStaticError("the new column has padding")
        return static_step(self.quantized_layers)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns that are cached."""
        if self.quantized_layers and self.quantized_layers[0].static.is_open:
            raise NotStaticError("the model goes by the cache's length, which a recorded step cannot tell it")
        return super().get_seq_length(layer_idx)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """The column of the next query. Only masks are made from it, and a static step refuses those."""
        return super().get_seq_length(layer_idx)

    def fill(self, cache: Cache, attention_mask: torch.Tensor | None = None) -> None:
        """Take over what an ordinary cache of the same model holds, with keys and values quantized.

        Args:
            cache: a `DynamicCache` made with the model's config; it stays as it is.
            attention_mask: 2D, [batch, columns], where the batch is padded.

        Raises:
            ValueError: this cache is not empty, or the other one is of another kind of model.
        """
        if any(layer.is_initialized for layer in self.quantized_layers):
            raise ValueError("fill takes an empty cache; reset() this one, or make a new one")
        kinds = [[type(layer) for layer in layers] for layers in (cache.layers, self.layers)]
        kinds[1] = [DynamicLayer if issubclass(kind, KVQLayer) else kind for kind in kinds[1]]
        if kinds[0] != kinds[1]:
            held, wanted = (", ".join(kind.__name__ for kind in side) for side in kinds)
            raise ValueError(
                f"this cache goes with ordinary layers of {wanted}, but was given {held}; make the ordinary cache "
                "with DynamicCache(config=model.config)"
            )
        self.observe_padding(attention_mask, cache.get_seq_length())
        for i, layer in enumerate(cache.layers):
            if isinstance(self.layers[i], KVQLayer):
                self.update(layer.keys, layer.values, i)
            else:
                self.layers[i] = copy.deepcopy(layer)
        self._settle()

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
        """Bytes that the quantized layers hold, per element of their tokens, in bits; NaN while there are none."""
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

    # --- files and devices -------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike) -> None:
        """Write all that the cache holds into one safetensors file, to go on from it later or elsewhere.

        It holds no room that is only reserved, and no code. On a model that is split by tensor parallelism, every
        process saves a file of its own.

        Raises:
            ValueError: the cache is empty, or what it holds cannot be stored.
            OSError: the file cannot be written; what was there before still is.

        Example:

        ```python
        >>> model(**prefix, past_key_values=cache)
        >>> cache.save("prefix.safetensors")
        >>> cache = KVQCache.load("prefix.safetensors", model)
        ```
        """
        from .files import save_cache  # here, as files build on plans

        save_cache(self, path)

    @classmethod
    def load(
        cls: type[T],
        path: str | os.PathLike,
        model: PreTrainedModel | PretrainedConfig,
        device: torch.device | str | None = None,
        kernel: str = "auto",
    ) -> T:
        """Read what `save` wrote. The cache goes on as the saved one would have.

        Args:
            path: the file.
            model: the model that it is for, or its config.
            device: where to; the default is the model's device, or the CPU. Each layer moves to the device of its
                tokens when new ones come.
            kernel: see the cache's options.

        Raises:
            ValueError: the file is damaged, too new, or belongs to another model or another kind of cache.
            OSError: there is no such file.
        """
        from .files import load_cache

        return load_cache(path, model, device, kernel, cls)

    def offload(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        """Not possible layer by layer: attention comes to a layer after `update`, where transformers would offload it.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            f"a {type(self).__name__} is not offloaded layer by layer; it holds far less than the caches that this is "
            "made for. cache.to('cpu') moves all of it"
        )

    def to(self: T, device: torch.device | str) -> T:
        """Bring everything to another device, in place; codes come to lie as that device's kernels want them."""
        from .state import move_layer

        self._settle()
        for layer in self.layers:
            move_layer(layer, torch.device(device))
        return self

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


def stock_layers(model_config: PretrainedConfig, may_be_none: bool = False) -> tuple[list[Any], list[int]]:
    """The layers of an ordinary cache for this model, and the indices of those that can be quantized.

    Raises:
        ValueError: the model has no full-attention layer; with `may_be_none` that is a warning, if it has others.
    """
    layers = DynamicCache(config=model_config).layers
    full_attention = [i for i, layer in enumerate(layers) if type(layer) is DynamicLayer]
    if not full_attention:
        kinds = ", ".join(sorted({type(layer).__name__ for layer in layers})) or "no cache layers"
        reason = (
            f"{type(model_config).__name__} has nothing to quantize: only full-attention layers are, and this model "
            f"has {kinds}. "
        )
        if not (may_be_none and layers):
            raise ValueError(reason + "Use its ordinary cache")
        logger.warning_once(reason + "This cache does what its ordinary cache does")
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
