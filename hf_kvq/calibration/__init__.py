# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Calibration: how to spend a budget, measured on text. Every step can be used alone."""

from .allocation import allocate, layer_costs, parse_budget
from .data import fingerprint, load_texts, token_blocks
from .fbits import calibrate_fbits, fbits_for_budget
from .measured import measured_sensitivity
from .pairs import pairs_for_budget
from .pareto import ThresholdTrial, knee, pareto_front, plot_trials, write_trials
from .samples import over_samples, remove_checkpoint
from .sensitivity import Sensitivity, cached_shapes, kv_gradients, quantization_error, sensitivity
from .smoothing import Smoothing, channel_scale, key_maxima, pair_maxima, smooth
from .thresholds import tune_thresholds


__all__ = [
    "Sensitivity",
    "Smoothing",
    "ThresholdTrial",
    "allocate",
    "cached_shapes",
    "calibrate_fbits",
    "channel_scale",
    "fbits_for_budget",
    "fingerprint",
    "key_maxima",
    "knee",
    "kv_gradients",
    "layer_costs",
    "load_texts",
    "measured_sensitivity",
    "over_samples",
    "pair_maxima",
    "pairs_for_budget",
    "pareto_front",
    "parse_budget",
    "plot_trials",
    "quantization_error",
    "remove_checkpoint",
    "sensitivity",
    "smooth",
    "token_blocks",
    "tune_thresholds",
    "write_trials",
]
