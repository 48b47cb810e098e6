# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
import json

import pytest
import torch

from conftest import forward, random_ids, tiny_model
from hf_kvq import PMKVQCache
from hf_kvq.evaluation.methods import (
    STOCK,
    Method,
    check_labels,
    exact_cache,
    held_bytes,
    load_methods,
    parse_methods,
    token_numbers,
)
from hf_kvq.evaluation.suites import SUITES


def test_options_follow_a_colon():
    found = parse_methods("pmkvq:fbit=2,window=64, mixkvq,kivi:bits=4,quanto:nbits=2,key_codec=token")
    assert [(m.cache, m.options) for m in found] == [
        ("pmkvq", {"fbit": 2, "window": 64}),
        ("mixkvq", {}),
        ("kivi", {"bits": 4}),
        ("quanto", {"nbits": 2, "key_codec": "token"}),
    ]
    assert [m.label for m in found[:2]] == ["pmkvq: fbit=2, window=64", "mixkvq"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pmkv", "did you mean 'pmkvq'"),
        ("zzz", "there are pmkvq"),
        ("fbit=2,pmkvq", "'fbit=2' is an option without a method"),
        ("pmkvq:fbit", "expected METHOD:option=value"),
    ],
)
def test_what_is_wrong_with_a_list_is_said(text, message):
    with pytest.raises(ValueError, match=message):
        parse_methods(text)


def test_methods_from_a_file(tmp_path):
    path = tmp_path / "methods.json"
    entries = [{"cache": "pmkvq", "options": {"fbit": [4, 2, 4]}, "label": "mine"}, {"cache": "kivi"}]
    path.write_text(json.dumps(entries))
    assert load_methods(path) == [Method("pmkvq", {"fbit": [4, 2, 4]}, "mine"), Method("kivi")]
    path.write_text('[{"name": "kivi"}]')
    with pytest.raises(ValueError, match="must hold a list of"):
        load_methods(path)


def test_labels_are_unique():
    check_labels([Method("kivi"), Method("kivi", {"bits": 4})])
    with pytest.raises(ValueError, match="'kivi' is taken"):
        check_labels([Method("kivi"), Method("kivi")])
    with pytest.raises(ValueError, match="'exact' is taken"):
        check_labels([Method("kivi", {}, "exact")])


def test_float32_models_store_bfloat16():
    model, ids = tiny_model(), random_ids(1, 40)
    cache = Method("pmkvq", {"window": 8, "group_size": 16}).build(model, 64)
    assert isinstance(cache, PMKVQCache)
    logits = forward(model, cache, ids)
    assert logits.dtype == torch.float32
    assert cache.layers[0].recent[0].dtype == torch.bfloat16
    exact = exact_cache(model)
    forward(model, exact, ids)
    keys = exact.layers[0].keys
    assert keys.dtype == torch.bfloat16
    # Nothing is rounded twice: the same numbers lie in both, where nothing is packed.
    assert torch.equal(cache.layers[0].keys[:, :, -4:], keys[:, :, -4:])
    half = exact_cache(tiny_model(dtype=torch.bfloat16))
    assert type(half).__mro__[1].__name__ == "Cache"


def test_bytes_of_an_ordinary_cache():
    model, ids = tiny_model(), random_ids(2, 30)
    cache = exact_cache(model)
    forward(model, cache, ids)
    assert token_numbers(cache, model.config) == 3 * 2 * 2 * 16
    assert held_bytes(cache, model.config) == 2 * 30 * 2 * 3 * 2 * 2 * 16


@pytest.mark.skipif(not Method("fp8").is_available, reason="this transformers has no fp8 cache")
def test_bytes_of_fp8():
    model, ids = tiny_model(), random_ids(1, 64)
    cache = Method("fp8").build(model, 64)
    forward(model, cache, ids[:, :32])
    forward(model, cache, ids[:, 32:])
    # A byte per number, and two float32 scales per layer.
    assert held_bytes(cache, model.config) == 3 * (64 * 2 * 2 * 16 + 8)


@pytest.mark.parametrize("nbits", [4, 2])
def test_bytes_of_quanto(nbits):
    pytest.importorskip("optimum.quanto")
    model, ids = tiny_model(), random_ids(1, 64)
    cache = Method("quanto", {"nbits": nbits, "q_group_size": 16, "residual_length": 16}).build(model, 64)
    for part in ids.split(16, dim=1):
        forward(model, cache, part)
    # Older versions of transformers keep the last 16 tokens exact at this point.
    recent = cache.layers[0].keys
    exact = recent.shape[2] if recent.numel() else 0
    assert exact in (0, 16)
    packed = (64 - exact) * 2 * 16
    # Codes, and for each group of 16 a bfloat16 scale and shift, of K and V, in three layers.
    assert held_bytes(cache, model.config) == 3 * 2 * (packed * nbits // 8 + packed // 16 * 2 * 2 + exact * 2 * 16 * 2)


def test_a_preset_is_its_cache_and_options():
    found = Method("rotatekv", {"window": 16}).build(tiny_model(), 64).config
    assert (found.key_codec, found.initial_bits, found.window) == ("token", 2, 16)


def test_suites_are_possible():
    model = tiny_model()
    for methods in SUITES.values():
        check_labels(methods)
        for method in methods:
            if method.cache not in STOCK:
                method.build(model, 128)
