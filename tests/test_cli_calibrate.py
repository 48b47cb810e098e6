# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""`hf-kvq calibrate`: from a model and a budget to a plan that `generate` finds."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from conftest import tiny_model
from hf_kvq import KVQPlan, PMKVQCache
from hf_kvq.cli import main
from hf_kvq.registration import cache_argument


@pytest.fixture
def folder(tmp_path) -> Path:
    """A tiny model with its tokenizer, and a text of its words."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(128)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w0").save_pretrained(tmp_path)
    tiny_model().save_pretrained(tmp_path)
    (tmp_path / "text.txt").write_text(" ".join(f"w{i * i % 127}" for i in range(3000)))
    return tmp_path


def command(folder: Path, *more: str) -> list[str]:
    return [
        *("calibrate", str(folder), "--data", str(folder / "text.txt"), "--samples", "2", "--sample-length", "300"),
        *("--max-length", "600", "--cache-config", "window=0", "--cache-config", "group_size=32"),
        *("-o", str(folder / "kvq"), *more),
    ]


def test_a_plan_within_its_budget(folder, capsys):
    assert main(command(folder, "--budget", "9bits")) == 0
    assert "method       pmkvq" in capsys.readouterr().out
    plan = KVQPlan.from_pretrained(folder / "kvq")
    assert plan.config.max_length == 600 and plan.config.window == 0
    assert plan.calibration["n_samples"] == 2 and len(plan.calibration["fingerprint"]) == 64
    model = tiny_model()
    plan.check_fits(model.config)
    cache = PMKVQCache(model.config, plan)
    model(torch.arange(600)[None] * 7 % 127 + 1, **{"use_cache": True, cache_argument(model): cache})
    elements = 600 * sum(2 * x.layout.shape.heads * x.layout.shape.key_dim for x in cache.layers)
    # What was promised is held, and nearly all of the budget is used.
    assert 0.5 * 9 <= cache.nbytes() * 8 / elements <= 9
    # The same again gives the same file.
    written = (folder / "kvq" / "kvq_config.json").read_bytes()
    assert main(command(folder, "--budget", "9bits")) == 0
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
    ],
)
def test_errors_are_one_line_and_leave_nothing(folder, capsys, more, status, message):
    assert main(command(folder, *more)) == status
    out, error = capsys.readouterr()
    last = error.strip().splitlines()[-1]
    assert not out and last.startswith("hf-kvq calibrate: error: ") and message in last
    assert not (folder / "kvq").exists()
