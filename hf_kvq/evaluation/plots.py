# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Line charts as SVG: no plotting library needed, and the same results give the same bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from .methods import EXACT
from .report import OURS


_WIDTH, _HEIGHT = 760, 420
_LEFT, _TOP, _BOTTOM, _RIGHT = 70, 44, 370, 500
_COLORS = ("#1c5aa6", "#c4512d", "#2f8f5b", "#7a4fb5", "#b58a00", "#0f8b9d", "#a83d6e", "#59636e")

Point = tuple[float, float]


def fidelity_chart(report: dict[str, Any]) -> str:
    """KL on text against true bits at the end, a line for each kind of cache."""
    task = report["tasks"]["text"]
    series: dict[str, list[Point]] = {}
    for method in report["methods"]:
        label = method["label"]
        point = (task["bits"][label][0], task["results"][label]["kl"]["mean"])
        series.setdefault(method["cache"], []).append(point)
    ordered = dict(sorted(series.items(), key=lambda item: item[0] not in OURS))
    lines = {name: sorted(points) for name, points in ordered.items()}
    return chart(lines, "KL to the exact cache", "true bits per number at the end", "nats per token", log_y=True)


def bits_chart(report: dict[str, Any]) -> str:
    """True bits against the number of tokens."""
    series = report["tasks"]["text"]["bits_by_position"]
    lines = {label: [tuple(p) for p in points] for label, points in series.items() if label != EXACT}
    return chart(lines, "True bits while the cache fills", "tokens", "true bits per number", log_y=True)


def layers_chart(report: dict[str, Any]) -> str:
    """Relative error of each attention layer's output."""
    series = report["tasks"]["attention"]["by_layer"]
    lines = {label: list(enumerate(errors)) for label, errors in series.items()}
    return chart(lines, "Error of each attention layer's output", "layer", "relative error", log_y=True)


def chart(lines: Mapping[str, Sequence[Point]], title: str, x_label: str, y_label: str, log_y: bool = False) -> str:
    """Lines over one pair of axes, as an SVG file.

    Args:
        lines: points by name; with `log_y` those at 0 or below are left out.
        title, x_label, y_label: texts.
        log_y: a logarithmic axis.
    """
    lines = {name: [p for p in points if p[1] > 0 or not log_y] for name, points in lines.items()}
    xs = [x for points in lines.values() for x, _ in points] or [0.0, 1.0]
    ys = [math.log10(y) if log_y else y for points in lines.values() for _, y in points] or [0.0, 1.0]
    (x_low, x_high), (y_low, y_high) = _range(xs), _range(ys)

    def at(x: float, y: float) -> Point:
        y = math.log10(y) if log_y else y
        return (
            _LEFT + (x - x_low) / (x_high - x_low) * (_RIGHT - _LEFT),
            _BOTTOM - (y - y_low) / (y_high - y_low) * (_BOTTOM - _TOP),
        )

    drawn = [_text(_LEFT, 24, title, 15, "#1f2328", "start")]
    for tick in _log_ticks(y_low, y_high) if log_y else _ticks(y_low, y_high):
        y = at(x_low, tick)[1]
        drawn.append(f'<path d="M{_LEFT} {y:.1f}H{_RIGHT}" stroke="#e4e8ec"/>')
        drawn.append(_text(_LEFT - 8, y + 4, f"{tick:.4g}", anchor="end"))
    for tick in _ticks(x_low, x_high):
        x = at(tick, 10**y_low if log_y else y_low)[0]
        drawn.append(_text(x, _BOTTOM + 18, f"{tick:.4g}"))
    drawn.append(f'<path d="M{_LEFT} {_BOTTOM}H{_RIGHT}M{_LEFT} {_BOTTOM}V{_TOP}" stroke="#818b98" fill="none"/>')
    drawn.append(_text((_LEFT + _RIGHT) / 2, _BOTTOM + 38, x_label))
    drawn.append(_text(_LEFT, _TOP - 6, y_label, anchor="start"))
    for i, (name, points) in enumerate(lines.items()):
        color, dash = _COLORS[i % len(_COLORS)], ' stroke-dasharray="5 3"' if i >= len(_COLORS) else ""
        placed = [at(*point) for point in points]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in placed)
        if placed:
            drawn.append(f'<path d="M{path}" stroke="{color}" fill="none" stroke-width="1.5"{dash}/>')
        if len(placed) <= 12:
            drawn += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"/>' for x, y in placed]
        y = _TOP + 8 + 19 * i
        drawn.append(f'<path d="M{_RIGHT + 16} {y - 4}h18" stroke="{color}" stroke-width="2.5"{dash}/>')
        drawn.append(_text(_RIGHT + 40, y, name, 11, anchor="start"))
    height = max(_HEIGHT, _TOP + 24 + 19 * len(lines))
    body = "\n".join(drawn)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'role="img" font-family="system-ui, sans-serif">\n<title>{escape(title)}</title>\n'
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


def _text(x: float, y: float, text: str, size: int = 12, color: str = "#59636e", anchor: str = "middle") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{color}" text-anchor="{anchor}">{escape(text)}</text>'
    )


def _range(values: Sequence[float]) -> tuple[float, float]:
    """A bit more than what the values span."""
    low, high = min(values), max(values)
    margin = 0.04 * (high - low) or 0.5
    return low - margin, high + margin


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers: 1, 2 or 5 times a power of ten apart."""
    rough = (high - low) / 6
    power = 10 ** math.floor(math.log10(rough))
    step = next(f * power for f in (1, 2, 5, 10) if f * power >= rough)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten, and 2 and 5 times those where there are few."""
    digits = (1,) if high - low > 3 else (1, 2, 5)
    powers = range(math.floor(low), math.ceil(high) + 1)
    return [d * 10.0**p for p in powers for d in digits if low <= math.log10(d * 10.0**p) <= high]
