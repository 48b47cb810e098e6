# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Several caches side by side, against `generate` with each of them alone."""

import dataclasses
import itertools
import re

import pytest
import torch

import compare
from compare import ORDINARY, Request, applicable, first_difference, measure, new_cache, race
from conftest import generate, random_ids, tiny_model
from hf_kvq import KVQPlan, MixKVQConfig, PMKVQConfig
from hf_kvq.registration import cache_argument
from view import heat_map, numbers, page


OPTIONS = {
    "pmkvq": {"fbit": 2, "window": 16, "group_size": 16, "sink_tokens": 1},
    "mixkvq": {"residual": 16, "group_size": 16, "sink_tokens": 1, "target_bits": 3.0},
    "kivi": {"bits": 2, "residual": 16, "group_size": 16},
}


class Words:
    """A tokenizer whose tokens are words with markup in them."""

    def decode(self, tokens, skip_special_tokens=False):
        return "".join(f"<b>{token}</b> " for token in tokens)


def request(**settings):
    return Request(**{"ids": random_ids(1, 12), "caches": OPTIONS, "new_tokens": 60, **settings})


def last(iterator):
    return list(iterator)[-1]


@pytest.fixture(scope="module")
def lanes():
    return last(race(tiny_model(), request()))


def test_each_cache_says_what_it_says_alone(lanes):
    model = tiny_model()
    assert [lane.name for lane in lanes] == [ORDINARY, *OPTIONS]
    for lane in lanes:
        cache = new_cache(lane.name, model, OPTIONS.get(lane.name, {}), 72)
        alone = generate(model, new_tokens=60, cache=cache, inputs=random_ids(1, 12), eos_token_id=None)
        assert lane.tokens == alone.sequences[0, 12:].tolist()
        if lane.name != ORDINARY:
            assert lane.snapshot.held == lane.cache.nbytes() == cache.nbytes()
            assert lane.snapshot.bits == tuple(cache.layer_bits())


def test_some_answers_differ(lanes):
    # Otherwise the test above would say little.
    assert len({tuple(lane.tokens) for lane in lanes}) > 1
    for lane in lanes[1:]:
        where = lane.differs_at
        assert (where is None) == (lane.tokens == lanes[0].tokens)
        if where is not None:
            assert lane.tokens[:where] == lanes[0].tokens[:where] and lane.tokens[where] != lanes[0].tokens[where]


def test_widths_are_noted_as_they_change(lanes):
    tokens, widths = zip(*lanes[1].history)
    assert [bits[0] for bits in widths] == [16, 8, 4, 2]
    assert tokens[0] == 12 and list(tokens) == sorted(set(tokens)) and tokens[-1] <= lanes[1].snapshot.tokens == 71


def test_rounds_are_shared(lanes):
    counts = [[len(lane.tokens) for lane in seen] for seen in race(tiny_model(), request(new_tokens=3))]
    # Prompts one after the other, then a token each.
    assert counts == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], [2] * 4, [3] * 4]
    assert all(lane.is_done and lane.seconds > 0 for lane in lanes)


def test_a_stop_token_ends_an_answer(lanes):
    stop = lanes[0].tokens[5]
    first = lanes[0].tokens.index(stop)
    seen = last(race(tiny_model(), request(stop=frozenset([stop]))))
    assert seen[0].tokens == lanes[0].tokens[: first + 1]


def test_drawn_tokens_follow_the_seed():
    def texts(seed):
        wanted = request(temperature=1.0, seed=seed, new_tokens=20, caches={"pmkvq": {"fbit": 16}})
        return [lane.tokens for lane in last(race(tiny_model(), wanted))]

    once = texts(1)
    assert once == texts(1) and once != texts(2)
    # The same draws for both, and nothing is quantized.
    assert once[0] == once[1]


def test_divergence_is_that_of_the_ordinary_answer(lanes, monkeypatch):
    monkeypatch.setattr(compare, "CHUNK", 1)
    model, wanted = tiny_model(), request()
    copies = [dataclasses.replace(lane) for lane in lanes]
    list(measure(model, wanted, copies))
    answer = torch.tensor([lanes[0].tokens])
    ids = torch.cat([wanted.ids, answer], dim=1)
    true = model(ids).logits[0, 11:-1].log_softmax(-1)
    for lane in copies[1:]:
        # A token at a time, as in decoding.
        cache = new_cache(lane.name, model, OPTIONS[lane.name], 72)
        logits = [model(ids[:, :12], **{cache_argument(model): cache}).logits[0, -1:]]
        logits += [model(ids[:, i : i + 1], **{cache_argument(model): cache}).logits[0] for i in range(12, 71)]
        here = torch.cat(logits).log_softmax(-1)
        kl = (true.exp() * (true - here)).sum(-1).mean().item()
        assert lane.kl > 0 and lane.kl == pytest.approx(kl, rel=1e-3)
    assert copies[0].kl is None


def test_an_answer_of_one_token_has_no_divergence():
    wanted = request(new_tokens=1)
    found = last(race(tiny_model(), wanted))
    assert list(measure(tiny_model(), wanted, found)) == []
    assert all(lane.kl is None and lane.tokens_per_second is None for lane in found)


@pytest.mark.parametrize(
    ("one", "two", "are_done", "index"),
    [
        ([1, 2], [1, 2], True, None),
        ([1, 2, 3], [1, 5, 3], False, 1),
        ([1, 2], [1], False, None),
        ([1, 2], [1], True, 1),
    ],
)
def test_first_difference(one, two, are_done, index):
    assert first_difference(one, two, are_done) == first_difference(two, one, are_done) == index


def test_options_go_where_they_belong():
    chosen = {"fbit": 2, "bits": 4, "window": 64, "residual": 64, "target_bits": 3.0, "max_length": 999}
    assert applicable("pmkvq", chosen, None) == {"plan": None, "fbit": 2, "window": 64, "max_length": 999}
    assert applicable("mixkvq", chosen, None) == {"plan": None, "residual": 64, "target_bits": 3.0}
    assert applicable("kivi", chosen, None) == {"plan": None, "bits": 4, "residual": 64}
    assert applicable("rotatekv", chosen, None) == {}
    plan = KVQPlan.of(tiny_model(), PMKVQConfig(fbit=(8, 2, 4)))
    assert applicable("pmkvq", chosen, plan) == {"plan": plan, "max_length": 999}
    other = KVQPlan.of(tiny_model(), MixKVQConfig())
    assert applicable("pmkvq", chosen, other)["plan"] is None


# ---- The page


def areas(svg):
    """(x, y, width, height, colour) of the rectangles."""
    number = r'="([\d.]+)"'
    pattern = rf"<rect x{number} y{number} width{number} height{number} fill=\"(#\w+)\"/>"
    return [(*map(float, found[:4]), found[4]) for found in re.findall(pattern, svg)]


def test_heat_map_covers_what_is_held():
    history = [(1, (16, 16, 16, 16)), (40, (16, 8, 8, 16)), (80, (4, 4, 4, 4))]
    found = areas(heat_map(history, tokens=100, most=200))
    assert len(found) == 1 + 3 + 1
    assert sum(width * height for _, _, width, height, _ in found) == pytest.approx(320 * 96 / 2, rel=0.01)
    for (x1, y1, w1, h1, _), (x2, y2, w2, h2, _) in itertools.combinations(found, 2):
        assert min(x1 + w1, x2 + w2) - max(x1, x2) <= 0.11 or min(y1 + h1, y2 + h2) - max(y1, y2) <= 0.011
    assert len({colour for *_, colour in found}) == 3


def test_heat_map_says_what_it_shows():
    svg = heat_map([(5, (16, 16)), (9, (4, 4))], tokens=12, most=20)
    assert 'role="img"' in svg
    assert "over 12 tokens: 2 layers at 16 bits from token 5 on; 2 layers at 4 bits from token 9 on" in svg


def test_nothing_that_a_model_writes_is_markup(lanes):
    shown = page(lanes, Words(), 72)
    assert "<b>" not in shown and "&lt;b&gt;" in shown
    marked = re.findall(r"<mark[^>]*>(.*?)</mark>", shown, re.DOTALL)
    assert len(marked) == sum(lane.differs_at is not None for lane in lanes) > 0


def test_the_page_tells_what_waits():
    first = next(race(tiny_model(), request()))
    assert page(first, Words(), 72).count("waiting") == 3
    assert [entry["cache"] for entry in numbers(first, Words())] == [ORDINARY]


def test_numbers(lanes):
    entry = numbers(lanes, Words())[1]
    assert entry["cache"] == "pmkvq" and entry["new_tokens"] == 60 and entry["layer_bits"] == [2, 2, 2]
    assert entry["held_bytes"] == lanes[1].cache.nbytes() and entry["changes"][0] == [12, "3 layers at 16 bits"]


def test_bars_are_shares_of_the_ordinary_cache_in_the_end(lanes):
    shares = [float(share) for share in re.findall(r'<i style="width:([\d.]+)%"></i></div>', page(lanes, Words(), 71))]
    held = [lane.snapshot.held for lane in lanes]
    assert shares == [pytest.approx(100 * min(n / held[0], 1), abs=0.06) for n in held]


def test_tiers_are_not_hidden(lanes):
    shown = page(lanes, Words(), 72)
    assert shown.count("the key channels that matter at 4 and 16") == 1
    assert "matter" not in page(next(race(tiny_model(), request())), Words(), 72)
