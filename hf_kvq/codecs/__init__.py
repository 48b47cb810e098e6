# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Codecs: how a block of K or V becomes codes and comes back. Pure functions, usable alone."""

from .block import BlockCodec
from .packing import pack, packed_size, unpack
from .uniform import WIDTHS, centered_right_shift, dequantize, equivalent_right_shift, narrow, quantize


__all__ = [
    "WIDTHS",
    "BlockCodec",
    "centered_right_shift",
    "dequantize",
    "equivalent_right_shift",
    "narrow",
    "pack",
    "packed_size",
    "quantize",
    "unpack",
]
