# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""The lanes of a comparison as HTML, and as plain numbers."""

from __future__ import annotations

import html
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from transformers import PreTrainedTokenizerBase

from compare import ORDINARY, Lane
from hf_kvq.cli.report import describe_widths, format_bytes
from hf_kvq.presets import resolve


# Legible on a light and on a dark page.
_COLORS = {16: "#2f5aa8", 8: "#4f9be0", 4: "#9fd0c0", 2: "#f2a65a"}
_WIDTH, _HEIGHT = 320, 96


def heat_map(history: Sequence[tuple[int, tuple[int, ...]]], tokens: int, most: int) -> str:
    """Width of each layer (from top to bottom) over the tokens held (from left to right), as SVG.

    Args:
        history: (tokens held, width of each layer) at each change.
        tokens: those held now.
        most: tokens at the right edge.
    """
    if not history:
        return ""
    layers = len(history[0][1])
    rectangles = []
    stops = [*(at for at, _ in history[1:]), tokens]
    start = 0
    for (_, bits), stop in zip(history, stops):
        row = 0
        for width, run in groupby(bits):
            count = len(list(run))
            x, y = start * _WIDTH / most, row * _HEIGHT / layers
            size = f'width="{(stop - start) * _WIDTH / most:.1f}" height="{count * _HEIGHT / layers:.2f}"'
            rectangles.append(f'<rect x="{x:.1f}" y="{y:.2f}" {size} fill="{_COLORS[width]}"/>')
            row += count
        start = stop
    said = "; ".join(f"{describe_widths(bits)} from token {max(at, 1):,} on" for at, bits in history)
    return (
        f'<svg class="kvq-map" viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="Width of each layer over {tokens:,} tokens: {said}">{"".join(rectangles)}</svg>'
    )


def page(lanes: Sequence[Lane], tokenizer: PreTrainedTokenizerBase, most: int, note: str = "") -> str:
    """All lanes side by side, below each other on a narrow screen."""
    cards = "".join(_card(lane, lanes[0], tokenizer, most) for lane in lanes)
    chips = "".join(
        f'<span class="kvq-chip"><i style="background:{color}"></i>{bits} bits</span>'
        for bits, color in _COLORS.items()
    )
    legend = (
        f'<div class="kvq-legend">Width of each layer (top to bottom) over tokens (left to right): {chips}'
        "<span>Bar: bytes held, of what an ordinary cache takes in the end</span></div>"
    )
    return f'<div class="kvq">{legend}<div class="kvq-lanes">{cards}</div><p class="kvq-note">{note}</p></div>'


def numbers(lanes: Sequence[Lane], tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """What there is to know of each lane, as plain JSON."""
    return [
        {
            "cache": lane.name,
            "text": tokenizer.decode(lane.tokens, skip_special_tokens=True),
            "new_tokens": len(lane.tokens),
            "tokens_per_second": lane.tokens_per_second,
            "held_bytes": lane.snapshot.held,
            "ordinary_bytes": lane.snapshot.ordinary,
            "true_bits": lane.snapshot.true_bits,
            "layer_bits": list(lane.snapshot.bits),
            "changes": [[at, describe_widths(bits)] for at, bits in lane.history],
            "differs_at": lane.differs_at,
            "kl": lane.kl,
            "top1": lane.top1,
        }
        for lane in lanes
        if lane.snapshot is not None
    ]


def _card(lane: Lane, ordinary: Lane, tokenizer: PreTrainedTokenizerBase, most: int) -> str:
    title = html.escape("ordinary cache" if lane.name == ORDINARY else lane.name)
    if lane.snapshot is None:
        return f'<section class="kvq-card" aria-label="{title}"><h3>{title}</h3><p>waiting …</p></section>'
    snapshot = lane.snapshot
    speed = lane.tokens_per_second
    # Budgets are set aside from the first token, so bytes compare at the end.
    share = snapshot.held / (snapshot.ordinary / snapshot.tokens * most)
    facts = [
        ("held now", format_bytes(snapshot.held)),
        ("ordinary now", format_bytes(snapshot.ordinary)),
        ("true bits", f"{snapshot.true_bits:.2f}"),
        ("tokens/s", "–" if speed is None else f"{speed:.1f}"),
    ]
    if lane is not ordinary:
        facts.append(("first other token", "none yet" if lane.differs_at is None else f"{lane.differs_at + 1}"))
        facts.append(("KL", "at the end" if lane.kl is None else f"{lane.kl:.2g}"))
    now = describe_widths(snapshot.bits)
    if resolve(lane.name)[0] == "mixkvq" and snapshot.packed:
        now += ", the key channels that matter at 4 and 16"
    tiles = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts)
    return (
        f'<section class="kvq-card" aria-label="{title}"><h3>{title}</h3>'
        f"{heat_map(lane.history, snapshot.tokens, most)}"
        f'<div class="kvq-bar" role="img" aria-label="{share:.0%} of the bytes of an ordinary cache at the end">'
        f'<i style="width:{min(share, 1):.1%}"></i></div><p class="kvq-now">{now}</p>'
        f'<dl>{tiles}</dl><div class="kvq-text">{_text(lane, tokenizer)}</div></section>'
    )


def _text(lane: Lane, tokenizer: PreTrainedTokenizerBase) -> str:
    """The answer; what comes after the first token that is not the ordinary cache's is marked."""
    text = tokenizer.decode(lane.tokens, skip_special_tokens=True)
    if lane.differs_at is None:
        return html.escape(text)
    common = tokenizer.decode(lane.tokens[: lane.differs_at], skip_special_tokens=True)
    # Half a character at the seam belongs to what differs.
    common = common.rstrip("\N{REPLACEMENT CHARACTER}")
    return f'{html.escape(common)}<mark title="differs from here">{html.escape(text[len(common) :])}</mark>'
