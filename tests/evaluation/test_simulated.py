# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
import pytest
import torch

from conftest import forward, left_padded, make_cache, random_ids, tiny_model
from hf_kvq.codecs import dequantize, quantize
from hf_kvq.evaluation.methods import Method
from hf_kvq.evaluation.simulated import SIMULATED, kvquant
from hf_kvq.evaluation.simulated.kvquant import fit_levels, k_means, nearest, outliers, rotate, simulate
from hf_kvq.evaluation.simulated.quest import visible_pages
from hf_kvq.evaluation.simulated.shrink import shrink
from hf_kvq.registration import NAMES


SMALL = {"window": 8, "group_size": 16}
OWN = {"shrink": {"strategy": "modified"}, "kvquant": {}, "quest": {"budget": 16, "dense_layers": 0}, "mikv": {}}


def build(name: str, **options):
    return SIMULATED[name](tiny_model().config, {**SMALL, "max_length": 256, **options})


def test_generate_does_not_know_them():
    assert not set(SIMULATED) & set(NAMES)
    assert Method("shrink").label == "shrink (simulated)"


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_strategies_by_their_definitions(bits):
    codes = torch.arange(65536)
    for strategy in ("direct", "modified", "equivalent"):
        found, scale, shift = shrink(codes, bits, strategy)
        back = found.double() * scale + shift
        step = 2 ** (16 - bits)
        if strategy == "direct":
            assert torch.equal(found, codes // step)
            assert scale == 65535 / (2**bits - 1) and shift == 0
        elif strategy == "modified":
            # Every code stands for the mean of those that became it.
            means = codes.double().view(-1, step).mean(1)
            assert torch.equal(back.view(-1, step), means[:, None].expand(-1, step))
        else:
            assert torch.equal(found, (codes.double() * (2**bits - 1) / 65535).round().long())
            assert scale == 65535 / (2**bits - 1)


@pytest.mark.parametrize("strategy", ["direct", "modified", "equivalent"])
def test_strategies_step_by_step_under_the_schedule(strategy):
    """Each page goes down with its layer, by the paper's definitions of one step."""

    def page(x, dim):
        zero = x.amin(dim, keepdim=True)
        scale = (x.amax(dim, keepdim=True) - zero) / 65535
        # In float32, as there: else some codes differ by one, and then truncate to others.
        return 16, ((x - zero) / scale).round().double(), scale.double(), zero.double()

    def halved(bits, codes, scale, zero):
        bits //= 2
        if strategy == "equivalent":
            return bits, (codes / (2**bits + 1)).round(), (2**bits + 1) * scale, zero
        codes = (codes / 2**bits).floor()
        if strategy == "direct":
            return bits, codes, (2**bits + 1) * scale, zero
        return bits, codes, 2**bits * scale, zero + scale * (2**bits - 1) / 2

    def narrowed(held, bits):
        while held[0] > bits:
            held = halved(*held)
        return held

    cache = build("shrink", fbit=2, max_length=160, strategy=strategy, sink_tokens=0)
    data = torch.randn(2, 1, 2, 160, 16, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    pages, seen = [[], []], []
    for stop in range(8, 161, 8):
        cache.update(*data[:, :, :, stop - 8 : stop], 0)
        found, layer = cache.dequantize(0), cache.layers[0]
        (state,), bits = layer.states, layer.bits()
        seen.append(bits)
        for kind, dim in ((0, -2), (1, -1)):
            exact = data[kind, 0, :, : state.pages * 16].unflatten(1, (-1, 16)).unbind(1)
            new = [page(x, dim) for x in exact[len(pages[kind]) :]]
            pages[kind] = [narrowed(held, bits) for held in (*pages[kind], *new)]
            for i, (_, codes, scale, zero) in enumerate(pages[kind]):
                expected = exact[i] if bits == 16 else (codes * scale + zero).float()
                torch.testing.assert_close(found[kind][0, :, i * 16 : i * 16 + 16], expected, rtol=0, atol=1e-5)
    assert list(dict.fromkeys(seen)) == [16, 8, 4, 2]


@pytest.mark.parametrize(
    "options", [{"fbit": 2}, {"fbit": 4, "initial_bits": 4}, {"fbit": 2, "transform": "hadamard"}]
)
def test_the_equivalent_shift_is_pmkvq(options):
    model, ids = tiny_model(), random_ids(2, 160)
    ours, same, other = (
        make_cache(model, max_length=96, key_shrink="equivalent", **options),
        *(build("shrink", **{**options, "max_length": 96, "strategy": s}) for s in ("equivalent", "direct")),
    )
    for part in ids.split(50, dim=1):
        expected = forward(model, ours, part)
        assert torch.equal(forward(model, same, part), expected)
        far = forward(model, other, part)
    assert not torch.equal(far, expected)
    for i in range(len(ours.layers)):
        assert all(torch.equal(a, b) for a, b in zip(ours.dequantize(i), same.dequantize(i)))
    assert same.nbytes() == ours.nbytes()


@pytest.mark.parametrize("name", SIMULATED)
def test_cuts_change_nothing(name):
    g = torch.Generator().manual_seed(0)
    data = [torch.randn(1, heads, 120, 16, generator=g) for heads in (2, 2, 4)]
    caches = [build(name, **OWN[name]) for _ in range(2)]
    for cache, step in zip(caches, (120, 7)):
        for keys, values, queries in zip(*(x.split(step, dim=2) for x in data)):
            cache.update(keys, values, 0)
            cache.layers[0].attend(queries, None, 0.25)
    one, other = (cache.layers[0] for cache in caches)
    assert torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)
    assert one.nbytes() == other.nbytes()
    query = torch.randn(1, 4, 1, 16, generator=g)
    torch.testing.assert_close(one.attend(query, None, 0.25), other.attend(query, None, 0.25))


@pytest.mark.parametrize("name", SIMULATED)
def test_rows_are_independent(name):
    model, batch = tiny_model(), left_padded(2, 100, [0, 23])
    cache, alone = (build(name, **OWN[name]) for _ in range(2))
    mask = batch["attention_mask"]
    forward(model, cache, batch["input_ids"][:, :70], mask[:, :70])
    forward(model, alone, batch["input_ids"][1:, 23:70])
    together = forward(model, cache, batch["input_ids"][:, 70:], mask)
    torch.testing.assert_close(together[1:], forward(model, alone, batch["input_ids"][1:, 70:]), rtol=1e-4, atol=1e-4)


def test_quest_with_all_pages_is_pmkvq():
    model, ids = tiny_model(), random_ids(1, 120)
    ours, all_pages, few = make_cache(model, fbit=4), build("quest", budget=4096), build("quest", **OWN["quest"])
    for part in ids.split(40, dim=1):
        expected = forward(model, ours, part)
        torch.testing.assert_close(forward(model, all_pages, part), expected)
        fewer = forward(model, few, part)
    assert (fewer - expected).abs().max() > 1e-3
    # (min, max) of 2 heads of 16 channels, float32, for 6 pages of 16 tokens (7 tokens more than the window wait).
    pages = few.layers[0].states[0].pages
    assert few.layers[0].nbytes() == ours.layers[0].nbytes() + pages * 2 * 2 * 16 * 4
    assert all_pages.layers[0].nbytes() == ours.layers[0].nbytes()


def test_pages_are_ranked_by_what_their_scores_can_reach():
    g = torch.Generator().manual_seed(0)
    query, keys = torch.randn(1, 4, 3, 8, generator=g), torch.randn(1, 2, 5, 16, 8, generator=g)
    found = visible_pages(query, keys.amin(3), keys.amax(3), 2)
    for head in range(4):
        for i in range(3):
            bounds = [
                sum(max(q * page[:, d].min(), q * page[:, d].max()) for d, q in enumerate(query[0, head, i])).item()
                for page in keys[0, head // 2]
            ]
            best = sorted(range(5), key=bounds.__getitem__)[-2:]
            assert found[0, head, i].nonzero().flatten().tolist() == sorted(best)


def test_keys_are_turned_back_to_before_rope():
    model, ids = tiny_model(), random_ids(1, 40)
    attention, seen = model.model.layers[0].self_attn, {}
    hook = attention.k_proj.register_forward_hook(lambda module, args, out: seen.update(before=out))
    cache = build("kvquant", sink_tokens=64)
    forward(model, cache, ids)
    hook.remove()
    before = seen["before"].view(1, 40, 2, 16).transpose(1, 2)
    theta = cache.own["theta"]
    torch.testing.assert_close(rotate(cache.layers[0].keys, 0, theta, inverse=True), before, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(rotate(before, 0, theta), cache.layers[0].keys, rtol=1e-4, atol=1e-4)


def test_outliers_are_exact_and_levels_fit():
    x = torch.randn(2, 30, 128, generator=torch.Generator().manual_seed(0))
    x[:, :, 5] += 40
    back = simulate(x, fit_levels(x[:, :10], 2, 0.01), 0.01)
    assert outliers(x, 0.01)[..., 5].all() and torch.equal(back[..., 5], x[..., 5])
    plain = dequantize(*quantize(x, 2), 2)
    assert (back - x).square().mean() < 0.1 * (plain - x).square().mean()
    # Fitted levels beat even ones on what they were fitted to.
    unit = torch.rand(1, 4000, generator=torch.Generator().manual_seed(1)) ** 3
    even = torch.linspace(0, 1, 4)[None]
    errors = [(levels.gather(1, nearest(unit, levels)) - unit).square().mean() for levels in (k_means(unit, 4), even)]
    assert errors[0] < 0.7 * errors[1]


def test_levels_of_kvquant_are_those_of_the_first_page_held():
    g = torch.Generator().manual_seed(0)
    one, other = ([torch.randn(2, 2, 60, 16, generator=g) * scale for _ in range(2)] for scale in (1, 30))

    def read(cache):
        return cache.dequantize(0)

    def fresh(*parts):
        cache = build("kvquant")
        for part in parts:
            cache.update(*part, 0)
        return cache

    cache = fresh(one)
    before = read(cache)
    # Within the first page: what stays is not touched. Below it: another first page, and levels of its own.
    cache.crop(-50)
    assert all(torch.equal(x, y[:, :, :10]) for x, y in zip(read(cache), before))
    cache.crop(-9)
    cache.update(*other, 0)
    expected = fresh([x[:, :, :1] for x in one], other)
    assert all(torch.equal(x, y) for x, y in zip(read(cache), read(expected)))
    # Rows that change places take theirs with them, and more tokens change nothing.
    swapped = torch.tensor([1, 0])
    cache.reorder_cache(swapped)
    assert all(torch.equal(x, y[swapped]) for x, y in zip(read(cache), read(expected)))
    cache.update(*one, 0)
    expected = fresh([x[swapped, :, :1] for x in one], [x[swapped] for x in other], one)
    assert all(torch.equal(x, y) for x, y in zip(read(cache), read(expected)))
    cache.reset()
    cache.update(*one, 0)
    assert all(torch.equal(x, y) for x, y in zip(read(cache), before))


def test_levels_of_kvquant_are_fitted_once(monkeypatch):
    calls = []
    monkeypatch.setattr(kvquant, "k_means", lambda x, count: calls.append(x.shape) or k_means(x, count))
    cache, g = build("kvquant"), torch.Generator().manual_seed(0)
    for _ in range(100):
        cache.update(*torch.randn(2, 1, 2, 1, 16, generator=g), 0)
        cache.dequantize(0)
    # Of keys and of values: 16 tokens of 2 heads of 16 channels.
    assert calls == [(1, 512)] * 2


def test_bytes_of_kvquant():
    cache = build("kvquant", sink_tokens=4)
    x = torch.zeros(1, 2, 4 + 8 + 3 * 16, 16, dtype=torch.bfloat16)
    cache.update(x, x, 0)
    layer = cache.layers[0]
    layer.settle()
    channels = 2 * 16
    codes = 2 * 48 * channels * 2 // 8
    ranges = (3 * channels + 48) * 4
    lists = (3 * channels + 48) * 3
    levels = 2 * 4 * 2
    exact = sum(t.nbytes for t in (*layer.sink, *layer.recent))
    assert layer.nbytes() == codes + ranges + lists + levels + exact


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("shrink", {"strategy": "best"}, "strategy must be one of direct"),
        ("quest", {"page": 32}, "page must divide 16"),
        ("kvquant", {"transform": "hadamard"}, "has no transform"),
    ],
)
def test_impossible_options_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        build(name, **options)
