# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""The query-aware layer against its simulation: tiers, every byte and all statistics, after any history."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig

from conftest import kv, storage_bytes
from hf_kvq import MixKVQCache
from hf_kvq.cache import tiered_body
from hf_kvq.ops import encode_tiers
from simulation_mixkvq import BF16, UINT2, UINT4, Rules, Simulation, assert_equal, feed, packed, queries


FP32, HALF, FP16 = torch.float32, torch.bfloat16, torch.float16
INF = float("inf")

# GQA ratios 1 to 4 and MQA, all dtypes, groups that do not divide the page, K and V of other sizes, all value widths.
SHAPES = [
    Rules(2, 1, 64, 64, FP32, residual=128, group=32, sink=32),
    Rules(2, 2, 80, 80, HALF, residual=64, group=48, sink=5),
    Rules(1, 3, 96, 96, FP16, residual=48, group=32, sink=0, value_bits=4),
    Rules(1, 4, 128, 128, HALF, residual=128, group=100, sink=32),
    Rules(3, 4, 48, 24, FP32, residual=32, group=5, sink=1, value_bits=8),
    Rules(2, 3, 16, 40, FP16, residual=16, group=16, sink=0, target_bits=4, importance_window="page"),
    Rules(2, 2, 64, 32, HALF, residual=64, group=256, sink=3, tau=(12.0, 2.0), value_bits=4),
    Rules(2, 4, 32, 32, FP32, residual=32, group=32, sink=4, tau=((INF, 5.0), (0.5, 1.0))),
    Rules(2, 1, 32, 32, FP32, residual=32, group=24, sink=4, importance="none", target_bits=4.5),
    Rules(1, 2, 256, 64, HALF, residual=32, group=32, sink=0, target_bits=6),
    Rules(2, 2, 32, 64, FP32, residual=64, group=64, sink=4, target_bits=4, hadamard=True, clips=(0.85, 0.75)),
    Rules(1, 4, 80, 16, HALF, residual=32, group=20, sink=1, value_bits=4, hadamard=True, clips=(0.9, 1.0)),
]
# Pages with channels in all three tiers.
SMALL = Rules(2, 2, 16, 24, FP32, residual=32, group=20, sink=4, target_bits=5)


def name_of(rules: Rules) -> str:
    tiers = "target" if rules.tau is None else "tau"
    tiers += "-hadamard" if rules.hadamard else ""
    return f"{rules.heads}x{rules.ratio}-{rules.key_dim}x{rules.value_dim}-r{rules.residual}g{rules.group}-{tiers}"


def cuts_of(kind: str, tokens: int, seed: int = 0) -> list[int]:
    if kind == "one call":
        return [tokens]
    if kind == "one by one":
        return list(range(1, tokens + 1))
    cuts = torch.randperm(tokens - 1, generator=torch.Generator().manual_seed(seed))[: tokens // 12] + 1
    return [*sorted(cuts.tolist()), tokens]


def cache_of(rules: Rules, layers: int = 1, **more) -> MixKVQCache:
    return MixKVQCache(LlamaConfig(num_hidden_layers=layers), rules.options(**more))


def paired(rules: Rules, batch: int = 1):
    """A one-layer cache, its layer, and the simulation of it."""
    cache = cache_of(rules)
    return cache, cache.layers[0], Simulation(rules, batch)


def data_of(rules: Rules, tokens: int, batch: int = 1, seed: int = 0) -> list[torch.Tensor]:
    """Keys, values and queries."""
    return [*kv(rules, tokens, batch, seed, grid=rules.hadamard), queries(rules, tokens, batch, seed)]


# --- codes, tiers and lengths ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", ["one call", "chunks", "one by one"])
@pytest.mark.parametrize("rules", SHAPES, ids=name_of)
def test_any_history_gives_the_same_bytes(rules, cuts):
    tokens = min(400, rules.sink + 5 * rules.residual + 7)
    cache, layer, simulation = paired(rules)
    feed(cache, data_of(rules, tokens), cuts_of(cuts, tokens), [simulation])
    assert_equal(layer, simulation)
    used = {tier for page in simulation.rows[0].pages for tier in page.tiers.flatten().tolist()}
    assert len(simulation.rows[0].pages) >= 2 and used == {UINT2, UINT4, BF16}


@pytest.mark.parametrize("cuts", ["one call", "chunks"])
@pytest.mark.parametrize("tokens", [1, 2, 31, 32, 33, 95, 159, 160, 161, 287, 288, 289, 400])
def test_any_length(tokens, cuts):
    # Defaults: 32 sinks, pages of 128. They are packed the moment they are full.
    rules = Rules(1, 2, 64, 64, HALF, residual=128, group=32, sink=32)
    cache, layer, simulation = paired(rules)
    feed(cache, data_of(rules, tokens, seed=tokens), cuts_of(cuts, tokens) if tokens > 1 else [1], [simulation])
    assert_equal(layer, simulation)
    pages = max(0, tokens - 32) // 128
    assert (layer.states[0].pages, layer.states[0].recent) == (pages, max(0, tokens - 32) - 128 * pages)


@pytest.mark.parametrize("sink", [0, 1, 16, 40])
def test_every_state_on_the_way(sink):
    rules = replace(SMALL, sink=sink, residual=16)
    cache, layer, simulation = paired(rules)
    data = data_of(rules, 90)
    for t in range(90):
        feed(cache, [x[:, :, t : t + 1] for x in data], None, [simulation])
        assert_equal(layer, simulation)


@pytest.mark.parametrize("new_dtype", [FP32, HALF, FP16])
def test_tokens_of_another_dtype_are_converted(new_dtype):
    cache, layer, simulation = paired(SMALL)
    data = data_of(SMALL, 90)
    feed(cache, [x[:, :, :20] for x in data], None, [simulation])
    feed(cache, [x[:, :, 20:].to(new_dtype) for x in data], [70], [simulation])
    assert_equal(layer, simulation)


def test_inputs_are_not_kept():
    # A model may reuse its buffers: what is stored must not alias them.
    cache, layer, simulation = paired(SMALL)
    for seed in range(5):
        data = data_of(SMALL, 14, seed=seed)
        feed(cache, data, None, [simulation])
        simulation.rows = copy.deepcopy(simulation.rows)
        for x in data:
            x.fill_(7)
    assert_equal(layer, simulation)


def test_long_inputs_pass_internal_block_sizes():
    # More pages than are dequantized or attended to at once.
    rules = Rules(1, 2, 16, 16, residual=16, group=16, sink=0, target_bits=4)
    cache, layer, simulation = paired(rules)
    feed(cache, data_of(rules, 4500), [2000, 4499, 4500], [simulation])
    assert layer.states[0].pages == 281
    assert_equal(layer, simulation)
    query = queries(rules, 1, seed=1)
    torch.testing.assert_close(
        layer.attend(query, None, 0.25).double(), simulation.attend(query, 0.25), rtol=1e-4, atol=1e-4
    )


# --- tiers ----------------------------------------------------------------------------------------------------------


def planted(rules: Rules, tokens: int) -> list[torch.Tensor]:
    """Channel 3 has a huge range and tiny queries, channel 9 a modest range and large queries."""
    g = torch.Generator().manual_seed(0)
    data = [torch.randn(x.shape, generator=g) for x in data_of(rules, tokens)]
    data[0][..., 3] *= 20
    data[0][..., 9] *= 2
    data[2][..., 3] *= 1e-3
    data[2][..., 9] *= 20
    return data


@pytest.mark.parametrize("by_tau", [False, True])
def test_importance_decides(by_tau):
    # Without queries it is the range that counts, and the order reverses.
    rules = Rules(2, 3, 16, 16, residual=64, group=32, sink=4, target_bits=3.5)
    tiers, errors = {}, {}
    for importance in ("query", "none"):
        # Above the best of the ordinary channels, below the planted one.
        own = replace(rules, importance=importance, tau=(8.0, 6.0) if by_tau else None)
        cache, layer, simulation = paired(own)
        keys, values, query = planted(own, 260)
        feed(cache, [keys, values, query], [100, 260], [simulation])
        assert_equal(layer, simulation)
        tiers[importance] = torch.tensor([page.tiers.tolist() for page in simulation.rows[0].pages])
        got, keys = (x.repeat_interleave(3, dim=1) for x in (layer.keys, keys))
        errors[importance] = float((query @ (got - keys).transpose(-1, -2)).abs().mean())
    assert bool((tiers["query"][..., 9] == BF16).all()) and bool((tiers["query"][..., 3] == UINT2).all())
    assert bool((tiers["none"][..., 3] == BF16).all()) and not bool((tiers["none"][..., 9] == BF16).any())
    assert errors["query"] < errors["none"] / 2


@pytest.mark.parametrize("dtype", [FP32, HALF, FP16])
def test_all_channels_at_bf16_are_exact(dtype):
    rules = replace(SMALL, dtype=dtype, tau=(-INF, 1.0))
    cache, layer, simulation = paired(rules)
    data = data_of(rules, 200)
    data[0][:, 1, :, 3] = 0.5  # no salience at all
    data[2][..., 5] = 0
    feed(cache, data, [70, 71, 200], [simulation])
    assert_equal(layer, simulation)
    assert torch.equal(layer.keys, data[0]) and not torch.equal(layer.values, data[1])


def test_bf16_is_tested_first():
    # Published pairs can have tau_uint4 > tau_bf16.
    cache, layer, simulation = paired(replace(SMALL, tau=(1.0, 3.0)))
    feed(cache, data_of(SMALL, 200), None, [simulation])
    assert_equal(layer, simulation)
    uint2, uint4, bf16 = layer.tier_counts().tolist()
    assert uint2 and bf16 and not uint4


def test_a_salience_equal_to_the_threshold_is_not_above_it():
    # Ranges of 1, 2 and 4 times three, and no queries: salience is exactly 1, 2 and 4.
    keys = torch.zeros(1, 1, 16, 4)
    keys[0, 0, 3] = torch.tensor([3.0, 6.0, 12.0, 0.0])
    for tau, wanted in (((2.0, 1.0), [0, 1, 2, 0]), ((4.0, 2.0), [0, 0, 1, 0]), ((1.9, 0.9), [1, 2, 2, 0])):
        rules = Rules(1, 1, 4, 4, residual=16, sink=0, tau=tau, importance="none")
        cache, layer, simulation = paired(rules)
        feed(cache, [keys, keys], None, [simulation])
        assert_equal(layer, simulation)
        assert simulation.rows[0].pages[0].tiers.tolist() == [wanted]
    # And a threshold of 0 leaves a constant channel at 2 bits.
    cache, layer, simulation = paired(replace(rules, tau=(0.0, 0.0)))
    feed(cache, [keys, keys], None, [simulation])
    assert_equal(layer, simulation)
    assert layer.tier_counts().tolist() == [1, 0, 3]


def test_thresholds_per_layer_and_head():
    taus = [(8.0, 2.0), ((-INF, 6.0), (0.0, 3.0)), (INF, (1.0, INF))]
    lists = [[tau[i] for tau in taus] for i in range(2)]
    cache = MixKVQCache(
        LlamaConfig(num_hidden_layers=3),
        {"residual": 32, "group_size": 20, "sink_tokens": 4, "tau_bf16": lists[0], "tau_uint4": lists[1]},
    )
    simulations = [Simulation(replace(SMALL, tau=tau)) for tau in taus]
    feed(cache, data_of(SMALL, 150), [90, 150], simulations)
    for layer, simulation in zip(cache.layers, simulations):
        assert_equal(layer, simulation)
    assert len({tuple(layer.tier_counts().tolist()) for layer in cache.layers}) == 3


def test_tiers_are_chosen_for_each_page_anew():
    cache, layer, simulation = paired(replace(SMALL, sink=0))
    data = data_of(SMALL, 96)
    for page, channel in enumerate((2, 7, 11)):
        data[0][:, :, 32 * page : 32 * page + 32, channel] *= 1000
    feed(cache, data, [50, 96], [simulation])
    assert_equal(layer, simulation)
    for page, channel in zip(simulation.rows[0].pages, (2, 7, 11)):
        assert page.tiers[:, channel].tolist() == [BF16, BF16]


# --- a page is packed once ------------------------------------------------------------------------------------------


def test_packed_pages_are_never_touched_again():
    rules = replace(SMALL, residual=16, sink=0)
    cache, layer, simulation = paired(rules)
    data = data_of(rules, 330)
    feed(cache, [x[:, :, :30] for x in data], None, [simulation])
    first = packed(layer, 0)
    for t in range(30, 330):
        feed(cache, [x[:, :, t : t + 1] for x in data], None, [simulation])
        now = packed(layer, 0)
        assert all(torch.equal(now[name][: len(x)], x) for name, x in first.items())
    assert_equal(layer, simulation)


def test_appending_does_not_copy_the_history():
    rules = replace(SMALL, residual=16, sink=0)
    cache, layer, _ = paired(rules)
    data = data_of(rules, 1600)
    places: dict[str, list[tuple[int, int]]] = {}
    for t in range(1600):
        feed(cache, [x[:, :, t : t + 1] for x in data])
        now = {"body": layer.body.data, **layer.body.records[0].buffers}
        for name, x in now.items():
            seen = places.setdefault(name, [])
            if not seen or seen[-1] != (x.data_ptr(), x.nbytes):
                seen.append((x.data_ptr(), x.nbytes))
    assert layer.states[0].pages == 100
    for name, seen in places.items():
        # 100 pages arrive; all copies together are not more than some times what is there, however long it gets.
        sizes = [nbytes for _, nbytes in seen]
        assert len(seen) < 60, name
        assert sum(sizes[:-1]) <= 20 * sizes[-1], name
    # Nor is much room left empty.
    used = {name: x.nbytes for name, x in packed(layer, 0).items()}
    assert layer.body.data.nbytes <= 17 / 16 * used.pop("regular")
    held = sum(buffer.nbytes for buffer in layer.body.records[0].buffers.values())
    assert held <= 17 / 16 * sum(used.values())


# --- bytes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("importance", ["query", "none"])
@pytest.mark.parametrize("rules", [SMALL, SHAPES[1], SHAPES[4]], ids=name_of)
def test_bytes_are_those_of_all_storages(rules, importance):
    rules = replace(rules, importance=importance)
    cache = cache_of(rules, layers=2)
    assert cache.nbytes() == storage_bytes(cache) == 0
    data = data_of(rules, 270, batch=3)
    start = 0
    for stop in (1, 40, 41, 200, 201, 202, 270):
        feed(cache, [x[:, :, start:stop] for x in data])
        assert cache.nbytes() == storage_bytes(cache)
        elements = 2 * 3 * stop * rules.heads * (rules.key_dim + rules.value_dim)
        assert cache.true_bits() == pytest.approx(8 * storage_bytes(cache) / elements)
        assert cache.exact_nbytes() == elements * rules.dtype.itemsize
        start = stop
    cache.reset()
    assert cache.nbytes() == storage_bytes(cache) == 0


def test_nothing_of_a_prompt_is_kept_but_what_is_stored():
    cache, layer, _ = paired(replace(SMALL, sink=0))
    feed(cache, data_of(SMALL, 2000))
    tokens_alone = 2000 * SMALL.heads * (SMALL.key_dim + SMALL.value_dim) * 4
    assert storage_bytes(cache) < tokens_alone / 2


@pytest.mark.parametrize("rules", SHAPES, ids=name_of)
def test_bytes_of_one_page(rules):
    # Counted by hand: 2-bit codes and (min, max) of all key channels, 2 bits more for UINT4 ones, whole BF16 channels,
    # a byte per channel in a list, two counts per head; and the values.
    cache, layer, simulation = paired(rules)
    feed(cache, data_of(rules, rules.sink + rules.residual), None, [simulation])
    (page,) = simulation.rows[0].pages
    size, tokens = rules.dtype.itemsize, rules.residual
    channels = rules.heads * rules.key_dim
    uint4, bf16 = (len(page.channels(tier)) for tier in (UINT4, BF16))
    keys = channels * (tokens // 4 + 2 * size * -(-tokens // rules.group))
    records = uint4 * (tokens // 4 + 1) + bf16 * (tokens * size + 1) + rules.heads * 4
    values = (
        rules.heads
        * tokens
        * (rules.value_dim * rules.value_bits // 8 + 2 * size * -(-rules.value_dim // rules.group))
    )
    exact = rules.heads * (rules.key_dim + rules.value_dim) * (rules.sink + tokens - 1) * size
    assert layer.nbytes() == keys + records + values + exact + channels * 8


def test_report_says_what_is_held():
    cache, layer, simulation = paired(SMALL, batch=2)
    assert torch.tensor(cache.nominal_bits()[:1]).isnan().all() and cache.summary()[0]["channels"]["uint2"] == 0
    feed(cache, data_of(SMALL, 150, batch=2), None, [simulation], torch.rand(2, 150) < 0.8)
    (report,) = cache.summary()
    tiers = [t for row in simulation.rows for page in row.pages for t in page.tiers.flatten().tolist()]
    assert report["channels"] == {name: tiers.count(t) for t, name in enumerate(("uint2", "uint4", "bf16"))}
    assert report["packed"] == [32 * len(row.pages) for row in simulation.rows]
    assert report["columns"] == 150 and report["bits"] == 2 and report["nbytes"] == layer.nbytes() == cache.nbytes()
    assert cache.nominal_bits().keys == pytest.approx(simulation.nominal_bits(), rel=1e-12)


# --- query statistics -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", ["all", "page"])
@pytest.mark.parametrize("cuts", ["one call", "chunks", "one by one"])
def test_window_of_the_statistics(window, cuts):
    # Queries prefer other channels from page to page.
    rules = replace(SMALL, importance_window=window, sink=3)
    cache, layer, simulation = paired(rules)
    data = data_of(rules, 170)
    for page in range(6):
        data[2][:, :, 32 * page : 32 * page + 32, 3 * page] *= 300
    feed(cache, data, cuts_of(cuts, 170), [simulation])
    assert_equal(layer, simulation)
    assert layer.query_count == [170 if window == "all" else 170 - 3 - 160]


@pytest.mark.parametrize("window", ["all", "page"])
def test_queries_that_were_not_seen_do_not_count(window):
    # As if another attention implementation had been used for a while.
    rules = replace(SMALL, importance_window=window)
    cache, layer, simulation = paired(rules)
    data, start = data_of(rules, 300), 0
    for i, stop in enumerate((10, 30, 70, 90, 170, 175, 290, 300)):
        chunk = [x[:, :, start:stop] for x in data]
        feed(cache, chunk[: 2 if i % 2 else 3], None, [simulation])
        assert_equal(layer, simulation)
        start = stop


def test_without_queries_it_is_as_without_importance():
    layers = []
    for importance, shown in (("query", 2), ("none", 2), ("none", 3)):
        cache, layer, simulation = paired(replace(SMALL, importance=importance))
        feed(cache, data_of(SMALL, 200)[:shown], [120, 200], [simulation])
        assert_equal(layer, simulation)
        layers.append(layer)
    for other in layers[1:]:
        assert all(torch.equal(a, b) for a, b in zip(packed(layers[0], 0).values(), packed(other, 0).values()))


def test_queries_count_once():
    cache, layer, simulation = paired(SMALL)
    data = data_of(SMALL, 120)
    feed(cache, [x[:, :, :50] for x in data], None, [simulation])
    keys, values, query = (x[:, :, 50:90] for x in data)
    cache.update(keys, values, 0)
    layer.observe_query(100 * query)  # only the last word counts
    layer.observe_query(query)
    layer.settle()
    layer.observe_query(query)  # too late
    layer.settle()
    simulation.update(keys, values, query)
    assert_equal(layer, simulation)
    assert cache.nbytes() == storage_bytes(cache)
    for stop, shown in ((100, 2), (120, 3)):
        feed(cache, [x[:, :, stop - 10 : stop] for x in data][:shown], None, [simulation])
        assert_equal(layer, simulation)


def test_magnitudes_are_summed_exactly():
    # Thirds, ties of the fixed point, values far below and above its range: no order of summation may matter.
    rules = replace(SMALL, ratio=3, sink=0)
    cache, layer, simulation = paired(rules)
    data = data_of(rules, 64)
    tiny = 2.0**-21
    data[2][:, :, 0::4, :4] = torch.tensor([tiny, 3 * tiny, -5 * tiny, 1e-30])
    data[2][:, :, 1::4, 4:8] = torch.tensor([1 / 3, -(2.0**20), 2.0**20 + 2, -3e38])
    feed(cache, data, [1, 30, 64], [simulation])
    assert_equal(layer, simulation)
    assert layer.query_sum[..., 7].tolist() == [[2**40 * 16 + s for s in (layer.query_sum[0, :, 7] - 2**44).tolist()]]


def test_one_small_query_tips_the_scales():
    # All channels alike, but for one part in 15 billion of what channel 11 was asked.
    rules = Rules(1, 1, 16, 16, residual=16, sink=0, target_bits=2.125)
    cache, layer, simulation = paired(rules)
    keys, values, query = data_of(rules, 16)
    query.fill_(1000)
    query[0, 0, 5] = 0
    query[0, 0, 5, 11] = 2.0**-20
    feed(cache, [keys[..., :1].expand_as(keys), values, query], None, [simulation])
    assert_equal(layer, simulation)
    assert packed(layer, 0)["low_channel"].tolist() == [11]


# --- broken and extreme numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_tau", [True, False])
@pytest.mark.parametrize("side", [0, 1], ids=["keys", "values"])
@pytest.mark.parametrize("bad", [float("nan"), INF, -INF])
def test_broken_numbers_stay_visible_and_in_their_row(by_tau, side, bad):
    rules = replace(SMALL, tau=(5.0, 1.0) if by_tau else None)
    data = data_of(rules, 100, batch=3)
    broken = [x.clone() for x in data]
    broken[side][1, 0, 9, 5] = bad
    # With the sign that lets an infinite key win all the attention.
    query = queries(rules, 1, batch=3, seed=1).abs() * (-1 if bad == -INF else 1)
    outs = []
    for x in (data, broken):
        cache, layer, _ = paired(rules)
        feed(cache, x, [40, 100])
        outs.append((*cache.dequantize(0), layer.attend(query, None, 0.25)))
    good, bad_out = outs
    for a, b in zip(good, bad_out):
        assert bool(a.isfinite().all())
        assert torch.equal(a[[0, 2]], b[[0, 2]])
    assert not bool(bad_out[side][1, 0, 9].isfinite().all())
    assert not bool(bad_out[2][1, :2].isfinite().all())
    # The other KV head, and tokens outside the page, are as they were.
    assert torch.equal(good[2][1, 2:], bad_out[2][1, 2:])
    assert torch.equal(good[side][1, :, 36:], bad_out[side][1, :, 36:])


@pytest.mark.parametrize("bad", [float("nan"), INF, -INF])
@pytest.mark.parametrize("when", ["prompt", "later"])
def test_broken_queries_do_no_harm_to_what_is_stored(bad, when):
    # NaN counts as nothing, inf as the largest magnitude there is; keys and values are finite, and so they stay.
    cache, layer, simulation = paired(SMALL, batch=3)
    data = data_of(SMALL, 200, batch=3)
    clean = [x.clone() for x in data]
    data[2][1, 1, 10 if when == "prompt" else 120, 5] = bad
    feed(cache, data, [100, *range(101, 200), 200], [simulation])
    assert_equal(layer, simulation)
    assert all(bool(x.isfinite().all()) for x in cache.dequantize(0))
    assert not bool((layer.query_sum < 0).any())
    other, twin, _ = paired(SMALL, batch=3)
    feed(other, clean)
    for row in (0, 2):
        assert all(torch.equal(a, b) for a, b in zip(packed(layer, row).values(), packed(twin, row).values()))
    # The answer to such a query is broken, and no other one.
    query = queries(SMALL, 2, batch=3, seed=1)
    good, query[1, 3, 1, 5] = layer.attend(query, None, 0.25), bad
    got = layer.attend(query, None, 0.25)
    assert not bool(got[1, 3, 1].isfinite().all())
    good[1, 3, 1] = got[1, 3, 1] = 0
    assert torch.equal(got, good)


@pytest.mark.parametrize("options", [{}, {"tau": (5.0, 1.0)}, {"tau": (INF, -INF)}, {"tau": (INF, INF)}], ids=str)
@pytest.mark.parametrize(
    ("dtype", "scale"), [(FP32, 3e38), (FP32, 1e-44), (HALF, 3e38), (HALF, 1e-39), (FP16, 65504.0), (FP16, 6e-8)]
)
def test_extreme_numbers_stay_finite(options, dtype, scale):
    rules = replace(SMALL, dtype=dtype, **options)
    cache, _, _ = paired(rules)
    g = torch.Generator().manual_seed(0)
    data = [(torch.rand(x.shape, generator=g, dtype=torch.float64) * 2 - 1) * scale for x in data_of(rules, 90)]
    data = [x.clamp(-scale, scale).to(dtype) for x in data]
    assert all(bool(x.isfinite().all()) for x in data)
    feed(cache, data, [50, 90])
    assert all(bool(x.isfinite().all()) for x in cache.dequantize(0))


@pytest.mark.parametrize("tau", [None, (INF, INF), (INF, -INF), (-INF, 0.0)])
@pytest.mark.parametrize("dtype", [FP32, HALF, FP16])
@pytest.mark.parametrize("value", [0.0, 0.1, -3.7])
def test_constant_data_is_exact(tau, dtype, value):
    rules = replace(SMALL, dtype=dtype, tau=tau)
    cache, _, _ = paired(rules)
    data = [torch.full_like(x, value) for x in data_of(rules, 90)]
    feed(cache, data)
    assert all(torch.equal(got, x) for got, x in zip(cache.dequantize(0), data))


# --- rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", ["all", "page"])
@pytest.mark.parametrize("cuts", ["one call", "chunks", "one by one"])
def test_rows_of_a_padded_batch_equal_rows_alone(window, cuts):
    rules = replace(SMALL, importance_window=window)
    g = torch.Generator().manual_seed(5)
    valid = torch.ones(5, 120, dtype=torch.bool)
    valid[1, :37] = False
    valid[2, 90:] = False
    valid[3] = torch.rand(120, generator=g) < 0.5
    valid[4, :70] = False
    data = data_of(rules, 120, batch=5)
    for x in data:
        x.masked_fill_(~valid[:, None, :, None], INF)
    cache, layer, simulation = paired(rules, batch=5)
    feed(cache, data, cuts_of(cuts, 120), [simulation], valid)
    assert_equal(layer, simulation)
    assert len({state.pages for state in layer.states}) > 1
    for row in range(5):
        own_cache, alone, _ = paired(rules)
        feed(own_cache, [x[row : row + 1][:, :, valid[row]] for x in data])
        assert alone.states[0] == layer.states[row] and alone.query_count[0] == layer.query_count[row]
        assert torch.equal(alone.query_sum[0], layer.query_sum[row])
        assert all(torch.equal(a, b) for a, b in zip(packed(alone, 0).values(), packed(layer, row).values()))
        for got, wanted in zip(cache.dequantize(0), own_cache.dequantize(0)):
            assert torch.equal(got[row : row + 1][:, :, valid[row]], wanted)
            assert not bool(got[row][:, ~valid[row]].any())


@pytest.mark.parametrize("kernel", ["auto", "torch"])
@pytest.mark.parametrize("cuts", ["one call", "one by one"])
def test_rows_with_other_numbers_of_promoted_channels_are_packed_at_once(cuts, kernel, monkeypatch):
    calls = []
    monkeypatch.setattr(tiered_body, "encode_tiers", lambda *x: calls.append(len(x[1])) or encode_tiers(*x))
    rules = replace(SMALL, tau=(6.0, 1.0))
    cache = cache_of(rules, kernel=kernel)
    layer, simulation = cache.layers[0], Simulation(rules, 4)
    tokens = rules.sink + 3 * rules.residual + 5
    data = data_of(rules, tokens, batch=4)
    # The second row promotes nothing, the last one everything.
    data[0] *= torch.tensor([1.0, 1.0, 0.1, 1e6])[:, None, None, None]
    data[0][1] = 0
    feed(cache, data, cuts_of(cuts, tokens), [simulation])
    assert_equal(layer, simulation)
    assert calls == [4, 4, 4]
    low, exact = zip(*(records.before[-1] for records in layer.body.records))
    assert low[1] == exact[1] == low[3] == 0 and exact[3] == 3 * rules.heads * rules.key_dim
    assert len({low[0], low[2], 0}) == 3 and 0 < exact[0] < exact[3]


@pytest.mark.parametrize("rules", [SHAPES[1], SHAPES[7]], ids=name_of)
def test_left_padding_of_other_shapes(rules):
    valid = torch.arange(260) >= torch.tensor([0, 13, 100])[:, None]
    cache, layer, simulation = paired(rules, batch=3)
    feed(cache, data_of(rules, 260, batch=3), [150, 151, 260], [simulation], valid)
    assert_equal(layer, simulation)


# --- operations -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", ["all", "page"])
@pytest.mark.parametrize("removed", [0, 1, 3, 10, 31, 32, 33, 64, 70, 96, 97, 99, 100, 150])
def test_crop_then_go_on(removed, window):
    # The statistics keep the queries of removed tokens: they were asked.
    rules = replace(SMALL, importance_window=window)
    cache, layer, simulation = paired(rules, batch=2)
    valid = torch.ones(2, 100, dtype=torch.bool)
    valid[1, :9] = valid[1, 60:63] = False
    feed(cache, data_of(rules, 100, batch=2), None, [simulation], valid)
    cache.crop(-removed)
    simulation.crop(removed)
    assert_equal(layer, simulation)
    if window == "all":
        assert layer.query_count == [100, 88]
    feed(cache, data_of(rules, 40, batch=2, seed=1), range(1, 41), [simulation])
    assert_equal(layer, simulation)
    cache.crop(-20)
    simulation.crop(20)
    feed(cache, data_of(rules, 90, batch=2, seed=2), [90], [simulation])
    assert_equal(layer, simulation)
    assert cache.nbytes() == storage_bytes(cache)


def test_crop_by_a_tensor():
    # Assisted decoding of older transformers says it so; nothing of that tensor is to be kept.
    cache, layer, simulation = paired(SMALL)
    feed(cache, data_of(SMALL, 100), None, [simulation])
    cache.crop(torch.tensor(-45))
    simulation.crop(45)
    assert_equal(layer, simulation)
    assert type(cache.get_seq_length()) is int and cache.nbytes() == storage_bytes(cache)


def test_attention_sees_nothing_of_cropped_pages():
    cache, layer, simulation = paired(SMALL)
    feed(cache, data_of(SMALL, 150), None, [simulation])
    query = queries(SMALL, 1, seed=1)
    for removed in (5, 30, 20):
        cache.crop(-removed)
        simulation.crop(removed)
        feed(cache, data_of(SMALL, 40, seed=removed), None, [simulation])
        torch.testing.assert_close(
            layer.attend(query, None, 0.25).double(), simulation.attend(query, 0.25), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("indices", [[2, 0, 1], [1, 1, 1], [0, 2], [2], [0, 1, 2, 0, 1, 2]])
@pytest.mark.parametrize("how", ["reorder_cache", "batch_select_indices"])
def test_rows_move_with_all_they_have(how, indices):
    cache, layer, simulation = paired(SMALL, batch=3)
    valid = torch.ones(3, 110, dtype=torch.bool)
    valid[0, :40] = valid[2, 20:50] = False
    feed(cache, data_of(SMALL, 110, batch=3), None, [simulation], valid)
    getattr(cache, how)(torch.tensor(indices))
    simulation.select(indices)
    assert_equal(layer, simulation)
    # Copies of one row must not share what they have.
    feed(cache, data_of(SMALL, 75, batch=len(indices), seed=1), range(5, 76, 5), [simulation])
    assert_equal(layer, simulation)
    assert cache.nbytes() == storage_bytes(cache)


def test_rows_by_mask_and_repeated():
    cache, layer, simulation = paired(SMALL, batch=3)
    feed(cache, data_of(SMALL, 90, batch=3), None, [simulation], torch.rand(3, 90) < 0.8)
    cache.batch_select_indices(torch.tensor([True, False, True]))
    simulation.select([0, 2])
    cache.batch_repeat_interleave(3)
    simulation.select([0, 0, 0, 1, 1, 1])
    feed(cache, data_of(SMALL, 60, batch=6), range(10, 61, 10), [simulation])
    assert_equal(layer, simulation)


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_are_independent(copier):
    cache, layer, simulation = paired(SMALL, batch=2)
    valid = torch.ones(2, 50, dtype=torch.bool)
    valid[1, :5] = False
    feed(cache, data_of(SMALL, 50, batch=2), None, [simulation], valid)
    twin, twin_simulation = copier(cache), copy.deepcopy(simulation)
    feed(twin, data_of(SMALL, 70, batch=2, seed=1), [30, 70], [twin_simulation])
    twin.crop(-3)
    twin_simulation.crop(3)
    assert_equal(layer, simulation)
    assert_equal(twin.layers[0], twin_simulation)
    feed(cache, data_of(SMALL, 60, batch=2, seed=2), range(1, 61), [simulation])
    assert_equal(layer, simulation)
    assert_equal(twin.layers[0], twin_simulation)


def test_copies_of_pending_tokens_keep_their_queries():
    cache, layer, simulation = paired(SMALL)
    data = data_of(SMALL, 80)
    cache.update(*data[:2], 0)
    layer.observe_query(data[2])
    simulation.update(*data)
    for copied in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), cache):
        copied.nbytes()
        assert_equal(copied.layers[0], simulation)


def test_reset_makes_place_for_another_batch_and_dtype():
    cache, layer, _ = paired(SMALL, batch=2)
    feed(cache, data_of(SMALL, 80, batch=2))
    for other, batch in ((SMALL, 2), (replace(SMALL, dtype=HALF, heads=3, key_dim=40), 3)):
        cache.reset()
        assert cache.get_seq_length() == 0 and cache.nbytes() == 0
        simulation = Simulation(other, batch)
        feed(cache, data_of(other, 110, batch=batch), [70, 110], [simulation])
        assert_equal(layer, simulation)


def test_filled_with_grad_enabled():
    cache, layer, simulation = paired(SMALL)
    with torch.enable_grad():
        weight = torch.ones(1, requires_grad=True)
        for seed in range(3):
            data = [x * weight for x in data_of(SMALL, 35, seed=seed)]
            cache.update(*data[:2], 0)
            layer.observe_query(data[2])
            simulation.update(*data)
        layer.settle()
    assert not any(x.requires_grad for x in (*cache.dequantize(0), layer.query_sum))
    assert_equal(layer, simulation)


OPERATIONS = {
    "append": lambda cache, s: None,
    "reorder": lambda cache, s: (cache.reorder_cache(torch.tensor([1, 0])), s.select([1, 0])),
    "repeat": lambda cache, s: (cache.batch_repeat_interleave(2), s.select([0, 0, 1, 1])),
    "select": lambda cache, s: (cache.batch_select_indices(torch.tensor([1])), s.select([1])),
    "crop": lambda cache, s: (cache.crop(-30), s.crop(30)),
    "grow": lambda cache, s: feed(cache, data_of(s.rules, 90, 2, seed=3), None, [s]),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_filled_in_inference_mode_goes_on_outside(operation):
    cache, layer, simulation = paired(replace(SMALL, importance_window="page"), batch=2)
    with torch.inference_mode():
        feed(cache, data_of(SMALL, 75, batch=2), None, [simulation])
        OPERATIONS[operation](cache, simulation)
        pending = data_of(SMALL, 3, len(simulation.rows), seed=1)
        cache.update(*pending[:2], 0)
        layer.observe_query(pending[2])
        simulation.update(*pending)
    with torch.enable_grad():
        feed(cache, data_of(SMALL, 70, len(simulation.rows), seed=2), range(10, 71, 10), [simulation])
    assert_equal(layer, simulation)
    assert_equal(copy.deepcopy(layer), simulation)
