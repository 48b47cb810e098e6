# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
import copy
import dataclasses
import json
import os
import stat

import pytest
import torch
from loopback import FBITS, make_plan, plan_fixture  # noqa: F401
from transformers import LlamaConfig, MistralConfig

import hf_kvq
from conftest import CONFIGS, tiny_model
from hf_kvq import (
    KIVICache,
    KIVIConfig,
    KVQPlan,
    MixKVQCache,
    MixKVQConfig,
    PlanError,
    PlanUnavailableError,
    PMKVQCache,
    PMKVQConfig,
)
from hf_kvq.hub import files as files_module
from hf_kvq.hub import plan as plan_module
from hf_kvq.hub import schema
from hf_kvq.hub.facts import BaseModel
from hf_kvq.registration import CACHES


FILE = "kvq_config.json"
TAU = ((1.5, 2.0), (0.5, 3.25), (1e-9, 4.0))
PLANS = {
    "pmkvq": lambda: make_plan(),
    "pmkvq, one width": lambda: make_plan(config=PMKVQConfig(fbit=4, budget_bytes=10**7), calibration={}, fidelity={}),
    "mixkvq": lambda: make_plan(config=MixKVQConfig(target_bits=2.75)),
    "mixkvq, thresholds": lambda: make_plan(config=MixKVQConfig(tau_bf16=TAU, tau_uint4=1.0)),
    "kivi": lambda: make_plan(config=KIVIConfig(bits=4), base_model=None),
    "tensors": lambda: make_plan(
        tensors={
            "layers.0.k_lambda": torch.rand(2, 8, generator=torch.Generator().manual_seed(0)),
            "layers.1.k_lambda": torch.ones(2, 8, dtype=torch.bfloat16),
            "empty": torch.empty(0, dtype=torch.uint8),
        }
    ),
    "odd facts": lambda: make_plan(
        calibration={"läyers\n|": [1, 2.5, None, "\ud800", True], "-0": -0.0, "big": 1e300}
    ),
}


def test_methods_are_called_as_their_caches():
    assert {name: cache.config_class for name, cache in CACHES.items()} == plan_module.METHODS
    assert sorted(plan_module.METHODS) == schema.schema()["properties"]["method"]["enum"]
    assert hf_kvq.KVQPlan is KVQPlan


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_survives_and_its_files_are_the_same_bytes(name, tmp_path):
    plan = PLANS[name]()
    plan.save_pretrained(tmp_path / "a")
    loaded = KVQPlan.from_pretrained(tmp_path / "a")
    loaded.save_pretrained(tmp_path / "b")
    files = [{path.name: path.read_bytes() for path in (tmp_path / x).iterdir()} for x in "ab"]
    assert files[0] == files[1] == plan.files()
    assert loaded == plan and repr(loaded) == repr(plan)
    assert loaded.config == plan.config and loaded.base_model == plan.base_model
    assert loaded.calibration == plan.calibration and loaded.fidelity == plan.fidelity
    assert loaded.tensors.keys() == plan.tensors.keys()
    for key, tensor in plan.tensors.items():
        assert torch.equal(loaded.tensors[key], tensor) and loaded.tensors[key].dtype == tensor.dtype
    assert KVQPlan.from_dict(plan.to_dict(), plan.tensors) == plan


def test_the_file_is_canonical(plan, tmp_path):
    text = plan.files()[FILE].decode()
    assert text.endswith("}\n") and not text.endswith("\n\n") and "\r" not in text
    values = json.loads(text)
    assert list(values) == sorted(values) and '"fbit": [8, 4, 2]' in text
    assert values["format_version"] == 1 and values["config"]["fbit"] == list(FBITS)
    assert "kernel" not in values["config"] and "tensors" not in values
    # Another order and other spaces are the same plan.
    (tmp_path / FILE).write_text(json.dumps(dict(reversed(values.items()))))
    assert KVQPlan.from_pretrained(tmp_path) == plan


def test_a_short_file_by_hand_is_enough(tmp_path):
    base = {"layers": 3, "model_type": "llama", "quantized_layers": [0, 1, 2]}
    values = {
        "base_model": base,
        "config": {"fbit": 2},
        "format_version": 1,
        "hf_kvq_version": "0.1",
        "method": "pmkvq",
    }
    (tmp_path / FILE).write_text(json.dumps(values))
    plan = KVQPlan.from_pretrained(tmp_path)
    assert plan.config == PMKVQConfig(fbit=2)
    plan.check_fits(tiny_model().config)


def test_what_a_plan_knows_of_its_model():
    config = CONFIGS["mixed"]()
    config._name_or_path, config._commit_hash, config.architectures = "me/gemma", "ab" * 20, ["Gemma3ForCausalLM"]
    base = BaseModel.of(config)
    assert base == BaseModel("gemma3_text", 3, (1,), 2, 16, "me/gemma", "ab" * 20, "Gemma3ForCausalLM")
    assert str(base) == "me/gemma at abababababab (Gemma3ForCausalLM, 3 layers)"
    plan = KVQPlan.of(config, PMKVQConfig(fbit=[2]))
    assert plan.layer_widths() == ((2, 2),)
    with pytest.raises(PlanError, match="fbit lists 3 layers"):
        KVQPlan.of(config, PMKVQConfig(fbit=[2, 4, 2]))


@pytest.mark.parametrize("name", ["", "/root/models/secret", "../x", "C:\\x", "a/b/c", "folder"])
def test_local_paths_do_not_get_into_a_plan(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    config = CONFIGS["llama"]()
    config._name_or_path = name
    plan = KVQPlan.of(config, PMKVQConfig())
    assert plan.base_model.id is None and plan.base_model.revision is None
    assert not name or json.dumps(name)[1:-1] not in plan.files()[FILE].decode().replace("quantized_layers", "")


def test_a_plan_leaves_its_arguments_alone_and_keeps_no_kernel(plan):
    facts, tensors = {"n": 1}, {"x": torch.ones(2)}
    made = make_plan(config=PMKVQConfig(kernel="torch"), calibration=facts, tensors=tensors)
    facts["n"], tensors["y"] = 2, torch.ones(1)
    assert made.calibration == {"n": 1} and list(made.tensors) == ["x"] and made.config.kernel == "auto"
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.method = "kivi"
    assert copy.deepcopy(plan) == plan and plan != make_plan(fidelity={}) and plan != 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config": {"fbit": 4}}, "config must be one of PMKVQConfig"),
        ({"config": PMKVQConfig(fbit=[4, 4])}, "fbit lists 2 layers"),
        ({"config": MixKVQConfig(tau_bf16=float("inf"), tau_uint4=1.0)}, "finite"),
        ({"config": MixKVQConfig(tau_bf16=[1.0], tau_uint4=1.0)}, "lists 1 layers"),
        ({"config": MixKVQConfig(tau_bf16=[[1.0]] * 3, tau_uint4=1.0)}, "1 KV heads of 2"),
        ({"calibration": {"loss": float("nan")}}, "finite"),
        ({"calibration": {"n": {"deep": 1}}}, "calibration.n must be"),
        ({"fidelity": {"kl": torch.ones(1)}}, "not plain, finite JSON"),
        ({"fidelity": {"text": "x" * 2**20}}, "at most 1,048,576"),
        ({"base_model": "../../etc"}, "base_model.id must look like"),
        ({"tensors": {"x": torch.tensor([float("inf")])}}, "'x' holds numbers that are not finite"),
        ({"tensors": {"../x": torch.ones(1)}}, "must consist of"),
        ({"tensors": {"x": torch.ones(1, dtype=torch.complex64)}}, "must be a torch.Tensor of"),
        ({"tensors": {"x": [1.0]}}, "must be a torch.Tensor of"),
    ],
)
def test_impossible_plans_cannot_be_made(changes, message):
    with pytest.raises(PlanError, match=message):
        make_plan(**changes)


# --- folders ---------------------------------------------------------------------------------------------------------


def test_saving_replaces_whole_files_and_drops_stale_tensors(tmp_path, monkeypatch):
    with_tensors, without = PLANS["tensors"](), make_plan()
    with_tensors.save_pretrained(tmp_path)
    (tmp_path / "README.md").write_text("mine")
    without.save_pretrained(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["README.md", FILE]
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == stat.S_IMODE((tmp_path / "README.md").stat().st_mode)

    def fail(*args):
        raise OSError(28, "No space left on device")

    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
            patch.setattr(files_module.os, name, fail)
            make_plan(fidelity={}).save_pretrained(tmp_path)
        assert sorted(os.listdir(tmp_path)) == ["README.md", FILE] and KVQPlan.from_pretrained(tmp_path) == without


def test_a_mix_of_two_saves_is_noticed(tmp_path):
    PLANS["tensors"]().save_pretrained(tmp_path)
    other = make_plan(tensors={"x": torch.zeros(2, 8)}).files()
    (tmp_path / "kvq.safetensors").write_bytes(other["kvq.safetensors"])
    with pytest.raises(PlanError, match=r"kvq.safetensors cannot be used: it has .* bytes, not the"):
        KVQPlan.from_pretrained(tmp_path)


@pytest.mark.parametrize("place", ["nothing", "empty", "weights"])
def test_missing_files_say_where_and_what_else_there_is(place, tmp_path, plan):
    (tmp_path / "empty").mkdir()
    plan.save_pretrained(tmp_path / "weights" / "kvq" / "pmkvq-2bit")
    wanted = {
        "nothing": "there is no folder",
        "empty": rf"there is no {FILE} in .*empty$",
        "weights": "it has plans in kvq/pmkvq-2bit: choose one with subfolder=",
    }
    with pytest.raises(PlanUnavailableError, match=wanted[place]):
        KVQPlan.from_pretrained(str(tmp_path / place))
    assert KVQPlan.from_pretrained(tmp_path / "weights", subfolder="kvq/pmkvq-2bit/") == plan


@pytest.mark.parametrize("path", ["../x", "/x", "a/../../b", "a//b", "./a", "a\\b", "C:x", "a\x00b", ".."])
def test_paths_that_lead_elsewhere_are_refused(path, tmp_path, plan):
    plan.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="subfolder must be a plain path"):
        KVQPlan.from_pretrained(tmp_path, subfolder=path)
    with pytest.raises(ValueError, match="path_in_repo must be a plain path"):
        plan.push_to_hub("me/x", path_in_repo=path)


def test_missing_tensors_and_huge_files(tmp_path):
    plan = PLANS["tensors"]()
    plan.save_pretrained(tmp_path)
    (tmp_path / "kvq.safetensors").unlink()
    with pytest.raises(PlanUnavailableError, match="kvq.safetensors cannot be read: No such file"):
        KVQPlan.from_pretrained(tmp_path)
    with (tmp_path / "kvq.safetensors").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(PlanError, match=r"it has 1,099,511,627,776 bytes, and at most"):
        KVQPlan.from_pretrained(tmp_path)
    with (tmp_path / FILE).open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(PlanError, match=r"it has 1,099,511,627,776 bytes, and at most 1,048,576"):
        KVQPlan.from_pretrained(tmp_path)


# --- caches ----------------------------------------------------------------------------------------------------------


def test_caches_take_plans_in_every_form(tmp_path, plan):
    config = tiny_model().config
    plan.save_pretrained(tmp_path)
    for given in (plan, {"plan": plan}, {"plan": str(tmp_path)}, {"plan": tmp_path}):
        assert PMKVQCache(config, given, max_length=64).config == plan.config
    assert PMKVQCache(config, {"plan": None, "fbit": 2}, max_length=64).config == PMKVQConfig(fbit=2)
    assert MixKVQCache(config, PLANS["mixkvq"]()).config == MixKVQConfig(target_bits=2.75)
    assert KIVICache(config, {"plan": PLANS["kivi"]()}).config == KIVIConfig(bits=4)


def test_a_plan_never_overrules_the_user(plan):
    config = tiny_model().config
    given = {"plan": plan, "window": 24, "kernel": "torch"}
    before = dict(given)
    cache = PMKVQCache(config, given, max_length=64)
    assert cache.config == dataclasses.replace(plan.config, window=24, kernel="torch") and given == before

    long = make_plan(config=PMKVQConfig(fbit=FBITS, max_length=4096, boundary_layers=1))
    assert PMKVQCache(config, long).config.max_length == 4096
    assert PMKVQCache(config, long, max_length=64).config.max_length is None
    chosen = PMKVQCache(config, {"plan": long, "fbit": 2, "max_length": 128}, max_length=64).config
    assert (chosen.fbit, chosen.boundary_layers, chosen.max_length) == (2, 0, 128)
    budget = PMKVQCache(config, {"plan": long, "budget_bytes": 10**6}).config
    assert (budget.budget_bytes, budget.max_length) == (10**6, None)

    thresholds = PLANS["mixkvq, thresholds"]()
    chosen = MixKVQCache(config, {"plan": thresholds, "target_bits": 3.0}).config
    assert (chosen.target_bits, chosen.tau_bf16, chosen.tau_uint4) == (3.0, None, None)
    chosen = MixKVQCache(config, {"plan": thresholds, "tau_uint4": 2.0}).config
    assert (chosen.tau_bf16, chosen.tau_uint4) == (TAU, 2.0)


def test_plans_of_others_are_refused_by_name(plan):
    with pytest.raises(ValueError, match="a pmkvq plan holds no options of MixKVQConfig"):
        MixKVQCache(tiny_model().config, plan)
    with pytest.raises(TypeError, match="plan must be a KVQPlan, a folder or the id"):
        PMKVQCache(tiny_model().config, {"plan": 3})
    with pytest.raises(ValueError, match="did you mean 'window'"):
        PMKVQCache(tiny_model().config, {"plan": plan, "windw": 3})
    fewer = LlamaConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    with pytest.raises(PlanError, match=r"made for me/tiny \(llama, 3 layers\), .* \(llama, 2 layers\).*layers: 3 ag"):
        PMKVQCache(fewer, plan)
    for change, words in (
        ({"num_key_value_heads": 4}, "kv_heads: 2 against 4"),
        ({"head_dim": 32}, "head_dim: 16 ag"),
    ):
        config = copy.deepcopy(tiny_model().config)
        for name, value in change.items():
            setattr(config, name, value)
        with pytest.raises(PlanError, match=words):
            plan.check_fits(config)
    with pytest.raises(PlanError, match="model_type: llama against mistral"):
        plan.check_fits(MistralConfig(**tiny_model("mistral").config.to_diff_dict()))
