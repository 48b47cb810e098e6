# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""`hf-kvq doctor`: what it says about models, machines and plans, from a config alone."""

import json
import re
import socket

import pytest
import torch
import transformers
from transformers import GenerationConfig

import hf_kvq_kernels
from conftest import CONFIGS
from hf_kvq import KVQPlan, PMKVQConfig
from hf_kvq.cli import main
from hf_kvq.doctor import versions


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def doctor(capsys, folder, *arguments: str) -> tuple[int, dict]:
    status = main(["doctor", str(folder), "--json", "--device", "cpu", *arguments])
    return status, json.loads(capsys.readouterr().out)


def saved(config, tmp_path):
    """A folder with a config and nothing else."""
    config.save_pretrained(tmp_path)
    assert [x.name for x in tmp_path.iterdir()] == ["config.json"]
    return tmp_path


LLAMA = {"quantized": 3}
MODELS = {
    "llama": (CONFIGS["llama"], LLAMA, "sdpa", []),
    "qwen3": (CONFIGS["qwen3"], LLAMA, "sdpa", []),
    "mixed": (
        CONFIGS["mixed"],
        {"quantized": 1, "DynamicSlidingWindowLayer": 2},
        "sdpa",
        ["2 of 3 layers keep their ordinary cache, exact: 2 DynamicSlidingWindowLayer"],
    ),
    "lfm2": (
        CONFIGS["lfm2"],
        {"quantized": 1, "LinearAttentionLayer": 2},
        "sdpa",
        ["2 of 3 layers keep their ordinary cache, exact: 2 LinearAttentionLayer"],
    ),
    "gpt_oss": (
        CONFIGS["gpt_oss"],
        {"quantized": 1, "DynamicSlidingWindowLayer": 2},
        "eager",
        ["keep their ordinary", "attn_implementation='eager' is given .* dequantized"],
    ),
    "deepseek_v3": (CONFIGS["deepseek_v3"], LLAMA, "sdpa", ["latent attention: .* not been measured"]),
    "t5": (
        lambda: transformers.T5Config(d_model=32, num_layers=2, num_heads=2, d_kv=16),
        {"quantized": 2},
        "(sdpa|eager)",
        ["encoder-decoder: self-attention is quantized, cross-attention keeps"],
    ),
    "head_dim 80": (
        lambda: transformers.LlamaConfig(head_dim=80, num_hidden_layers=2),
        {"quantized": 2},
        "sdpa",
        ["head_dim 80 is no multiple of mixkvq's groups of 32: the last one has 16"],
    ),
    "head_dim 512": (
        lambda: transformers.LlamaConfig(head_dim=512, num_hidden_layers=2),
        {"quantized": 2},
        "sdpa",
        ["mixkvq takes up to 256 channels per head, and here are 512"],
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name, tmp_path, capsys):
    config, layers, attention, notes = MODELS[name]
    status, found = doctor(capsys, saved(config(), tmp_path))
    assert status == 0 and found["usable"] and not found["problems"]
    assert found["layers"] == layers and re.fullmatch(attention, found["attention"])
    # Whether T5 has more than eager attention depends on transformers' version.
    kept = [note for note in found["notes"] if name != "t5" or "attn_implementation" not in note]
    assert len(kept) == len(notes)
    for note, pattern in zip(kept, notes):
        assert re.search(pattern, note)


def test_a_model_with_nothing_to_quantize(tmp_path, capsys):
    status, found = doctor(capsys, saved(CONFIGS["sliding"](), tmp_path))
    assert status == 1 and not found["usable"]
    assert "MistralConfig has nothing to quantize" in found["problems"][0]
    assert main(["doctor", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert (
        "problem    MistralConfig has nothing" in shown and "verdict    quantized caches are of no use here" in shown
    )


def test_text(tmp_path, capsys):
    assert main(["doctor", str(saved(CONFIGS["mixed"](), tmp_path)), "--device", "cpu", "--dtype", "float16"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["model"] == f"{tmp_path} (gemma3_text), float16 on cpu"
    assert lines["layers"] == "1 quantized, 2 DynamicSlidingWindowLayer; 2 KV heads of 16 channels"
    assert lines["verdict"] == "quantized caches work" and "transformers " in lines["versions"]


def test_versions(tmp_path, capsys):
    # ENV-08: a bug report says what it is about.
    _, found = doctor(capsys, saved(CONFIGS["llama"](), tmp_path))
    assert found["versions"] == versions()
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["transformers"] == transformers.__version__
    assert {"hf_kvq", "hf_kvq_kernels", "python", "triton"} <= found["versions"].keys()


def test_kernels(tmp_path, capsys, monkeypatch):
    folder = saved(CONFIGS["llama"](), tmp_path)
    reason = hf_kvq_kernels.why_not(torch.empty(1, 1, 1, 64), None)
    _, found = doctor(capsys, folder)
    assert found["kernel"] == ("cpu" if reason is None else "torch") and "triton" in found["why_not"]
    monkeypatch.setattr(hf_kvq_kernels, "why_not", lambda query, layout: "no compiler was found")
    status, found = doctor(capsys, folder)
    assert status == 0 and found["kernel"] == "torch" and found["why_not"]["cpu"] == "no compiler was found"
    if not torch.cuda.is_available():
        status, found = doctor(capsys, folder, "--device", "cuda:0")
        assert status == 1 and found["problems"] == ["there is no cuda:0 on this machine"]


def test_kernels_look_at_the_model(tmp_path, capsys):
    if hf_kvq_kernels.why_not(torch.empty(1, 1, 1, 64), None) is not None:
        pytest.skip("there is no compiler")
    config = transformers.LlamaConfig(head_dim=66, num_hidden_layers=2)
    _, found = doctor(capsys, saved(config, tmp_path))
    assert found["kernel"] == "torch" and "multiples of 4" in found["why_not"]["cpu"]


def test_plans(tmp_path, capsys):
    folder = saved(CONFIGS["llama"](), tmp_path)
    KVQPlan.of(CONFIGS["llama"](), PMKVQConfig(fbit=[8, 4, 2])).save_pretrained(folder / "kvq")
    KVQPlan.of(CONFIGS["qwen3"](), PMKVQConfig(fbit=2)).save_pretrained(folder / "kvq" / "other")
    _, found = doctor(capsys, folder)
    assert len(found["plans"]) == 1 and found["plans"][0].startswith("kvq: KVQPlan(pmkvq")
    (note,) = [note for note in found["notes"] if "plan" in note]
    assert "other cannot be used" in note and "model_type: qwen3 against llama" in note


def test_a_default_that_breaks_the_model_for_others(tmp_path, capsys):
    folder = saved(CONFIGS["llama"](), tmp_path)
    GenerationConfig(cache_implementation="pmkvq").save_pretrained(folder)
    _, found = doctor(capsys, folder)
    assert "generation_config.json names 'pmkvq'" in found["notes"][0]


def test_newer_transformers(tmp_path, capsys, monkeypatch):
    folder = saved(CONFIGS["llama"](), tmp_path)
    monkeypatch.setattr("hf_kvq.doctor.transformers.__version__", "5.31.2")
    _, found = doctor(capsys, folder)
    assert found["notes"] == ["transformers 5.31.2 is newer than what this version is tested with, 5.24"]


def test_no_such_model(tmp_path, capsys):
    assert main(["doctor", str(tmp_path / "nothing")]) == 1
    text, error = capsys.readouterr()
    assert not text and error.startswith("hf-kvq doctor: error: there is no file or folder")
