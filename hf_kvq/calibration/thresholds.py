# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Thresholds of MixKVQ: a search for the least divergence at every size, with Optuna (arXiv 2512.19206)."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..cache.mixkvq import MixKVQCache
from ..config import MixKVQConfig
from ..evaluation import compare_fidelity
from ..registration import cache_argument
from .data import fingerprint
from .distributed import gather, world
from .pareto import ThresholdTrial
from .salience import observed_salience, search_ranges
from .samples import explained_out_of_memory, model_facts
from .sensitivity import frozen


_NAMES = ("tau_bf16", "tau_uint4")


def tune_thresholds(
    model: PreTrainedModel,
    samples: torch.Tensor | Sequence[torch.Tensor],
    max_length: int,
    config: MixKVQConfig | dict[str, Any] | None = None,
    n_trials: int = 30,
    storage: str | os.PathLike | None = None,
    seed: int = 0,
    chunk: int = 128,
    desc: str | None = "thresholds",
) -> tuple[ThresholdTrial, ...]:
    """Try pairs (tau_bf16, tau_uint4) for all layers, to find small divergence from the exact cache at small size.

    Two objectives at once, by Optuna's TPE: the KL divergence on the samples, fed in chunks so that codes are really
    read, and the bytes of a request. Published thresholds do not transfer between models, so the ranges are what one
    pass over the samples shows of this model's salience: tau_uint4 from its 1 % quantile (nearly all channels have
    more than 2 bits) to its maximum (none have), tau_bf16 from its 80 % quantile to its maximum, on a logarithmic
    scale. The first pairs are those that spend an average of 2.25, 2.5, 3 and 4 bits on a key element.

    The same call gives the same trials, whether it was interrupted or not; the processes of `accelerate launch` or
    `torchrun` try different pairs at the same time.

    Args:
        model: a causal language model.
        samples: token ids, [samples, tokens], or a sequence of [tokens]; best text that nothing else was fitted to.
        max_length: tokens of the request whose bytes are counted; see `request_bytes`.
        config: the cache's other options; neither thresholds nor `target_bits`.
        n_trials: pairs altogether, those of an interrupted call included.
        storage: where to keep the trials: a path (a journal file of Optuna) or a URL such as "sqlite:///trials.db".
            A call with the same model, samples and options goes on where an earlier one stopped.
        seed: of the search.
        chunk: tokens per forward.
        desc: label of the progress bar; None for no bar.

    Returns:
        All trials, in their order; see `pareto_front` and `knee`.

    Raises:
        ImportError: optuna is not installed.
        ValueError: `config` has thresholds, or a sample is too short to fill a page.
        MemoryError: a sample is too long.
    """
    optuna = require_optuna()
    config = _searchable(config)
    if n_trials < 1 or not len(samples):
        raise ValueError(f"there must be 1 trial and 1 sample at least; got {n_trials} and {len(samples)}")
    rank, _ = world()
    trials: list[ThresholdTrial]
    with _without_log(optuna):
        study = None
        if rank == 0:
            study = _open_study(optuna, storage, _study_name(model, samples, max_length, config, seed, chunk))
        # The storage belongs to the main process alone; the others hear from it.
        known = [(study.user_attrs.get("ranges"), [*map(_from_optuna, study.trials)])] if study else []
        ranges, trials = gather(known)[0]
        if ranges is None:
            ranges = search_ranges(observed_salience(model, samples, config))
            if study:
                study.set_user_attr("ranges", ranges)
        bar = tqdm(total=n_trials, initial=len(trials), desc=desc, disable=desc is None or rank > 0, unit="trial")
        with bar:
            while len(trials) < n_trials:
                found, index = [], len(trials) + rank
                if index < n_trials:
                    tau = _propose(optuna, ranges, trials, index, seed)
                    found.append(_evaluate(model, samples, max_length, config, tau, chunk))
                found = gather(found)
                for trial in found if study else ():
                    study.add_trial(_to_optuna(optuna, ranges, trial))
                trials += found
                bar.update(len(found))
    return tuple(trials)


def request_bytes(cache: MixKVQCache, max_length: int) -> int:
    """Bytes that a request of `max_length` tokens needs with the tiers of the pages that this cache holds, row 0.

    Codes, (min, max), lists of channels, sinks, residual and query statistics are counted; the room that a cache
    reserves ahead, up to a sixteenth of its pages, is not, as it depends on the length at which one looks.
    """
    total = 0.0
    for layer in cache.quantized_layers:
        layout, codec, pages = layer.layout, layer.body.codec, layer.states[0].pages
        uint4, bf16 = layer.tier_counts()[1:].tolist()
        # A record is a channel's low bits or exact numbers, and its index.
        records = uint4 * (codec.low_bytes + 1) + bf16 * (layout.page_tokens * codec.dtype.itemsize + 1)
        page = layout.page_bytes(2) + layer.body.records[0].counts(1).nbytes + records / pages
        sink, coming_pages, recent = layout.split(max_length)
        total += (sink + recent) * layout.shape.token_bytes + coming_pages * page + layer.query_sum[0].nbytes
    return round(total)


def numbers_per_token(cache: MixKVQCache) -> int:
    """Of K and V of all quantized layers."""
    shapes = [layer.layout.shape for layer in cache.quantized_layers]
    return sum(shape.heads * (shape.key_dim + shape.value_dim) for shape in shapes)


@torch.no_grad()
def require_feasible(model: PreTrainedModel, max_length: int, budget: int, config: MixKVQConfig) -> None:
    """Raise `ValueError` if not even keys at 2 bits fit `budget` bytes per request; it says what would."""
    config = dataclasses.replace(_searchable(config), target_bits=2.0)
    cache = MixKVQCache(model.config, config)
    ids = torch.zeros(1, config.sink_tokens + config.residual, dtype=torch.long, device=model.device)
    with frozen(model):
        model(input_ids=ids, use_cache=True, **{cache_argument(model): cache})
    if (least := request_bytes(cache, max_length)) > budget:
        raise ValueError(
            f"a budget of {budget} bytes is too small for {max_length} tokens; the smallest feasible one is {least} "
            "bytes"
        )


def require_optuna() -> Any:
    """The module; `ImportError` tells how to install it."""
    try:
        import optuna
    except ImportError as error:
        raise ImportError("searching thresholds needs optuna; run: pip install 'hf-kvq[calibrate]'") from error
    return optuna


def _searchable(config: MixKVQConfig | dict[str, Any] | None) -> MixKVQConfig:
    """The options, if they leave the thresholds open."""
    config = MixKVQConfig.of(config)
    if config.tau_bf16 is not None or config.target_bits is not None:
        raise ValueError("config gives thresholds or target_bits already; leave them out to have thresholds searched")
    if config.boundary_layers:
        raise ValueError("layers with a fixed width have no thresholds; leave boundary_layers out of config")
    return config


@torch.no_grad()
def _evaluate(
    model: PreTrainedModel,
    samples: torch.Tensor | Sequence[torch.Tensor],
    max_length: int,
    config: MixKVQConfig,
    tau: dict[str, float],
    chunk: int,
) -> ThresholdTrial:
    cache_config = dataclasses.replace(config, **tau)
    found = []
    for ids in samples:
        cache = MixKVQCache(model.config, cache_config)
        advice = f"lower the tokens per sample (now {len(ids)}) or per chunk (now {chunk})"
        with frozen(model), explained_out_of_memory(advice):
            kl = compare_fidelity(model, ids[None].to(model.device), {"": cache}, chunk)[""].kl
        found.append((kl, request_bytes(cache, max_length), cache.nominal_bits().keys))
    kl, size, key_bits = (sum(values) / len(found) for values in zip(*found))
    numbers = max_length * numbers_per_token(cache)
    return ThresholdTrial(**tau, kl=kl, nbytes=round(size), true_bits=8 * round(size) / numbers, key_bits=key_bits)


# --- Optuna ----------------------------------------------------------------------------------------------------------


def _open_study(optuna: Any, storage: str | os.PathLike | None, name: str) -> Any:
    if storage is not None and "://" not in str(storage):
        Path(storage).parent.mkdir(parents=True, exist_ok=True)
        storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(storage)))
    return optuna.create_study(
        storage=storage, study_name=name, directions=("minimize", "minimize"), load_if_exists=True
    )


def _study_name(
    model: PreTrainedModel,
    samples: torch.Tensor | Sequence[torch.Tensor],
    max_length: int,
    config: MixKVQConfig,
    seed: int,
    chunk: int,
) -> str:
    """Names what the trials depend on: a study is only ever continued by the same."""
    facts = {
        **model_facts(model),
        "samples": [fingerprint(ids[None]) for ids in samples],
        "config": {key: value for key, value in config.to_dict().items() if key != "kernel"},
        "others": [max_length, seed, chunk],
    }
    return f"mixkvq-{hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]}"


def _propose(
    optuna: Any, ranges: dict[str, Any], trials: Sequence[ThresholdTrial], index: int, seed: int
) -> dict[str, float]:
    """The pair of trial number `index`: it depends on the finished trials alone, and not on who asked before."""
    if index < len(ranges["first"]):
        return dict(zip(_NAMES, ranges["first"][index]))
    digest = hashlib.sha256(f"{seed} {index}".encode()).digest()
    sampler = optuna.samplers.TPESampler(seed=int.from_bytes(digest[:4], "little"))
    study = optuna.create_study(directions=("minimize", "minimize"), sampler=sampler)
    study.add_trials([_to_optuna(optuna, ranges, trial) for trial in trials])
    return study.ask(_space(optuna, ranges)).params


def _space(optuna: Any, ranges: dict[str, Any]) -> dict[str, Any]:
    return {name: optuna.distributions.FloatDistribution(*ranges[name], log=True) for name in _NAMES}


def _to_optuna(optuna: Any, ranges: dict[str, Any], trial: ThresholdTrial) -> Any:
    return optuna.trial.create_trial(
        params={name: getattr(trial, name) for name in _NAMES},
        distributions=_space(optuna, ranges),
        values=(trial.kl, trial.true_bits),
        user_attrs={"nbytes": trial.nbytes, "key_bits": trial.key_bits},
    )


def _from_optuna(trial: Any) -> ThresholdTrial:
    kl, true_bits = trial.values
    return ThresholdTrial(**trial.params, kl=kl, true_bits=true_bits, **trial.user_attrs)


@contextlib.contextmanager
def _without_log(optuna: Any) -> Iterator[None]:
    """Optuna tells about each study it makes."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)
