# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Attention over parts, against a float64 softmax over the dequantized keys and values."""

from __future__ import annotations

import pytest
import torch

from conftest import feed, kv, paired
from hf_kvq.ops import ExactPart, require_kernel
from hf_kvq.ops.naive import attend
from simulation import Rules, assert_equal


TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def reference(query, keys, values, mask, scaling, causal=True):
    """[batch, query heads, queries, value_dim], float64. A query that sees nothing gets zeros."""
    groups = query.shape[1] // keys.shape[1]
    keys, values = (x.double().repeat_interleave(groups, dim=1) for x in (keys, values))
    scores = query.double() @ keys.transpose(-1, -2) * scaling
    queries, columns = scores.shape[-2:]
    if mask is None and causal:
        mask = torch.arange(columns) <= torch.arange(columns - queries, columns)[:, None]
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask.double()
    return scores.softmax(-1).nan_to_num(0.0) @ values


def check(layer, query, mask, scaling=0.3, causal=True):
    keys, values = layer.keys, layer.values
    valid = torch.ones(len(layer.states), layer.columns, dtype=torch.bool)
    for row in range(len(layer.states)):
        for low, high in layer.padding.of(row):
            valid[row, low:high] = False
    wanted_mask = mask
    if not bool(valid.all()) and mask is None:
        queries, columns = query.shape[2], layer.columns
        wanted_mask = torch.arange(columns) <= torch.arange(columns - queries, columns)[:, None]
        wanted_mask = wanted_mask[None, None] & valid[:, None, None]
    got = layer.attend(query, mask, scaling, causal)
    wanted = reference(query, keys, values, wanted_mask, scaling, causal)
    assert got.dtype == query.dtype and got.shape == wanted.shape
    tolerance = TOLERANCE[query.dtype]
    torch.testing.assert_close(
        got.double(), wanted, rtol=tolerance, atol=tolerance * max(1, float(values.abs().max()))
    )
    return got


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def filled(rules: Rules, tokens: int, batch: int = 1, valid=None, **options):
    cache, layer, simulation = paired(rules, batch, **options)
    feed(cache, kv(rules, tokens, batch), [tokens // 2, tokens], [simulation], valid)
    return cache, layer, simulation


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [16, 8, 4, 2])
@pytest.mark.parametrize(("query_heads", "heads"), [(4, 4), (4, 2), (6, 2), (7, 1), (1, 1)])
def test_head_groups_widths_and_dtypes(dtype, bits, query_heads, heads):
    rules = Rules(heads, 32, 24, dtype, fbit=bits, initial_bits=bits, max_length=200, group=16)
    _, layer, _ = filled(rules, 100, batch=2)
    assert layer.bits() == bits and layer.states[0].pages == 5
    for queries in (1, 5):
        check(layer, random(2, query_heads, queries, 32, dtype=dtype), None)


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("channel", [False, True])
@pytest.mark.parametrize(("key_dim", "value_dim", "group"), [(80, 80, 32), (96, 64, 64), (48, 128, 128)])
def test_codecs_and_head_dims(hadamard, channel, key_dim, value_dim, group):
    rules = Rules(2, key_dim, value_dim, fbit=2, initial_bits=2, group=group, hadamard=hadamard, channel=channel)
    _, layer, _ = filled(rules, 300)
    assert layer.states[0].pages >= 2
    check(layer, random(1, 4, 3, key_dim), None)


MASKS = {
    "none": None,
    "[1,1,1,S]": (1, 1, 1, 50),
    "[B,1,1,S]": (2, 1, 1, 50),
    "[1,1,Q,S]": (1, 1, 5, 50),
    "[B,1,Q,S]": (2, 1, 5, 50),
    "[B,H,Q,S]": (2, 4, 5, 50),
    "[1,H,1,S]": (1, 4, 1, 50),
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", ["bool", "additive", "minus infinity", "finfo.min"])
@pytest.mark.parametrize("shape", MASKS)
def test_masks(shape, kind, padded):
    valid = torch.ones(2, 50, dtype=torch.bool)
    if padded:
        valid[1, :13] = valid[0, 20:23] = False
    _, layer, simulation = filled(Rules(fbit=4, initial_bits=4), 50, 2, valid)
    assert_equal(layer, simulation)
    mask = None
    if MASKS[shape]:
        visible = torch.rand(MASKS[shape], generator=torch.Generator().manual_seed(1)) < 0.7
        visible[..., 10] = True
        visible = visible if not padded else visible & valid[:, None, None]
        mask = {
            "bool": visible,
            "additive": random(*visible.shape, seed=2).masked_fill(~visible, float("-inf")),
            "minus infinity": torch.zeros(visible.shape).masked_fill(~visible, float("-inf")),
            "finfo.min": torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min),
        }[kind]
    check(layer, random(2, 4, 5, 16), mask)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 1, 5, 1), (1, 4, 1, 1)])
def test_masks_that_broadcast_over_tokens(shape):
    _, layer, _ = filled(Rules(fbit=4, initial_bits=4), 50, 2)
    mask = random(*shape, seed=1)
    check(layer, random(2, 4, 5, 16), mask.expand(*shape[:-1], 50))
    check(layer, random(2, 4, 5, 16), mask)


@pytest.mark.parametrize("shape", [None, (1, 1, 1, 1300), (2, 1, 1, 1300), (1, 1, 300, 1300), (2, 4, 300, 1300)])
@pytest.mark.parametrize("causal", [True, False])
def test_more_queries_and_tokens_than_are_handled_at_once(shape, causal):
    rules = Rules(1, 8, 8, fbit=4, initial_bits=4, max_length=2000, window=1100)
    _, layer, _ = filled(rules, 1300, 2)
    assert layer.states[0].recent > 1024 and layer.states[0].pages > 0
    mask = None if shape is None else torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.5
    check(layer, random(2, 4, 300, 8), mask, causal=causal)


def test_long_packed_part():
    rules = Rules(1, 8, 8, fbit=2, initial_bits=2, max_length=3000, window=0)
    _, layer, _ = filled(rules, 2500)
    check(layer, random(1, 2, 2, 8), torch.rand(1, 1, 2, 2500) < 0.5)


@pytest.mark.parametrize("queries", [1, 2, 7, 33, 50])
def test_causal_queries_belong_to_the_newest_columns(queries):
    rules = Rules(fbit=8, initial_bits=8, window=10)
    _, layer, _ = filled(rules, 50)
    check(layer, random(1, 4, queries, 16), None)
    check(layer, random(1, 4, queries, 16), None, causal=False)


def test_pending_tokens_are_attended_exactly():
    rules = Rules(fbit=2, initial_bits=2, window=0)
    cache, layer, _ = filled(rules, 40, 2)
    new = kv(rules, 9, 2, seed=5)
    # Whoever holds these may still attend to them; then they are stored.
    handles = cache.update(*new, 0)
    assert all(torch.equal(x[:, :, 40:], y) for x, y in zip((layer.keys, layer.values), new))
    check(layer, random(2, 4, 9, 16), None)
    del handles
    layer.settle()
    assert not torch.equal(layer.keys[:, :, 40:], new[0])


@pytest.mark.parametrize("tokens", [0, 1, 2, 5, 20, 21])
def test_empty_and_tiny_parts(tokens):
    rules = Rules(fbit=4, initial_bits=4, sink=2, window=4)
    cache, layer, _ = paired(rules)
    if tokens:
        feed(cache, kv(rules, tokens))
    cache.update(*kv(rules, 1, seed=1), 0)
    check(layer, random(1, 4, 1, 16), None)


@pytest.mark.parametrize("removed", [1, 9, 15, 16, 17, 30, 45, 49])
def test_cropped_pages(removed):
    rules = Rules(fbit=4, initial_bits=4, window=0)
    cache, layer, simulation = filled(rules, 50, 2)
    for seed in (1, 2):
        cache.crop(-removed)
        simulation.crop(removed)
        if cache.get_seq_length():
            check(layer, random(2, 4, 1, 16), None)
        feed(cache, kv(rules, 20, 2, seed), simulations=[simulation])
        columns = cache.get_seq_length()
        check(layer, random(2, 4, 3, 16), None)
        check(layer, random(2, 4, 3, 16), random(2, 1, 3, columns, seed=3))


def test_rows_of_different_widths():
    rules = Rules(fbit=2, max_length=100)
    valid = torch.ones(4, 95, dtype=torch.bool)
    valid[1, :50] = valid[2, :30] = valid[3, ::2] = False
    _, layer, _ = filled(rules, 95, 4, valid)
    assert len({state.bits for state in layer.states}) > 1
    check(layer, random(4, 4, 6, 16), None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_query_that_sees_nothing_gets_zeros(dtype):
    rules = Rules(dtype=dtype, fbit=4, initial_bits=4)
    _, layer, _ = filled(rules, 50, 2)
    query, mask = random(2, 4, 3, 16, dtype=dtype), torch.ones(2, 1, 3, 50, dtype=torch.bool)
    mask[1, 0, 1] = False
    out = check(layer, query, mask)
    assert not bool(out[1, :, 1].any()) and bool(out[0].abs().sum(-1).all())


def test_a_row_of_padding_gets_zeros():
    rules = Rules(fbit=4, initial_bits=4)
    valid = torch.ones(2, 50, dtype=torch.bool)
    valid[0] = False
    _, layer, _ = filled(rules, 50, 2, valid)
    assert not bool(layer.attend(random(2, 4, 1, 16), None, 0.3)[0].any())


def test_large_keys_are_summed_in_float32():
    rules = Rules(1, 128, 128, torch.float16, fbit=8, initial_bits=8, window=8, group=128, max_length=400)
    cache, layer, _ = paired(rules)
    keys, values = kv(rules, 300)
    feed(cache, [keys.clamp(-2, 2) + 200, values])
    out = check(layer, random(1, 2, 1, 128, dtype=torch.float16) + 3, None, scaling=128**-0.5)
    assert bool(out.isfinite().all())


@pytest.mark.parametrize("mask", [None, "bool", "additive"])
def test_order_and_division_of_parts_do_not_matter(mask):
    query, keys, values = random(2, 6, 4, 16), random(2, 2, 40, 16, seed=1), random(2, 2, 40, 24, seed=2)
    given = {
        None: None,
        "bool": torch.rand(2, 1, 4, 40, generator=torch.Generator().manual_seed(3)) < 0.6,
        "additive": random(1, 6, 4, 40, seed=4),
    }[mask]
    wanted = reference(query, keys, values, given, 0.25, causal=False)
    for cuts in ([0, 40], [0, 1, 7, 40], [0, 0, 39, 40, 40]):
        parts = [
            ExactPart(keys[:, :, a:b], values[:, :, a:b], None if given is None else given[..., a:b])
            for a, b in zip(cuts, cuts[1:])
        ]
        for order in (parts, parts[::-1]):
            got = attend(query, order, 0.25)
            torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)


def test_no_tokens_at_all():
    part = ExactPart(torch.zeros(2, 2, 0, 16), torch.zeros(2, 2, 0, 24))
    assert torch.equal(attend(random(2, 4, 3, 16), [part], 0.25), torch.zeros(2, 4, 3, 24))


def test_scores_far_apart_do_not_overflow():
    keys, values = random(1, 1, 30, 16) * 1e4, random(1, 1, 30, 16, seed=1)
    parts = [ExactPart(keys[:, :, a:b], values[:, :, a:b]) for a, b in ((0, 10), (10, 30))]
    query = random(1, 1, 2, 16, seed=2) * 1e4
    wanted = reference(query, keys, values, None, 1.0, causal=False)
    torch.testing.assert_close(attend(query, parts, 1.0).double(), wanted, rtol=1e-5, atol=1e-5)


def test_kernels_by_name():
    assert require_kernel("auto") == "auto"
    assert require_kernel("torch") == "torch"
