# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Triton kernels."""

from .attend import attend, why_not


__all__ = ["attend", "why_not"]
