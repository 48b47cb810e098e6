# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""`hf-kvq calibrate`: from a model and a budget to a plan that `generate` finds."""

import csv
import sys
from pathlib import Path

import pytest
import torch

from conftest import save_with_words, tiny_model
from hf_kvq import KVQPlan, MixKVQCache, PMKVQCache
from hf_kvq.calibration import thresholds
from hf_kvq.calibration.thresholds import request_bytes
from hf_kvq.cli import main
from hf_kvq.registration import cache_argument


@pytest.fixture
def folder(tmp_path) -> Path:
    """A tiny model with its tokenizer, and a text of its words."""
    return save_with_words(tmp_path)


def command(folder: Path, *more: str) -> list[str]:
    return [
        *("calibrate", str(folder), "--data", str(folder / "text.txt"), "--samples", "2", "--sample-length", "300"),
        *("--max-length", "600", "--cache-config", "window=0", "--cache-config", "group_size=32"),
        *("-o", str(folder / "kvq"), *more),
    ]


def mixkvq(folder: Path, *more: str) -> list[str]:
    return [
        *("calibrate", str(folder), "--data", str(folder / "text.txt"), "--samples", "1", "--sample-length", "300"),
        *("--max-length", "600", "-o", str(folder / "kvq"), "--method", "mixkvq", "--trials", "6"),
        *("--cache-config", "residual=32", "--cache-config", "sink_tokens=4", *more),
    ]


def names(folder: Path) -> set[str]:
    """What has been added to the folder."""
    return {path.name for path in folder.iterdir() if path.name.startswith("kvq")}


@pytest.mark.parametrize("measure", ["gradient", "kl"])
def test_a_plan_within_its_budget(folder, capsys, measure):
    assert main(command(folder, "--budget", "9bits", "--measure", measure)) == 0
    assert "method       pmkvq" in capsys.readouterr().out
    plan = KVQPlan.from_pretrained(folder / "kvq")
    assert plan.config.max_length == 600 and plan.config.window == 0
    assert plan.calibration["n_samples"] == 2 and len(plan.calibration["fingerprint"]) == 64
    assert plan.calibration["measure"] == measure and names(folder) == {"kvq"}
    model = tiny_model()
    plan.check_fits(model.config)
    cache = PMKVQCache(model.config, plan)
    model(torch.arange(600)[None] * 7 % 127 + 1, **{"use_cache": True, cache_argument(model): cache})
    elements = 600 * sum(2 * x.layout.shape.heads * x.layout.shape.key_dim for x in cache.layers)
    # What was promised is held, and nearly all of the budget is used.
    assert 0.5 * 9 <= cache.nbytes() * 8 / elements <= 9
    # The same again gives the same file.
    written = (folder / "kvq" / "kvq_config.json").read_bytes()
    assert main(command(folder, "--budget", "9bits", "--measure", measure)) == 0
    assert (folder / "kvq" / "kvq_config.json").read_bytes() == written


@pytest.mark.parametrize(
    ("more", "status", "message"),
    [
        (("--budget", "0.5bits"), 1, "smallest"),
        (("--budget", "many"), 1, "a budget is"),
        (("--budget", "8bits", "--data", "none.txt"), 1, "none.txt"),
        (("--budget", "8bits", "--samples", "2000"), 1, "2000"),
        (("--budget", "8bits", "--cache-config", "windw=3"), 2, "window"),
        (("--budget", "8bits", "--cache-config", "boundary_layers=1"), 1, "boundary_layers"),
        (("--budget", "8bits", "--method", "mixkvq"), 2, "window"),
        (("--budget", "8bits", "--trials", "0"), 2, "--trials"),
    ],
)
def test_errors_are_one_line_and_leave_nothing(folder, capsys, more, status, message):
    complains(capsys, command(folder, *more), status, message)
    assert not names(folder)


@pytest.mark.parametrize(
    ("more", "status", "message"),
    [
        (("--budget", "6bits"), 1, "smallest feasible one is"),
        (("--budget", "many"), 1, "a budget is"),
        (("--budget", "8bits", "--cache-config", "target_bits=3"), 1, "leave them out"),
        (("--budget", "8bits", "--sample-length", "35"), 1, "35 tokens fills no page"),
        (("--budget", "8bits", "--cache-config", "fbit=4"), 2, "fbit"),
    ],
)
def test_errors_of_the_search_are_alike(folder, capsys, more, status, message):
    complains(capsys, mixkvq(folder, *more), status, message)
    assert not names(folder) - {"kvq.trials"}


def complains(capsys, arguments: list[str], status: int, message: str) -> None:
    try:
        assert main(arguments) == status
    except SystemExit as stopped:  # argparse
        assert stopped.code == status
    out, error = capsys.readouterr()
    last = error.strip().splitlines()[-1]
    assert not out and last.startswith("hf-kvq calibrate: error: ") and message in last


def test_thresholds_within_their_budget(folder, capsys):
    arguments = mixkvq(folder, "--budget", "7.6bits", "--front", str(folder / "front.csv"))
    assert main(arguments) == 0
    out, error = capsys.readouterr()
    assert "method       mixkvq" in out and "6 trials are in" in error
    plan = KVQPlan.from_pretrained(folder / "kvq")
    assert plan.config.sink_tokens == 4 and plan.config.tau_bf16 and plan.config.tau_uint4
    assert plan.calibration["trials"] == 6 and plan.calibration["budget"] == "7.6bits" and names(folder) == {"kvq"}
    with (folder / "front.csv").open(newline="") as file:
        rows = [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]
    within = [row for row in rows if row["true_bits"] <= 7.6]
    best = min(within, key=lambda row: row["kl"])
    assert 0 < len(within) < len(rows) == 6
    assert (best["tau_bf16"], best["tau_uint4"]) == (plan.config.tau_bf16, plan.config.tau_uint4)
    assert plan.calibration["kl"] == best["kl"] and plan.calibration["true_bits"] == best["true_bits"]
    # What was promised is what a request of that length needs.
    model = tiny_model()
    cache = MixKVQCache(model.config, plan)
    model(torch.arange(600)[None] * 7 % 127 + 1, **{"use_cache": True, cache_argument(model): cache})
    assert request_bytes(cache, 600) * 8 / (600 * 3 * 2 * 2 * 16) == pytest.approx(best["true_bits"], rel=0.05)
    # The same again gives the same file. Bytes are a budget, too.
    written = (folder / "kvq" / "kvq_config.json").read_bytes()
    assert main(arguments) == 0
    assert (folder / "kvq" / "kvq_config.json").read_bytes() == written
    assert main(mixkvq(folder, "--budget", str(int(best["nbytes"])))) == 0
    assert KVQPlan.from_pretrained(folder / "kvq").config == plan.config


@pytest.mark.parametrize("method", ["pmkvq", "mixkvq", "mixkvq with a storage"])
def test_an_interrupted_command_goes_on(folder, monkeypatch, capsys, method):
    arguments = [*(command if method == "pmkvq" else mixkvq)(folder, "--budget", "9bits"), "--measure", "gradient"]
    if method.endswith("storage"):
        arguments += ["--storage", str(folder / "kept")]
    assert main(arguments) == 0
    wanted = (folder / "kvq" / "kvq_config.json").read_bytes()
    (folder / "kvq" / "kvq_config.json").unlink()
    (folder / "kvq").rmdir()
    assert (folder / "kept").exists() == method.endswith("storage")
    (folder / "kept").unlink(missing_ok=True)

    module, name = sys.modules["hf_kvq.calibration.sensitivity"], "kv_gradients"
    if method != "pmkvq":
        module, name = thresholds, "_evaluate"
    original, calls = getattr(module, name), []

    def once(*args):
        if calls:
            raise KeyboardInterrupt
        calls.append(args)
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(module, name, once)
        assert main(arguments) == 130
    left = {"pmkvq": {"kvq.samples"}, "mixkvq": {"kvq.trials"}}.get(method, set())
    assert names(folder) == left
    monkeypatch.setattr(module, name, lambda *args: calls.append(args) or original(*args))
    assert main(arguments) == 0
    assert len(calls) == (2 if method == "pmkvq" else 6)
    assert (folder / "kvq" / "kvq_config.json").read_bytes() == wanted and names(folder) == {"kvq"}
    assert (folder / "kept").exists() == method.endswith("storage")


def test_smoothed_keys(folder, capsys):
    assert (
        main(command(folder, "--budget", "11bits", "--cache-config", '{"key_codec": "token", "transform": "lambda"}'))
        == 0
    )
    plan = KVQPlan.from_pretrained(folder / "kvq")
    assert plan.config.transform == "lambda" and plan.tensors["key_scale"].shape == (3, 2, 16)
    assert len(plan.calibration["alphas"]) == 3
    model = tiny_model()
    cache = PMKVQCache(model.config, plan)
    model(torch.arange(300)[None] * 7 % 127 + 1, **{"use_cache": True, cache_argument(model): cache})


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(""), None])
def test_out_of_memory_names_what_to_lower(folder, monkeypatch, capsys, error):
    def too_much(*args):
        if error:
            raise error
        torch.empty(2**60)

    monkeypatch.setattr(sys.modules["hf_kvq.calibration.sensitivity"], "kv_gradients", too_much)
    assert main(command(folder, "--budget", "9bits", "--measure", "gradient")) == 1
    assert "lower --sample-length (now 300)" in capsys.readouterr().err.splitlines()[-1]
    assert not names(folder)


def test_a_split_model(folder, monkeypatch):
    pytest.importorskip("accelerate")
    assert main(command(folder, "--budget", "9bits")) == 0
    plan = KVQPlan.from_pretrained(folder / "kvq")
    assert main(command(folder, "--budget", "9bits", "--device-map", "auto")) == 0
    assert KVQPlan.from_pretrained(folder / "kvq") == plan
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(command(folder, "--budget", "9bits", "--device-map", "auto")) == 2
