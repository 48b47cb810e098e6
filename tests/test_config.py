# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
import dataclasses
import json

import pytest

from hf_kvq import PMKVQConfig


GOOD = {
    "fbit": [4, 2, 8],
    "value_fbit": [2, 2, 8],
    "max_length": 1000,
    "budget_bytes": 10**6,
    "initial_bits": 8,
    "sink_tokens": 0,
    "window": 0,
    "group_size": 48,
    "key_codec": "token",
    "transform": "hadamard_kv",
    "key_shrink": "equivalent",
    "key_clip": 0.9,
    "value_clip": 0.75,
    "boundary_layers": 2,
    "on_overflow": "error",
    "kernel": "torch",
}

WIDTH_ERROR, INTEGER_ERROR = "16, 8, 4, 2", "must be an integer"
BAD = [
    *[("fbit", value, ValueError, WIDTH_ERROR) for value in (3, 0, -4, 32, 4.0, True, "4", None, [4, 3], [4, "2"])],
    ("fbit", [], ValueError, "empty"),
    ("fbit", (), ValueError, "empty"),
    ("fbit", [[4]], ValueError, WIDTH_ERROR),
    ("fbit", {"0": 4}, ValueError, WIDTH_ERROR),
    *[("initial_bits", value, ValueError, WIDTH_ERROR) for value in (3, 16.0, "16", None, [16])],
    *[(key, -1, ValueError, "at least 0") for key in ("sink_tokens", "window", "boundary_layers")],
    *[(key, 0, ValueError, "at least 1") for key in ("max_length", "budget_bytes", "group_size")],
    *[
        (key, value, TypeError, INTEGER_ERROR)
        for key in ("max_length", "budget_bytes", "sink_tokens", "window", "group_size", "boundary_layers")
        for value in (1.5, "8", True, [8])
    ],
    *[(key, None, TypeError, INTEGER_ERROR) for key in ("sink_tokens", "window", "group_size", "boundary_layers")],
    *[("value_fbit", value, ValueError, WIDTH_ERROR) for value in (3, 0, True, "4", [4, 3])],
    ("value_fbit", [], ValueError, "empty"),
    *[(key, value, ValueError, "above 0 and at most 1") for key in ("key_clip", "value_clip") for value in (0, 1.1)],
    *[
        (key, value, TypeError, "must be a number")
        for key in ("key_clip", "value_clip")
        for value in (None, "1", True)
    ],
    ("key_clip", float("nan"), ValueError, "above 0 and at most 1"),
    ("key_codec", "chanel", ValueError, "'token', 'channel'"),
    ("key_codec", None, ValueError, "'token', 'channel'"),
    ("transform", "rotation", ValueError, "'hadamard'"),
    ("on_overflow", "raise", ValueError, "'grow', 'error'"),
    ("kernel", "cuda", ValueError, "'auto'"),
    ("kernel", ["auto"], ValueError, "'auto'"),
    ("group_size", 100, ValueError, "multiple of 16"),
    ("group_size", 8, ValueError, "multiple of 16"),
]


@pytest.mark.parametrize(("key", "value", "error", "message"), BAD, ids=lambda x: str(x)[:24])
@pytest.mark.parametrize("build", [PMKVQConfig.from_dict, lambda values: PMKVQConfig(**values)])
def test_impossible_values(build, key, value, error, message):
    with pytest.raises(error, match=message) as caught:
        build({key: value})
    assert key in str(caught.value)


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("xyz", None),
        ("nbits", "fbit"),
        ("fbits", "fbit"),
        ("windows", "window"),
        ("max_len", "max_length"),
        ("group", "group_size"),
    ],
)
def test_unknown_keys_name_the_nearest(key, nearest):
    with pytest.raises(ValueError, match=f"unknown option '{key}'") as caught:
        PMKVQConfig.from_dict({"fbit": 4, key: 4})
    assert (f"did you mean {nearest!r}?" if nearest else "known options: fbit") in str(caught.value)


def test_any_group_size_with_token_keys():
    assert PMKVQConfig(key_codec="token", group_size=100).group_size == 100


def test_round_trip_through_json():
    config = PMKVQConfig.from_dict(GOOD)
    values = config.to_dict()
    assert values == GOOD and list(values) == [field.name for field in dataclasses.fields(config)]
    assert PMKVQConfig.from_dict(json.loads(json.dumps(values))) == config
    assert PMKVQConfig.from_dict(PMKVQConfig().to_dict()) == PMKVQConfig()


def test_inputs_are_left_alone():
    values = {key: list(value) if isinstance(value, list) else value for key, value in GOOD.items()}
    config = PMKVQConfig.from_dict(values)
    assert values == GOOD
    values["fbit"].append(2)
    values["value_fbit"].append(2)
    assert (config.fbit, config.value_fbit) == ((4, 2, 8), (2, 2, 8))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.fbit = 2


def test_of_accepts_what_users_give():
    config = PMKVQConfig(fbit=2)
    assert PMKVQConfig.of(config) is config
    assert PMKVQConfig.of(None) == PMKVQConfig.of({}) == PMKVQConfig()
    assert PMKVQConfig.of({"fbit": 2}) == config
    for wrong in ("fbit=2", 4, [("fbit", 2)], PMKVQConfig):
        with pytest.raises(TypeError, match="PMKVQConfig or a dict"):
            PMKVQConfig.of(wrong)


def test_defaults_are_the_documented_ones():
    config = PMKVQConfig()
    assert (config.fbit, config.initial_bits, config.sink_tokens, config.window) == (4, 16, 1, 128)
    assert (config.group_size, config.on_overflow, config.kernel, config.transform) == (128, "grow", "auto", "none")


@pytest.mark.parametrize(
    ("fbit", "boundary", "layers", "wanted"),
    [
        (4, 0, 5, (4,) * 5),
        (2, 1, 5, (8, 2, 2, 2, 8)),
        (2, 2, 5, (8, 8, 2, 8, 8)),
        (4, 9, 3, (8, 8, 8)),
        ([16, 4, 8, 2], 1, 4, (16, 4, 8, 8)),
        (16, 1, 2, (16, 16)),
    ],
)
def test_widths_per_layer(fbit, boundary, layers, wanted):
    assert PMKVQConfig(fbit=fbit, boundary_layers=boundary).layer_fbits(layers) == wanted


def test_a_list_is_of_the_quantized_layers():
    # Layers 1, 3 and 5 of 6, the boundary counted over the model.
    assert PMKVQConfig(fbit=(4, 2, 16)).layer_fbits(6, [1, 3, 5]) == (4, 2, 16)
    assert PMKVQConfig(fbit=2).layer_fbits(6, [1, 3, 5]) == (2, 2, 2)
    assert PMKVQConfig(fbit=[4, 2, 4], boundary_layers=1).layer_fbits(6, [1, 3, 5]) == (4, 2, 8)
    assert PMKVQConfig(fbit=[4, 2, 4], boundary_layers=2).layer_fbits(6, [1, 3, 5]) == (8, 2, 8)
    with pytest.raises(ValueError, match="lists 6 layers, but the model has 3 that are quantized, of 6"):
        PMKVQConfig(fbit=[4] * 6).layer_fbits(6, [1, 3, 5])


def test_values_may_have_widths_of_their_own():
    assert PMKVQConfig(fbit=4).layer_widths(2) == ((4, 4), (4, 4))
    assert PMKVQConfig(fbit=4, value_fbit=2).layer_widths(2) == ((4, 2), (4, 2))
    config = PMKVQConfig(fbit=[4, 2, 16], value_fbit=[2, 8, 4], boundary_layers=1)
    assert config.layer_widths(5, [0, 2, 4]) == ((8, 8), (2, 8), (16, 8))
    assert config.layer_fbits(5, [0, 2, 4]) == (8, 2, 16)
    with pytest.raises(ValueError, match="value_fbit lists 3 layers, but the model has 2"):
        PMKVQConfig(value_fbit=[2, 2, 2]).layer_widths(2)


@pytest.mark.parametrize("fbit", [[4], [4, 4, 4]])
def test_a_list_of_another_length_is_refused(fbit):
    with pytest.raises(ValueError, match=rf"lists {len(fbit)} layers, but the model has 2"):
        PMKVQConfig(fbit=fbit).layer_fbits(2)
