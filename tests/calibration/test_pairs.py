# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
from itertools import product

import pytest
import torch

from conftest import feed, kv, tiny_model
from hf_kvq import PMKVQCache, PMKVQConfig
from hf_kvq.cache.layout import LayerShape
from hf_kvq.calibration import Sensitivity, pairs_for_budget
from simulation import Rules


WIDTHS = (8, 4, 2)
CONFIG = PMKVQConfig(window=8, group_size=16, sink_tokens=2)
RULES = Rules(2, 16, 16, torch.float32, sink=2, window=8)
LENGTH = 400


def measured(seed: int, layers: int = 2) -> Sensitivity:
    """Layers whose losses grow as the width falls."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.rand(2, layers, len(WIDTHS), generator=generator, dtype=torch.float64).cumsum(-1).unbind()
    shapes = (LayerShape(2, 16, 16, torch.float32),) * layers
    return Sensitivity(tuple(range(layers)), shapes, WIDTHS, keys + values, 1, keys, values)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("bits", [9.0, 11.0, 15.0])
def test_no_choice_of_pairs_is_better(seed, bits):
    found = measured(seed)
    budget = int(bits / 8 * LENGTH * 2 * 2 * 32)
    config = pairs_for_budget(found, LENGTH, budget, CONFIG)

    def loss_and_bytes(pairs) -> tuple[float, int]:
        loss, size = 0.0, 0
        for layer, (k, v) in enumerate(pairs):
            for side, width in ((found.keys, k), (found.values, v)):
                loss += 0.0 if width == 16 else float(side[layer, WIDTHS.index(width)])
            size += Rules(2, 16, 16, fbit=k, value_fbit=v, sink=2, window=8).bytes_for(LENGTH, min(k, v))
        return loss, size

    choices = [(16, 16), *product(WIDTHS, repeat=2)]
    possible = [loss_and_bytes(pairs) for pairs in product(choices, repeat=2)]
    best = min(loss for loss, size in possible if size <= budget)
    loss, size = loss_and_bytes(zip(config.fbit, config.value_fbit))
    assert loss == pytest.approx(best) and size <= budget
    assert config.max_length == LENGTH and config.window == 8


def test_a_cache_of_these_pairs_holds_what_was_allocated():
    model = tiny_model()
    found = measured(0, layers=3)
    budget = int(10 / 8 * LENGTH * 3 * 2 * 32)
    config = pairs_for_budget(found, LENGTH, budget, CONFIG)
    assert set(zip(config.fbit, config.value_fbit)) != {(w, w) for w in WIDTHS}
    cache = PMKVQCache(model.config, config)
    feed(cache, kv(RULES, LENGTH))
    assert 0.9 * budget < cache.nbytes() <= budget
    assert cache.layer_bits() == [min(pair) for pair in zip(config.fbit, config.value_fbit)]


def test_keys_and_values_must_be_known_apart():
    found = measured(0)
    with pytest.raises(ValueError, match="sensitivities of keys and of values"):
        pairs_for_budget(Sensitivity(found.layers, found.shapes, WIDTHS, found.total, 1), LENGTH, "6bits", CONFIG)
