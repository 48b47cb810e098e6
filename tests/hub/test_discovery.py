# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""A plan next to a model's weights is found by `generate`, at no cost where there is none."""

import copy
import gc
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from loopback import FBITS, closed_port_fixture, hub_fixture, make_plan, plan_fixture  # noqa: F401
from transformers import AutoModelForCausalLM, GenerationConfig

from conftest import generate, random_ids, tiny_model
from hf_kvq import KVQPlan, MixKVQConfig, PlanError, PlanUnavailableError, PMKVQCache, PMKVQConfig
from hf_kvq.hub import discovery, find


DEFAULT = PMKVQConfig()
LONG = {"inputs": random_ids(1, 60), "new_tokens": 40}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("weights")
    tiny_model().save_pretrained(path)
    return path


@pytest.fixture
def local(folder, tmp_path):
    """A model in a folder of its own, and that folder."""
    shutil.copytree(folder, tmp_path / "tiny")
    return AutoModelForCausalLM.from_pretrained(tmp_path / "tiny"), tmp_path / "tiny"


@pytest.fixture
def on_the_hub(hub, folder):
    """A model that was loaded from the Hub, after `files` were added to its repository."""

    def load(files: dict[str, bytes], **kwargs):
        weights = {path.name: path.read_bytes() for path in folder.iterdir()}
        hub.add("me/tiny", {**weights, **files})
        model = AutoModelForCausalLM.from_pretrained("me/tiny", **kwargs)
        hub.requests.clear()
        return model

    return load


@pytest.fixture
def said(caplog):
    """What discovery logged since the last call."""
    caplog.set_level(logging.INFO, logger="hf_kvq.hub.discovery")

    def said() -> list[str]:
        lines = [record.getMessage() for record in caplog.records if record.name == discovery.__name__]
        caplog.clear()
        return lines

    return said


def used(model, name: str = "pmkvq", **options):
    """The options of the cache that a short `generate` makes."""
    request = {"cache_config": options} if options else {}
    return generate(model, 2, inputs=random_ids(1, 5), cache_implementation=name, **request).cache.config


def in_repo(plan: KVQPlan, place: str) -> dict[str, bytes]:
    return {f"{place}/{name}": data for name, data in plan.files().items()}


# --- a local folder --------------------------------------------------------------------------------------------------


def test_the_plan_beside_local_weights_is_used(local, plan, said):
    model, path = local
    assert used(model) == DEFAULT
    assert said() == [f"pmkvq uses its own defaults, as no plan for it was found in {path}"]
    plan.save_pretrained(path / "kvq")
    for _ in range(2):
        out = generate(model, LONG["new_tokens"], inputs=LONG["inputs"], cache_implementation="pmkvq")
        assert out.cache.config == plan.config and out.cache.layer_bits() == list(FBITS)
    assert said() == [f"pmkvq uses the plan kvq of {path}: {plan!r}"]
    by_hand = PMKVQCache(model.config, plan, max_length=99)
    wanted = generate(model, LONG["new_tokens"], inputs=LONG["inputs"], cache=by_hand)
    assert torch.equal(out.logits, wanted.logits) and out.cache.nbytes() == by_hand.nbytes()
    assert find(model, "pmkvq") == plan and find(model, "mixkvq") is None
    assert used(model, "quantized", backend="pmkvq") == plan.config


def test_what_the_user_says_comes_first(local, plan, monkeypatch):
    model, path = local
    plan.save_pretrained(path / "kvq")
    other = make_plan(config=PMKVQConfig(fbit=2, window=16, group_size=32))
    other.save_pretrained(path / "other")
    assert used(model, window=24) == PMKVQConfig(fbit=FBITS, window=24, group_size=16)
    assert used(model, fbit=8, kernel="torch") == PMKVQConfig(fbit=8, window=8, group_size=16, kernel="torch")
    for given in (other, str(path / "other"), path / "other"):
        options = {"plan": given, "window": 0}
        before = dict(options)
        assert used(model, **options) == PMKVQConfig(fbit=2, window=0, group_size=32)
        assert options == before
    assert used(model, plan=None) == DEFAULT
    objects = PMKVQConfig(fbit=8)
    out = generate(model, 2, inputs=random_ids(1, 5), cache_implementation="pmkvq", cache_config=objects)
    assert out.cache.config == objects
    config = GenerationConfig(cache_implementation="pmkvq", cache_config={"plan": str(path / "other")})
    config.save_pretrained(path / "generation")
    config = GenerationConfig.from_pretrained(path / "generation")
    assert generate(model, 2, inputs=random_ids(1, 5), generation_config=config).cache.config == other.config
    for value in ("0", "off", "False"):
        monkeypatch.setenv("HF_KVQ_DISCOVERY", value)
        assert used(model) == DEFAULT
        assert used(model, plan=plan) == plan.config


def test_variants(local, plan, said):
    model, path = local
    other = make_plan(fidelity={})
    plan.save_pretrained(path / "kvq" / "a")
    make_plan(config=MixKVQConfig(target_bits=3.5)).save_pretrained(path / "kvq" / "mix")
    assert used(model) == plan.config and used(model, "mixkvq").target_bits == 3.5
    assert used(model, "kivi").bits == 2
    other.save_pretrained(path / "kvq" / "b")
    said()
    assert used(model) == DEFAULT
    assert said() == [
        f"pmkvq uses its own defaults, as {path} has several plans for it: kvq/a, kvq/b. Choose one with "
        "cache_config={'plan': KVQPlan.from_pretrained(..., subfolder=...)}"
    ]
    make_plan(config=PMKVQConfig(fbit=2)).save_pretrained(path / "kvq")
    assert used(model).fbit == 2
    # A plan for another method that cannot be read is nobody's business.
    (path / "kvq" / "mix" / "kvq_config.json").write_text('{"method": "mixkvq", "format_version": 99}')
    assert used(model).fbit == 2


def test_a_bad_plan_is_an_error_and_not_half_used(local, plan):
    model, path = local
    plan.save_pretrained(path / "kvq")
    file = path / "kvq" / "kvq_config.json"
    good = file.read_bytes()
    for bad in (good[:-20], good.replace(b'"fbit": [8, 4, 2]', b'"fbit": [8, 4, 3]'), b""):
        file.write_bytes(bad)
        with pytest.raises(PlanError, match=r"kvq_config.json cannot be used: "):
            used(model)
        assert used(model, plan=None) == DEFAULT
    file.write_bytes(good.replace(b'"layers": 3', b'"layers": 4'))
    with pytest.raises(PlanError, match=r"differ in layers: 4 against 3. cache_config={'plan': None} does without"):
        used(model)


def test_a_model_from_nowhere_costs_nothing(monkeypatch):
    monkeypatch.setattr(discovery, "snapshot_download", None)
    assert used(tiny_model()) == DEFAULT
    model = copy.deepcopy(tiny_model())
    model.config._name_or_path = "me/tiny"  # no commit: not known to come from there
    assert used(model) == DEFAULT


@pytest.mark.slow
def test_weights_with_a_plan_beside_them_are_a_plain_model(local, plan):
    model, path = local
    plan.save_pretrained(path / "kvq")
    plan.save_pretrained(path)
    ids = random_ids(1, 9)
    script = f"""
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(path)!r})
print(model.generate(torch.tensor({ids.tolist()}), max_new_tokens=8, do_sample=False).tolist())
assert "hf_kvq" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(generate(model, 8, inputs=ids).sequences.tolist())


# --- the Hub ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["kvq", "kvq/pmkvq-2bit"])
def test_the_plan_in_the_models_repository_is_used(on_the_hub, hub, plan, said, place):
    model = on_the_hub(in_repo(plan, place))
    commit = model.config._commit_hash
    # The repository moves on; the model's own revision counts.
    hub.add("me/tiny", in_repo(make_plan(config=PMKVQConfig(fbit=8)), place))
    for _ in range(3):
        assert used(model) == plan.config
    assert said() == [f"pmkvq uses the plan {place} of me/tiny at {commit[:12]}: {plan!r}"]
    listings = [x for x in hub.requests if "/resolve/" not in x]
    assert listings == [x for x in listings if f"/tree/{commit}" in x] and len(listings) == 1
    file = f"/me/tiny/resolve/{commit}/{place}/kvq_config.json"
    assert [x for x in hub.requests if "/resolve/" in x] == [f"HEAD {file}", f"GET {file}"]
    # Another process, as it were: the cache on disk is enough.
    hub.requests.clear()
    again = AutoModelForCausalLM.from_pretrained("me/tiny", revision=commit)
    hub.requests.clear()
    assert used(again) == plan.config and hub.requests == []


def test_absence_is_remembered(on_the_hub, hub, said, caplog):
    model = on_the_hub({})
    for _ in range(3):
        assert used(model) == DEFAULT
    used(model, "mixkvq")
    assert len(hub.requests) == 1
    # Nor does the client complain that it found nothing.
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    where = f"me/tiny at {model.config._commit_hash[:12]}"
    assert said() == [
        f"{name} uses its own defaults, as no plan for it was found in {where}" for name in ("pmkvq", "mixkvq")
    ]
    hub.requests.clear()
    assert used(AutoModelForCausalLM.from_pretrained("me/tiny", local_files_only=True)) == DEFAULT
    assert hub.requests == []


@pytest.mark.parametrize("files", [{}, {"kvq/kvq_config.json": make_plan().files()["kvq_config.json"]}])
def test_a_model_keeps_what_it_found(on_the_hub, hub, files):
    model = on_the_hub(files)
    first = used(model)
    assert (first == DEFAULT) == (not files)
    shutil.rmtree(constants.HF_HUB_CACHE)
    hub.requests.clear()
    assert used(model) == first and hub.requests == []


@pytest.mark.parametrize("cached", [True, False])
def test_offline(on_the_hub, hub, plan, cached, monkeypatch):
    model = on_the_hub(in_repo(plan, "kvq"))
    if cached:
        used(model)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    huggingface_hub.close_session()
    model = AutoModelForCausalLM.from_pretrained("me/tiny")
    hub.requests.clear()
    assert used(model) == (plan.config if cached else DEFAULT)
    assert hub.requests == []


def test_an_explicit_repository_is_asked_once_per_model(on_the_hub, hub, plan):
    hub.add("me/tiny-kvq", plan.files())
    model = on_the_hub({})
    for _ in range(3):
        assert used(model, plan="me/tiny-kvq", window=16).window == 16
    assert len(hub.requests) == 2 and all("/me/tiny-kvq/resolve/" in x for x in hub.requests)
    with pytest.raises(PlanUnavailableError, match="there is no repository me/none"):
        used(model, plan="me/none")


def test_tensors_beside_weights_come_from_the_models_commit(on_the_hub, hub):
    plan = make_plan(tensors={"x": torch.ones(3)})
    model = on_the_hub(in_repo(plan, "kvq/a"))
    assert torch.equal(find(model, "pmkvq").tensors["x"], torch.ones(3))
    assert all(model.config._commit_hash in x or "/lfs/" in x for x in hub.requests)


def test_no_way_to_the_hub_is_one_warning(on_the_hub, hub, plan, said, closed_port, monkeypatch):
    model = on_the_hub(in_repo(plan, "kvq"))
    hub.repos["me/tiny"].private = True
    fresh = copy.deepcopy(model)
    shutil.rmtree(constants.HF_HUB_CACHE)
    for _ in range(2):
        assert used(fresh) == DEFAULT
    (line,) = said()
    assert (
        line.startswith("pmkvq uses its own defaults, as there is no way to look for a plan: ") and "private" in line
    )
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{closed_port}")
    assert used(copy.deepcopy(model)) == DEFAULT
    assert len(said()) == 1


def test_models_are_not_kept_alive(local):
    model, _ = local
    used(model)
    before = len(discovery._memories)
    del model, local
    gc.collect()
    assert len(discovery._memories) <= before
