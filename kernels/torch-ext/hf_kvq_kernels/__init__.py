# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Decode attention over a quantized KV cache that reads packed codes and nothing else."""

from .ops import attend, why_not
from .pages import DTYPES, PageLayout


__all__ = ["DTYPES", "PageLayout", "attend", "why_not"]
