# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Calibration: which layer deserves how many bits, measured on text. Every step can be used alone."""

from .allocation import allocate, layer_costs, parse_budget
from .data import fingerprint, load_texts, token_blocks
from .fbits import calibrate_fbits, fbits_for_budget
from .sensitivity import Sensitivity, cached_shapes, kv_gradients, quantization_error, sensitivity


__all__ = [
    "Sensitivity",
    "allocate",
    "cached_shapes",
    "calibrate_fbits",
    "fbits_for_budget",
    "fingerprint",
    "kv_gradients",
    "layer_costs",
    "load_texts",
    "parse_budget",
    "quantization_error",
    "sensitivity",
    "token_blocks",
]
