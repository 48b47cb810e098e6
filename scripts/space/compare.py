# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Several caches answer one prompt side by side, a token each per round, so that they are timed alike."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from hf_kvq import KVQPlan
from hf_kvq.cli.report import Snapshot
from hf_kvq.presets import PRESETS, resolve
from hf_kvq.registration import CACHES, cache_argument


#: The name of the cache that all others are compared with.
ORDINARY = "ordinary"

#: Tokens per forward where divergence is measured: 1 is what decoding does, and takes as long as that.
CHUNK = 4

# One step at a time on this machine, so that nobody's tokens per second suffer from somebody else's.
_turn = threading.Lock()


@dataclass(frozen=True)
class Request:
    """What is asked for.

    Args:
        ids: [1, tokens], the prompt.
        caches: options by name, as in `generate`; `ORDINARY` is always there and comes first.
        new_tokens: longest answer.
        temperature: 0 for the most likely token, else tokens are drawn.
        seed: of what is drawn, the same for all caches, so that they differ by what they hold alone.
        stop: tokens that end an answer.
    """

    ids: torch.Tensor
    caches: Mapping[str, dict[str, Any]]
    new_tokens: int
    temperature: float = 0.0
    seed: int = 0
    stop: frozenset[int] = frozenset()

    @property
    def length(self) -> int:
        """Tokens that a request may come to."""
        return self.ids.shape[1] + self.new_tokens


@dataclass
class Lane:
    """A cache and its answer so far.

    Args:
        name: of the cache.
        cache: what holds the keys and values.
        tokens: the answer.
        seconds: time of its own steps, the prompt not counted.
        history: (tokens held, width of each layer) each time a width changed.
        snapshot: what the cache holds now.
        is_done: whether the answer has ended.
        differs_at: the first token that is not the ordinary cache's; None while there is none.
        kl: mean KL(ordinary || this cache) in nats per token of the ordinary cache's answer, once it is measured.
        top1: share of these tokens whose most likely successor is the ordinary cache's.
    """

    name: str
    cache: Cache
    generator: torch.Generator
    tokens: list[int] = field(default_factory=list)
    seconds: float = 0.0
    history: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    snapshot: Snapshot | None = None
    is_done: bool = False
    differs_at: int | None = None
    kl: float | None = None
    top1: float | None = None

    @property
    def tokens_per_second(self) -> float | None:
        """Of the steps after the prompt; None before the second token."""
        return (len(self.tokens) - 1) / self.seconds if len(self.tokens) > 1 else None

    def look(self) -> None:
        """Note what the cache holds."""
        self.snapshot = Snapshot.of(self.cache)
        if not self.history or self.history[-1][1] != self.snapshot.bits:
            self.history.append((self.snapshot.tokens, self.snapshot.bits))


def new_cache(name: str, model: PreTrainedModel, options: dict[str, Any], max_length: int) -> Cache:
    """An empty cache of a name that `generate` knows, or an ordinary one.

    Raises:
        ValueError, TypeError, RuntimeError: the options are impossible, or do not go with the model.
    """
    if name == ORDINARY:
        return DynamicCache(config=model.config.get_text_config(decoder=True))
    method, options = resolve(name, dict(options))
    return CACHES[method](model.config, options, max_length=max_length)


def applicable(name: str, chosen: Mapping[str, Any], plan: KVQPlan | None) -> dict[str, Any]:
    """Those of the chosen options that a cache has. Presets keep their own, and so does a plan, but for the budget."""
    if name in PRESETS:
        return {}
    known = {option.name for option in dataclasses.fields(CACHES[name].config_class)}
    if plan is not None and plan.method == name:
        known &= {"max_length", "budget_bytes"}
    else:
        plan = None
    return {"plan": plan, **{key: value for key, value in chosen.items() if key in known}}


def race(model: PreTrainedModel, request: Request) -> Iterator[list[Lane]]:
    """Answer with all caches at once; yields the same lanes after each round of one token per cache.

    A consumer that stops asking ends it at that token.

    Raises:
        ValueError, TypeError, RuntimeError: a cache cannot be made, or holds no more.
    """
    ids = request.ids.to(model.device)
    lanes = []
    for name in (ORDINARY, *(name for name in request.caches if name != ORDINARY)):
        cache = new_cache(name, model, request.caches.get(name, {}), request.length)
        lanes.append(Lane(name, cache, torch.Generator(model.device).manual_seed(request.seed)))
    for lane in lanes:
        _step(model, lane, ids, request)
        yield lanes
    while not all(lane.is_done for lane in lanes):
        for lane in lanes:
            if not lane.is_done:
                _step(model, lane, ids.new_tensor([lane.tokens[-1:]]), request)
        for lane in lanes[1:]:
            lane.differs_at = first_difference(lanes[0].tokens, lane.tokens, lanes[0].is_done and lane.is_done)
        yield lanes


def measure(model: PreTrainedModel, request: Request, lanes: list[Lane]) -> Iterator[float]:
    """Let every cache read the ordinary one's answer; at the end sets the lanes' `kl` and `top1`.

    Yields the share that is done after each forward. A consumer that stops asking ends it there.
    """
    prompt, answer = request.ids.shape[1], request.ids.new_tensor([lanes[0].tokens])
    if answer.shape[1] < 2:
        return
    ids = torch.cat([request.ids, answer], dim=1).to(model.device)
    caches = [new_cache(lane.name, model, request.caches.get(lane.name, {}), request.length) for lane in lanes]
    # Nothing follows the last token, so it is not read.
    stops = [*range(prompt, ids.shape[1] - 1, CHUNK), ids.shape[1] - 1]
    found: list[list[torch.Tensor]] = [[] for _ in lanes]
    for begin, stop in zip([0, *stops], stops):
        true = None
        for i, cache in enumerate(caches):
            with _turn, torch.inference_mode():
                logits = model(input_ids=ids[:, begin:stop], use_cache=True, **{cache_argument(model): cache}).logits
                here = logits[0, -1 if begin == 0 else 0 :].float().log_softmax(-1)
                true = here if true is None else true
                kl = (true.exp() * (true - here)).sum(-1)
                found[i].append(torch.stack([kl, (true.argmax(-1) == here.argmax(-1)).float()]).double().cpu())
            yield stop / ids.shape[1]
    for lane, parts in zip(lanes[1:], found[1:]):
        lane.kl, lane.top1 = torch.cat(parts, dim=1).mean(1).tolist()


def first_difference(one: list[int], two: list[int], are_done: bool = True) -> int | None:
    """Index of the first token that differs; where one answer only goes on longer, its end, if both are done."""
    for i, (a, b) in enumerate(zip(one, two)):
        if a != b:
            return i
    return min(len(one), len(two)) if are_done and len(one) != len(two) else None


@torch.inference_mode()
def _step(model: PreTrainedModel, lane: Lane, ids: torch.Tensor, request: Request) -> None:
    """Feed tokens and choose the next one."""
    with _turn:
        started = time.perf_counter()
        logits = model(input_ids=ids, use_cache=True, **{cache_argument(model): lane.cache}).logits[0, -1].float()
        if request.temperature:
            shares = (logits / request.temperature).softmax(-1)
            token = int(torch.multinomial(shares, 1, generator=lane.generator))
        else:
            token = int(logits.argmax())
        if lane.tokens:
            lane.seconds += time.perf_counter() - started
    lane.tokens.append(token)
    lane.is_done = token in request.stop or len(lane.tokens) == request.new_tokens
    lane.look()
