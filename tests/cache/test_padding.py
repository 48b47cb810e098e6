# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
import pytest
import torch

from conftest import kv, paired
from hf_kvq.cache.layer import count_tokens
from hf_kvq.cache.padding import Padding
from simulation import Rules, assert_equal


def check(padding: Padding, valid: torch.Tensor) -> None:
    """All ranges of columns, against the plain bool matrix."""
    rows, columns = valid.shape
    for row in range(rows):
        for start in range(columns + 1):
            for stop in range(start, columns + 1):
                wanted = valid[row, start:stop].nonzero().flatten()
                index = padding.tokens(row, start, stop)
                assert torch.equal(torch.arange(stop - start)[index], wanted)
                assert count_tokens(padding, row, start, stop) == len(wanted)


@pytest.mark.parametrize("seed", range(12))
def test_random_masks_chunks_and_operations(seed):
    g = torch.Generator().manual_seed(seed)
    padding, valid = Padding(), torch.ones(3, 0, dtype=torch.bool)
    for _ in range(5):
        new = int(torch.randint(1, 5, (1,), generator=g))
        chunk = torch.rand(3, new, generator=g) < (0.5 if seed % 3 else 1.0)
        padding.observe(valid.shape[1], torch.rand(3, new, generator=g) < 0.5)
        # The last word counts: masks are observed once per layer kind, and again after a crop.
        padding.observe(valid.shape[1], chunk)
        valid = torch.cat([valid, chunk], dim=1)
        if torch.rand(1, generator=g) < 0.3:
            rows = torch.randint(0, 3, (3,), generator=g)
            padding.select(rows.tolist())
            valid = valid[rows]
        if torch.rand(1, generator=g) < 0.3:
            length = int(torch.randint(0, valid.shape[1] + 1, (1,), generator=g))
            padding.crop(length)
            valid = valid[:, :length]
        check(padding, valid)


def test_without_padding_nothing_is_kept():
    padding = Padding()
    padding.observe(0, torch.ones(2, 9, dtype=torch.bool))
    assert padding.rows == []
    padding.observe(9, torch.zeros(2, 1, dtype=torch.bool))
    padding.crop(9)
    assert padding.rows == []
    padding.select([1, 1, 0])
    check(padding, torch.ones(3, 9, dtype=torch.bool))


def test_another_batch_size_is_refused():
    padding = Padding()
    padding.observe(0, torch.tensor([[False, True], [True, True]]))
    with pytest.raises(ValueError, match="3 rows.*2"):
        padding.observe(2, torch.tensor([[False], [True], [True]]))


@pytest.mark.parametrize("pads", ["left", "right", "middle", "all", "none"])
def test_layer_stores_no_padding(pads):
    rules = Rules(fbit=2, max_length=60)
    cache, layer, simulation = paired(rules, batch=3)
    data = kv(rules, 50, batch=3)
    valid = torch.ones(3, 50, dtype=torch.bool)
    where = {"left": slice(0, 7), "right": slice(43, 50), "middle": slice(20, 31), "all": slice(0, 50)}.get(pads)
    if where:
        valid[1, where] = False
        for x in data:
            x[1, :, where] = float("nan")
    cache.observe_padding(valid, 50)
    cache.update(*data, 0)
    simulation.update(*data, valid)
    layer.settle()
    assert_equal(layer, simulation)
    assert layer.summary()["packed"] == [row.state()["pages"] * 16 for row in simulation.rows]


def test_a_mask_that_is_too_short_means_padding():
    # As in transformers: columns that the mask does not reach are masked.
    rules = Rules()
    cache, layer, simulation = paired(rules)
    data = kv(rules, 10)
    cache.observe_padding(torch.ones(1, 7), 10)
    cache.update(*data, 0)
    simulation.update(*data, torch.arange(10)[None] < 7)
    layer.settle()
    assert_equal(layer, simulation)


def test_crop_and_reset_forget_padding():
    rules = Rules()
    cache, layer, _ = paired(rules)
    for forget in (lambda: cache.crop(-10), cache.reset, lambda: cache.crop(-100)):
        cache.observe_padding(torch.tensor([[0] * 4 + [1] * 6]), 10)
        cache.update(*kv(rules, 10), 0)
        forget()
        assert cache.padding.rows == [] and cache.get_seq_length() == 0
        cache.update(*kv(rules, 3), 0)
        layer.settle()
        assert [state.tokens(16) for state in layer.states] == [3]
        cache.reset()
