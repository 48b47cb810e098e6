# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""How much the loss suffers from quantizing each layer's K and V, to first order (s_{i,b} of PM-KVQ)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import DynamicCache, PreTrainedModel

from ..cache.base import stock_layers
from ..cache.layout import LayerLayout, LayerShape
from ..codecs import BlockCodec
from ..config import PMKVQConfig
from ..registration import cache_argument
from .samples import model_facts, over_samples


# Options of a cache that do not matter to the errors of one width.
_OTHER_OPTIONS = {
    *("fbit", "value_fbit", "initial_bits", "max_length", "budget_bytes", "boundary_layers", "on_overflow", "kernel")
}

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, eq=False)
class Sensitivity:
    """s_{i,b}: what layer i at width b costs, averaged over samples; see `sensitivity` and `measured_sensitivity`.

    Args:
        layers: indices of the quantized layers in the model.
        shapes: what each of them caches.
        widths: the widths b.
        total: keys and values together, float64 [layers, widths], in nats.
        samples: number of samples.
        keys, values: their shares of `total`, where they are known.
    """

    layers: tuple[int, ...]
    shapes: tuple[LayerShape, ...]
    widths: tuple[int, ...]
    total: torch.Tensor
    samples: int
    keys: torch.Tensor | None = None
    values: torch.Tensor | None = None


class GradientCache(DynamicCache):
    """An ordinary cache whose keys and values are always in the graph, so that their gradients can be asked for."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Pair:
        # With frozen parameters nothing needs a gradient before the first layer's keys: the graph begins with them.
        tracked = (x if x.requires_grad else x.detach().requires_grad_() for x in (key_states, value_states))
        return super().update(*tracked, layer_idx, *args, **kwargs)


def sensitivity(
    model: PreTrainedModel,
    samples: torch.Tensor | Sequence[torch.Tensor],
    config: PMKVQConfig | dict[str, Any] | None = None,
    widths: Sequence[int] = (8, 4, 2),
    desc: str | None = "sensitivity",
    checkpoint: str | os.PathLike | None = None,
) -> Sensitivity:
    """Sensitivity of every quantized layer to every width, to first order, with one sample in memory at a time.

    s_{i,b} = ||G_i * (X_i - Q_b(X_i))||_1, for X the layer's keys after RoPE and for its values. G is the gradient of
    the mean next-token cross entropy with respect to X. Q_b is the codec of `PMKVQCache`, applied to just those tokens
    that the cache holds packed after the sample: neither the sinks, nor the window, nor an incomplete page. The model
    is left as it was.

    Args:
        model: a causal language model, on one device or several. Its parameters need no gradients.
        samples: token ids, [samples, tokens], or a sequence of [tokens].
        config: codec (`group_size`, `key_codec`, `transform`) and exact regions (`sink_tokens`, `window`).
        widths: the widths b, all below 16.
        desc: label of the progress bar; None for no bar.
        checkpoint: folder of finished samples, from which an interrupted call goes on; see `over_samples`.

    Raises:
        ValueError: a width or a sample is impossible, a sample is too short to fill a page, or no gradient reaches
            some layer's keys and values through the cache.
        MemoryError: a sample is too long.
    """
    config, widths = PMKVQConfig.of(config), tuple(widths)
    check_request(samples, widths)

    def measure(ids: torch.Tensor) -> torch.Tensor:
        layers = kv_gradients(model, ids)
        return torch.stack([_errors(*pairs, config, widths) for pairs in layers.values()])

    facts = measurement_facts("gradient", model, config, widths)
    with frozen(model):
        found = over_samples(measure, samples, facts, checkpoint, desc)
    keys, values = found.mean(0).unbind(1)
    layers = stock_layers(model.config.get_text_config(decoder=True))[1]
    return Sensitivity(tuple(layers), cached_shapes(model), widths, keys + values, len(samples), keys, values)


def check_request(samples: torch.Tensor | Sequence[torch.Tensor], widths: Sequence[int]) -> None:
    """Raise `ValueError` unless there is something to measure."""
    if not widths or not set(widths) <= {8, 4, 2}:
        raise ValueError(f"widths must be some of 8, 4 and 2; got {tuple(widths)}")
    if not len(samples):
        raise ValueError("there are no samples to measure the sensitivity on")


def measurement_facts(
    measure: str, model: PreTrainedModel, config: PMKVQConfig, widths: Sequence[int]
) -> dict[str, Any]:
    """What the sensitivity on a sample depends on, for a checkpoint."""
    options = {name: value for name, value in config.to_dict().items() if name not in _OTHER_OPTIONS}
    return {**model_facts(model), "measure": measure, "widths": list(widths), "options": options}


def kv_gradients(model: PreTrainedModel, ids: torch.Tensor) -> dict[int, tuple[Pair, Pair]]:
    """K and V of every full-attention layer, as a cache sees them, and the gradients of the loss with respect to them.

    The loss is the cross entropy of the next token, summed over the sample: its gradients survive half precision where
    the mean's would vanish.

    Args:
        model: a causal language model, best in eval mode with frozen parameters.
        ids: token ids, [tokens].

    Returns:
        By index of the layer: ((K, V), (dL/dK, dL/dV)), each [1, KV heads, tokens, head_dim] in the model's dtype.

    Raises:
        ValueError: `ids` has another shape, or no gradient reaches some layer through the cache.
    """
    if ids.ndim != 1 or len(ids) < 2:
        raise ValueError(f"a sample is a row of 2 token ids or more; got a tensor of shape {tuple(ids.shape)}")
    if model.config.is_encoder_decoder:
        raise ValueError(f"{type(model).__name__} is an encoder-decoder model; only decoders can be calibrated")
    config = model.config.get_text_config(decoder=True)
    cache, ids = GradientCache(config=config), ids.to(model.device)
    with torch.inference_mode(False), torch.enable_grad():
        logits = model(input_ids=ids[None], use_cache=True, **{cache_argument(model): cache}).logits[0]
        loss = F.cross_entropy(logits[:-1].float(), ids[1:].to(logits.device), reduction="sum")
        layers = {i: (cache.layers[i].keys, cache.layers[i].values) for i in stock_layers(config)[1]}
        tensors = [x for pair in layers.values() for x in pair]
        reached = loss.requires_grad and all(isinstance(x, torch.Tensor) and x.requires_grad for x in tensors)
        grads = torch.autograd.grad(loss, tensors, allow_unused=True) if reached else [None]
    if any(grad is None for grad in grads):
        raise ValueError(
            f"no gradient reaches the keys and values of {type(model).__name__} through its cache: it does not hand "
            "them to the cache it is given, or goes on with others than it gets back, or runs without autograd"
        )
    return {
        i: ((k.detach(), v.detach()), pair) for (i, (k, v)), pair in zip(layers.items(), zip(grads[0::2], grads[1::2]))
    }


def cached_shapes(model: PreTrainedModel) -> tuple[LayerShape, ...]:
    """What each full-attention layer caches per token, found by running the model on one token."""
    config = model.config.get_text_config(decoder=True)
    cache, ids = DynamicCache(config=config), torch.zeros(1, 1, dtype=torch.long, device=model.device)
    with torch.no_grad(), frozen(model):
        model(input_ids=ids, use_cache=True, **{cache_argument(model): cache})
    return tuple(_shape(cache.layers[i].keys, cache.layers[i].values) for i in stock_layers(config)[1])


def quantization_error(codec: BlockCodec, x: torch.Tensor, bits: int) -> torch.Tensor:
    """X - Q_b(X) of whole pages of keys or values.

    Args:
        codec: the codec of one page.
        x: [rows, KV heads, n * codec.tokens, head_dim].
        bits: the width b.

    Returns:
        float32, the shape of `x`.
    """
    pages = x.unflatten(2, (-1, codec.tokens)).transpose(1, 2)
    return x.float() - codec.restore(codec.decode(codec.encode(pages, bits), bits), bits).float()


@contextlib.contextmanager
def frozen(model: torch.nn.Module) -> Iterator[None]:
    """The model in eval mode, without gradients of parameters; afterwards it is as it was before."""
    modes = [(module, module.training) for module in model.modules()]
    needed = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        model.eval().requires_grad_(False)
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for parameter, need in needed:
            parameter.requires_grad_(need)


def packed_tokens(layout: LayerLayout, length: int) -> slice:
    """Those of `length` tokens that a cache holds packed; `ValueError` if there are none."""
    sink, pages, _ = layout.split(length)
    if not pages:
        least = layout.sink_tokens + layout.window + layout.page_tokens
        raise ValueError(
            f"a sample of {length} tokens fills no page of the cache; with this sink, window and page it takes {least}"
        )
    return slice(sink, sink + pages * layout.page_tokens)


def _errors(tensors: Pair, grads: Pair, config: PMKVQConfig, widths: tuple[int, ...]) -> torch.Tensor:
    """||G * (X - Q_b(X))||_1 of one layer, float64 [2, widths]: keys, values."""
    layout = LayerLayout.of(config, _shape(*tensors), tensors[0].device.type)
    length = tensors[0].shape[2]
    body = packed_tokens(layout, length)
    norms = [
        (quantization_error(codec, x[:, :, body], bits) * grad[:, :, body].float()).abs().sum(dtype=torch.float64)
        for codec, x, grad in zip((layout.keys, layout.values), tensors, grads)
        for bits in widths
    ]
    # The gradients are those of a sum over the predicted tokens.
    return torch.stack(norms).cpu().view(2, len(widths)) / (length - 1)


def _shape(keys: torch.Tensor, values: torch.Tensor) -> LayerShape:
    return LayerShape(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype)
