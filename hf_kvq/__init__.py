# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""hf_kvq: quantized KV caches for transformers. `import hf_kvq` registers them with `generate`."""

from .cache import BudgetExceededError, KIVICache, KVQCache, MixKVQCache, PMKVQCache
from .config import KIVIConfig, MixKVQConfig, PMKVQConfig
from .hub import KVQPlan, PlanError, PlanUnavailableError
from .registration import register, unregister
from .version import __version__


__all__ = [
    "BudgetExceededError",
    "KIVICache",
    "KIVIConfig",
    "KVQCache",
    "KVQPlan",
    "MixKVQCache",
    "MixKVQConfig",
    "PMKVQCache",
    "PMKVQConfig",
    "PlanError",
    "PlanUnavailableError",
    "__version__",
    "register",
    "unregister",
]

register()
