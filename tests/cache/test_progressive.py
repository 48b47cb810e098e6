# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""The progressive layer against the simulation: every byte, after any history."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import cache_of, feed, kv, paired, storage_bytes
from hf_kvq import BudgetExceededError
from simulation import Rules, Simulation, assert_equal


FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16

# Per-channel and per-token keys, all dtypes, head_dims with full and with short last groups, K and V of other sizes.
SHAPES = [
    Rules(2, 32, 32, FP32),
    Rules(1, 64, 64, BF16, group=32, sink=4),
    Rules(2, 80, 80, FP16, group=32, window=0),
    Rules(1, 96, 96, BF16, group=64, window=17),
    Rules(1, 128, 128, FP32, group=128, sink=0),
    Rules(1, 256, 256, BF16, group=16),
    Rules(2, 48, 24, FP32, group=32, centered=False),
    Rules(1, 16, 40, FP16, group=48, sink=2),
    Rules(2, 32, 32, BF16, channel=False),
    Rules(1, 64, 64, FP32, channel=False, group=48, sink=4, centered=False),
    Rules(2, 80, 80, BF16, channel=False, group=32, window=0),
    Rules(1, 96, 96, FP16, channel=False, group=64, window=17),
    Rules(1, 128, 128, BF16, channel=False, group=128, sink=0),
    Rules(1, 256, 256, FP32, channel=False, group=128),
    Rules(2, 24, 48, FP16, channel=False, group=100),
]
# Rotating values is exact here: blocks are powers of 4, and the data lies on a grid.
ROTATED = [
    Rules(2, 32, 64, FP32, hadamard=True, group=32),
    Rules(1, 32, 16, FP16, hadamard=True),
    Rules(2, 80, 80, BF16, hadamard=True, channel=False, group=32),
]
SMOOTHED = [
    Rules(2, 32, 48, FP32, channel=False, smooth=True),
    Rules(1, 80, 80, BF16, channel=False, smooth=True, group=32),
    Rules(3, 24, 24, FP16, channel=False, smooth=True, group=100, sink=4, window=17),
]
# Both sides rotated, clipped groups, and keys and values that end at widths of their own.
COMBINED = [
    Rules(2, 64, 64, FP32, hadamard=True, hadamard_keys=True, channel=False, group=32),
    Rules(1, 80, 64, BF16, hadamard=True, hadamard_keys=True, clips=(0.9, 0.7), group=32),
    Rules(2, 32, 48, FP16, clips=(0.8, 1.0), channel=False, group=20),
    Rules(2, 32, 32, FP32, fbit=4, value_fbit=2),
    Rules(1, 64, 32, BF16, fbit=2, value_fbit=8, group=32, clips=(1.0, 0.85)),
    Rules(2, 32, 64, FP16, fbit=8, value_fbit=2, channel=False, group=32, hadamard=True),
    Rules(1, 48, 24, BF16, fbit=16, value_fbit=4, group=32),
]


def name_of(rules: Rules) -> str:
    kind = "channel" if rules.channel else "token"
    kind += "" if rules.transform == "none" else f"-{rules.transform}"
    kind += f"-k{rules.fbit}v{rules.value_fbit}" if rules.value_fbit else ""
    kind += f"-clip{rules.clips}" if rules.clips != (1.0, 1.0) else ""
    return f"{kind}-{rules.key_dim}x{rules.value_dim}-g{rules.group}-{str(rules.dtype)[6:]}"


def cuts_of(kind: str, tokens: int, seed: int = 0) -> list[int]:
    if kind == "one call":
        return [tokens]
    if kind == "one by one":
        return list(range(1, tokens + 1))
    cuts = torch.randperm(tokens - 1, generator=torch.Generator().manual_seed(seed))[: tokens // 12] + 1
    return [*sorted(cuts.tolist()), tokens]


def max_length_of(rules: Rules) -> int:
    """Room for a few pages at the final width, so that a full cache has passed 16, 8, 4 and 2 bits."""
    return rules.sink + rules.window + 10 * rules.page + 3


# --- codes, ranges and lengths ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", ["one call", "chunks", "one by one"])
@pytest.mark.parametrize("rules", [*SHAPES, *ROTATED, *SMOOTHED, *COMBINED], ids=name_of)
def test_any_history_gives_the_same_bytes(rules, cuts):
    rules = replace(rules, max_length=max_length_of(rules))
    tokens = rules.max_length - 2
    cache, layer, simulation = paired(rules)
    feed(cache, kv(rules, tokens, grid=rules.hadamard), cuts_of(cuts, tokens), [simulation])
    assert_equal(layer, simulation)
    assert layer.states[0].bits < 16 and layer.states[0].pages >= 8


@pytest.mark.parametrize("fbit", [16, 8, 4, 2])
@pytest.mark.parametrize("initial_bits", [16, 8, 2])
@pytest.mark.parametrize("max_length", [30, 70, 150, 1000])
def test_every_state_on_the_way(fbit, initial_bits, max_length):
    rules = Rules(fbit=fbit, initial_bits=initial_bits, max_length=max_length, dtype=BF16, window=5)
    cache, layer, simulation = paired(rules)
    tokens = min(max_length, 150)
    data = kv(rules, tokens, seed=max_length)
    widths, start = [], 0
    for stop in cuts_of("chunks", tokens, seed=fbit):
        feed(cache, [x[:, :, start:stop] for x in data], simulations=[simulation])
        assert_equal(layer, simulation)
        widths.append(layer.bits())
        start = stop
    assert widths == sorted(widths, reverse=True)


@pytest.mark.parametrize("dim", [32, 96, 128])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_rotated_values_do_not_depend_on_the_cuts(dim, dtype):
    # Here the rotation rounds, so the simulation can only be close; the cache must still agree with itself.
    rules = Rules(2, 32, dim, dtype, hadamard=True, group=32, max_length=380)
    data, layers = kv(rules, 370), []
    for cuts in ("one call", "chunks", "one by one"):
        cache = cache_of(rules)
        feed(cache, data, cuts_of(cuts, 370))
        layers.append(cache.layers[0])
    pages = [layer.body.pages(slice(0, 1), layer.bits())[0, : layer.states[0].pages] for layer in layers]
    assert layers[0].bits() == 2
    assert torch.equal(pages[0], pages[1]) and torch.equal(pages[0], pages[2])
    simulation = Simulation(rules)
    simulation.update(*data)
    got, wanted = layers[0].values, simulation.visible()[1]
    step = 20 * float(wanted.abs().max()) / 3
    assert float((got - wanted).abs().max()) <= step
    assert float((got - wanted).abs().mean()) <= 1e-3 * step


def test_long_inputs_pass_internal_block_sizes():
    # More pages than are converted or dequantized at once.
    rules = Rules(1, 16, 16, BF16, max_length=12000, window=0)
    cache, layer, simulation = paired(rules)
    data = kv(rules, 9000)
    for cuts, pages, bits in (([4000], 249, 8), ([5000], 562, 2)):
        feed(cache, data, cuts, [simulation])
        data = [x[:, :, 4000:] for x in data]
        assert (layer.states[0].pages, layer.bits()) == (pages, bits)
        assert_equal(layer, simulation)


@pytest.mark.parametrize("channel", [True, False])
def test_a_finished_page_is_quantized_once(channel):
    rules = Rules(fbit=4, initial_bits=4, max_length=400, channel=channel)
    cache, layer, _ = paired(rules)
    data = kv(rules, 300)
    feed(cache, [x[:, :, :60] for x in data])
    first = layer.body.pages(slice(0, 1), 4)[0, 0].clone()
    feed(cache, [x[:, :, 60:] for x in data], range(1, 241))
    assert torch.equal(layer.body.pages(slice(0, 1), 4)[0, 0], first)


@pytest.mark.parametrize("new_dtype", [FP32, BF16, FP16])
def test_tokens_of_another_dtype_are_converted(new_dtype):
    rules = Rules(dtype=FP32, max_length=100)
    cache, layer, simulation = paired(rules)
    data = kv(rules, 90)
    feed(cache, [x[:, :, :20] for x in data], simulations=[simulation])
    feed(cache, [x[:, :, 20:].to(new_dtype) for x in data], simulations=[simulation])
    assert_equal(layer, simulation)


@pytest.mark.parametrize("layout", ["transposed", "expanded", "strided"])
def test_inputs_need_not_be_contiguous(layout):
    rules = Rules(max_length=100)
    cache, layer, simulation = paired(rules)
    data = kv(rules, 90)
    if layout == "transposed":
        data = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in data]
    elif layout == "expanded":
        data = [x[:, :1].expand(-1, 2, -1, -1) for x in data]
    else:
        data = [torch.stack([x, x + 1], dim=-1)[..., 0] for x in data]
    feed(cache, data, [50, 90], [simulation])
    assert_equal(layer, simulation)


def test_inputs_are_not_kept():
    # A model may reuse its buffers: what is stored must not alias them.
    rules = Rules(max_length=100)
    cache, layer, simulation = paired(rules)
    for seed in range(3):
        data = kv(rules, 12, seed=seed)
        feed(cache, data, simulations=[simulation])
        simulation.rows = copy.deepcopy(simulation.rows)
        for x in data:
            x.fill_(7)
    assert_equal(layer, simulation)


# --- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_bytes", [False, True])
@pytest.mark.parametrize("rules", [SHAPES[0], SHAPES[1], SHAPES[8], SHAPES[11]], ids=name_of)
def test_bytes_and_widths_at_every_step(rules, by_bytes):
    fbits = (2, 8, 4)
    rules = replace(rules, max_length=max_length_of(rules))
    layers = [replace(rules, fbit=fbit) for fbit in fbits]
    budget = sum(layer.budget for layer in layers)
    options = {"max_length": None, "budget_bytes": budget} if by_bytes else {}
    cache = cache_of(rules, len(fbits), fbit=fbits, **options)
    simulations = [Simulation(layer) for layer in layers]
    assert cache.nbytes() == storage_bytes(cache) == 0
    data = kv(rules, rules.max_length)
    seen = [[] for _ in fbits]
    for t in range(rules.max_length):
        feed(cache, [x[:, :, t : t + 1] for x in data], simulations=simulations)
        assert cache.nbytes() == storage_bytes(cache) == budget
        assert cache.layer_bits() == [simulation.rows[0].bits for simulation in simulations]
        for widths, bits in zip(seen, cache.layer_bits()):
            widths.append(bits)
    for layer, widths, fbit in zip(layers, seen, fbits):
        # The same once more, as a formula: the width follows from the pages that have left the window.
        assert widths == [layer.width(layer.pages(t + 1)) for t in range(rules.max_length)]
        assert sorted(set(widths)) == [b for b in (2, 4, 8, 16) if b >= fbit]
    for layer, simulation in zip(cache.layers, simulations):
        assert_equal(layer, simulation)


@pytest.mark.parametrize("hadamard", [False, True])
def test_bytes_of_the_batch(hadamard):
    rules = Rules(max_length=80, hadamard=hadamard)
    cache, layer, _ = paired(rules)
    feed(cache, kv(rules, 70, batch=5), range(1, 71))
    assert cache.nbytes() == storage_bytes(cache) == 5 * rules.budget
    assert layer.bits() == 2


@pytest.mark.parametrize("by_bytes", [False, True])
def test_keys_and_values_of_layers_end_at_widths_of_their_own(by_bytes):
    rules = Rules(max_length=120, clips=(1.0, 0.8))
    pairs = ((4, 2), (2, 4), (8, 8), (2, 2))
    layers = [replace(rules, fbit=keys, value_fbit=values) for keys, values in pairs]
    budget = sum(layer.budget for layer in layers)
    options = {"max_length": None, "budget_bytes": budget} if by_bytes else {}
    keys, values = zip(*pairs)
    cache = cache_of(rules, len(pairs), fbit=keys, value_fbit=values, **options)
    simulations = [Simulation(layer) for layer in layers]
    data, start = kv(rules, 120), 0
    for stop in cuts_of("chunks", 120):
        feed(cache, [x[:, :, start:stop] for x in data], simulations=simulations)
        for layer, simulation in zip(cache.layers, simulations):
            assert_equal(layer, simulation)
        start = stop
    assert cache.nbytes() == storage_bytes(cache) == budget
    assert cache.layer_bits() == [2, 2, 8, 2]


def test_report_says_what_is_held():
    rules = Rules(max_length=120, dtype=BF16, heads=3, key_dim=48, value_dim=24)
    cache, layer, _ = paired(rules, batch=2)
    assert torch.tensor(cache.true_bits()).isnan() and cache.exact_nbytes() == 0 and cache.layer_bits() == [16]
    assert cache.dequantize(0) == (None, None)
    feed(cache, kv(rules, 100, batch=2))
    elements = 2 * 100 * 3 * (48 + 24)
    assert cache.true_bits() == pytest.approx(8 * 2 * rules.budget / elements)
    assert cache.exact_nbytes() == 2 * elements
    (report,) = cache.summary()
    wanted = {"layer": 0, "bits": layer.bits(), "columns": 100, "sink": [1, 1], "nbytes": 2 * rules.budget}
    assert {key: report[key] for key in wanted} == wanted
    assert [sum(row) for row in zip(report["sink"], report["packed"], report["recent"])] == [100, 100]


@pytest.mark.parametrize("max_length", [1, 2, 5, 20, 21, 22, 37])
def test_budgets_below_the_window(max_length):
    # Nothing is ever packed then, and no more is reserved than needed.
    rules = Rules(max_length=max_length, window=20)
    cache, layer, simulation = paired(rules)
    feed(cache, kv(rules, max_length), range(1, max_length + 1), [simulation])
    assert_equal(layer, simulation)
    assert cache.nbytes() == rules.budget <= max_length * rules.token_bytes + rules.page_bytes(2)


# --- what stays exact ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channel", [True, False])
@pytest.mark.parametrize(("sink", "window"), [(1, 4), (0, 0), (4, 33), (3, 0)])
def test_sink_and_window_are_exact_at_any_time(channel, sink, window):
    rules = Rules(fbit=2, sink=sink, window=window, channel=channel, max_length=200, initial_bits=2)
    cache, _, _ = paired(rules)
    data = kv(rules, 200)
    start = 0
    for stop in cuts_of("chunks", 200, seed=window):
        feed(cache, [x[:, :, start:stop] for x in data])
        for got, wanted in zip(cache.dequantize(0), data):
            assert torch.equal(got[:, :, :sink], wanted[:, :, : min(sink, stop)])
            assert torch.equal(got[:, :, max(0, stop - window) :], wanted[:, :, max(0, stop - window) : stop])
        start = stop
    assert not torch.equal(cache.dequantize(0)[0], data[0])


@pytest.mark.parametrize("rules", [*SHAPES, *ROTATED, *SMOOTHED, *COMBINED], ids=name_of)
def test_no_loss_until_the_budget_binds(rules):
    rules = replace(rules, max_length=rules.sink + rules.window + 9 * rules.page)
    rules = rules if rules.value_fbit else replace(rules, fbit=4)
    cache, layer, _ = paired(rules)
    data, start, lossless = kv(rules, rules.max_length), 0, 0
    room = rules.pages(rules.max_length) * rules.page_bytes(min(rules.finals))
    for stop in range(rules.page // 2, rules.max_length, rules.page // 2):
        feed(cache, [x[:, :, start:stop] for x in data])
        exact = all(torch.equal(got, x[:, :, :stop]) for got, x in zip(cache.dequantize(0), data))
        fits = rules.pages(stop) * rules.page_bytes(16) <= room
        assert exact == fits == (layer.bits() == 16)
        lossless += exact and rules.pages(stop) > 0
        start = stop
    assert lossless and not exact


# --- broken and extreme numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("channel", [True, False])
@pytest.mark.parametrize("side", [0, 1], ids=["keys", "values"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("hadamard", [False, True])
def test_broken_numbers_stay_visible_and_in_their_row(channel, side, bad, hadamard):
    rules = Rules(fbit=4, initial_bits=4, max_length=120, channel=channel, hadamard=hadamard)
    data = kv(rules, 100, batch=3)
    broken = [x.clone() for x in data]
    broken[side][1, 0, 9, 5] = bad
    query = torch.randn(3, 4, 1, 16, generator=torch.Generator().manual_seed(1))
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
    # The other KV head, and tokens outside the group's page, are as they were.
    assert torch.equal(good[2][1, 2:], bad_out[2][1, 2:])
    assert torch.equal(good[side][1, :, 40:], bad_out[side][1, :, 40:])


@pytest.mark.parametrize("bits", [16, 8, 4, 2])
@pytest.mark.parametrize("channel", [True, False])
@pytest.mark.parametrize(
    ("dtype", "scale"), [(FP32, 3e38), (FP32, 1e-44), (BF16, 3e38), (BF16, 1e-39), (FP16, 65504.0), (FP16, 6e-8)]
)
def test_extreme_numbers_stay_finite(bits, channel, dtype, scale):
    rules = Rules(dtype=dtype, fbit=bits, initial_bits=bits, max_length=100, channel=channel)
    cache, _, _ = paired(rules)
    g = torch.Generator().manual_seed(0)
    data = [(torch.rand(1, 2, 90, 16, generator=g, dtype=torch.float64) * 2 - 1) * scale for _ in range(2)]
    data = [x.clamp(-scale, scale).to(dtype) for x in data]
    assert all(bool(x.isfinite().all()) for x in data)
    feed(cache, data, [50, 90])
    assert all(bool(x.isfinite().all()) for x in cache.dequantize(0))


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("value", [0.0, 0.1, -3.7])
def test_constant_data_is_exact(bits, dtype, value):
    rules = Rules(dtype=dtype, fbit=bits, initial_bits=bits, max_length=100)
    cache, _, _ = paired(rules)
    data = [torch.full((1, 2, 90, 16), value, dtype=dtype) for _ in range(2)]
    feed(cache, data)
    assert all(torch.equal(got, x) for got, x in zip(cache.dequantize(0), data))


# --- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channel", [True, False])
@pytest.mark.parametrize("cuts", ["one call", "chunks", "one by one"])
def test_rows_of_a_padded_batch_equal_rows_alone(channel, cuts):
    rules = Rules(fbit=2, max_length=110, channel=channel)
    g = torch.Generator().manual_seed(5)
    valid = torch.ones(5, 120, dtype=torch.bool)
    valid[1, :37] = False
    valid[2, 90:] = False
    valid[3] = torch.rand(120, generator=g) < 0.5
    valid[4, :70] = False
    data = kv(rules, 120, batch=5)
    for x in data:
        x.masked_fill_(~valid[:, None, :, None], float("nan"))
    # The first row would be beyond its budget.
    valid[0, :15] = False
    cache, layer, simulation = paired(rules, batch=5)
    feed(cache, data, cuts_of(cuts, 120), [simulation], valid)
    assert_equal(layer, simulation)
    assert len({state.bits for state in layer.states}) > 1
    for row in range(5):
        own_cache, alone, _ = paired(rules)
        feed(own_cache, [x[row : row + 1][:, :, valid[row]] for x in data])
        assert alone.states[0] == layer.states[row]
        bits, pages = alone.states[0].bits, alone.states[0].pages
        assert torch.equal(
            alone.body.pages(slice(0, 1), bits)[0, :pages], layer.body.pages(slice(row, row + 1), bits)[0, :pages]
        )
        for got, wanted in zip(cache.dequantize(0), own_cache.dequantize(0)):
            assert torch.equal(got[row : row + 1][:, :, valid[row]], wanted)
            assert not bool(got[row][:, ~valid[row]].any())


def test_an_overflowing_row_leaves_its_neighbours_alone():
    rules = Rules(fbit=2, max_length=90)
    valid = torch.ones(2, 160, dtype=torch.bool)
    valid[1, :75] = False
    data = kv(rules, 160, batch=2)
    cache, layer, simulation = paired(rules, batch=2)
    for stop in range(1, 161):
        feed(cache, [x[:, :, stop - 1 : stop] for x in data], None, [simulation], valid)
        assert [state.bits for state in layer.states] == [row.bits for row in simulation.rows]
    assert_equal(layer, simulation)


# --- past the budget -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fbit", [16, 8, 4, 2])
@pytest.mark.parametrize("cuts", ["one call", "chunks", "one by one"])
@pytest.mark.parametrize("rules", [SHAPES[0], SHAPES[8]], ids=name_of)
def test_growing_keeps_the_final_width(rules, fbit, cuts):
    rules = replace(rules, fbit=fbit, max_length=90)
    cache, layer, simulation = paired(rules)
    feed(cache, kv(rules, 250), cuts_of(cuts, 250), [simulation])
    assert_equal(layer, simulation)
    assert layer.bits() == fbit
    assert cache.nbytes() == storage_bytes(cache) <= 2 * replace(rules, max_length=250).budget


def test_growing_warns_once(warnings_log):
    rules = Rules(max_length=40)
    cache = cache_of(rules, layers=3)
    feed(cache, kv(rules, 40), range(1, 41))
    assert not warnings_log
    feed(cache, kv(rules, 200), range(1, 201))
    assert len(warnings_log) == 1 and "40 tokens" in warnings_log[0]


@pytest.mark.parametrize("tokens", [60, 110, 135, 136, 200])
@pytest.mark.parametrize("group", [16, 48])
def test_growing_does_not_depend_on_the_cuts(tokens, group):
    # Much metadata: here a width takes less than twice the bytes of the next one.
    rules = Rules(2, 16, 16, FP32, fbit=2, max_length=56, group=group, channel=False)
    states = []
    for cuts in ("one call", "chunks", "one by one"):
        cache, layer, _ = paired(rules)
        feed(cache, kv(rules, tokens), cuts_of(cuts, tokens))
        states.append(layer.states)
    assert states[0] == states[1] == states[2]


def test_reset_starts_anew_after_growing():
    rules = Rules(fbit=2, max_length=60)
    cache, layer, simulation = paired(rules)
    feed(cache, kv(rules, 150))
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.nbytes() == storage_bytes(cache) == 0
    for t in range(55):
        feed(cache, kv(rules, 1, seed=t), simulations=[simulation])
        assert layer.bits() == simulation.rows[0].bits
        assert cache.nbytes() == rules.budget
    assert_equal(layer, simulation)


@pytest.mark.parametrize("by_bytes", [False, True])
@pytest.mark.parametrize("first", [True, False])
def test_error_leaves_everything_as_it_was(by_bytes, first):
    # 84 tokens take the bytes of 80: none of them completes another page.
    rules = Rules(fbit=2, max_length=84)
    options = {"max_length": None, "budget_bytes": 3 * rules.budget} if by_bytes else {}
    cache = cache_of(rules, layers=3, on_overflow="error", **options)
    simulations = [Simulation(rules) for _ in range(3)]
    if not first:
        feed(cache, kv(rules, 82), [50, 82], simulations)
    with pytest.raises(BudgetExceededError, match="84 tokens of 2 bits"):
        feed(cache, kv(rules, 85 if first else 3, seed=1))
    assert {layer.get_seq_length() for layer in cache.layers} == {0 if first else 82}
    for layer, simulation in zip(cache.layers, simulations):
        if not first:
            assert_equal(layer, simulation)
    feed(cache, kv(rules, 84 if first else 2, seed=2), simulations=simulations)
    with pytest.raises(BudgetExceededError):
        feed(cache, kv(rules, 1))
    cache.crop(-30)
    for simulation in simulations:
        simulation.crop(30)
    feed(cache, kv(rules, 20, seed=3), simulations=simulations)
    for layer, simulation in zip(cache.layers, simulations):
        assert_equal(layer, simulation)


def test_error_counts_tokens_not_columns():
    rules = Rules(max_length=40)
    cache, layer, simulation = paired(rules, batch=2, on_overflow="error")
    valid = torch.ones(2, 60, dtype=torch.bool)
    valid[0, :20] = valid[1, 30:] = False
    feed(cache, kv(rules, 60, batch=2), [20, 60], [simulation], valid)
    assert_equal(layer, simulation)
    more = torch.cat([valid, torch.tensor([[True], [False]])], dim=1)
    with pytest.raises(BudgetExceededError, match="row 0 would hold 41 tokens"):
        cache.observe_padding(more, 1)
        cache.update(*kv(rules, 1, batch=2), 0)


@pytest.mark.parametrize(("rows", "new", "error"), [(2, 15, BudgetExceededError), (3, 4, ValueError)])
def test_an_error_forgets_the_refused_padding(rows, new, error):
    rules = Rules(max_length=20)
    cache, layer, simulation = paired(rules, batch=2, on_overflow="error")
    feed(cache, kv(rules, 15, batch=2), simulations=[simulation])
    mask = torch.ones(rows, 15 + new)
    mask[0, 15:18] = 0
    with pytest.raises(error):
        cache.observe_padding(mask, new)
        cache.update(*kv(rules, new, batch=rows), 0)
    # The next call has no mask, so all of its columns are tokens.
    feed(cache, kv(rules, 5, batch=2, seed=1), simulations=[simulation])
    assert_equal(layer, simulation)


# --- operations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channel", [True, False])
@pytest.mark.parametrize("removed", [0, 1, 3, 4, 10, 20, 21, 36, 70, 97, 98, 99, 100, 150])
def test_crop_then_go_on(channel, removed):
    rules = Rules(fbit=2, max_length=130, channel=channel, sink=3)
    cache, layer, simulation = paired(rules, batch=2)
    valid = torch.ones(2, 100, dtype=torch.bool)
    valid[1, :9] = valid[1, 60:63] = False
    feed(cache, kv(rules, 100, batch=2), None, [simulation], valid)
    cache.crop(-removed)
    simulation.crop(removed)
    assert_equal(layer, simulation)
    feed(cache, kv(rules, 30, batch=2, seed=1), range(1, 31), [simulation])
    assert_equal(layer, simulation)
    cache.crop(-20)
    simulation.crop(20)
    feed(cache, kv(rules, 40, batch=2, seed=2), [40], [simulation])
    assert_equal(layer, simulation)


def test_crop_within_the_window_undoes_an_append():
    rules = Rules(max_length=130, window=20)
    data, wrong = kv(rules, 100), kv(rules, 6, seed=1)
    caches = [cache_of(rules) for _ in range(2)]
    for cache in caches:
        feed(cache, [x[:, :, :60] for x in data])
    feed(caches[1], wrong)
    caches[1].crop(-6)
    for cache in caches:
        feed(cache, [x[:, :, 60:] for x in data], [25, 40])
    assert caches[0].layers[0].states == caches[1].layers[0].states
    assert all(torch.equal(a, b) for a, b in zip(*(cache.dequantize(0) for cache in caches)))


def test_repeated_crops_into_the_body():
    # Each leaves a page that is not full. They may take more room than planned, but no row's widths follow from that.
    rules = Rules(fbit=2, max_length=70, window=0)
    cache, layer, simulation = paired(rules, batch=2)
    valid = torch.ones(2, 10**4, dtype=torch.bool)
    for seed in range(12):
        length = cache.get_seq_length()
        valid[1, length : length + 25] = False
        feed(cache, kv(rules, 30, 2, seed), None, [simulation], valid)
        assert_equal(layer, simulation)
        cache.crop(-25)
        simulation.crop(25)
        assert_equal(layer, simulation)
    cache.crop(-(10**4))
    simulation.crop(10**4)
    feed(cache, kv(rules, 70, 2), range(1, 71), [simulation])
    assert_equal(layer, simulation)


@pytest.mark.parametrize("positive", [1, 50])
def test_positive_crop_is_refused(positive):
    rules = Rules()
    cache, layer, simulation = paired(rules)
    feed(cache, kv(rules, 30), simulations=[simulation])
    with pytest.raises(ValueError, match="negative"):
        cache.crop(positive)
    assert_equal(layer, simulation)


@pytest.mark.parametrize("indices", [[2, 0, 1], [1, 1, 1], [0, 2], [2], [0, 1, 2, 0, 1, 2]])
@pytest.mark.parametrize("how", ["reorder_cache", "batch_select_indices"])
def test_rows_move_with_all_they_have(how, indices):
    # K and V differ in size, so a mix-up would not go unnoticed.
    rules = Rules(2, 32, 16, fbit=2, max_length=120)
    cache, layer, simulation = paired(rules, batch=3)
    valid = torch.ones(3, 90, dtype=torch.bool)
    valid[0, :40] = valid[2, 20:50] = False
    feed(cache, kv(rules, 90, batch=3), None, [simulation], valid)
    getattr(cache, how)(torch.tensor(indices))
    simulation.select(indices)
    assert_equal(layer, simulation)
    feed(cache, kv(rules, 25, batch=len(indices), seed=1), range(1, 26), [simulation])
    assert_equal(layer, simulation)
    assert cache.nbytes() == storage_bytes(cache) == len(indices) * rules.budget


def test_rows_by_mask_and_repeated():
    rules = Rules(fbit=4, max_length=100)
    cache, layer, simulation = paired(rules, batch=3)
    feed(cache, kv(rules, 60, batch=3), None, [simulation], torch.rand(3, 60) < 0.8)
    cache.batch_select_indices(torch.tensor([True, False, True]))
    simulation.select([0, 2])
    cache.batch_repeat_interleave(3)
    simulation.select([0, 0, 0, 1, 1, 1])
    feed(cache, kv(rules, 30, batch=6), range(1, 31), [simulation])
    assert_equal(layer, simulation)


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_are_independent(copier):
    rules = Rules(max_length=120, hadamard=True)
    cache, layer, simulation = paired(rules, batch=2)
    valid = torch.ones(2, 50, dtype=torch.bool)
    valid[1, :5] = False
    feed(cache, kv(rules, 50, batch=2, grid=True), None, [simulation], valid)
    twin, twin_simulation = copier(cache), copy.deepcopy(simulation)
    feed(twin, kv(rules, 60, batch=2, grid=True, seed=1), [30, 60], [twin_simulation])
    twin.crop(-3)
    twin_simulation.crop(3)
    assert_equal(layer, simulation)
    assert_equal(twin.layers[0], twin_simulation)
    assert twin.nbytes() == cache.nbytes()
    feed(cache, kv(rules, 30, batch=2, grid=True, seed=2), range(1, 31), [simulation])
    assert_equal(layer, simulation)
    assert_equal(twin.layers[0], twin_simulation)


def test_reset_makes_place_for_another_batch_and_dtype():
    rules = Rules(max_length=100)
    cache, layer, _ = paired(rules, batch=2)
    feed(cache, kv(rules, 80, batch=2))
    for other, batch in ((rules, 2), (replace(rules, dtype=BF16, heads=3, value_dim=32), 3)):
        cache.reset()
        assert cache.get_seq_length() == 0 and storage_bytes(cache) == 0
        simulation = Simulation(other, batch)
        feed(cache, kv(other, 90, batch=batch), [70, 90], [simulation])
        assert_equal(layer, simulation)


# --- modes of autograd -----------------------------------------------------------------------------------------------


def test_filled_with_grad_enabled():
    rules = Rules(max_length=100)
    cache, layer, simulation = paired(rules)
    with torch.enable_grad():
        weight = torch.ones(1, requires_grad=True)
        for seed in range(3):
            data = [x * weight for x in kv(rules, 25, seed=seed)]
            cache.update(*data, 0)
            simulation.update(*data)
            twin = copy.deepcopy(cache)
            pickle.dumps(cache)
    assert not any(x.requires_grad for x in (*cache.dequantize(0), *twin.dequantize(0)))
    assert_equal(twin.layers[0], simulation)
    layer.settle()
    assert_equal(layer, simulation)


OPERATIONS = {
    "append": lambda cache, s: None,
    "reorder": lambda cache, s: (cache.reorder_cache(torch.tensor([1, 0])), s.select([1, 0])),
    "repeat": lambda cache, s: (cache.batch_repeat_interleave(2), s.select([0, 0, 1, 1])),
    "select": lambda cache, s: (cache.batch_select_indices(torch.tensor([1])), s.select([1])),
    "crop": lambda cache, s: (cache.crop(-30), s.crop(30)),
    "grow": lambda cache, s: feed(cache, kv(s.rules, 90, 2, seed=3), simulations=[s]),
    "crop often": lambda cache, s: [
        (feed(cache, kv(s.rules, 30, 2, seed=i), simulations=[s]), cache.crop(-25), s.crop(25)) for i in range(9)
    ],
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_filled_in_inference_mode_goes_on_outside(operation):
    rules = Rules(max_length=120)
    cache, layer, simulation = paired(rules, batch=2)
    with torch.inference_mode():
        feed(cache, kv(rules, 60, batch=2), simulations=[simulation])
        OPERATIONS[operation](cache, simulation)
        cache.update(*(pending := kv(rules, 3, len(simulation.rows), seed=1)), 0)
        simulation.update(*pending)
    with torch.enable_grad():
        feed(cache, kv(rules, 30, len(simulation.rows), seed=2), range(1, 31), [simulation])
    assert_equal(layer, simulation)
    assert_equal(copy.deepcopy(layer), simulation)


# --- anything, in any order ------------------------------------------------------------------------------------------

APPEND = st.tuples(st.just("append"), st.integers(1, 60), st.sampled_from(["none", "none", "some", "one row"]))
STEPS = st.lists(
    st.one_of(
        APPEND,
        APPEND,
        st.tuples(st.just("crop"), st.integers(0, 60)),
        st.tuples(st.just("reorder"), st.lists(st.integers(0, 1), min_size=2, max_size=2)),
        st.tuples(st.sampled_from(["copy", "reset"])),
    ),
    min_size=3,
    max_size=12,
)


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(
    steps=STEPS,
    channel=st.booleans(),
    fbit=st.sampled_from([2, 2, 4, 8, 16]),
    window=st.integers(0, 12),
    sink=st.integers(0, 5),
    max_length=st.integers(20, 150),
)
def test_random_programs(steps, channel, fbit, window, sink, max_length):
    rules = Rules(2, 16, 8, BF16, fbit=fbit, max_length=max_length, sink=sink, window=window, channel=channel)
    cache, simulation = cache_of(rules), Simulation(rules, 2)
    for seed, (step, *arguments) in enumerate(steps):
        if step == "append":
            tokens, padded = arguments
            valid = None
            if padded != "none":
                old = torch.tensor(simulation.valid, dtype=torch.bool).view(2, -1)
                new = torch.rand(2, tokens, generator=torch.Generator().manual_seed(seed)) < 0.7
                new[0] |= padded == "one row"
                valid = torch.cat([old, new], dim=1)
            feed(cache, kv(rules, tokens, 2, seed), None, [simulation], valid)
        elif step == "crop":
            cache.crop(-arguments[0])
            simulation.crop(arguments[0])
        elif step == "reorder":
            cache.reorder_cache(torch.tensor(arguments[0]))
            simulation.select(arguments[0])
        elif step == "copy":
            cache = copy.deepcopy(cache)
        else:
            cache.reset()
            simulation = Simulation(rules, 2)
        if cache.layers[0].is_initialized:
            assert_equal(cache.layers[0], simulation)
            assert cache.nbytes() == storage_bytes(cache)
