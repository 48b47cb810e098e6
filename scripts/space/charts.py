# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Charts of the calculator as SVG. Text and grid have the colour of the page's text, so that they fit both themes."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

from hf_kvq.cli.report import format_bytes


#: Colour and dashes of a line or a bar, legible on light and on dark ground; dashes tell apart without colours.
STYLES = {
    "ordinary": ("currentColor", ""),
    "pmkvq 16": ("#8a8f98", "2 3"),
    "pmkvq 8": ("#4f9be0", ""),
    "pmkvq 4": ("#2f79c4", "7 3"),
    "pmkvq 2": ("#5a6fd6", "2 3"),
    "mixkvq": ("#e08b3e", ""),
    "kivi": ("#b065c8", "7 3"),
    "kvq": ("#2f9e6e", ""),
}
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 470, 14, 300


def sizes_chart(tokens: Sequence[int], sizes: Mapping[str, Sequence[int]], room: int | None = None) -> str:
    """Bytes of a cache over the tokens of a request, both on logarithmic scales.

    Args:
        tokens: of a request.
        sizes: bytes at each of them, by method.
        room: bytes that there are; drawn as a line.
    """
    every = [size for line in sizes.values() for size in line] + ([room] if room else [])
    low, high = math.floor(math.log2(min(every))), math.ceil(math.log2(max(every)))

    def x(n: int) -> float:
        return _LEFT + (_RIGHT - _LEFT) * math.log2(n / tokens[0]) / math.log2(tokens[-1] / tokens[0])

    def y(size: int) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * (math.log2(size) - low) / max(high - low, 1)

    drawing = []
    for power in range(low, high + 1, max(1, round((high - low) / 6))):
        drawing.append(f'<path d="M{_LEFT} {y(2**power):.1f}H{_RIGHT}" stroke="currentColor" stroke-opacity=".15"/>')
        drawing.append(f'<text x="{_LEFT - 6}" y="{y(2**power) + 4:.1f}" text-anchor="end">{_short(2**power)}</text>')
    for n in tokens[:: max(1, len(tokens) // 6)]:
        drawing.append(f'<text x="{x(n):.1f}" y="{_BOTTOM + 18}" text-anchor="middle">{short_count(n)}</text>')
    for name, line in sizes.items():
        color, dashes = STYLES[name]
        points = " ".join(f"{x(n):.1f},{y(size):.1f}" for n, size in zip(tokens, line))
        drawing.append(
            f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2" stroke-dasharray="{dashes}">'
            f"<title>{html.escape(name)}</title></polyline>"
        )
    if room:
        drawing.append(
            f'<path d="M{_LEFT} {y(room):.1f}H{_RIGHT}" stroke="#d64545" stroke-width="1.5"/>'
            f'<text x="{_LEFT + 4}" y="{y(room) - 5:.1f}">room on the GPU</text>'
        )
    drawing.append(
        f'<text x="{(_LEFT + _RIGHT) / 2}" y="{_BOTTOM + 38}" text-anchor="middle">tokens per request</text>'
    )
    said = "; ".join(f"{name} {format_bytes(line[-1])}" for name, line in sizes.items())
    return _svg(f"Cache size against tokens. At {tokens[-1]:,} tokens: {said}.", drawing, _BOTTOM + 46)


def legend(names: Sequence[str]) -> str:
    """What the lines of `sizes_chart` stand for."""
    lines = (
        f'<span class="kvq-chip"><svg width="26" height="10" aria-hidden="true"><path d="M0 5H26" stroke-width="3" '
        f'stroke="{STYLES[name][0]}" stroke-dasharray="{STYLES[name][1]}"/></svg>{html.escape(name)}</span>'
        for name in names
    )
    return f'<div class="kvq-legend">{"".join(lines)}</div>'


def bars_chart(title: str, counts: Mapping[str, int]) -> str:
    """A bar for each method, with its number."""
    most, drawing = max(*counts.values(), 1), []
    for row, (name, count) in enumerate(counts.items()):
        y, width = 6 + 30 * row, (_RIGHT - 90 - 66) * count / most
        drawing.append(f'<text x="84" y="{y + 16}" text-anchor="end">{html.escape(name)}</text>')
        drawing.append(f'<rect x="90" y="{y}" width="{width:.1f}" height="22" rx="3" fill="{STYLES[name][0]}"/>')
        drawing.append(f'<text x="{96 + width:.1f}" y="{y + 16}" font-weight="600">{short_count(count)}</text>')
    said = "; ".join(f"{name} {count:,}" for name, count in counts.items())
    return _svg(f"{title}: {said}.", drawing, 6 + 30 * len(counts))


def short_count(count: int) -> str:
    """Such as 512, 8k (of 1024) or 1.5M."""
    if count < 1024:
        return f"{count}"
    for unit, size in (("k", 2**10), ("M", 2**20)):
        if count < 1000 * size or unit == "M":
            value = count / size
            return f"{value:.1f}".removesuffix(".0") + unit if value < 10 else f"{value:,.0f}{unit}"
    raise AssertionError


def _short(size: int) -> str:
    """A power of two as bytes, without decimals."""
    return f"{size >> 40} TiB" if size >= 2**40 else format_bytes(size).replace(".00", "").replace(".0", "")


def _svg(said: str, drawing: Sequence[str], height: float) -> str:
    return (
        f'<svg class="kvq-chart" viewBox="0 0 480 {height:.0f}" role="img" aria-label="{html.escape(said)}" '
        f'style="max-width:40rem" font-size="15" fill="currentColor">{"".join(drawing)}</svg>'
    )
