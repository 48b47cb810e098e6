# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Rotary positions, seen from outside a model: samples at stretched positions, and which channels rotate together."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator

import torch
from transformers import DynamicCache, PreTrainedModel

from ..cache.base import stock_layers
from ..registration import cache_argument
from .sensitivity import frozen


# Single tokens that are looked at, and positions where the model does not say how many it has.
_TOKENS, _POSITIONS = 32, 2048
# How much further they are looked at where that can be computed, so that slow channels turn visibly in any dtype.
_FURTHER = 16
# Correlation below which two channels are a pair; an exact pair has -1.
_PAIRED = -0.95
# Mean change of a channel's square, relative to squares, below which nothing but rounding happened.
_STILL = 1e-3


def feed(model: PreTrainedModel, ids: torch.Tensor, cache: DynamicCache, stretch: int = 1) -> None:
    """Run a model on tokens, `stretch` positions apart; what it computes is left in the cache.

    Tokens attend to all tokens before them, as ever: only what rotary embeddings make of their distances changes. It
    is the model's own code that computes them, whatever their kind.

    Args:
        model: a decoder. Its head is not run.
        ids: token ids, [tokens].
        cache: the tokens follow those that it holds; it must be empty if `stretch` is not 1.
        stretch: distance of one token from the next.

    Raises:
        ValueError: `stretch` is not 1, and the model takes no positions, or knows none that far.
    """
    model, ids = model.base_model, ids.to(model.device)
    arguments = {}
    if stretch != 1:
        _check_positions(model, stretch * (len(ids) - 1))
        arguments["position_ids"] = stretch * torch.arange(len(ids), device=ids.device)[None]
        # Positions with gaps may stand for several sequences side by side, unless a mask says otherwise.
        arguments["attention_mask"] = torch.ones_like(ids)[None]
    model(input_ids=ids[None], use_cache=True, **{cache_argument(model): cache}, **arguments)


def rotary_pairs(model: PreTrainedModel) -> torch.Tensor:
    """Which two channels of a key turn together, as its position grows.

    Found by experiment, so it holds for every layout: halves, neighbours, a rotated part anywhere. A token alone has
    the same key at every position but for the rotation, which keeps k_i^2 + k_j^2 of a pair: what one square gains,
    the other loses. Channels so slow that the model's dtype shows no rotation at any position count as still.

    Args:
        model: a decoder; it is left as it was.

    Returns:
        int64 [quantized layers, head_dim]: each channel's partner, or the channel itself if it stands still.

    Raises:
        ValueError: the keys of the layers differ in head_dim.
    """
    keys = _keys_of_single_tokens(model)
    if len({k.shape[-1] for k in keys}) > 1:
        raise ValueError(f"the layers of {type(model).__name__} differ in head_dim; their keys cannot be smoothed")
    channels = torch.arange(keys[0].shape[-1])
    grams = torch.stack([_products_of_changes(k) for k in keys])
    # All layers together: deep ones may hardly tell first tokens apart, and so show too few different keys.
    gram = grams.sum(0)
    size = gram.diagonal().clamp(min=torch.finfo(gram.dtype).tiny).sqrt()
    correlation, partner = (gram / size / size[:, None]).min(dim=1)
    paired = (correlation < _PAIRED) & (partner[partner] == channels)
    # Some models rotate only in some layers.
    rotates = grams.diagonal(dim1=1, dim2=2).mean(dim=1, keepdim=True) > _STILL
    return torch.where(paired & rotates, partner, channels)


def require_rotary(model: PreTrainedModel, pairs: torch.Tensor) -> None:
    """Raise `ValueError` if no channel has a partner in `rotary_pairs`, so that there is nothing to stretch."""
    if (pairs == torch.arange(pairs.shape[1])).all():
        raise ValueError(
            f"the keys that {type(model).__name__} caches do not rotate with their position, so positions cannot be "
            "stretched; use stretch=1"
        )


@contextlib.contextmanager
def probed(model: PreTrainedModel) -> Iterator[None]:
    """The model in eval mode and without gradients; afterwards it is as it was, frequencies of its positions included.

    Some rotary embeddings change their frequencies with the longest position that they are asked for.
    """
    owners = {name.rpartition(".")[0] for name, _ in model.named_buffers() if name.endswith("inv_freq")}
    modules = [model.get_submodule(name) for name in owners]
    before = [(dict(vars(m)), [(k, x, x.clone()) for k, x in m.named_buffers(recurse=False)]) for m in modules]
    with frozen(model), torch.no_grad():
        try:
            yield
        finally:
            for module, (attributes, buffers) in zip(modules, before):
                for name in set(vars(module)) - set(attributes):
                    delattr(module, name)
                vars(module).update(attributes)
                for name, buffer, value in buffers:
                    setattr(module, name, buffer.copy_(value))


def _keys_of_single_tokens(model: PreTrainedModel) -> list[torch.Tensor]:
    """The keys of some tokens, each alone at several positions, 0 first: float64 [positions, tokens, heads, dim]."""
    config, base = model.config.get_text_config(decoder=True), model.base_model
    end = (getattr(config, "max_position_embeddings", None) or _POSITIONS) * (_FURTHER if _is_computed(base) else 1)
    has_positions = "position_ids" in inspect.signature(base.forward).parameters
    positions = torch.tensor([0, *(4**i for i in range(16) if 4**i < end - 1), end - 1] if has_positions else [0, 0])
    ids = torch.arange(_TOKENS) * config.vocab_size // _TOKENS
    inputs = {"input_ids": ids.repeat(len(positions)), "position_ids": positions.repeat_interleave(_TOKENS)}
    inputs = {name: x[:, None].to(model.device) for name, x in inputs.items() if has_positions or name == "input_ids"}
    cache = DynamicCache(config=config)
    with probed(model):
        base(
            **inputs,
            attention_mask=torch.ones_like(inputs["input_ids"]),
            use_cache=True,
            **{cache_argument(base): cache},
        )
    keys = [cache.layers[i].keys[:, :, 0].double().cpu() for i in stock_layers(config)[1]]
    return [k.unflatten(0, (len(positions), _TOKENS)) for k in keys]


def _products_of_changes(keys: torch.Tensor) -> torch.Tensor:
    """Products of the changes of two channels' squares, mean over all keys, in units of a square: [dim, dim]."""
    squares = keys.square()
    change = (squares[1:] - squares[:1]).flatten(0, 2) / squares.mean().clamp(min=torch.finfo(squares.dtype).tiny)
    return change.mT @ change / len(change)


def _check_positions(model: PreTrainedModel, last: int) -> None:
    """Raise `ValueError` unless the model can be told positions up to `last`."""
    name, config = type(model).__name__, model.config.get_text_config(decoder=True)
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ValueError(f"{name} takes no positions, so they cannot be stretched; use stretch=1")
    known = getattr(config, "max_position_embeddings", None)
    if known is not None and last >= known and not _is_computed(model):
        raise ValueError(
            f"{name} looks its positions up in a table of {known}, and this sample would need position {last}; take a "
            "smaller stretch or shorter samples"
        )


def _is_computed(model: PreTrainedModel) -> bool:
    """Whether rotations are computed from frequencies, for any position, rather than looked up in a table."""
    return any(name.endswith("inv_freq") for name, _ in model.named_buffers())
