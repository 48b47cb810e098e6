# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""KIVI against its simulation: one width for keys per channel and values per token, nothing else."""

import copy
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig

from conftest import kv, storage_bytes
from hf_kvq import KIVICache, MixKVQCache
from simulation_mixkvq import Rules, Simulation, assert_equal, feed, packed, queries


FP32, HALF, FP16 = torch.float32, torch.bfloat16, torch.float16
INF = float("inf")

SHAPES = [
    Rules(2, 2, 64, 64, HALF, residual=128, group=32, sink=0, key_bits=2),
    Rules(1, 4, 128, 128, FP32, residual=128, group=100, sink=32, key_bits=4),
    Rules(2, 1, 80, 80, FP16, residual=48, group=32, sink=3, key_bits=8),
    Rules(3, 1, 96, 24, FP32, residual=16, group=5, sink=1, key_bits=2),
    Rules(1, 3, 320, 16, HALF, residual=32, group=64, sink=0, key_bits=4),
]
SMALL = Rules(2, 2, 16, 24, FP32, residual=32, group=20, sink=4, key_bits=2)


def name_of(rules: Rules) -> str:
    return f"{rules.key_bits}bit-{rules.heads}x{rules.key_dim}x{rules.value_dim}-r{rules.residual}g{rules.group}"


def paired(rules: Rules, batch: int = 1):
    """A one-layer cache, its layer, and the simulation of it."""
    cache = KIVICache(LlamaConfig(num_hidden_layers=1), rules.options())
    return cache, cache.layers[0], Simulation(rules, batch)


def cuts_of(kind: str, tokens: int) -> list[int]:
    return {"one call": [tokens], "chunks": [*range(7, tokens, 31), tokens]}.get(kind, list(range(1, tokens + 1)))


@pytest.mark.parametrize("cuts", ["one call", "chunks", "one by one"])
@pytest.mark.parametrize("rules", SHAPES, ids=name_of)
def test_any_history_gives_the_same_bytes(rules, cuts):
    tokens = min(400, rules.sink + 5 * rules.residual + 7)
    cache, layer, simulation = paired(rules)
    feed(cache, kv(rules, tokens), cuts_of(cuts, tokens), [simulation])
    assert_equal(layer, simulation)
    assert layer.states[0].pages >= 2 and layer.bits() == cache.layer_bits()[0] == rules.key_bits
    assert cache.nbytes() == storage_bytes(cache)


@pytest.mark.parametrize("tokens", [1, 31, 127, 128, 129, 255, 256, 257, 400])
def test_any_length(tokens):
    # Defaults: no sinks, pages of 128. They are packed the moment they are full.
    rules = Rules(1, 1, 64, 64, HALF, residual=128, group=32, sink=0, key_bits=2)
    cache, layer, simulation = paired(rules)
    feed(cache, kv(rules, tokens), None, [simulation])
    assert_equal(layer, simulation)
    assert (layer.states[0].pages, layer.states[0].recent) == divmod(tokens, 128)


@pytest.mark.parametrize("cuts", ["one call", "chunks", "one by one"])
def test_rows_of_a_padded_batch_equal_rows_alone(cuts):
    valid = torch.ones(3, 120, dtype=torch.bool)
    valid[1, :37] = False
    valid[2] = torch.rand(120, generator=torch.Generator().manual_seed(5)) < 0.5
    data = [x.masked_fill(~valid[:, None, :, None], INF) for x in kv(SMALL, 120, 3)]
    cache, layer, simulation = paired(SMALL, 3)
    feed(cache, data, cuts_of(cuts, 120), [simulation], valid)
    assert_equal(layer, simulation)
    for row in range(3):
        own, alone, _ = paired(SMALL)
        feed(own, [x[row : row + 1][:, :, valid[row]] for x in data])
        assert alone.states[0] == layer.states[row]
        assert torch.equal(packed(alone, 0)["regular"], packed(layer, row)["regular"])


def test_packed_pages_are_never_touched_again():
    cache, layer, simulation = paired(SMALL)
    data = kv(SMALL, 360)
    feed(cache, [x[:, :, :50] for x in data], None, [simulation])
    first = packed(layer, 0)["regular"]
    for t in range(50, 360):
        feed(cache, [x[:, :, t : t + 1] for x in data], None, [simulation])
        assert torch.equal(packed(layer, 0)["regular"][:1], first)
    assert layer.states[0].pages == 11
    assert_equal(layer, simulation)


@pytest.mark.parametrize("kind", [KIVICache, MixKVQCache])
def test_room_grows_by_a_sixteenth(kind):
    cache = kind(LlamaConfig(num_hidden_layers=1), {"residual": 16, "group_size": 16, "sink_tokens": 0})
    data, layer, sizes = kv(Rules(1, 1, 16, 16), 2560), cache.layers[0], []
    for start in range(0, 2560, 16):
        feed(cache, [x[:, :, start : start + 16] for x in data])
        sizes.append(layer.body.row_bytes // layer.layout.page_bytes(2))
        assert start // 16 + 1 <= sizes[-1] <= (start // 16 + 1) * 17 / 16
    assert len(set(sizes)) < 80


def test_bytes_of_one_page():
    # 2-bit codes of keys and values, and (min, max) of each group, in the model's dtype; no slack yet.
    rules = replace(SMALL, dtype=HALF)
    cache, layer, _ = paired(rules)
    feed(cache, kv(rules, 36))
    keys = 2 * (32 * 16 // 4 + 2 * 2 * 2 * 16)
    values = 2 * (32 * 24 // 4 + 2 * 2 * 2 * 32)
    exact = 2 * (16 + 24) * 2 * (4 + 31)
    assert cache.nbytes() == storage_bytes(cache) == keys + values + exact
    assert cache.true_bits() == pytest.approx(8 * (keys + values + exact) / (36 * 2 * (16 + 24)))


@pytest.mark.parametrize("operation", ["crop", "reorder", "repeat", "select", "copy", "reset"])
def test_operations(operation):
    cache, layer, simulation = paired(SMALL, 3)
    valid = torch.ones(3, 110, dtype=torch.bool)
    valid[0, :40] = valid[2, 20:50] = False
    feed(cache, kv(SMALL, 110, 3), None, [simulation], valid)
    if operation == "crop":
        cache.crop(-45)
        simulation.crop(45)
    elif operation == "reorder":
        cache.reorder_cache(torch.tensor([2, 0, 0]))
        simulation.select([2, 0, 0])
    elif operation == "repeat":
        cache.batch_repeat_interleave(2)
        simulation.select([0, 0, 1, 1, 2, 2])
    elif operation == "select":
        cache.batch_select_indices(torch.tensor([True, False, True]))
        simulation.select([0, 2])
    elif operation == "copy":
        twin, cache = cache, copy.deepcopy(cache)
        layer, before = cache.layers[0], copy.deepcopy(simulation)
    else:
        cache.reset()
        simulation = Simulation(SMALL, 3)
    feed(cache, kv(SMALL, 75, len(simulation.rows), seed=1), range(5, 76, 5), [simulation])
    assert_equal(layer, simulation)
    assert cache.nbytes() == storage_bytes(cache)
    if operation == "copy":
        assert_equal(twin.layers[0], before)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_attention_sees_the_simulated_values(bits):
    rules = replace(SMALL, key_bits=bits)
    cache, layer, simulation = paired(rules, 2)
    valid = torch.arange(150) >= torch.tensor([0, 50])[:, None]
    data = kv(rules, 150, 2)
    feed(cache, data, None, [simulation], valid)
    query = queries(rules, 1, 2)
    got, wanted = layer.attend(query, None, 0.2), simulation.attend(query, 0.2)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-5)
    assert not torch.equal(layer.keys[0], data[0][0])


# --- MixKVQ with one tier is KIVI -----------------------------------------------------------------------------------


@pytest.mark.parametrize("importance", ["query", "none"])
@pytest.mark.parametrize("rules", [SMALL, SHAPES[0], SHAPES[3]], ids=name_of)
def test_without_promotions_mixkvq_is_kivi(rules, importance):
    rules = replace(rules, key_bits=2)
    data = [*kv(rules, 300, 2), queries(rules, 300, 2)]
    valid = torch.arange(300) >= torch.tensor([0, 50])[:, None]
    cache, layer, _ = paired(rules, 2)
    feed(cache, data[:2], [200, 300], (), valid)
    query = queries(rules, 3, 2, seed=1)
    for choice in ({"tau": (INF, INF)}, {"target_bits": 2}):
        tiered = replace(rules, key_bits=None, importance=importance, **choice)
        mixed = MixKVQCache(LlamaConfig(num_hidden_layers=1), tiered.options())
        feed(mixed, data, [200, 300], (), valid)
        assert mixed.layers[0].states == layer.states
        for row in range(2):
            assert torch.equal(packed(mixed.layers[0], row)["regular"], packed(layer, row)["regular"])
        assert all(torch.equal(a, b) for a, b in zip(mixed.dequantize(0), cache.dequantize(0)))
        assert torch.equal(mixed.layers[0].attend(query, None, 0.2), layer.attend(query, None, 0.2))
        assert mixed.nominal_bits() == (2, 2, 2)


@pytest.mark.parametrize("dtype", [FP32, HALF, FP16])
def test_all_uint4_channels_are_kivi_at_4_bits(dtype):
    rules = replace(SMALL, key_bits=4, dtype=dtype)
    data = [*kv(rules, 200), queries(rules, 200)]
    cache, layer, _ = paired(rules)
    feed(cache, data[:2])
    tiered = replace(rules, key_bits=None, tau=(INF, -INF), value_bits=4)
    mixed = MixKVQCache(LlamaConfig(num_hidden_layers=1), tiered.options())
    feed(mixed, data)
    assert mixed.nominal_bits() == (4, 4, 4)
    keys, values = mixed.dequantize(0)
    rtol = max(torch.finfo(dtype).eps, 1e-5)
    torch.testing.assert_close(keys, layer.keys, rtol=rtol, atol=1e-5)
    assert torch.equal(values, layer.values)
    query = queries(rules, 2, seed=1)
    got, wanted = (x.attend(query, None, 0.2) for x in (mixed.layers[0], layer))
    torch.testing.assert_close(got, wanted, rtol=max(rtol, 1e-4), atol=1e-5)


@pytest.mark.parametrize("kind", [KIVICache, MixKVQCache])
def test_first_and_last_layers_may_have_8_bits(kind):
    options = {"residual": 32, "group_size": 20, "sink_tokens": 4}
    cache = kind(LlamaConfig(num_hidden_layers=4), {**options, "boundary_layers": 1})
    simulation = Simulation(replace(SMALL, key_bits=8))
    feed(cache, kv(SMALL, 110), [60, 110], [simulation])
    assert cache.layer_bits() == [8, 2, 2, 8] and cache.nbytes() == storage_bytes(cache)
    for layer in (cache.layers[0], cache.layers[3]):
        assert_equal(layer, simulation)
    if kind is MixKVQCache:
        inner = MixKVQCache(LlamaConfig(num_hidden_layers=2), options)
        feed(inner, kv(SMALL, 110), [60, 110])
        assert cache.nominal_bits() == inner.nominal_bits()
