# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Decode attention over a quantized KV cache that reads packed codes and nothing else."""

from .ops import BYTE_ORDERS, attend, quantize_, quantize_tiers_, shrink_, why_not, why_not_packing
from .pages import DTYPES, PageLayout


__all__ = [
    "BYTE_ORDERS",
    "DTYPES",
    "PageLayout",
    "attend",
    "quantize_",
    "quantize_tiers_",
    "shrink_",
    "why_not",
    "why_not_packing",
]
