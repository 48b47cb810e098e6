# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
import json
import sys

import pytest
import torch

from conftest import forward, generate, random_ids, tiny_model
from hf_kvq import PMKVQCache, PMKVQConfig
from hf_kvq.bundled import bundled_text
from hf_kvq.calibration import (
    cached_shapes,
    calibrate_fbits,
    fbits_for_budget,
    layer_costs,
    sensitivity,
    token_blocks,
)
from hf_kvq.calibration import fbits as fbits_module


pytest.importorskip("cvxpy")
OPTIONS = {"window": 8, "group_size": 16}
SAMPLES = random_ids(2, 60)
LENGTH = 200


@pytest.fixture(scope="module")
def measured():
    return sensitivity(tiny_model(), SAMPLES, OPTIONS, desc=None)


@pytest.mark.parametrize("arch", ["llama", "gpt2", "mixed", "deepseek_v3"])
@pytest.mark.parametrize("budget", ["10bits", "14bits", "25bits"])
def test_promised_bytes_are_what_a_filled_cache_holds(arch, budget):
    model = tiny_model(arch)
    found = sensitivity(model, SAMPLES, OPTIONS, desc=None)
    assert cached_shapes(model) == found.shapes
    config = fbits_for_budget(found, LENGTH, budget, PMKVQConfig(**OPTIONS))
    assert config == PMKVQConfig(**OPTIONS, fbit=config.fbit, max_length=LENGTH) and len(config.fbit) == len(
        found.layers
    )
    cache = PMKVQCache(model.config, config)
    forward(model, cache, random_ids(1, LENGTH))
    costs = layer_costs(found.shapes, LENGTH, (16, 8, 4, 2), config)
    promised = [row[(16, 8, 4, 2).index(bits)] for row, bits in zip(costs, config.fbit)]
    assert [layer.nbytes() for layer in cache.quantized_layers] == promised
    assert [layer.bits() for layer in cache.quantized_layers] == list(config.fbit)
    assert cache.true_bits() <= float(budget.removesuffix("bits"))


def test_more_bytes_never_hurt(measured):
    config = PMKVQConfig(**OPTIONS)
    widths = (16, 8, 4, 2)
    losses = []
    for bits in range(10, 33):
        fbits = fbits_for_budget(measured, LENGTH, f"{bits}bits", config).fbit
        losses.append(
            sum(0 if b == 16 else measured.total[i, widths.index(b) - 1].item() for i, b in enumerate(fbits))
        )
    assert losses == sorted(losses, reverse=True) and losses[-1] == 0 and len(set(losses)) > 3


def test_too_small_a_budget_names_the_smallest(measured):
    least = sum(row[-1] for row in layer_costs(measured.shapes, LENGTH, (2,), PMKVQConfig(**OPTIONS)))
    with pytest.raises(ValueError, match=f"smallest feasible one is {least} bytes"):
        fbits_for_budget(measured, LENGTH, least - 1, PMKVQConfig(**OPTIONS))
    assert fbits_for_budget(measured, LENGTH, least, PMKVQConfig(**OPTIONS)).fbit == (2, 2, 2)


def test_impossible_budgets_fail_before_anything_is_measured(monkeypatch):
    monkeypatch.setitem(fbits_module.MEASURES, "kl", lambda *a, **k: pytest.fail("measured in vain"))
    for length, budget, message in (
        (LENGTH, 1000, "smallest feasible one is"),
        (LENGTH, "14 bytes", "'512MiB'"),
        (0, "14bits", "max_length must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            calibrate_fbits(tiny_model(), length, budget, SAMPLES, OPTIONS)


def test_from_model_to_config(measured):
    config = calibrate_fbits(tiny_model(), LENGTH, "14bits", SAMPLES, OPTIONS, measure="gradient")
    assert config == fbits_for_budget(measured, LENGTH, "14bits", PMKVQConfig(**OPTIONS))
    assert PMKVQConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    out = generate(tiny_model(), 8, input_ids=SAMPLES[:1], cache_implementation="pmkvq", cache_config=config.to_dict())
    assert isinstance(out.cache, PMKVQCache) and out.cache.config == config


def test_default_samples_are_the_bundled_text(monkeypatch):
    asked = []
    monkeypatch.setattr(fbits_module, "load_texts", lambda: ["essays"])
    monkeypatch.setattr(fbits_module.AutoTokenizer, "from_pretrained", lambda name: f"tokenizer of {name}")
    monkeypatch.setattr(fbits_module, "token_blocks", lambda *args: asked.append(args) or SAMPLES)
    model = tiny_model()
    config = calibrate_fbits(model, LENGTH, "14bits", config=OPTIONS)
    assert asked == [(["essays"], f"tokenizer of {model.name_or_path}", 2, 2048)]
    assert config == calibrate_fbits(model, LENGTH, "14bits", SAMPLES, OPTIONS)
    calibrate_fbits(model, LENGTH, "14bits", config=OPTIONS, measure="gradient")
    assert asked[1][2:] == (16, 2048)


@pytest.mark.parametrize("options", [{"budget_bytes": 10**6}, {"boundary_layers": 1}, {"value_fbit": 4}])
def test_options_that_would_overrule_the_result(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} would overrule"):
        calibrate_fbits(tiny_model(), LENGTH, "14bits", SAMPLES, {**OPTIONS, **options})


def test_without_cvxpy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cvxpy", None)
    with pytest.raises(ImportError, match="needs cvxpy"):
        calibrate_fbits(tiny_model(), LENGTH, "14bits", SAMPLES, OPTIONS)


@pytest.mark.slow
def test_real_model(real_model):
    model, tokenizer = real_model
    samples = token_blocks(bundled_text(), tokenizer, 1, 512)
    config = calibrate_fbits(model, 512, "20bits", samples)
    assert len(config.fbit) == 30 and len(set(config.fbit)) > 1
    cache = PMKVQCache(model.config, config)
    forward(model, cache, samples)
    assert cache.layer_bits() == list(config.fbit) and cache.true_bits() <= 20
    assert torch.isfinite(forward(model, cache, samples[:, :1])).all()
