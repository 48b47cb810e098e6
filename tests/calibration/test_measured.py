# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Measured sensitivities against caches of the package with one quantized layer each."""

import copy

import pytest
import torch

from conftest import random_ids, tiny_model
from hf_kvq import PMKVQCache, PMKVQConfig
from hf_kvq.calibration import calibrate_fbits, fbits_for_budget, measured_sensitivity, sensitivity
from hf_kvq.evaluation import measure_fidelity


OPTIONS = {"window": 8, "group_size": 16}
SAMPLES = random_ids(2, 60)
CHUNK = 24


def measure(model, samples=SAMPLES, options=OPTIONS, **kwargs):
    return measured_sensitivity(model, samples, options, chunk=CHUNK, desc=None, **kwargs)


def reference(model, ids, options, layers, layer, bits):
    """KL of a cache in which one layer alone is quantized, from the first page on."""
    config = {**OPTIONS, **options, "initial_bits": bits, "max_length": len(ids)}
    fbit = tuple(bits if i == layer else 16 for i in layers)
    return measure_fidelity(model, ids[None], PMKVQCache(model.config, {**config, "fbit": fbit}), CHUNK).kl


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        ("llama", {}),
        ("llama", {"key_codec": "token", "sink_tokens": 4, "window": 0, "transform": "hadamard"}),
        ("qwen3", {}),
        ("mixed", {}),
        ("gpt2", {}),
    ],
)
def test_equals_caches_with_one_quantized_layer(arch, options):
    model = tiny_model(arch)
    found = measure(model, options={**OPTIONS, **options}, rows=4)
    assert found.widths == (8, 4, 2) and found.samples == 2 and found.keys is found.values is None
    gradient = sensitivity(model, SAMPLES, {**OPTIONS, **options}, desc=None)
    assert (found.layers, found.shapes, found.total.shape) == (gradient.layers, gradient.shapes, gradient.total.shape)
    wanted = [
        [sum(reference(model, ids, options, found.layers, i, bits) for ids in SAMPLES) / 2 for bits in found.widths]
        for i in found.layers
    ]
    torch.testing.assert_close(found.total, torch.tensor(wanted, dtype=torch.float64), rtol=2e-2, atol=1e-7)
    assert (found.total[:, 1] < found.total[:, 2]).all() and (found.total[:, 2] > 1e-5).all()


@pytest.mark.parametrize("rows", [1, 4, 100])
def test_how_many_run_together_does_not_matter(rows):
    torch.testing.assert_close(
        measure(tiny_model(), rows=rows).total, measure(tiny_model()).total, rtol=1e-3, atol=1e-7
    )


def test_a_layer_that_does_not_matter():
    model = copy.deepcopy(tiny_model())
    model.model.layers[1].self_attn.o_proj.weight.zero_()
    found = measure(model).total
    assert (found >= 0).all() and (found[1] < 1e-7).all() and (found[[0, 2], 2] > 1e-5).all()


def test_from_model_to_config(tmp_path):
    pytest.importorskip("cvxpy")
    model = tiny_model()
    config = calibrate_fbits(model, 200, "14bits", SAMPLES, OPTIONS, measure="kl", checkpoint=tmp_path)
    found = measured_sensitivity(model, SAMPLES, OPTIONS, desc=None)
    assert config == fbits_for_budget(found, 200, "14bits", PMKVQConfig(**OPTIONS))
    assert len(list(tmp_path.iterdir())) == 2 * 2  # 9 (layer, width), 8 at a time
    with pytest.raises(ValueError, match="'kl' or 'gradient'; got 'loss'"):
        calibrate_fbits(model, 200, "14bits", SAMPLES, OPTIONS, measure="loss")


def test_a_checkpoint_of_the_other_measure_is_not_used(tmp_path):
    model = tiny_model()
    sensitivity(model, SAMPLES, OPTIONS, desc=None, checkpoint=tmp_path)
    found = measure(model, checkpoint=tmp_path)
    assert torch.equal(found.total, measure(model).total)
    assert torch.equal(measure(model, checkpoint=tmp_path).total, found.total)


@pytest.mark.parametrize(
    ("samples", "kwargs", "message"),
    [
        (random_ids(1, 60), {"widths": (16, 4)}, "some of 8, 4 and 2"),
        ([], {}, "no samples"),
        (random_ids(1, 24), {}, "24 tokens fills no page.*takes 25"),
        (random_ids(1, 60), {"rows": 0}, "rows and chunk"),
    ],
)
def test_impossible_requests(samples, kwargs, message):
    with pytest.raises(ValueError, match=message):
        measure(tiny_model(), samples, **kwargs)


def test_the_model_is_left_as_it_was():
    model = copy.deepcopy(tiny_model()).train()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    measure(model, SAMPLES[:1], widths=(2,))
    assert all(module.training for module in model.modules())
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())
