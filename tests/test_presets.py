# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
import pytest
import torch
from transformers import GenerationConfig

import hf_kvq
from conftest import forward, generate, random_ids, tiny_model
from hf_kvq import KVQPlan, PMKVQConfig
from hf_kvq.presets import PRESETS, resolve
from hf_kvq.registration import CACHES


# Short pages and windows, so that paging happens early.
SMALL = {"pmkvq": {"group_size": 16, "window": 8}, "mixkvq": {"group_size": 16, "residual": 32}}


def options_of(name: str, **more) -> dict:
    """Options for a tiny model, of which a preset wants no more than factors for its keys."""
    options = {**SMALL[PRESETS[name].method], **more}
    if PRESETS[name].options.get("transform") == "lambda":
        config = PMKVQConfig(fbit=8, key_codec="token", transform="lambda", on_overflow="error")
        scale = torch.rand(3, 2, 16, generator=torch.Generator().manual_seed(0)) + 0.5
        options["plan"] = KVQPlan.of(tiny_model(), config, tensors={"key_scale": scale})
    return options


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("as_backend", [False, True])
def test_generate_knows_its_name(name, as_backend):
    options = options_of(name)
    asked = {"cache_implementation": name, "cache_config": options}
    if as_backend:
        asked = {"cache_implementation": "quantized", "cache_config": {"backend": name, **options}}
    cache = generate(tiny_model(), 30, inputs=random_ids(2, 90), **asked).cache
    preset = PRESETS[name]
    assert type(cache) is CACHES[preset.method]
    wanted = {**preset.options, **SMALL[preset.method]}
    assert {key: cache.config.to_dict()[key] for key in wanted} == wanted
    assert cache.get_seq_length() == 119 and max(cache.layer_bits()) < 16


@pytest.mark.parametrize("name", PRESETS)
def test_what_goes_with_every_preset(name, tmp_path):
    method, options = resolve(name, options_of(name, boundary_layers=1, sink_tokens=7))
    model, ids = tiny_model(), random_ids(1, 150)
    cache = CACHES[method](model.config, options, max_length=150)
    forward(model, cache, ids[:, :120])
    bits = cache.layer_bits()
    assert bits[0] == bits[2] == 8 and bits[1] < 8
    assert [layer.states[0].sink for layer in cache.layers] == [7] * 3
    # A file knows the cache and its options, not the preset's name.
    cache.save(tmp_path / "cache.safetensors")
    loaded = CACHES[method].load(tmp_path / "cache.safetensors", model)
    assert loaded.config == cache.config
    torch.testing.assert_close(forward(model, loaded, ids[:, 120:]), forward(model, cache, ids[:, 120:]))
    for got, wanted in zip(loaded.layers, cache.layers):
        assert torch.equal(got.keys, wanted.keys) and torch.equal(got.values, wanted.values)


def test_options_overrule_a_preset():
    assert resolve("rotatekv", {"fbit": 4})[1] == {"plan": None, **PRESETS["rotatekv"].options, "fbit": 4}
    assert resolve("rotatekv", {"plan": "me/plan"})[1]["plan"] == "me/plan"
    config = PMKVQConfig(fbit=8)
    assert resolve("rotatekv", config) == ("pmkvq", config)
    assert resolve("pmkvq", {"fbit": 4}) == ("pmkvq", {"fbit": 4}) and resolve("dynamic") == ("dynamic", None)


def test_a_preset_is_left_as_it_is():
    before = {name: dict(preset.options) for name, preset in PRESETS.items()}
    for name in PRESETS:
        resolve(name, {"sink_tokens": 9})[1]["fbit"] = 16
    assert {name: dict(preset.options) for name, preset in PRESETS.items()} == before
    assert not set(PRESETS) & set(CACHES)


def test_names_come_and_go_with_registration():
    assert GenerationConfig(cache_implementation="skvq").cache_implementation == "skvq"
    hf_kvq.unregister()
    with pytest.raises(ValueError, match="skvq"):
        GenerationConfig(cache_implementation="skvq")


def test_smoothing_without_factors_says_what_is_missing():
    with pytest.raises(ValueError, match="needs the factors of a plan"):
        generate(tiny_model(), 4, inputs=random_ids(1, 9), cache_implementation="qserve")


def test_a_misspelt_option_is_refused():
    with pytest.raises(ValueError, match="did you mean 'fbit'"):
        generate(tiny_model(), 4, inputs=random_ids(1, 9), cache_implementation="skvq", cache_config={"fbits": 4})
