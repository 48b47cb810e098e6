# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
from dataclasses import replace

import pytest
import torch

from hf_kvq import PMKVQConfig
from hf_kvq.cache.layout import LayerLayout, LayerShape, length_for_budget
from simulation import WIDTHS, Rules, max_length_for


RULES = [
    Rules(),
    Rules(3, 48, 80, torch.bfloat16, sink=4, window=0, group=32),
    Rules(1, 128, 64, torch.float16, sink=0, window=33, group=128, channel=False),
    Rules(2, 40, 40, torch.float32, sink=2, window=100, group=48, channel=False),
]


def layout_of(rules: Rules) -> LayerLayout:
    return LayerLayout.of(
        PMKVQConfig(**rules.options()), LayerShape(rules.heads, rules.key_dim, rules.value_dim, rules.dtype)
    )


@pytest.mark.parametrize("rules", RULES)
def test_byte_formula(rules):
    layout = layout_of(rules)
    assert layout.page_tokens == rules.page
    for bits in WIDTHS:
        assert layout.page_bytes(bits) == rules.page_bytes(bits)
        for length in (*range(1, 200), 1000, 4097):
            assert layout.bytes_for(length, bits) == rules.bytes_for(length, bits)


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("fbit", WIDTHS)
def test_width_for_any_number_of_pages(rules, fbit):
    rules = replace(rules, fbit=fbit, max_length=700)
    room = rules.pages(700) * rules.page_bytes(fbit)
    widths = [layout_of(rules).bits_for(pages, room, fbit) for pages in range(60)]
    assert widths == [rules.width(pages) for pages in range(60)]
    assert widths[0] == 16 and widths[-1] == fbit


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("fbits", [(4,), (16, 2, 8, 4), (2, 2)])
def test_length_for_budget_is_the_longest_that_fits(rules, fbits):
    layout, layers = layout_of(rules), [replace(rules, fbit=fbit) for fbit in fbits]
    least = sum(layer.bytes_for(rules.sink + rules.window + rules.page, layer.fbit) for layer in layers)
    for budget in (least, least + 1, 2 * least + 17, 10 * least):
        assert length_for_budget(layout, [(b, b) for b in fbits], budget) == max_length_for(layers, budget)
    with pytest.raises(ValueError, match=rf"budget_bytes={least - 1} is too small.*take {least} bytes"):
        length_for_budget(layout, [(b, b) for b in fbits], least - 1)
