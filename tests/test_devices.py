# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Models on several devices, or partly on disk: every layer of a cache is where its keys are."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from conftest import generate, kv, left_padded, make_cache, storage_bytes, tiny_model
from hf_kvq import KIVICache, PMKVQCache
from hf_kvq.cache.base import tensors_of
from simulation import Rules


PM = {"fbit": 2, "window": 8, "group_size": 16, "max_length": 100}
MIX = {"residual": 16, "group_size": 8, "sink_tokens": 4}
MAPS = {
    "all on one": {"": "cpu"},
    "layers on disk": {"model.layers.1": "disk", "model.layers.2": "disk"},
    "all layers on disk": {"model.layers": "disk"},
}


@pytest.mark.parametrize("name", MAPS)
def test_device_map(name, tmp_path):
    # Weights come from disk for each call; keys and values are on the device that the layer runs on.
    pytest.importorskip("accelerate")
    # In float64, as weights that lie elsewhere may be summed up in another order, which may lead to another code.
    model = tiny_model(dtype=torch.float64)
    model.save_pretrained(tmp_path / "model")
    rest = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    layers = {f"model.layers.{i}": "cpu" for i in range(3)} if name == "layers on disk" else {}
    device_map = MAPS[name] if "" in MAPS[name] else {**rest, **layers, **MAPS[name]}
    split = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.float64, device_map=device_map, offload_folder=tmp_path / "offload"
    )
    on_disk = [weight for weight in split.parameters() if weight.device.type == "meta"]
    assert bool(on_disk) == ("disk" in device_map.values())
    for method, options in (("pmkvq", PM), ("mixkvq", MIX)):
        request = {**left_padded(2, 60, [0, 9]), "cache_implementation": method, "cache_config": options}
        out, wanted = generate(split, 12, **request), generate(model, 12, **request)
        assert torch.equal(out.sequences, wanted.sequences)
        torch.testing.assert_close(out.logits, wanted.logits, atol=1e-5, rtol=0)
        assert {x.device.type for x in held(out.cache)} == {"cpu"}


def held(cache) -> list[torch.Tensor]:
    """Everything that a cache's quantized layers store."""
    return [
        x
        for layer in cache.quantized_layers
        for x in (layer.body.data, *layer.sink, *layer.recent, *tensors_of(vars(layer)), *tensors_of(vars(layer.body)))
    ]


@pytest.mark.parametrize("kind, options", [(PMKVQCache, {**PM, "transform": "hadamard"}), (KIVICache, MIX)])
def test_layers_on_two_devices(kind, options):
    # ENV-05, ENV-06: "meta" stands in for a second device. It has no data, so whatever mixes devices is an error.
    cache = kind(tiny_model().config, options)
    rules, where = Rules(2, 16, 16, torch.float32), ["cpu", "meta", "cpu"]
    for length, seed in ((60, 0), (1, 1), (1, 2), (40, 3)):
        cache.observe_padding(torch.ones(2, cache.get_seq_length() + length), length)
        for i, device in enumerate(where):
            keys, values = (x.to(device) for x in kv(rules, length, 2, seed))
            handles = cache.update(keys, values, i)
            assert [handle.device.type for handle in handles] == [device] * 2
            out = cache.layers[i].attend(torch.zeros(2, 4, length, 16, device=device), None, 1.0)
            assert out.device.type == device and out.shape == (2, 4, length, 16)
    index = torch.tensor([1, 0])
    cache.reorder_cache(index)
    cache.crop(-5)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([True, False, True, True]))
    for layer, device in zip(cache.layers, where):
        assert layer.bits() < 16 and layer.device.type == device
        tensors = [layer.body.data, layer.dequantize(False), layer.dequantize(True), *tensors_of(vars(layer))]
        assert {x.device.type for x in tensors} == {device}
    assert cache.layers[0].states == cache.layers[1].states


def test_offloading_is_refused():
    model = tiny_model()
    cache = make_cache(model)
    with pytest.raises(NotImplementedError, match=r"not offloaded layer by layer.*cache.to\('cpu'\)"):
        cache.offload(0)
    with pytest.raises(ValueError, match="unknown option 'offloading'"):
        generate(model, 2, **left_padded(1, 5, [0]), cache_implementation="pmkvq", cache_config={"offloading": True})


def test_moving_gives_memory_back():
    # What was outgrown is not taken along, and nothing stays behind.
    model = tiny_model()
    out = generate(model, 30, **left_padded(2, 60, [0, 9]), cache_implementation="mixkvq", cache_config=MIX)
    before = out.cache.dequantize(1)
    assert out.cache.to("cpu") is out.cache
    assert all(torch.equal(*pair) for pair in zip(before, out.cache.dequantize(1)))
    assert out.cache.nbytes() == storage_bytes(out.cache.layers)
