# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""What a CUDA graph does, on a CPU: all operations of a run are written down, and repeated on the very same tensors.

As in a graph, recording changes nothing, numbers that Python had are fixed, no Python runs in a repetition but that of
an operator, results come to lie where they lay before, and the host may neither read tensors nor make some from its
own numbers. Memory that a repetition uses and nobody else holds is gone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers.utils import import_utils


# What would have to wait for a device that is being captured.
_FORBIDDEN = {
    torch.ops.aten._local_scalar_dense.default: "reads a tensor",
    torch.ops.aten.lift_fresh.default: "makes a tensor of its own numbers",
    torch.ops.aten.nonzero.default: "must know how many numbers are not zero",
    torch.ops.aten.is_nonzero.default: "reads a tensor",
}


class Recorder(TorchDispatchMode):
    """Records operations while it is active."""

    def __init__(self):
        super().__init__()
        self.calls: list[tuple] = []
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._made: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _FORBIDDEN:
            raise RuntimeError(f"the host {_FORBIDDEN[func]} while a step is recorded")
        for argument, value in zip(func._schema.arguments, args):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._before.append((value, value.clone()))
        result = func(*args, **kwargs)
        self.calls.append((func, *tree_map_only(torch.Tensor, self._lent, (args, kwargs)), result))
        self._made |= {id(x): x for x in tree_leaves(result) if isinstance(x, torch.Tensor)}
        return result

    def _lent(self, x: torch.Tensor) -> torch.Tensor | weakref.ref:
        """What was there before the recording belongs to others."""
        return x if id(x) in self._made else weakref.ref(x)

    def undo(self) -> None:
        """Put back what was written to."""
        for tensor, old in reversed(self._before):
            tensor.copy_(old)
        self._before.clear()

    def replay(self) -> None:
        for func, args, kwargs, result in self.calls:
            args, kwargs = tree_map_only(weakref.ref, _there, (args, kwargs))
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again)):
                if isinstance(old, torch.Tensor) and old.untyped_storage()._cdata != new.untyped_storage()._cdata:
                    old.copy_(new)


def _there(reference: weakref.ref) -> torch.Tensor:
    tensor = reference()
    if tensor is None:
        raise RuntimeError("a step uses memory that was given back")
    return tensor


def record(function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    """As `hf_kvq.capture.cuda_graph`."""
    recorder = Recorder()
    try:
        with pytest.MonkeyPatch.context() as patch, recorder:
            # Some of transformers' code asks.
            patch.setattr(import_utils, "is_cuda_stream_capturing", lambda: True)
            result = function()
    finally:
        recorder.undo()
    for leaf in tree_leaves(result):
        if isinstance(leaf, torch.Tensor):
            leaf.fill_(0)
    return result, recorder.replay
