# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
import math

import pytest
import torch

from hf_kvq.evaluation.estimates import BLOCK, bootstrap, over_tokens, share


def test_bootstrap_agrees_with_the_normal_approximation():
    x = torch.randn(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3 + 5
    found = bootstrap(x)
    half = 1.96 * x.std().item() / math.sqrt(400)
    assert found.mean == pytest.approx(x.mean().item())
    assert found.low == pytest.approx(found.mean - half, abs=0.15 * half)
    assert found.high == pytest.approx(found.mean + half, abs=0.15 * half)
    assert found.n == 400


def test_bootstrap_weighs_observations_by_their_counts():
    found = bootstrap([10.0, 1.0], [100, 1])
    assert found.mean == pytest.approx(11 / 101)
    assert (found.low, found.high) == pytest.approx((0.1, 1.0))
    # Resampled means are weighed as well, or the interval would lie around 0.55.
    many = bootstrap([10.0, 1.0] * 50, [100, 1] * 50)
    assert 0.1 < many.low < 11 / 101 < many.high < 0.13


def test_bootstrap_repeats_itself():
    x = torch.arange(20.0) ** 2
    assert bootstrap(x, seed=1) == bootstrap(x, seed=1) != bootstrap(x, seed=2)


def test_one_observation_has_no_interval():
    found = bootstrap([2.0])
    assert found.mean == 2 and math.isnan(found.low) and math.isnan(found.high)
    assert found.to_dict() == {"mean": 2.0, "low": None, "high": None, "n": 1}


def test_over_tokens_takes_blocks_within_rows():
    values = torch.rand(2, BLOCK + 10, generator=torch.Generator().manual_seed(0))
    counts = torch.ones_like(values, dtype=torch.bool)
    counts[0, BLOCK:] = False
    found = over_tokens(values, counts)
    assert found.n == 3
    assert found.mean == pytest.approx(values[counts].double().mean().item())
    pieces = [values[0, :BLOCK], values[1, :BLOCK], values[1, BLOCK:]]
    assert found == bootstrap([x.double().sum() for x in pieces], [len(x) for x in pieces])


def test_blocks_widen_the_interval_of_correlated_tokens():
    steps = torch.randn(8, generator=torch.Generator().manual_seed(0)).repeat_interleave(BLOCK)
    by_block, by_token = over_tokens(steps[None]), bootstrap(steps)
    assert by_block.high - by_block.low > 4 * (by_token.high - by_token.low)


# From the closed form of Wilson's interval, as tables give it.
@pytest.mark.parametrize(
    ("hits", "n", "low", "high"),
    [(0, 10, 0.0, 0.2775), (5, 10, 0.2366, 0.7634), (10, 10, 0.7225, 1.0), (62, 100, 0.5221, 0.7090)],
)
def test_share_is_wilsons_interval(hits, n, low, high):
    found = share(hits, n)
    assert (found.mean, found.low, found.high) == pytest.approx((hits / n, low, high), abs=1e-4)


def test_map_keeps_the_order():
    found = bootstrap([1.0, 2.0, 3.0]).map(math.exp)
    assert found.mean == pytest.approx(math.exp(2)) and found.low < found.mean < found.high
