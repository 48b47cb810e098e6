# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""What a cache holds, taken at one step, and how it reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import Cache

from ..cache import KVQCache
from ..cache.base import layer_bytes, tensors_of


#: A cell per layer; its height is the width in bits.
_CELLS = {16: "█", 8: "▄", 4: "▂", 2: "▁"}
_ASCII_CELLS = {16: "#", 8: "8", 4: "4", 2: "2"}
_COLOURS = {16: 32, 8: 36, 4: 33, 2: 35}


@dataclass(frozen=True)
class Snapshot:
    """A cache at one step: tokens, packed ones among them, width per layer, bytes held and in an ordinary cache."""

    tokens: int
    packed: int
    bits: tuple[int, ...]
    held: int
    ordinary: int
    true_bits: float

    @classmethod
    def of(cls, cache: Cache) -> Snapshot:
        """Look at a cache, ours or an ordinary one."""
        tokens = cache.get_seq_length()
        if isinstance(cache, KVQCache):
            packed = max((layer.states[0].body(layer.page_tokens) for layer in cache.quantized_layers), default=0)
            bits = tuple(cache.layer_bits())
            return cls(tokens, packed, bits, cache.nbytes(), cache.exact_nbytes(), cache.true_bits())
        held = sum(layer_bytes(layer) for layer in cache.layers)
        elements = sum(x.numel() for layer in cache.layers for x in tensors_of(vars(layer)))
        return cls(tokens, 0, (16,) * len(cache.layers), held, held, 8 * held / max(elements, 1))

    def widths(self) -> str:
        """See `describe_widths`."""
        return describe_widths(self.bits)

    def facts(self) -> list[str]:
        """What there is to say besides the widths, most important first."""
        return [
            f"{self.tokens:,} tokens",
            f"{format_bytes(self.held)} held, ordinary cache {format_bytes(self.ordinary)}",
            f"{self.true_bits:.2f} true bits",
        ]


def describe_widths(layer_bits: Sequence[int]) -> str:
    """Such as "12 layers at 8 bits, 18 at 4"."""
    (first, count), *others = sorted(Counter(layer_bits).items(), reverse=True)
    layers = f"{count} layer{'s' if count > 1 else ''} at {first} bits"
    return ", ".join([layers, *(f"{n} at {bits}" for bits, n in others)])


def format_bytes(count: int) -> str:
    """Such as "1.50 GiB": three significant digits, or more where they are whole."""
    units = ("B", "KiB", "MiB", "GiB")
    power = min((max(count, 1).bit_length() - 1) // 10, len(units) - 1)
    value = count / 1024**power
    return f"{value:,.{max(0, 3 - len(str(int(value)))) if power else 0}f} {units[power]}"


def cells(bits: Sequence[int], encoding: str, colour: bool) -> str:
    """One character per layer, as high as the layer is wide."""
    try:
        "".join(_CELLS.values()).encode(encoding)
        drawn = _CELLS
    except UnicodeEncodeError:
        drawn = _ASCII_CELLS
    return "".join(f"\033[{_COLOURS[b]}m{drawn[b]}\033[0m" if colour else drawn[b] for b in bits)
