# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
import re
import xml.etree.ElementTree as ElementTree
from typing import NamedTuple

import pytest
import torch

from hf_kvq.hub import plots


SVG = "{http://www.w3.org/2000/svg}"


class Bar(NamedTuple):
    left: float
    width: float
    height: float
    bottom: float


def bars(svg: bytes) -> dict[str, list[Bar]]:
    """By colour."""
    found = {}
    for path in ElementTree.fromstring(svg).iter(f"{SVG}path"):
        if (color := path.get("fill")) is None:
            continue
        for one in path.get("d").removesuffix("z").split("z"):
            x, bottom, up, *corner, end = map(float, re.findall(r"-?[\d.]+", one))
            radius, straight = corner[2], corner[4]
            found.setdefault(color, []).append(Bar(x, straight + 2 * radius, radius - up, bottom))
            assert end == bottom
    return found


@pytest.mark.parametrize(
    ("layers", "fbits", "number"),
    [
        (range(3), (8, 4, 2), 3),
        (range(1), (16,), 1),
        (range(5, 34, 6), (8, 4, 4, 2, 16), 34),
        (range(80), (2, 4, 8, 16) * 20, 80),
    ],
)
def test_every_layer_has_its_bar(layers, fbits, number):
    svg = plots.layer_widths(layers, list(zip(fbits, fbits)), number)
    found = bars(svg)
    assert len(found) == len(set(fbits))
    drawn = sorted((bar, color) for color, one in found.items() for bar in one)
    assert [fbits[[b for _, b in drawn].index(color)] for _, color in drawn] == list(fbits)
    heights = torch.tensor([bar.height for bar, _ in drawn])
    assert torch.allclose(heights / max(heights), torch.tensor(fbits) / max(fbits), atol=1e-3)
    assert len({bar.bottom for bar, _ in drawn}) == 1 and max(heights) == pytest.approx(plots._BITS, abs=0.1)
    # In the slot of its layer, all slots alike, and not over its neighbours.
    slot = (plots._RIGHT - plots._LEFT) / number
    for layer, (bar, _) in zip(layers, drawn):
        assert bar.left + bar.width / 2 == pytest.approx(plots._LEFT + (layer + 0.5) * slot, abs=0.1)
        assert 0 < bar.width < slot
    texts = [element.text for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    assert {f"{bits} bits" for bits in fbits} <= set(texts)
    ticks = [int(text) for text in texts if text.isdigit()]
    assert ticks == list(range(0, number, ticks[1] if ticks[1:] else 1)) and len(ticks) <= 12


def test_keys_and_values_have_panels_of_their_own_at_one_scale():
    widths = [(8, 2), (4, 4), (8, 4)]
    svg = plots.layer_widths(range(3), widths, 3)
    drawn = sorted(bar for one in bars(svg).values() for bar in one)
    by_bottom = {bottom: [bar.height for bar in drawn if bar.bottom == bottom] for bottom in {x.bottom for x in drawn}}
    keys, values = (torch.tensor(by_bottom[bottom]) for bottom in sorted(by_bottom))
    unit = keys[0] / 8
    assert torch.allclose(keys / unit, torch.tensor([8.0, 4, 8]), atol=1e-2)
    assert torch.allclose(values / unit, torch.tensor([2.0, 4, 4]), atol=1e-2)
    # One below the other, within the page.
    assert max(by_bottom) - max(values) > min(by_bottom)
    assert max(by_bottom) < float(ElementTree.fromstring(svg).get("height"))


def test_the_picture_is_described_for_those_who_do_not_see_it():
    widths = [(4, 4), (2, 2)]
    root = ElementTree.fromstring(plots.layer_widths((0, 2), widths, 3))
    named = root.get("aria-labelledby").split()
    words = {element.get("id"): element.text for element in root if element.get("id") in named}
    assert root.get("role") == "img"
    assert words == {"title": "Final width of each layer", "desc": plots.describe(widths, 3)}


def test_the_picture_of_a_huge_model():
    svg = plots.layer_widths(range(10_000), ((4, 4), (2, 2)) * 5000, 10_000)
    assert len(svg) < 2**20 and sum(map(len, bars(svg).values())) == 10_000


def test_the_picture_in_words():
    assert plots.describe([(4, 4), (2, 2), (2, 2)], 3) == "1 layer at 4 bits, 2 at 2; 2.67 bits on average"
    rest = "8 bits on average, 10 layers not quantized"
    assert plots.describe([(8, 8), (8, 8)], 12) == f"2 layers at 8 bits; {rest}"
    words = "keys: 1 layer at 8 bits, 1 at 4; values: 2 layers at 2 bits; 4 bits on average"
    assert plots.describe([(8, 2), (4, 2)], 2) == words
