# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Quantized KV caches."""

from .base import KVQCache
from .handle import KVHandle
from .mixkvq import KIVICache, MixKVQCache
from .pmkvq import PMKVQCache
from .progressive import BudgetExceededError
from .static import NotCapturedError, NotStaticError


__all__ = [
    "BudgetExceededError",
    "KIVICache",
    "KVHandle",
    "KVQCache",
    "MixKVQCache",
    "NotCapturedError",
    "NotStaticError",
    "PMKVQCache",
]
