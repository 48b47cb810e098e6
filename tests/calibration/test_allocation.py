# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
import itertools
import math
import sys
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_kvq import PMKVQConfig
from hf_kvq.cache.layout import LayerShape
from hf_kvq.calibration import allocate, layer_costs, parse_budget
from simulation import Rules


pytest.importorskip("cvxpy")
WIDTHS = (16, 8, 4, 2)


def total(matrix, fbits, widths=WIDTHS):
    return sum(row[widths.index(bits)] for row, bits in zip(matrix, fbits))


def brute_force(s, cost, budget) -> float:
    best = math.inf
    for choice in itertools.product(*(range(len(row)) for row in s)):
        if sum(row[j] for row, j in zip(cost, choice)) <= budget:
            best = min(best, sum(row[j] for row, j in zip(s, choice)))
    return best


def dynamic_programming(s, cost, budget) -> float:
    best = np.zeros(budget + 1)
    for row, costs in zip(s, cost):
        new = np.full(budget + 1, np.inf)
        for error, c in zip(row, costs):
            new[c:] = np.minimum(new[c:], best[: budget + 1 - c] + error)
        best = new
    return best[-1]


@st.composite
def programs(draw):
    layers, widths = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    errors = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(1e-6, 1e3))
    s = [[draw(errors) for _ in range(widths)] for _ in range(layers)]
    cost = [
        [draw(st.integers(1, 40)) * draw(st.sampled_from([1, 4096])) for _ in range(widths)] for _ in range(layers)
    ]
    low, high = (sum(f(row) for row in cost) for f in (min, max))
    return s, cost, draw(st.integers(low, high + 1))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(programs())
def test_no_choice_is_better(program):
    s, cost, budget = program
    widths = WIDTHS[: len(s[0])]
    fbits = allocate(s, cost, budget, widths)
    assert total(cost, fbits, widths) <= budget
    assert total(s, fbits, widths) == pytest.approx(brute_force(s, cost, budget), rel=1e-9, abs=1e-12)
    assert allocate(s, cost, budget, widths) == fbits


@pytest.mark.parametrize("seed", range(4))
def test_eighty_layers_in_less_than_a_second(seed):
    rng = np.random.default_rng(seed)
    s = np.array([0, 1 / 85, 1 / 17, 1]) * rng.lognormal(0, 2, (80, 1)) * rng.lognormal(0, 0.3, (80, 4))
    cost = np.array([64, 33, 17, 9]) * rng.integers(1, 20 if seed % 2 else 2, (80, 1))
    budget = int(cost[:, 3].sum() * rng.uniform(1.05, 3))
    start = time.process_time()
    fbits = allocate(s, cost * 4096, budget * 4096 + 100, WIDTHS)
    seconds = time.process_time() - start
    assert seconds < 2  # 0.1 s, but the machine may be busy
    assert total(cost, fbits) <= budget
    assert total(s, fbits) == pytest.approx(dynamic_programming(s, cost, budget), rel=1e-9)


def test_bits_go_where_they_help():
    s = torch.tensor([[0, 0.1, 1, 10], [0, 0.1, 1, 90], [0, 0.1, 1, 10]])
    cost = [[16, 8, 4, 2]] * 3
    assert allocate(s, cost, 8, WIDTHS) == (2, 4, 2)
    assert allocate(s, cost, 6, WIDTHS) == (2, 2, 2)
    assert allocate(s, cost, 48, WIDTHS) == (16, 16, 16)


def test_a_width_that_does_not_help_is_not_paid_for():
    assert allocate([[0, 0, 0, 0]] * 3, [[16, 8, 4, 2]] * 3, 48, WIDTHS) == (2, 2, 2)
    assert allocate([[0, 1, 1, 1]] * 2, [[16, 8, 4, 2]] * 2, 30, WIDTHS) in ((16, 2), (2, 16))


def test_too_small_a_budget_names_the_smallest():
    cost = [[16, 8, 4, 2], [160, 80, 40, 20]]
    with pytest.raises(ValueError, match="budget of 21 bytes is too small for 2 layers.* is 22 bytes"):
        allocate([[0, 1, 2, 3]] * 2, cost, 21, WIDTHS)
    assert allocate([[0, 1, 2, 3]] * 2, cost, 22, WIDTHS) == (2, 2)


@pytest.mark.parametrize(
    ("s", "message"),
    [
        ([[0, 1, 2]], "with 4 widths; got shapes"),
        ([0, 1, 2, 3], "with 4 widths; got shapes"),
        ([], "with 4 widths; got shapes"),
        ([[0, 1, 2, math.nan]], "finite and not negative"),
        ([[0, 1, 2, math.inf]], "finite and not negative"),
        ([[0, 1, 2, -3]], "finite and not negative"),
    ],
)
def test_impossible_matrices(s, message):
    with pytest.raises(ValueError, match=message):
        allocate(s, [[16, 8, 4, 2]], 100, WIDTHS)


def test_without_cvxpy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cvxpy", None)
    with pytest.raises(ImportError, match=r"pip install 'hf-kvq\[calibrate\]'"):
        allocate([[0, 1]], [[2, 1]], 2, (4, 2))


SHAPES = [LayerShape(2, 16, 16, torch.float32), LayerShape(3, 64, 32, torch.bfloat16)]


def test_costs_are_the_byte_formula():
    rules = [Rules(2, 16, 16, max_length=200, window=8), Rules(3, 64, 32, torch.bfloat16, max_length=200, window=8)]
    config = PMKVQConfig(window=8, group_size=16)
    wanted = [[rule.bytes_for(200, bits) for bits in WIDTHS] for rule in rules]
    assert layer_costs(SHAPES, 200, WIDTHS, config) == wanted


@pytest.mark.parametrize(
    ("budget", "size"),
    [
        (1000, 1000),
        ("1000", 1000),
        ("1000 B", 1000),
        ("512MiB", 512 * 2**20),
        ("1.5 gib", 3 * 2**29),
        (".5KiB", 512),
        ("2.25bits", 100 * 352 * 9 // 32),
        ("16 bits", 100 * 352 * 2),
    ],
)
def test_budgets(budget, size):
    assert parse_budget(budget, SHAPES, 100) == size


@pytest.mark.parametrize("budget", ["", "MiB", "-4", "2,25bits", "2.25 bytes", "1e6", "512MB", "0bits", 0, -1, "nan"])
def test_impossible_budgets(budget):
    with pytest.raises(ValueError, match="'512MiB'"):
        parse_budget(budget, SHAPES, 100)


@pytest.mark.parametrize("budget", [None, 2.25, True, [1]])
def test_budgets_of_another_type(budget):
    with pytest.raises(TypeError, match="bytes or text"):
        parse_budget(budget, SHAPES, 100)
