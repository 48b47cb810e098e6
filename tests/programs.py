# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""What happens to the layers of a cache, noted down and repeated on the simulation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import simulation
import simulation_mixkvq
from hf_kvq.cache import KVHandle
from hf_kvq.cache.fixed import FixedLayer
from hf_kvq.cache.layer import KVQLayer
from hf_kvq.cache.progressive import ProgressiveLayer
from hf_kvq.cache.tiered import TieredLayer


class Notes:
    """Lets every layer note its updates, queries, crops and row selections, and counts what is dequantized.

    A layer's notes are a part of it, so its copies have them.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.dequantized = 0
        original = KVHandle.dequantize

        def dequantize(handle):
            self.dequantized += 1
            return original(handle)

        monkeypatch.setattr(KVHandle, "dequantize", dequantize)
        for name in ("update", "crop", "_select", "reset", "observe_query"):
            for owner in (KVQLayer, TieredLayer):
                if name in vars(owner):
                    monkeypatch.setattr(owner, name, _noting(owner, name))


def _noting(owner: type, name: str) -> Any:
    original = vars(owner)[name]

    def method(layer, *args, **kwargs):
        program = vars(layer).setdefault("program", [])
        # A method that overrides and calls another one is noted once, by the outer one.
        is_inner = getattr(layer, "is_noting", False)
        if name == "observe_query":
            # Of layers that share keys, the first shows the queries that count.
            if not is_inner and "query" not in program[-1][2]:
                program[-1][2]["query"] = args[0].clone()
        elif not is_inner:
            tensors = [x.clone() if isinstance(x, torch.Tensor) else x for x in args[:2]]
            program.append((name, tensors, {}))
        layer.is_noting = True
        try:
            out = original(layer, *args, **kwargs)
        finally:
            layer.is_noting = is_inner
        if name == "update":
            start = layer.columns - args[0].shape[2]
            program[-1][2]["valid"] = torch.tensor(
                [
                    [
                        all(not low <= c < high for low, high in layer.padding.of(row))
                        for c in range(start, layer.columns)
                    ]
                    for row in range(args[0].shape[0])
                ]
            )
        return out

    return method


def queries_seen(layer: KVQLayer) -> list[bool]:
    """Of each update of a layer, whether the queries were seen."""
    return ["query" in more for name, _, more in layer.program if name == "update"]


def assert_as_simulated(layer: KVQLayer) -> None:
    """A layer holds what the simulation holds after the same program."""
    layer.nbytes()  # settles
    simulated, module = _simulation(layer)
    for name, arguments, more in layer.program:
        if name == "update":
            shown = (more.get("query"),) if module is simulation_mixkvq else ()
            simulated.update(*arguments, *shown, more["valid"])
        elif name == "crop":
            simulated.crop(-int(arguments[0]))
        elif name == "_select":
            simulated.select(arguments[0].tolist())
        else:
            simulated = _simulation(layer)[0]
    module.assert_equal(layer, simulated)


def _simulation(layer: KVQLayer) -> tuple[Any, Any]:
    """An empty simulation of a layer, and its module."""
    (keys, values), more = next((a, more) for name, a, more in layer.program if name == "update")
    batch, heads, _, dim = keys.shape
    shape = {"heads": heads, "key_dim": dim, "value_dim": values.shape[3], "dtype": keys.dtype}
    if isinstance(layer, ProgressiveLayer):
        c = layer.config
        rules = simulation.Rules(
            **shape,
            fbit=layer.fbit,
            max_length=layer.max_length,
            sink=c.sink_tokens,
            window=c.window,
            group=c.group_size,
            channel=c.key_codec == "channel",
            initial_bits=c.initial_bits,
        )
        return simulation.Simulation(rules, batch), simulation
    assert isinstance(layer, FixedLayer)
    options = {"residual": layer.page_tokens, "group": layer.group_size, "sink": layer.sink_tokens}
    if isinstance(layer, TieredLayer):
        options["target_bits"] = layer.config.target_bits
    else:
        options["key_bits"] = layer.key_bits
    ratio = more["query"].shape[1] // heads if "query" in more else 1
    rules = simulation_mixkvq.Rules(**shape, ratio=ratio, **options)
    return simulation_mixkvq.Simulation(rules, batch), simulation_mixkvq
