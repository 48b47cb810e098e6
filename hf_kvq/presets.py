# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Methods as presets: a cache of ours and options for it, each with what it follows and what it leaves out.

    model.generate(**inputs, cache_implementation="rotatekv", cache_config={"fbit": 4})

Any other option of the cache goes with a preset, first and last layers at a higher width and exact sinks among them:
what those gain must not be taken for a method's own merit. Some methods are not here, as they are no way of writing
down K and V. MiKV gives a token a width by the attention it gets, which kernels do not tell, and may lower it later,
so stored data would be quantized anew. KVQuant wants keys before RoPE, learned levels and sparse outliers, thus
kernels of its own. Quest chooses what to read, not how to store it. `hf_kvq.evaluation.simulated` has all three, for
comparison only; its MiKV settles a token's width once.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Preset:
    """Options of a cache under a name of their own.

    Args:
        method: name of the cache, as in `generate`.
        options: its options; those that a user gives come before them.
        paper: where the method is from.
        follows: what of it these options are.
        leaves_out: what of it they are not.
    """

    method: str
    options: dict[str, Any]
    paper: str
    follows: str
    leaves_out: str


#: By the name that `generate` knows them under.
PRESETS = MappingProxyType(
    {
        "kvq": Preset(
            "mixkvq",
            {
                **{"target_bits": 2.5, "residual": 64, "group_size": 64, "sink_tokens": 4},
                **{"transform": "hadamard", "key_clip": 0.85, "value_clip": 0.75},
            },
            "MixKVQ, arXiv 2512.19206, with what RotateKV and SKVQ add",
            "What measured best: query-aware tiers of key channels, rotated values, and ranges clipped at 2 bits, "
            "which makes up for longer groups. Values of more bits want value_clip=1.",
            "Thresholds: each head has the same average of bits.",
        ),
        "rotatekv": Preset(
            "pmkvq",
            {
                **{"fbit": 2, "initial_bits": 2, "key_codec": "token", "key_shrink": "equivalent"},
                **{"transform": "hadamard_kv", "sink_tokens": 4},
            },
            "RotateKV, arXiv 2501.16383",
            "Keys and values rotated by a Hadamard matrix per head, one (min, max) per token and head, exact sinks.",
            "Rotation across heads and before RoPE, reordered channels, and sinks found by their massive activations.",
        ),
        "kvtuner": Preset(
            "pmkvq",
            {
                **{"fbit": 4, "value_fbit": 2, "initial_bits": 2, "key_shrink": "equivalent"},
                **{"group_size": 32, "sink_tokens": 0, "window": 32},
            },
            "KVTuner, arXiv 2502.04420",
            "Fixed widths, one for keys and one for values, layer by layer: fbit and value_fbit may be lists, which "
            "`calibration.pairs_for_budget` finds. Keys per channel, values per token, as in its KIVI mode.",
            "The search by multi-objective optimization on a task: ours is an integer program over sensitivities.",
        ),
        "skvq": Preset(
            "pmkvq",
            {
                **{"fbit": 2, "initial_bits": 2, "key_codec": "token", "key_shrink": "equivalent"},
                **{"sink_tokens": 5, "key_clip": 0.9, "value_clip": 0.9},
            },
            "SKVQ, arXiv 2405.06219",
            "Groups along the channels of a token, clipped to a share of their range; a window and sinks are exact.",
            "Channels reordered so that like ones share a group, clipping calibrated per group, and FP8 (min, max).",
        ),
        "qserve": Preset(
            "pmkvq",
            {
                **{"fbit": 4, "initial_bits": 4, "key_codec": "token", "transform": "lambda"},
                **{"sink_tokens": 0, "window": 0},
            },
            "QServe, arXiv 2405.04532",
            "Keys and values per token and head at 4 bits, keys smoothed by static factors (SmoothAttention). The "
            "factors are a plan's, so give one that was calibrated with transform='lambda'.",
            "Folding the factors into the weights, and quantized weights and activations.",
        ),
    }
)


def resolve(name: str, options: dict[str, Any] | Any = None) -> tuple[str, Any]:
    """The cache that a name stands for, and its options: a preset's, overruled by those given.

    A preset asks for no plan, so that what lies next to a model does not change what is compared with it.

    Args:
        name: of a preset, or of a cache, which stays as it is.
        options: as `generate` takes them in `cache_config`; an object says everything already.
    """
    if name not in PRESETS:
        return name, options
    preset = PRESETS[name]
    if options is not None and not isinstance(options, dict):
        return preset.method, options
    return preset.method, {"plan": None, **preset.options, **(options or {})}
