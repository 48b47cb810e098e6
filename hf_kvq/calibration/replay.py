# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""What a layer's attention would have said with other keys and values, everything else being exact."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from .positions import feed
from .sensitivity import Pair


#: From a layer's index, its K and its V to pairs like these.
Candidates = Callable[[int, torch.Tensor, torch.Tensor], Iterable[Pair]]


class ReplayCache(DynamicCache):
    """An ordinary cache; while `replayed` is set, it hands out that pair and takes nothing in."""

    replayed: Pair | None = None
    on_update: Callable[[int, Pair], None] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Pair:
        if self.replayed is not None:
            return self.replayed
        pair = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if self.on_update is not None:
            self.on_update(layer_idx, pair)
        return pair


class Replays:
    """Runs each module that updates a cache again, with other keys and values in the cache's place.

    That module is the innermost one running when the cache is updated, whatever the model calls it. While the object
    is entered as a context, it watches all modules.

    Args:
        model: the model that is watched.
        cache: the cache it is run with.
        candidates: see `attention_errors`.
    """

    def __init__(self, model: torch.nn.Module, cache: ReplayCache, candidates: Candidates):
        self.model, self.cache, self.candidates = model, cache, candidates
        #: By layer, the squared error and the squared output for each candidate.
        self.found: dict[int, list[tuple[float, float]]] = {}
        self._running: list[torch.nn.Module] = []
        self._updated: dict[torch.nn.Module, tuple[int, Pair]] = {}

    def __enter__(self) -> Replays:
        self.cache.on_update = lambda layer, pair: self._updated.update({self._running[-1]: (layer, pair)})
        self._hooks = [m.register_forward_pre_hook(self._enter) for m in self.model.modules()]
        self._hooks += [m.register_forward_hook(self._leave, with_kwargs=True) for m in self.model.modules()]
        return self

    def __exit__(self, *args: Any) -> None:
        self.cache.on_update = None
        for hook in self._hooks:
            hook.remove()

    def _enter(self, module: torch.nn.Module, args: tuple) -> None:
        self._running.append(module)

    def _leave(self, module: torch.nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        self._running.pop()
        if module in self._updated:
            layer, own = self._updated.pop(module)
            self.found[layer] = self._errors(layer, own, lambda: module.forward(*args, **kwargs), _first(output))

    def _errors(self, layer: int, own: Pair, run: Callable[[], Any], exact: torch.Tensor) -> list[tuple[float, float]]:
        exact, errors = exact.double(), []
        for pair in self.candidates(layer, *own):
            self.cache.replayed = pair
            errors.append((float((_first(run()).double() - exact).square().sum()), float(exact.square().sum())))
        if errors:
            # Some models keep what they got from the cache, for later layers that share it.
            self.cache.replayed = own
            run()
        self.cache.replayed = None
        return errors


def attention_errors(
    model: PreTrainedModel, ids: torch.Tensor, queries: int, candidates: Candidates
) -> dict[int, list[tuple[float, float]]]:
    """Errors of each layer's attention output with other K and V in place of the layer's own.

    All tokens but the last are fed to the model, then those: they are the queries that count. In that second run each
    attention module is run again for each candidate, by its own code and with its own arguments, while what follows
    the layer sees exact output only. So masks, softcaps, biases, GQA and devices are the model's business, and one
    layer's candidates are in memory at a time.

    Args:
        model: a decoder, best in eval mode and without gradients.
        ids: token ids, [tokens].
        queries: the number of last tokens, less than `tokens`.
        candidates: called with a layer's index, K and V, [1, KV heads, tokens, head_dim]; gives pairs like these.

    Returns:
        By index of the layer, one pair for each candidate: the squared error of the attention's output (projected, as
        the module returns it), and the square of the exact output, both summed over all elements.

    Raises:
        ValueError: the sample has another shape, or is too short.
    """
    if ids.ndim != 1 or len(ids) <= queries:
        raise ValueError(
            f"a sample is a row of more than {queries} token ids; got a tensor of shape {tuple(ids.shape)}"
        )
    cache = ReplayCache(config=model.config.get_text_config(decoder=True))
    feed(model, ids[:-queries], cache)
    with Replays(model, cache, candidates) as replays:
        feed(model, ids[-queries:], cache)
    return replays.found


def _first(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output[0]
