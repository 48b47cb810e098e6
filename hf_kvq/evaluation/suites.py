# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Ready-made lists of methods: an overview, and the ablations of the papers that these caches can do.

Those that turn on calibration (block-wise allocation, positional interpolation) are in `hf_kvq.evaluation.calibrated`.
What is no way for our caches to store data is simulated, see `hf_kvq.evaluation.simulated`.
"""

from __future__ import annotations

from typing import Any

from .methods import Method


_TWO = {"fbit": 2, "initial_bits": 2}
_FOUR = {"fbit": 4, "initial_bits": 4}
#: Fixed widths, and those that are reached through all others.
_SHRINK = (_FOUR, _TWO, {"fbit": 4}, {"fbit": 2})


def _ablation(cache: str, option: str, values: tuple, **fixed: Any) -> list[Method]:
    return [Method(cache, {**fixed, option: value}) for value in values]


#: By name.
SUITES: dict[str, list[Method]] = {
    "overview": [
        Method("pmkvq", {"fbit": 4}, "pmkvq, to 4"),
        Method("pmkvq", {"fbit": 4, "value_fbit": 2}, "pmkvq, keys to 4, values to 2"),
        Method("pmkvq", {"fbit": 2}, "pmkvq, to 2"),
        Method("pmkvq", _TWO, "pmkvq, fixed 2"),
        Method("kvq", {}, "kvq"),
        Method("mixkvq", {}, "mixkvq"),
        Method("mixkvq", {"target_bits": 4.0, "value_bits": 4}, "mixkvq, target 4, values 4"),
        Method("kivi", {"bits": 4}, "kivi-4"),
        Method("kivi", {"bits": 2}, "kivi-2"),
        Method("kivi", {"bits": 2, "sink_tokens": 32}, "kivi-2, 32 sinks"),
        Method("quanto", {"nbits": 4}, "transformers quanto-4"),
        Method("quanto", {"nbits": 2}, "transformers quanto-2"),
        Method("hqq", {"nbits": 4, "axis_key": 1, "axis_value": 1}, "transformers hqq-4"),
        Method("fp8", {}, "transformers fp8"),
    ],
    "baselines": [
        Method("kvq"),
        Method("pmkvq", {**_TWO, "sink_tokens": 4}),
        *_ablation("kivi", "sink_tokens", (0, 4, 32)),
        Method("rotatekv"),
        Method("kvtuner"),
        Method("kvtuner", {"sink_tokens": 4}),
        Method("skvq"),
    ],
    "paper-progressive": [
        *_ablation("pmkvq", "fbit", (8, 4, 2)),
        *(Method("pmkvq", {"fbit": bits, "initial_bits": bits}) for bits in (8, 4, 2)),
    ],
    "anchors": [
        Method("kvq"),
        Method("pmkvq", {"fbit": 4, "sink_tokens": 4}),
        Method("pmkvq", {**_FOUR, "sink_tokens": 4}),
        Method("quest", {**_FOUR, "sink_tokens": 4}),
        *_ablation("mixkvq", "importance", ("query", "none"), target_bits=2.25),
    ],
    "paper-shrink": [
        *(Method("pmkvq", bits) for bits in _SHRINK),
        *(
            Method("shrink", {**bits, "strategy": strategy})
            for bits in _SHRINK
            for strategy in ("equivalent", "modified", "direct")
        ),
    ],
    "paper-kvquant": [
        *_ablation("kvquant", "sink_tokens", (1, 4)),
        Method("pmkvq", {**_TWO, "sink_tokens": 4}),
        Method("kvq"),
    ],
    "paper-mikv": [
        *_ablation("mikv", "important", (0.125, 0.25, 0.5), sink_tokens=4),
        *(Method("pmkvq", {**bits, "sink_tokens": 4}) for bits in (_TWO, _FOUR)),
        Method("kvq"),
    ],
    "paper-quest": [
        Method("pmkvq", {**_FOUR, "sink_tokens": 4}),
        *_ablation("quest", "budget", (256, 512, 1024), **_FOUR, sink_tokens=4),
    ],
    "paper-keys": [
        Method("pmkvq", {**bits, "key_codec": codec}) for bits in (_FOUR, _TWO) for codec in ("channel", "token")
    ],
    "paper-error-only": [
        Method("mixkvq", {"target_bits": bits, "importance": importance})
        for bits in (2.25, 2.5, 3.0)
        for importance in ("query", "none")
    ],
    "paper-group-size": [
        *_ablation("pmkvq", "group_size", (32, 64, 128), **_TWO),
        *_ablation("mixkvq", "group_size", (32, 64, 128)),
        *_ablation("kivi", "group_size", (32, 64, 128)),
    ],
    "paper-residual": [
        *_ablation("pmkvq", "window", (0, 32, 64, 128, 256), **_TWO),
        *_ablation("mixkvq", "residual", (32, 64, 128, 256)),
    ],
    "paper-sinks": [
        *_ablation("pmkvq", "sink_tokens", (0, 1, 4, 32, 64), **_TWO),
        *_ablation("kivi", "sink_tokens", (0, 1, 4, 32, 64)),
    ],
    "paper-length": _ablation("pmkvq", "max_length", (2048, 4096, 8192, 16384), fbit=2),
}
