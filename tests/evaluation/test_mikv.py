# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
import math

import pytest
import torch
from transformers import DynamicCache

from conftest import forward, make_cache, random_ids, tiny_model
from hf_kvq.evaluation.simulated.kvquant import rotate
from hf_kvq.evaluation.simulated.mikv import MiKVCache, balancer, most_important, received_attention
from hf_kvq.evaluation.suites import SUITES
from hf_kvq.registration import cache_argument
from simulation import TOKEN_PAGE as PAGE


SINK, WINDOW, GROUP, TOKENS = 6, 8, 8, 144
PAGES = (TOKENS - SINK - WINDOW) // PAGE
SMALL = {"sink_tokens": SINK, "window": WINDOW, "group_size": GROUP, "max_length": 256}


def build(**options) -> MiKVCache:
    return MiKVCache(tiny_model().config, {**SMALL, **options})


def feed(cache, data, cuts) -> None:
    """Give the first layer keys, values and queries in calls that end at `cuts`."""
    start, layer = 0, cache.layers[0]
    for stop in cuts:
        keys, values, queries = (x[:, :, start:stop] for x in data)
        cache.update(keys, values, 0)
        layer.attend(queries, None, 0.25)
        layer.settle()
        start = stop


def random_data(tokens: int, rows: int = 1, seed: int = 0) -> list[torch.Tensor]:
    """Keys and values of 2 heads, and queries of 4."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, heads, tokens, 16, generator=g) for heads in (2, 2, 4)]


# --- an independent, slow, obvious MiKV --------------------------------------------------------------------------


def rounded(group: list[float], bits: int) -> list[float]:
    """One group, there and back."""
    low, high = min(group), max(group)
    if low == high:
        return group
    step = (high - low) / (2**bits - 1)
    return [low + min(max(math.floor((x - low) / step + 0.5), 0), 2**bits - 1) * step for x in group]


def back(vector: torch.Tensor, bits: int) -> torch.Tensor:
    """A token of one head, there and back."""
    return torch.tensor(sum((rounded(group.tolist(), bits) for group in vector.split(GROUP)), []))


def reference(keys, values, queries, weights, important: float, high: int, low: int, has_balancer: bool):
    """Keys and values [heads, tokens, dim] as MiKV gives them, and which tokens are important, by plain loops.

    `queries` are [query heads, tokens, dim], `weights` attention of the exact model, [query heads, tokens, tokens].
    """
    keys, values = keys.clone(), values.clone()
    heads, tokens, dim = keys.shape
    per_head = queries.shape[0] // heads
    marks = torch.zeros(heads, tokens, dtype=torch.bool)
    for head in range(heads):
        mine = range(head * per_head, (head + 1) * per_head)
        factors = torch.ones(dim)
        if has_balancer:
            span = range(SINK, SINK + PAGE + WINDOW)
            for c in range(dim):
                largest_query = max(abs(queries[h, i, c].item()) for h in mine for i in span)
                factors[c] = math.sqrt(largest_query / max(abs(keys[head, i, c].item()) for i in span))
        exact = keys[head].clone()
        for start in range(SINK, tokens - WINDOW - PAGE + 1, PAGE):
            page = range(start, start + PAGE)
            got = {}
            for j in page:
                got[j] = sum(weights[h, i, j].item() for h in mine for i in range(j, start + PAGE + WINDOW))
            best = sorted(page, key=lambda j: -got[j])[: round(important * PAGE)]
            for j in page:
                marks[head, j] = j in best
                keys[head, j] = back(exact[j], high) if j in best else back(exact[j] * factors, low) / factors
                values[head, j] = back(values[head, j], high if j in best else low)
    return keys, values, marks


def packed_marks(layer, row: int = 0) -> torch.Tensor:
    return layer.important[row][:, : layer.states[row].pages * PAGE]


@pytest.mark.parametrize(
    ("important", "high", "low", "has_balancer"), [(0.25, 8, 2, True), (0.5, 4, 2, False), (0.125, 8, 4, True)]
)
def test_it_is_what_plain_loops_give(important, high, low, has_balancer):
    model, eager, ids = tiny_model(), tiny_model(attention="eager"), random_ids(1, TOKENS)
    queries = {}
    hooks = [
        layer.self_attn.q_proj.register_forward_hook(lambda m, args, out, i=i: queries.update({i: out}))
        for i, layer in enumerate(model.model.layers)
    ]
    cache = build(important=important, high_bits=high, low_bits=low, balancer=has_balancer)
    logits = forward(model, cache, ids)
    for hook in hooks:
        hook.remove()
    exact = DynamicCache(config=model.config)
    out = eager(input_ids=ids, output_attentions=True, **{cache_argument(model): exact})
    # A prompt attends to itself exactly.
    torch.testing.assert_close(logits, out.logits, rtol=1e-4, atol=1e-4)
    theta = model.config.rope_parameters["rope_theta"]
    for i, layer in enumerate(cache.layers):
        query = rotate(queries[i].view(1, TOKENS, 4, 16).transpose(1, 2), 0, theta)[0]
        rest = out.attentions[i][0], important, high, low, has_balancer
        keys, values, marks = reference(exact.layers[i].keys[0], exact.layers[i].values[0], query, *rest)
        packed = slice(SINK, SINK + layer.states[0].pages * PAGE)
        assert torch.equal(packed_marks(layer), marks[:, packed]) and marks.any()
        # Hardly any number lies so much between two codes that rounding errors decide.
        for found, expected in ((layer.keys[0], keys), (layer.values[0], values)):
            off = (found - expected).abs() > 1e-4
            assert off.float().mean() < 0.002
            assert not off[:, : packed.start].any() and not off[:, packed.stop :].any()


def test_attention_is_summed_as_the_definition_says():
    keys, _, queries = (x.double() for x in random_data(12))
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    plain, capped, sunk = (
        received_attention(queries[:, :, 7:], keys, 0.5, *more) for more in ((), (1.5,), (None, sinks))
    )
    for found, softcap, logits in ((plain, None, None), (capped, 1.5, None), (sunk, None, sinks)):
        expected = torch.zeros(2, 5, dtype=torch.float64)
        for head in range(4):
            for i in range(7, 12):
                scores = [0.5 * (queries[0, head, i] @ keys[0, head // 2, j]).item() for j in range(i + 1)]
                scores = [softcap * math.tanh(s / softcap) if softcap else s for s in scores]
                total = sum(map(math.exp, scores)) + (math.exp(logits[head]) if logits is not None else 0)
                for j in range(7, i + 1):
                    expected[head // 2, j - 7] += math.exp(scores[j]) / total
        torch.testing.assert_close(found[0], expected)


def test_the_first_of_equally_important_tokens_are_taken():
    importance = torch.tensor([[[1.0, 3.0, 1.0, 1.0, 1.0, 2.0, 1.0, 1.0]]])
    assert most_important(importance, 0.5)[0, 0].nonzero().flatten().tolist() == [0, 1, 2, 5]
    assert not most_important(importance, 0).any() and most_important(importance, 1).all()


def test_channels_of_zeros_are_not_balanced():
    keys, _, queries = random_data(10)
    keys[:, :, :, 3], queries[:, :, :, 5] = 0, 0
    factors = balancer(queries, keys)
    assert (factors[..., [3, 5]] == 1).all()
    assert torch.equal(factors[0, 1, 0], (queries[0, 2:, :, 0].abs().max() / keys[0, 1, :, 0].abs().max()).sqrt())


# --- what they must not depend on --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cuts", [range(1, TOKENS + 1), [40, 41, TOKENS], [SINK + PAGE + WINDOW, TOKENS], [1, 25, 110, TOKENS]]
)
def test_cuts_change_nothing(cuts):
    data = random_data(TOKENS)
    at_once, in_pieces = build(), build()
    feed(at_once, data, [TOKENS])
    feed(in_pieces, data, cuts)
    one, other = at_once.layers[0], in_pieces.layers[0]
    assert one.states[0].pages == PAGES
    assert torch.equal(packed_marks(one), packed_marks(other))
    assert torch.equal(one.balance[0], other.balance[0])
    assert torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)


def test_looking_at_it_changes_nothing():
    data, layers = random_data(TOKENS), []
    for looks in (0, 1):
        cache = build()
        feed(cache, data, [100])
        for _ in range(looks):
            cache.layers[0].attend(data[2][:, :, 3:47], None, 0.1)
        feed(cache, [x[:, :, 100:] for x in data], [TOKENS - 100])
        layers.append(cache.layers[0])
    assert torch.equal(*(packed_marks(layer) for layer in layers))


def test_later_queries_do_not_count():
    """Those behind a page's window, even if they come in the call in which it is packed."""
    data = random_data(TOKENS)
    changed = [*data[:2], data[2].clone()]
    changed[2][:, :, SINK + PAGE + WINDOW :] *= -3
    caches = build(), build()
    for cache, x in zip(caches, (data, changed)):
        feed(cache, x, [TOKENS])
    marks = [packed_marks(cache.layers[0]) for cache in caches]
    assert torch.equal(marks[0][:, :PAGE], marks[1][:, :PAGE])
    assert not torch.equal(marks[0][:, PAGE:], marks[1][:, PAGE:])
    assert torch.equal(caches[0].layers[0].balance[0], caches[1].layers[0].balance[0])


def test_padding_and_other_rows_change_nothing():
    data, pads, cache = random_data(TOKENS, rows=3), (0, 23, 7), build()
    mask = torch.arange(TOKENS) >= torch.tensor(pads)[:, None]
    mask[2, 80:85] = False
    cuts = [60, TOKENS]
    for start, stop in zip([0, *cuts], cuts):
        cache.observe_padding(mask[:, :stop], stop - start)
        feed(cache, [x[:, :, start:stop] for x in data], [stop - start])
    layer = cache.layers[0]
    for row, valid in enumerate(mask):
        alone = build()
        feed(alone, [x[row : row + 1, :, valid] for x in data], [int(valid[:stop].sum()) for stop in cuts])
        other = alone.layers[0]
        assert layer.states[row] == other.states[0]
        assert torch.equal(packed_marks(layer, row), packed_marks(other))
        assert torch.equal(layer.keys[row, :, valid], other.keys[0])
        assert torch.equal(layer.values[row, :, valid], other.values[0])


def test_removed_tokens_leave_nothing_behind():
    data, other = random_data(TOKENS), random_data(TOKENS, seed=1)
    mixed = [torch.cat([x[:, :, :130], y[:, :, 130:]], dim=2) for x, y in zip(data, other)]
    cropped, straight = build(), build()
    feed(cropped, data, [135])
    cropped.layers[0].crop(-5)
    feed(cropped, [x[:, :, 130:] for x in mixed], [TOKENS - 130])
    feed(straight, mixed, [TOKENS])
    one, other = cropped.layers[0], straight.layers[0]
    assert torch.equal(one.keys, other.keys) and torch.equal(packed_marks(one), packed_marks(other))


def test_tokens_removed_from_a_page():
    data, more, cache = random_data(TOKENS), random_data(80, seed=2), build()
    left = SINK + PAGE + 10
    # If these got attention after they are removed, it would be much.
    data[0][:, :, left:] *= 4
    feed(cache, data, [TOKENS])
    layer = cache.layers[0]
    keys, marks = layer.keys, packed_marks(layer)
    layer.crop(left - TOKENS)
    feed(cache, more, [80])
    assert layer.states[0].short == {1: 10} and layer.states[0].pages == 4
    assert torch.equal(layer.keys[:, :, :left], keys[:, :, :left])
    expected = [marks[:, : 2 * PAGE]]
    keys, _, queries = (torch.cat([x[:, :, :left], y], dim=2) for x, y in zip(data, more))
    for start in (left, left + PAGE):
        stop = start + PAGE + WINDOW
        importance = received_attention(queries[:, :, start:stop], keys[:, :, :stop], 0.25)[..., :PAGE]
        expected.append(most_important(importance, 0.25)[0])
    assert torch.equal(packed_marks(layer), torch.cat(expected, dim=1))


def test_rows_can_be_selected():
    data = random_data(TOKENS, rows=2)
    cache, swapped = build(), build()
    feed(cache, data, [60])
    cache.layers[0].reorder_cache(torch.tensor([1, 0, 1]))
    again = [x[[1, 0, 1]] for x in data]
    feed(cache, [x[:, :, 60:] for x in again], [TOKENS - 60])
    feed(swapped, again, [60, TOKENS])
    assert torch.equal(cache.layers[0].keys, swapped.layers[0].keys)
    assert torch.equal(cache.layers[0].values, swapped.layers[0].values)


# --- where it is another method ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "bits"),
    [
        ({"important": 0, "balancer": False}, 2),
        ({"important": 1, "high_bits": 4}, 4),
        ({"important": 1}, 8),
        ({"boundary_layers": 1, "high_bits": 4, "balancer": False}, 8),
    ],
)
def test_one_width_for_all_is_pmkvq(options, bits):
    plain = {"key_codec": "token", "key_shrink": "equivalent"}
    ours = make_cache(tiny_model(), **SMALL, **plain, fbit=bits, initial_bits=bits)
    same, data = build(**options), random_data(TOKENS, rows=2)
    for cache in (ours, same):
        feed(cache, data, [TOKENS])
    assert all(torch.equal(x, y) for x, y in zip(same.dequantize(0), ours.dequantize(0)))
    query = torch.randn(2, 4, 3, 16, generator=torch.Generator().manual_seed(1))
    one, other = (cache.layers[0].attend(query, None, 0.25) for cache in (same, ours))
    torch.testing.assert_close(one, other)


def test_important_tokens_are_exact_at_16_bits():
    data = random_data(TOKENS)
    cache = build(high_bits=16)
    feed(cache, data, [TOKENS])
    layer = cache.layers[0]
    packed = slice(SINK, SINK + layer.states[0].pages * PAGE)
    for found, exact in ((layer.keys, data[0]), (layer.values, data[1])):
        is_same = (found == exact)[0, :, packed].all(-1)
        assert is_same[packed_marks(layer)].all() and is_same.float().mean() < 0.3


# --- bytes and errors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("high", "has_balancer"), [(8, True), (16, False)])
def test_bytes(high, has_balancer):
    data = [x.bfloat16() for x in random_data(TOKENS, rows=2)]
    cache = build(high_bits=high, balancer=has_balancer)
    feed(cache, data, [TOKENS])
    layer = cache.layers[0]
    many = PAGE // 4
    assert [state.pages for state in layer.states] == [PAGES, PAGES]
    exact = 2 * 2 * 16 * 2 * (SINK + WINDOW + PAGE - 1)
    sums = 2 * 4 * (WINDOW + PAGE - 1)
    ranges = 16 // GROUP * 2 * 2
    important = 16 * 2 if high == 16 else 16 * high // 8 + ranges
    other = 16 * 2 // 8 + ranges
    per_head = 2 * (many * important + (PAGE - many) * other) + PAGE // 8
    factors = 2 * 16 * 2 if has_balancer else 0
    assert layer.nbytes() == 2 * (exact + sums + PAGES * 2 * per_head + factors)
    assert cache.layers[1].nbytes() == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"important": 1.5}, "between 0 and 1; got 1.5"),
        ({"important": "all"}, "between 0 and 1; got 'all'"),
        ({"high_bits": 2}, "low_bits the smaller; got low_bits=2, high_bits=2"),
        ({"low_bits": 3}, "two of 16, 8, 4, 2"),
        ({"fbit": 4}, "leave fbit out"),
        ({"transform": "hadamard", "key_clip": 0.9}, "leave key_clip, transform out"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)


def test_a_model_that_shows_no_queries_is_told_how_to():
    with pytest.raises(RuntimeError, match="attn_implementation='sdpa'"):
        forward(tiny_model(attention="eager"), build(), random_ids(1, 60))


def test_the_suite_can_be_built():
    for method in SUITES["paper-mikv"]:
        method.build(tiny_model(), 256)
