# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Options of MixKVQ and KIVI."""

import dataclasses
import json

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig

from conftest import CONFIGS, generate, random_ids, tiny_model
from hf_kvq import KIVICache, KIVIConfig, MixKVQCache, MixKVQConfig


NAN, INF = float("nan"), float("inf")
TAUS = {"tau_bf16": [1.5, [INF, 0.25], 3.0], "tau_uint4": [0.5, 1.0, [-INF, 1.0]]}
GOOD = {
    "residual": 64,
    "group_size": 20,
    "sink_tokens": 0,
    "value_bits": 4,
    **TAUS,
    "target_bits": None,
    "importance": "none",
    "importance_window": "page",
    "transform": "hadamard",
    "key_clip": 0.9,
    "value_clip": 0.75,
    "boundary_layers": 1,
    "kernel": "torch",
}
GOOD_KIVI = {
    "bits": 4,
    "residual": 64,
    "group_size": 20,
    "sink_tokens": 2,
    "boundary_layers": 1,
    "kernel": "torch",
}

INTEGER_ERROR, TAU_ERROR = "must be an integer", "must be a number, one per layer, or one per layer and KV head"
BAD_BOTH = [
    *[("residual", value, ValueError, "multiple of 16") for value in (100, 8, 129)],
    *[(key, 0, ValueError, "at least 1") for key in ("residual", "group_size")],
    ("sink_tokens", -1, ValueError, "at least 0"),
    *[
        (key, value, TypeError, INTEGER_ERROR)
        for key in ("residual", "group_size", "sink_tokens")
        for value in (64.0, "64", True, None, [64])
    ],
    ("boundary_layers", -1, ValueError, "at least 0"),
    ("boundary_layers", 1.0, TypeError, INTEGER_ERROR),
    ("kernel", "cuda", ValueError, "'auto'"),
    ("kernel", None, ValueError, "'auto'"),
]
BAD = [
    *BAD_BOTH,
    *[("value_bits", value, ValueError, "2, 4, 8") for value in (3, 16, 2.0, "2", None, True, [2])],
    *[("target_bits", value, ValueError, "between 2 and 16") for value in (1.9, 17, 0, -2.5, NAN, INF)],
    *[("target_bits", value, TypeError, "must be a number") for value in ("3", True, [3], (2, 3))],
    *[("importance", value, ValueError, "'query', 'none'") for value in ("key", None, True)],
    *[("importance_window", value, ValueError, "'all', 'page'") for value in ("pages", None, 1)],
    *[("transform", value, ValueError, "'none', 'hadamard'") for value in ("hadamard_kv", "lambda", None)],
    *[(key, value, ValueError, "above 0 and at most 1") for key in ("key_clip", "value_clip") for value in (0, 1.5)],
    ("value_clip", "0.5", TypeError, "must be a number"),
]
BAD_TAUS = [NAN, "1", True, {"0": 1.0}, [1.0, 2.0, NAN], [1.0, [1.0, "2"], 1.0]]
# Of these some are seen only when the model is known, which has 3 layers of 2 KV heads.
BAD_TAU_LISTS = [
    [],
    [1.0, 2.0],
    [1.0, 2.0, None],
    [1.0, [1.0, None], 2.0],
    [1.0, [], 2.0],
    [1.0, [1.0], 2.0],
    [1.0, [1.0, 2.0, 3.0], 2.0],
    [[[1.0, 2.0]]] * 3,
]
BAD_KIVI = [*BAD_BOTH, *[("bits", value, ValueError, "2, 4, 8") for value in (3, 16, 2.0, "2", None, True)]]


@pytest.mark.parametrize(
    ("config", "key", "value", "error", "message"),
    [*[(MixKVQConfig, *bad) for bad in BAD], *[(KIVIConfig, *bad) for bad in BAD_KIVI]],
    ids=lambda x: getattr(x, "__name__", str(x)[:24]),
)
def test_impossible_values(config, key, value, error, message):
    for build in (config.from_dict, lambda values: config(**values)):
        with pytest.raises(error, match=message) as caught:
            build({key: value})
        assert key in str(caught.value)


@pytest.mark.parametrize("key", ["tau_bf16", "tau_uint4"])
@pytest.mark.parametrize("value", BAD_TAUS, ids=str)
def test_impossible_thresholds(key, value):
    with pytest.raises(TypeError, match=f"{key} {TAU_ERROR}"):
        MixKVQConfig(**{"tau_bf16": 1.0, "tau_uint4": 1.0, key: value})


@pytest.mark.parametrize("key", ["tau_bf16", "tau_uint4"])
@pytest.mark.parametrize("value", BAD_TAU_LISTS, ids=str)
def test_lists_of_thresholds_that_do_not_fit(key, value):
    with pytest.raises((TypeError, ValueError), match=key):
        cache = MixKVQCache(CONFIGS["llama"](), {"tau_bf16": 1.0, "tau_uint4": 1.0, key: value})
        generate(tiny_model(), 4, inputs=random_ids(1, 200), cache=cache)


def test_thresholds_come_in_pairs_and_alone():
    for name in ("tau_bf16", "tau_uint4"):
        with pytest.raises(ValueError, match="both thresholds, tau_bf16 and tau_uint4, or neither"):
            MixKVQConfig(**{name: 1.0})
    with pytest.raises(ValueError, match="either target_bits or the thresholds"):
        MixKVQConfig(tau_bf16=1.0, tau_uint4=0.5, target_bits=3)


@pytest.mark.parametrize("name", ["tau_bf16", "tau_uint4"])
@pytest.mark.parametrize("layers", [1, 2, 4])
def test_thresholds_for_other_layers_are_refused(name, layers):
    taus = {"tau_bf16": 1.0, "tau_uint4": 1.0, name: [1.0] * layers}
    config = MixKVQConfig(**taus)
    with pytest.raises(ValueError, match=rf"{name} lists {layers} layers, but the model has 3"):
        config.layer_tau(0, 3)
    with pytest.raises(ValueError, match=rf"{name} lists {layers} layers, but the model has 3"):
        MixKVQCache(LlamaConfig(num_hidden_layers=3), config)


def test_thresholds_of_a_layer():
    config = MixKVQConfig(**TAUS)
    assert [config.layer_tau(i, 3) for i in range(3)] == [(1.5, 0.5), ((INF, 0.25), 1.0), (3.0, (-INF, 1.0))]
    assert MixKVQConfig(tau_bf16=2, tau_uint4=1).layer_tau(7, 8) == (2.0, 1.0)
    assert MixKVQConfig(target_bits=3).layer_tau(0, 1) is None
    assert MixKVQConfig().layer_tau(0, 1) is None


def test_key_bits():
    assert MixKVQConfig().key_bits == 2.5
    assert MixKVQConfig(target_bits=3).key_bits == 3 and MixKVQConfig(target_bits=2).key_bits == 2


@pytest.mark.parametrize(
    ("config", "key", "nearest"),
    [
        (MixKVQConfig, "xyz", None),
        (MixKVQConfig, "tau_bf4", "tau_bf16"),
        (MixKVQConfig, "targetbits", "target_bits"),
        (MixKVQConfig, "value_bit", "value_bits"),
        (MixKVQConfig, "sinks_token", "sink_tokens"),
        (KIVIConfig, "nbits", "bits"),
        (KIVIConfig, "residual_length", "residual"),
        (KIVIConfig, "target_bits", None),
    ],
)
def test_unknown_keys_name_the_nearest(config, key, nearest):
    with pytest.raises(ValueError, match=f"unknown option '{key}' for {config.__name__}") as caught:
        config.from_dict({"residual": 64, key: 4})
    assert nearest is None or f"did you mean {nearest!r}?" in str(caught.value)


@pytest.mark.parametrize(("config", "good"), [(MixKVQConfig, GOOD), (KIVIConfig, GOOD_KIVI)])
def test_round_trip_through_json(config, good):
    given = json.loads(json.dumps(good))
    made = config.from_dict(given)
    assert given == good
    values = made.to_dict()
    assert values == good and list(values) == [field.name for field in dataclasses.fields(config)]
    assert config.from_dict(json.loads(json.dumps(values))) == made
    assert config.from_dict(config().to_dict()) == config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.residual = 32
    hash(made)


@pytest.mark.parametrize(("name", "config"), [("mixkvq", MixKVQConfig(**TAUS)), ("kivi", KIVIConfig(bits=4))])
def test_round_trip_through_a_generation_config(name, config, tmp_path):
    GenerationConfig(cache_implementation=name, cache_config=config.to_dict()).save_pretrained(tmp_path)
    loaded = GenerationConfig.from_pretrained(tmp_path)
    assert loaded.cache_implementation == name and type(config).from_dict(loaded.cache_config) == config


def test_of_accepts_what_users_give():
    for config, cache in ((MixKVQConfig(residual=32), MixKVQCache), (KIVIConfig(residual=32), KIVICache)):
        kind = type(config)
        assert kind.of(config) is config and kind.of(None) == kind.of({}) == kind()
        assert kind.of({"residual": 32}) == config
        for given in (config, {"residual": 32}):
            made = cache(LlamaConfig(num_hidden_layers=2), given)
            assert made.config == config and [layer.page_tokens for layer in made.layers] == [32, 32]
        for wrong in ("residual=32", 4, [("residual", 32)], kind):
            with pytest.raises(TypeError, match=f"{kind.__name__} or a dict"):
                kind.of(wrong)
    with pytest.raises(TypeError, match="expected a MixKVQConfig"):
        MixKVQCache(LlamaConfig(), KIVIConfig())


def test_defaults_are_the_documented_ones():
    config = MixKVQConfig()
    assert (config.residual, config.group_size, config.sink_tokens, config.value_bits) == (128, 32, 32, 2)
    assert (config.importance, config.importance_window, config.kernel) == ("query", "all", "auto")
    kivi = KIVIConfig()
    assert (kivi.bits, kivi.residual, kivi.group_size, kivi.sink_tokens) == (2, 128, 32, 0)


@pytest.mark.parametrize("kernel", ["triton"])
@pytest.mark.parametrize("cache", [MixKVQCache, KIVICache])
def test_a_named_kernel_that_cannot_run_is_refused(cache, kernel):
    with pytest.raises(RuntimeError, match=f"kernel='{kernel}'"):
        cache(LlamaConfig(), {"kernel": kernel})


def test_heads_wider_than_a_byte_counts():
    cache = MixKVQCache(LlamaConfig(num_hidden_layers=1))
    with pytest.raises(ValueError, match="head_dim can be 256 at most; got 320"):
        cache.update(torch.zeros(1, 1, 3, 320), torch.zeros(1, 1, 3, 320), 0)
    assert cache.get_seq_length() == 0 and cache.nbytes() == 0
    cache.update(torch.zeros(1, 1, 3, 256), torch.zeros(1, 1, 3, 320), 0)
    assert cache.get_seq_length() == 3


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mixkvq", {"residual": 100}, "multiple of 16"),
        ("mixkvq", {"fbit": 4}, "unknown option 'fbit' for MixKVQConfig"),
        ("mixkvq", {"tau_bf16": [1.0], "tau_uint4": [1.0]}, "lists 1 layers, but the model has 3"),
        ("mixkvq", {"target_bits": 17}, "between 2 and 16"),
        ("kivi", {"value_bits": 2}, "unknown option 'value_bits' for KIVIConfig"),
        ("kivi", {"bits": 3}, "2, 4, 8"),
    ],
)
def test_bad_options_are_one_clear_error_in_generate(name, options, message):
    before = dict(options)
    with pytest.raises(ValueError, match=message) as caught:
        tiny_model().generate(
            random_ids(1, 8), max_new_tokens=2, cache_implementation=name, cache_config=options, do_sample=False
        )
    assert caught.value.__cause__ is None and caught.value.__context__ is None
    assert options == before
