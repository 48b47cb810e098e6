# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""The search for MixKVQ's thresholds: its range, its objectives, and that it goes on after an interruption."""

import copy
import math
import sys

import pytest
import torch

from conftest import forward, random_ids, storage_bytes, tiny_model
from hf_kvq import MixKVQCache, MixKVQConfig
from hf_kvq.calibration import ThresholdTrial, pareto_front, tune_thresholds
from hf_kvq.calibration import thresholds as module
from hf_kvq.calibration.salience import observed_salience
from hf_kvq.calibration.thresholds import request_bytes, require_feasible
from hf_kvq.evaluation import measure_fidelity


optuna = pytest.importorskip("optuna")
OPTIONS = {"residual": 16, "group_size": 16, "sink_tokens": 4}
CONFIG = MixKVQConfig(**OPTIONS)
SAMPLES = random_ids(2, 90)
LENGTH = 300


def tune(n_trials=6, model=None, samples=SAMPLES, config=OPTIONS, **kwargs):
    return tune_thresholds(model or tiny_model(), samples, LENGTH, config, n_trials, chunk=24, desc=None, **kwargs)


def invented(model, samples, max_length, config, tau, chunk) -> ThresholdTrial:
    """In place of running the model: many bits and little divergence for small thresholds."""
    bits = 3 + math.exp(-tau["tau_uint4"]) + 7 * math.exp(-tau["tau_bf16"])
    return ThresholdTrial(
        **tau, kl=(tau["tau_uint4"] + tau["tau_bf16"] / 3) / 100, nbytes=7, true_bits=bits, key_bits=3
    )


@pytest.fixture
def evaluations(monkeypatch) -> list:
    """Evaluations are invented, and counted."""
    done = []
    monkeypatch.setattr(module, "_evaluate", lambda *args: done.append(args) or invented(*args))
    return done


# --- what is measured ------------------------------------------------------------------------------------------------


def test_trials_are_what_caches_measure():
    model = tiny_model()
    trials = tune(6)
    # The first ones spend 2.25, 2.5, 3 and 4 bits on a key element, but for queries that pages could not know yet.
    for trial, bits in zip(trials, (2.25, 2.5, 3, 4)):
        assert trial.key_bits == pytest.approx(bits, abs=0.1)
    for trial in trials[::2]:
        config, kl, key_bits = trial.config(CONFIG), 0, 0
        for ids in SAMPLES:
            cache = MixKVQCache(model.config, config)
            kl += measure_fidelity(model, ids[None], cache, 24).kl / 2
            key_bits += cache.nominal_bits().keys / 2
        assert trial.kl == pytest.approx(kl, rel=1e-9) and trial.key_bits == pytest.approx(key_bits)
        # K and V of 3 layers, 2 heads, 16 channels.
        assert trial.true_bits == pytest.approx(8 * trial.nbytes / (LENGTH * 3 * 2 * 2 * 16))


@pytest.mark.parametrize("config", [CONFIG, MixKVQConfig(**OPTIONS, value_bits=4)])
@pytest.mark.parametrize("target_bits", [2.0, 3.0, 16.0])
def test_bytes_are_those_of_a_cache_without_reserved_room(config, target_bits):
    cache = MixKVQCache(tiny_model().config, {**config.to_dict(), "target_bits": target_bits})
    length = 4 + 5 * 16 + 15
    forward(tiny_model(), cache, random_ids(1, length))
    cache.nbytes()
    reserved = 0
    for layer in cache.quantized_layers:
        body = layer.body
        reserved += body.data.nbytes - layer.states[0].pages * layer.layout.page_bytes(2)
        (low, exact), buffers = body.records[0].before[-1], body.records[0].buffers
        used = {"low": low, "low_channel": low, "exact": exact, "exact_channel": exact, "counts": 5}
        reserved += sum(buffers[name][n:].nbytes for name, n in used.items())
    assert request_bytes(cache, length) == storage_bytes(cache.quantized_layers) - reserved
    # A longer request has more pages like these.
    pages = request_bytes(cache, length + 10 * 16) - request_bytes(cache, length)
    assert pages == pytest.approx(2 * (request_bytes(cache, length) - request_bytes(cache, length - 5 * 16)), abs=2)


def test_salience_is_that_of_the_tiers():
    """Thresholds taken from the observed salience split the channels where they should."""
    model, ids = tiny_model(), random_ids(1, 4 + 16)
    salience = observed_salience(model, ids, CONFIG)
    assert salience.shape == (3 * 2 * 16,) and (salience > 0).all()
    # With a single page, the mean over its queries is the one that the cache ranks by.
    ordered = salience.sort().values
    for n_bf16, n_uint4 in [(0, 0), (5, 0), (0, 7), (9, 20)]:
        at = [ordered[-1 - n].item() for n in (n_bf16, n_bf16 + n_uint4)]
        cache = MixKVQCache(model.config, {**OPTIONS, "tau_bf16": at[0], "tau_uint4": at[1]})
        forward(model, cache, ids)
        counts = sum(layer.tier_counts() for layer in cache.quantized_layers)
        assert counts.tolist() == [96 - n_bf16 - n_uint4, n_uint4, n_bf16]


def test_salience_without_queries():
    config = MixKVQConfig(**OPTIONS, importance="none")
    model, ids = tiny_model(), random_ids(1, 36)
    salience = observed_salience(model, ids, config)
    cache = MixKVQCache(model.config, {**config.to_dict(), "target_bits": 16.0})
    forward(model, cache, ids)
    keys = [cache.dequantize(i)[0][0, :, 4:].unflatten(1, (2, 16)).double() for i in range(3)]
    wanted = torch.cat([(k.amax(2) - k.amin(2)).flatten() / 3 for k in keys])
    torch.testing.assert_close(salience.sort().values, wanted.sort().values)


# --- the search ------------------------------------------------------------------------------------------------------


def test_the_range_is_the_models_own(evaluations):
    trials = tune(40)
    salience = observed_salience(tiny_model(), SAMPLES, CONFIG)
    for name, share in (("tau_uint4", 0.01), ("tau_bf16", 0.8)):
        found = torch.tensor([getattr(trial, name) for trial in trials], dtype=torch.float64)
        low, high = salience.sort().values[int(share * (len(salience) - 1))], salience.max()
        assert (found >= low * 0.999).all() and (found <= high * 1.001).all()
        # Logarithmically speaking, nearly all of it has been looked at.
        assert (found.max() / found.min()).log() > 0.9 * (high / low).log()
    # Keys eight times as large, queries an eighth: nothing else changes.
    model = copy.deepcopy(tiny_model())
    for layer in model.model.layers:
        layer.self_attn.k_proj.weight.mul_(8)
        layer.self_attn.q_proj.weight.div_(8)
    for one, other in zip(tune(6, model), trials):
        assert one.tau_bf16 == pytest.approx(other.tau_bf16, rel=1e-4)
        assert one.tau_uint4 == pytest.approx(other.tau_uint4, rel=1e-4)


def test_the_search_learns(monkeypatch):
    """Objectives whose front is a line: the middle of one threshold's range, whatever the other one is."""
    salience = observed_salience(tiny_model(), SAMPLES, CONFIG).sort().values
    ends = [salience[int(share * (len(salience) - 1))].log() for share in (0.8, 1.0)]

    def evaluate(model, samples, max_length, config, tau, chunk):
        off = (math.log(tau["tau_bf16"]) - ends[0]) / (ends[1] - ends[0]) - 0.5
        other = math.log(tau["tau_uint4"])
        kl, bits = math.exp(other) + 99 * off**2, 9 - other + 99 * off**2
        return ThresholdTrial(**tau, kl=kl.item(), nbytes=7, true_bits=bits.item(), key_bits=3)

    monkeypatch.setattr(module, "_evaluate", evaluate)
    trials = tune(50)
    assert len(set(trials)) == 50
    off = [((math.log(trial.tau_bf16) - ends[0]) / (ends[1] - ends[0]) - 0.5).abs().item() for trial in trials]
    # The pairs until the tenth are drawn at random.
    assert sum(off[20:]) / 30 < 0.16 < sum(off[4:10]) / 6


def test_the_seed_draws_other_pairs(evaluations):
    one, other = tune(12), tune(12, seed=1)
    assert other[:4] == one[:4] and not set(other[4:]) & set(one)
    assert tune(7) == one[:7]


@pytest.mark.parametrize("storage", ["trials.log", "sqlite:///{}/trials.db"])
@pytest.mark.parametrize("after", [0, 2, 5])
def test_an_interrupted_search_goes_on(tmp_path, monkeypatch, evaluations, storage, after):
    storage = storage.format(tmp_path) if "{" in storage else tmp_path / "new" / storage
    wanted = tune(8)
    evaluations.clear()

    def interrupted(*args):
        if len(evaluations) == after:
            raise KeyboardInterrupt
        evaluations.append(args)
        return invented(*args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "_evaluate", interrupted)
        tune(7, storage=storage)
    assert len(evaluations) == after
    assert tune(7, storage=storage) == wanted[:7] and len(evaluations) == 7
    # All there: nothing is run again, and more can be asked for.
    assert tune(7, storage=storage) == wanted[:7] and len(evaluations) == 7
    assert tune(8, storage=storage) == wanted and len(evaluations) == 8
    # Fewer than there are cost nothing.
    assert tune(2, storage=storage) == wanted and len(evaluations) == 8


def test_the_range_is_not_observed_twice(tmp_path, monkeypatch, evaluations):
    wanted = tune(5)
    tune(3, storage=tmp_path / "trials")
    monkeypatch.setattr(module, "observed_salience", lambda *args: pytest.fail("observed twice"))
    assert tune(5, storage=tmp_path / "trials") == wanted


@pytest.mark.parametrize(
    "changes",
    [
        {"samples": SAMPLES.flip(1)},
        {"config": {**OPTIONS, "value_bits": 4}},
        {"seed": 1},
        {"model": tiny_model("mistral")},
    ],
)
def test_other_studies_are_not_continued(tmp_path, evaluations, changes):
    tune(1, storage=tmp_path / "trials")
    assert tune(1, storage=tmp_path / "trials", **changes) == tune(1, **changes)
    names = {study.study_name for study in optuna.get_all_study_summaries(_journal(tmp_path / "trials"))}
    assert len(names) == 2 and len(evaluations) == 3


def test_optuna_can_read_the_storage(tmp_path, evaluations):
    trials = tune(5, storage=tmp_path / "trials")
    study = optuna.load_study(study_name=None, storage=_journal(tmp_path / "trials"))
    assert [trial.values for trial in study.trials] == [[t.kl, t.true_bits] for t in trials]
    assert len(study.best_trials) == len(pareto_front(trials))


def _journal(path):
    return optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(path)))


# --- what cannot be done ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"config": {"tau_bf16": 1.0, "tau_uint4": 1.0}}, "leave them out"),
        ({"config": {"target_bits": 3.0}}, "leave them out"),
        ({"config": {"boundary_layers": 1}}, "leave boundary_layers out"),
        ({"n_trials": 0}, "1 trial and 1 sample"),
        ({"samples": SAMPLES[:0]}, "1 trial and 1 sample"),
        ({"samples": SAMPLES[:, :19]}, "19 tokens fills no page of the cache; it takes 20"),
    ],
)
def test_impossible_requests(kwargs, message):
    with pytest.raises(ValueError, match=message):
        tune(**kwargs)


def test_too_small_a_budget_names_the_smallest():
    model = tiny_model()
    with pytest.raises(ValueError, match="smallest feasible one is") as caught:
        require_feasible(model, LENGTH, 1000, CONFIG)
    least = int(str(caught.value).split()[-2])
    require_feasible(model, LENGTH, least, CONFIG)
    with pytest.raises(ValueError, match=f"is {least} bytes"):
        require_feasible(model, LENGTH, least - 1, CONFIG)
    cache = MixKVQCache(model.config, {**OPTIONS, "tau_bf16": math.inf, "tau_uint4": math.inf})
    forward(model, cache, SAMPLES[:1])
    assert request_bytes(cache, LENGTH) == least


def test_without_optuna(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ImportError, match=r"pip install 'hf-kvq\[calibrate\]'"):
        tune()


def test_out_of_memory_says_what_to_lower(monkeypatch):
    def too_much(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(module, "compare_fidelity", too_much)
    with pytest.raises(MemoryError, match=r"lower the tokens per sample \(now 90\) or per chunk \(now 24\)"):
        tune()


def test_optuna_is_left_as_it_was(capsys, evaluations):
    before = optuna.logging.get_verbosity()
    tune(1)
    assert optuna.logging.get_verbosity() == before and capsys.readouterr() == ("", "")
