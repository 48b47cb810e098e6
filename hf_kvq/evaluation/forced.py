# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""The one measurement that most metrics are views of: given tokens, read through several caches side by side."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from tqdm.auto import tqdm
from transformers import Cache, PreTrainedModel

from ..registration import cache_argument
from .methods import exact_cache, held_bytes, token_numbers


@dataclass(frozen=True)
class Usage:
    """What a cache held while it filled, per call: tokens without padding, bytes, and numbers they stand for."""

    tokens: list[int] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)

    @property
    def last_bits(self) -> float:
        """True bits at the end: all bytes held, per number."""
        return 8 * self.nbytes[-1] / self.numbers[-1]

    @property
    def mean_bits(self) -> float:
        """True bits averaged over time: bytes held, summed over the calls, per number held, summed likewise."""
        return 8 * sum(self.nbytes) / sum(self.numbers)

    def bits(self) -> list[tuple[float, float]]:
        """(tokens, true bits) after each call."""
        return [(n, 8 * held / count) for n, held, count in zip(self.tokens, self.nbytes, self.numbers)]


@dataclass(frozen=True)
class Forced:
    """What a model made of given tokens while it read its history from a cache; [rows, scored tokens] each.

    Args:
        nll: negative log likelihood of each token, nats.
        kl: KL(exact || this cache) of the distribution that it came from, nats.
        agreed: whether the most likely token is the exact cache's.
        hit: whether the most likely token is the token itself, as greedy decoding up to here needs it.
        usage: what the cache held.
    """

    nll: torch.Tensor
    kl: torch.Tensor
    agreed: torch.Tensor
    hit: torch.Tensor
    usage: Usage


@torch.no_grad()
def teacher_forced(
    model: PreTrainedModel,
    ids: torch.Tensor,
    caches: Mapping[str, Cache],
    start: int = 1,
    prefill: int = 0,
    chunk: int = 128,
    mask: torch.Tensor | None = None,
    exact: Cache | None = None,
    desc: str | None = None,
) -> dict[str | None, Forced]:
    """Feed tokens through caches in chunks, so that all but the newest are read from them, and compare.

    One forward over everything would never read a cache. The exact model, on an ordinary cache, runs beside.

    Args:
        model: a causal language model.
        ids: [rows, tokens].
        caches: empty caches by name; each holds the tokens afterwards.
        start: the first token that counts; those before are only read.
        prefill: the first tokens that go in at once, as a prompt does.
        chunk: tokens per forward after that. With 1 this is what decoding does.
        mask: [rows, tokens], 0 for padding, which has to come first.
        exact: the empty cache to compare with; the default is an ordinary one.
        desc: label of a progress bar; None for no bar.

    Returns:
        By name of the cache; what the exact one gave is under None.

    Raises:
        ValueError: there is nothing to predict.
    """
    length = ids.shape[1]
    if not 1 <= start < length:
        raise ValueError(
            f"the first token that counts must be one of 1 to {length - 1}, as it is predicted; got {start}"
        )
    ids, config = ids.to(model.device), model.config.get_text_config(decoder=True)
    mask = mask.to(model.device) if mask is not None else None
    caches = {None: exact if exact is not None else exact_cache(model), **caches}
    usages = {name: Usage() for name in caches}
    found: dict[str | None, list[torch.Tensor]] = {name: [] for name in caches}
    stops = [*range(prefill or chunk, length, chunk), length]
    with tqdm(total=length * len(caches), desc=desc, disable=desc is None, unit="tok") as bar:
        for begin, stop in zip([0, *stops], stops):
            if begin == stop:
                continue
            # Position p predicts token p + 1.
            first = max(begin, start - 1)
            targets = ids[:, first + 1 : stop + 1]
            true = None
            for name, cache in caches.items():
                logits = _logits(model, ids[:, begin:stop], cache, stop - first, _kwargs(mask, begin, stop))
                bar.update(stop - begin)
                usages[name].tokens.append(stop)
                usages[name].nbytes.append(held_bytes(cache, config))
                if targets.numel() and first < stop:
                    here = logits[:, : targets.shape[1]].float().log_softmax(-1)
                    true = here if true is None else true
                    found[name].append(_scores(here, true, targets))
            per_token = token_numbers(caches[None], config)
            held = int(mask[:, :stop].sum()) if mask is not None else ids.shape[0] * stop
            for usage in usages.values():
                usage.numbers.append(per_token * held)
    return {name: _collect(parts, usages[name]) for name, parts in found.items()}


def _logits(model: PreTrainedModel, ids: torch.Tensor, cache: Cache, keep: int, kwargs: dict) -> torch.Tensor:
    """Logits at the last `keep` positions; of the rest they are not computed, where the model allows."""
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        kwargs["logits_to_keep"] = max(keep, 1)  # 0 would mean all
    logits = model(input_ids=ids, use_cache=True, **{cache_argument(model): cache}, **kwargs).logits
    return logits[:, -keep:] if keep > 0 else logits[:, :0]


def _kwargs(mask: torch.Tensor | None, begin: int, stop: int) -> dict[str, torch.Tensor]:
    if mask is None:
        return {}
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
    return {"attention_mask": mask[:, :stop], "position_ids": positions[:, begin:stop]}


def _scores(here: torch.Tensor, true: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """[4, rows, tokens]: nll, KL, agreement with the exact cache, agreement with the token."""
    nll = -here.gather(-1, targets[..., None])[..., 0]
    kl = (true.exp() * (true - here)).sum(-1)
    top = here.argmax(-1)
    return torch.stack([nll, kl, (top == true.argmax(-1)).float(), (top == targets).float()]).double().cpu()


def _collect(parts: list[torch.Tensor], usage: Usage) -> Forced:
    nll, kl, agreed, hit = torch.cat(parts, dim=-1)
    return Forced(nll, kl, agreed.bool(), hit.bool(), usage)
