# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
import copy
import dataclasses
import json
import random

import pytest
import torch
from transformers import AutoTokenizer

from conftest import forward, random_ids, save_with_words, tiny_model
from hf_kvq import KVQPlan, PMKVQConfig
from hf_kvq.calibration import measured, measured_sensitivity, sensitivity, smooth
from hf_kvq.cli import main
from hf_kvq.evaluation import calibrated
from hf_kvq.evaluation.methods import Method, check_labels
from hf_kvq.evaluation.run import Settings


#: The bundled text of these tests; a fifth of it is 6,000 tokens.
WORDS = " ".join(random.Random(0).choices([f"w{i}" for i in range(1, 127)], k=30_000))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A tiny model and its tokenizer."""
    monkeypatch.setattr(calibrated, "bundled_text", lambda: WORDS)
    monkeypatch.setattr(calibrated, "_LENGTH", 600)
    monkeypatch.setattr(calibrated, "_TRIED", 400)
    return save_with_words(tmp_path)


@pytest.fixture
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(("layers", "expected"), [(2, (4, 2)), (5, (4, 2, 4, 2, 2)), (6, (4, 2, 4, 2, 4, 2))])
def test_half_of_the_layers_are_wide(layers, expected):
    assert calibrated.evenly_spread(layers) == expected


def test_allocations_have_equal_bytes(tokenizer, tmp_path, monkeypatch):
    model = copy.deepcopy(tiny_model())
    # What is wide where they are spread, the first of three, hardly matters here.
    model.model.layers[0].self_attn.o_proj.weight.mul_(0.01)
    methods = calibrated.allocation_suite(model, tokenizer, tmp_path)
    check_labels(methods)
    by_label = {method.label: method for method in methods}
    assert len(methods) == 10
    ids, held, bits = random_ids(1, 400), {}, {}
    for label, method in by_label.items():
        cache = method.build(model, 400)
        for part in ids.split(100, dim=1):
            forward(model, cache, part)
            bits.setdefault(label, []).append(max(cache.layer_bits()))
        held[label] = cache.nbytes()
    for schedule in ("fixed", "progressive"):
        sizes = [held[f"half at 4, {how}, {schedule}"] for how in ("measured", "by gradient", "evenly spread")]
        assert len(set(sizes)) == 1
        assert held[f"all layers at 2, {schedule}"] < sizes[0] < held[f"all layers at 4, {schedule}"]
    # As soon as there is a page, or at the end.
    assert bits["all layers at 2, fixed"] == [16, 16, 2, 2]
    assert bits["all layers at 2, progressive"] == [16, 16, 4, 2]

    # Of three layers the one is at 4 bits that gains the most by it.
    samples = calibrated.calibration_samples(tokenizer)
    for how, found in {
        "measured": measured_sensitivity(model, samples[:1, :400], widths=(4, 2), desc=None),
        "by gradient": sensitivity(model, samples, widths=(4, 2), desc=None),
    }.items():
        best = int((found.total[:, 1] - found.total[:, 0]).argmax())
        fbit = [4 if i == best else 2 for i in range(3)]
        assert best > 0 and by_label[f"half at 4, {how}, fixed"].options == {"fbit": fbit, "initial_bits": 2}
        assert by_label[f"half at 4, {how}, progressive"].options == {"fbit": fbit}

    # Again: nothing is measured twice.
    monkeypatch.setattr(measured, "divergence", None)
    assert calibrated.allocation_suite(model, tokenizer, tmp_path) == methods


def test_plans_are_of_their_distance(tokenizer, tmp_path):
    model = tiny_model()
    methods = calibrated.positions_suite(model, tokenizer, tmp_path)
    check_labels(methods)
    assert [method.options for method in methods if "plan" not in method.options] == [
        {"fbit": bits, "initial_bits": bits, "key_codec": "token"} for bits in (4, 2)
    ]
    samples = calibrated.calibration_samples(tokenizer)[:1]
    for bits in (4, 2):
        config = PMKVQConfig(fbit=bits, initial_bits=bits, key_codec="token")
        for stretch in (1, 4, 16):
            (method,) = [m for m in methods if m.options.get("plan") == f"plans/{bits}bits-s{stretch}"]
            cache = method.build(model, 400)
            assert (cache.config.transform, cache.config.fbit, cache.config.initial_bits) == ("lambda", bits, bits)
            assert torch.equal(cache.key_scale, smooth(model, samples, config, stretch, desc=None).key_scale)
    scales = [m.build(model, 400).key_scale for m in methods if "plan" in m.options]
    assert len({tuple(scale.flatten().tolist()) for scale in scales}) == 6


def test_plans_are_made_once_from_the_same(tokenizer, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(
        calibrated, "smooth", lambda *args, **kwargs: calls.append(args[2:]) or smooth(*args, **kwargs)
    )
    model = tiny_model()

    def made(model=model):
        calls.clear()
        calibrated.positions_suite(model, tokenizer, tmp_path)
        return [(config.fbit, stretch) for config, stretch in calls]

    assert made() == [(bits, stretch) for bits in (4, 2) for stretch in (1, 4, 16)]
    assert made() == []
    (tmp_path / "plans" / "4bits-s4" / "kvq_config.json").unlink()
    (tmp_path / "plans" / "2bits-s1" / "kvq.safetensors").write_bytes(b"half")
    for name, change in {
        "4bits-s1": lambda plan: {"config": dataclasses.replace(plan.config, window=64)},
        "4bits-s16": lambda plan: {"hf_kvq_version": "0.0.1"},
    }.items():
        plan = KVQPlan.from_pretrained(tmp_path / "plans" / name)
        dataclasses.replace(plan, **change(plan)).save_pretrained(tmp_path / "plans" / name)
    assert made() == [(4, 1), (4, 4), (4, 16), (2, 1)]
    # Another model, or other text.
    other = copy.deepcopy(model)
    other.model.layers[1].self_attn.k_proj.weight.mul_(1.5)
    assert len(made(other)) == 6
    monkeypatch.setattr(calibrated, "bundled_text", lambda: f"w5 {WORDS[:-1000]}")
    assert len(made(other)) == 6
    assert KVQPlan.from_pretrained(tmp_path / "plans" / "2bits-s16").calibration["stretch"] == 16


def test_what_is_calibrated_on_is_not_measured(tokenizer):
    assert WORDS.endswith(calibrated.calibration_text())
    calibrated.require_apart(WORDS, tokenizer, 23_000)
    with pytest.raises(ValueError, match="calibrates on what comes after its first 2.* lower --tokens"):
        calibrated.require_apart(WORDS, tokenizer, 25_000)
    calibrated.require_apart("w1 w2 w3", tokenizer, 25_000)


@pytest.fixture
def run(folder, capsys, monkeypatch):
    monkeypatch.setattr("hf_kvq.cli.evaluate.Settings", lambda **given: Settings(**{**given, "tokens": 400}))

    def run(*arguments: str) -> tuple[int, str, str]:
        text = str(folder / "text.txt")
        status = main(["eval", str(folder), "--data", text, "--metrics", "text", *arguments])
        return status, *capsys.readouterr()

    return run


def test_a_report_tells_nobody_where_plans_are(run, tmp_path, monkeypatch):
    arguments = ["--suite", "paper-positions", "--report", str(tmp_path / "out")]
    status, out, err = run(*arguments)
    assert status == 0, err
    made = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.is_file()}
    assert all(str(tmp_path).encode() not in data for data in made.values()) and str(tmp_path) not in out
    methods = json.loads(made["results.json"])["methods"]
    assert (methods[1]["label"], methods[1]["cache"]) == ("keys per token, 4 bits, s = 1", "pmkvq")
    assert methods[1]["options"] == {"plan": "plans/4bits-s1"}
    assert (tmp_path / "out" / methods[1]["options"]["plan"] / "kvq.safetensors").is_file()

    # Gone on with: neither calibrated nor measured again. Elsewhere, and without a report: the same numbers.
    with monkeypatch.context() as patch:
        patch.setattr(calibrated, "smooth", None)
        patch.setattr(Method, "build", None)
        assert run(*arguments)[:2] == (0, out)
    assert run("--suite", "paper-positions")[:2] == (0, out)
    # Results go with what was in the plans.
    monkeypatch.setattr(calibrated, "bundled_text", lambda: WORDS[:-9000])
    status, other, _ = run(*arguments)
    assert status == 0 and other != out


def test_allocations_from_the_command(run, tmp_path):
    status, out, _ = run("--suite", "paper-allocation")
    assert status == 0 and "| half at 4, by gradient, progressive |" in out
    status, out, err = run("--suite", "paper-allocation", "--metrics", "txt")
    assert status == 1 and not out and "unknown metric 'txt'" in err.splitlines()[-1]
    assert "measured sensitivity" not in err


def test_the_command_refuses_to_measure_what_was_calibrated_on(run, folder):
    (folder / "text.txt").write_text(WORDS)
    status, out, err = run("--suite", "paper-positions", "--rows", "60")
    assert status == 1 and not out and "lower --tokens or --rows" in err.splitlines()[-1]
