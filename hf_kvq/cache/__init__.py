# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Quantized KV caches."""

from .base import KVQCache
from .handle import KVHandle
from .pmkvq import PMKVQCache
from .progressive import BudgetExceededError


__all__ = ["BudgetExceededError", "KVHandle", "KVQCache", "PMKVQCache"]
