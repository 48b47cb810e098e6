# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Decode steps as CUDA graphs: a step over a quantized cache is captured once and replayed, without Python between."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel
from transformers.utils import logging

from .cache import KVQCache, NotCapturedError, NotStaticError


logger = logging.get_logger(__name__)

# Runs a function so that what it does on the device can be repeated; returns its result and what repeats it.
Capture = Callable[[Callable[[], Any]], tuple[Any, Callable[[], None]]]


# Captures of one process must not overlap, as each of them waits for the device.
_lock = threading.Lock()
_underway = threading.local()

# What the host cannot do while a step is captured, as it would have to wait for the device.
_WAITING = {
    torch.ops.aten._local_scalar_dense.default: "reads a number",
    torch.ops.aten.is_nonzero.default: "reads a number",
    torch.ops.aten.nonzero.default: "asks how many numbers are not zero",
}


def is_capturing() -> bool:
    """Whether this thread is capturing a step."""
    return getattr(_underway, "flag", False)


@functools.cache
def _stream(device: int) -> torch.cuda.Stream:
    """The stream that steps are captured on; its work space is shared by all graphs."""
    return torch.cuda.Stream(device)


def cuda_graph(function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    """Capture a function as a CUDA graph; what it returns is filled by each replay, and by nothing before.

    While a step is captured, other threads must neither wait for the device nor draw random numbers on it.
    """
    graph, stream = torch.cuda.CUDAGraph(), _stream(torch.cuda.current_device())
    # The outer context gives the stream back where a capture fails at its end.
    with _lock, torch.cuda.stream(stream):
        try:
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                result = function()
        except BaseException:
            graph.reset()
            raise
    return result, graph.replay


class _NoWaiting(TorchDispatchMode):
    """Refuses what a capture could not do. CUDA itself may be left in disorder by a capture that fails."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in _WAITING:
            raise NotStaticError(f"the model {_WAITING[func]} at each step")
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            source = args[1] if func is torch.ops.aten.copy_.default else args[0]
            if source.device.type != result.device.type:
                raise NotStaticError("the model moves numbers between host and device at each step")
        return result


class CapturedSteps:
    """Calls a model, and captures the steps that take one more token into a quantized cache.

    The first step of a kind is an ordinary call, which also compiles what has to be compiled; the next one is
    captured, and from then on replayed. Another width, another cache or other arguments begin anew. One more ordinary
    call, once, finds out whether the model can be captured at all. Whatever is no such step, like a prompt, is just a
    call of the model.

    Args:
        model: it must be given `position_ids` where it uses positions.
        cache_name: the keyword under which it takes its cache.
        capture: what captures.
    """

    def __init__(self, model: PreTrainedModel, cache_name: str, capture: Capture = cuda_graph):
        self.model, self.cache_name, self.capture = model, cache_name, capture
        #: Why steps are not captured; found out by trying.
        self.refusal: str | None = None
        self._is_proved = False
        self._key: tuple = ()
        self._inputs: dict[str, torch.Tensor] = {}
        self._output: Any = None
        self._replay: Callable[[], None] | None = None

    def __call__(self, **inputs: Any) -> Any:
        """As the model's own call."""
        cache, mask = inputs.get(self.cache_name), inputs.get("attention_mask")
        if self.refusal is None and self._is_step(inputs):
            if mask is not None:
                cache.observe_padding(mask, 1)
            try:
                with cache.static_step() as versions:
                    try:
                        return self._step(versions, cache, {**inputs, "attention_mask": None})
                    except NotStaticError as error:
                        self._refuse(error)
                        raise
                    except Exception as error:
                        self._refuse(error)
                        raise NotStaticError(self.refusal) from error
            except NotStaticError as error:
                logger.debug(f"an ordinary decode step: {error}")
        return self.model(**inputs)

    def _refuse(self, error: Exception) -> None:
        self.refusal = str(error) or type(error).__name__
        self._replay = self._output = None
        logger.warning_once(f"decode steps are not captured, which is slower: {self.refusal}")

    def _is_step(self, inputs: dict[str, Any]) -> bool:
        """Whether this may be a step that can be captured."""
        mask, ids = inputs.get("attention_mask"), inputs.get("input_ids")
        return (
            isinstance(inputs.get(self.cache_name), KVQCache)
            and ids is not None
            and ids.shape[1] == 1
            and inputs.get("position_ids") is not None
            and (mask is None or mask.ndim == 2)
            and inputs.get("return_dict") is not False
            and not torch.is_grad_enabled()
            and not self.model.training
        )

    def _step(self, versions: tuple[int, ...], cache: KVQCache, inputs: dict[str, Any]) -> Any:
        tensors = {name: x for name, x in inputs.items() if isinstance(x, torch.Tensor)}
        others = {name: x for name, x in inputs.items() if name not in tensors and name != self.cache_name}
        kinds = {name: (x.shape, x.dtype, x.device) for name, x in tensors.items()}
        key = versions, kinds, others
        if key != self._key:
            self._key, self._replay, self._output = key, None, None
            self._inputs = {name: x.clone() for name, x in tensors.items()}
            return self.model(**inputs)
        for name, x in tensors.items():
            self._inputs[name].copy_(x)
        if not self._is_proved:
            with _NoWaiting():
                output = self.model(**inputs)
            self._is_proved = True
            return output
        if self._replay is None:
            self._capture(inputs)
        self._replay()
        output = tree_map_only(torch.Tensor, torch.clone, self._output)
        output[self.cache_name] = cache
        return output

    def _capture(self, inputs: dict[str, Any]) -> None:
        def step() -> Any:
            output = self.model(**{**inputs, **self._inputs})
            # What is kept must not keep the cache.
            output[self.cache_name] = None
            return output

        _underway.flag = True
        try:
            with torch.cuda.device_of(self._inputs["input_ids"]):
                self._output, self._replay = self.capture(step)
        except Exception as error:
            raise NotCapturedError(str(error) or type(error).__name__) from error
        finally:
            _underway.flag = False
