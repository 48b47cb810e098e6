# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""The picture of a model card. SVG, as text is drawn by whoever shows it, and the same plan gives the same bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


# A ground of its own, as the page may be light or dark.
_COLORS = {2: "#8cbcf0", 4: "#3d85d8", 8: "#1c5aa6", 16: "#0d2f5e"}
_WIDTH, _LEFT, _RIGHT = 720, 64, 700
# Heights: of the title, of a line above a panel, of the widest width, and of what is below.
_TITLE, _CAPTION, _BITS, _FOOT = 30, 44, 132, 46
_MOST_TICKS = 12

_PAGE = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" \
role="img" aria-labelledby="title desc" font-family="system-ui, -apple-system, 'Segoe UI', sans-serif" font-size="12" \
fill="#59636e">
<title id="title">Final width of each layer</title>
<desc id="desc">{description}</desc>
<rect x="0.5" y="0.5" width="{inner_width}" height="{inner_height}" rx="8" fill="#ffffff" stroke="#d0d7de"/>
<text x="20" y="29" font-size="15" font-weight="600" fill="#1f2328">Final width of each layer</text>
<text x="{right}" y="29" text-anchor="end">{mean}</text>
{drawing}
<text x="{middle}" y="{label_y}" text-anchor="middle">layer</text>
</svg>
"""


def layer_widths(layers: Sequence[int], widths: Sequence[tuple[int, int]], num_layers: int) -> bytes:
    """A bar for each quantized layer, as high as it has bits, so that areas are shares of the memory.

    Args:
        layers: indices of the quantized layers.
        widths: final widths of their keys and values, in two panels where they differ.
        num_layers: all layers of the model; those that are not quantized stay empty.

    Returns:
        An SVG file.
    """
    unit = _BITS / max(map(max, widths))
    bottom, lines = _TITLE, []
    for caption, fbits in _sides(widths):
        bottom += _CAPTION
        lines.append(f'<text x="20" y="{bottom - 20:.1f}">{caption}</text>')
        bottom += max(fbits) * unit
        lines += _panel(layers, fbits, num_layers, unit, bottom)
    slot = (_RIGHT - _LEFT) / num_layers
    for i in range(0, num_layers, _tick_step(num_layers)):
        x = _LEFT + (i + 0.5) * slot
        lines.append(f'<text x="{x:.1f}" y="{bottom + 17:.1f}" text-anchor="middle">{i}</text>')
    height = round(bottom) + _FOOT
    return _PAGE.format(
        width=_WIDTH,
        height=height,
        inner_width=_WIDTH - 1,
        inner_height=height - 1,
        description=describe(widths, num_layers),
        mean=_mean(widths, num_layers),
        drawing="\n".join(lines),
        right=_RIGHT,
        middle=(_LEFT + _RIGHT) // 2,
        label_y=height - 11,
    ).encode()


def describe(widths: Sequence[tuple[int, int]], num_layers: int) -> str:
    """What the picture says, in words."""
    return "; ".join([*(caption for caption, _ in _sides(widths)), _mean(widths, num_layers)])


def _sides(widths: Sequence[tuple[int, int]]) -> list[tuple[str, tuple[int, ...]]]:
    """(caption, widths) of the panels."""
    keys, values = zip(*widths)
    sides = [("", keys)] if keys == values else [("keys: ", keys), ("values: ", values)]
    return [(name + _counts(fbits), fbits) for name, fbits in sides]


def _counts(fbits: Sequence[int]) -> str:
    first, *others = sorted(Counter(fbits).items(), reverse=True)
    start = f"{first[1]} layer{'s' if first[1] > 1 else ''} at {first[0]} bits"
    return ", ".join([start, *(f"{n} at {bits}" for bits, n in others)])


def _mean(widths: Sequence[tuple[int, int]], num_layers: int) -> str:
    mean = f"{sum(map(sum, widths)) / (2 * len(widths)):.2f}".rstrip("0").rstrip(".")
    rest = num_layers - len(widths)
    return f"{mean} bits on average" + (f", {rest} layers not quantized" if rest else "")


def _panel(layers: Sequence[int], fbits: Sequence[int], num_layers: int, unit: float, bottom: float) -> list[str]:
    """Grid, bars and base line; a bit is `unit` high."""
    slot = (_RIGHT - _LEFT) / num_layers
    grid, bars = [], []
    for bits in sorted(set(fbits)):
        y = bottom - bits * unit
        grid.append(f'<path d="M{_LEFT} {y:.1f}H{_RIGHT}" stroke="#e4e8ec"/>')
        grid.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{bits} bits</text>')
        shapes = [_bar(_LEFT + i * slot, slot, bottom, bits * unit) for i, b in zip(layers, fbits) if b == bits]
        bars.append(f'<path d="{"".join(shapes)}" fill="{_COLORS[bits]}"/>')
    return [*grid, *bars, f'<path d="M{_LEFT} {bottom:.1f}H{_RIGHT}" stroke="#818b98"/>']


def _bar(left: float, slot: float, bottom: float, height: float) -> str:
    """A path: a bar in the middle of its slot, with rounded corners at the top."""
    width = min(0.82 * slot, 40)
    r = min(3, width / 4)
    return (
        f"M{left + (slot - width) / 2:.2f} {bottom:.1f}v{r - height:.2f}q0 {-r:.2f} {r:.2f} {-r:.2f}"
        f"h{width - 2 * r:.2f}q{r:.2f} 0 {r:.2f} {r:.2f}V{bottom:.1f}z"
    )


def _tick_step(num_layers: int) -> int:
    """1, 2, 5, 10, 20, 50 ... so that there are few enough numbers."""
    steps = (digit * 10**power for power in range(8) for digit in (1, 2, 5))
    return next(step for step in steps if num_layers <= step * _MOST_TICKS)
