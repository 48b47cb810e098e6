# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Decode steps of fixed shapes: nothing that happens on the device depends on numbers that the host holds.

So a step can be recorded once, as a CUDA graph, and repeated. New tokens go straight to the exact recent tokens, at a
place that the device counts; attention covers all room there is and looks at the counts. The host follows, and acts
between steps only when a page is full: it packs it, and narrows the body where that is due. For the token that
completes a page there is room for one exact token more than the budget counts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from ..ops import ExactPart, Part, why_plain
from .handle import KVHandle
from .rows import runs


if TYPE_CHECKING:
    from .layer import KVQLayer


_versions = itertools.count()


@contextlib.contextmanager
def static_step(layers: list[KVQLayer]) -> Iterator[tuple[int, ...]]:
    """A step of one column in all layers; yields what a recording of it depends on.

    Raises:
        NotStaticError: it has to be an ordinary step; the layers hold what they held before.
        BudgetExceededError: a layer's budget forbids it; the same.
    """
    for layer in layers:
        layer.check_room(len(layer.states), 1)
    opened: list[StaticSteps] = []
    try:
        for layer in layers:
            layer.static.open()
            opened.append(layer.static)
        yield tuple(steps.version for steps in opened)
    except BaseException as error:
        for steps in opened:
            steps.abandon(has_run=not isinstance(error, NotCapturedError))
        raise
    for steps in opened:
        steps.close()


class NotStaticError(RuntimeError):
    """The coming step, or this model, cannot do with fixed shapes; nothing has been stored."""


class NotCapturedError(NotStaticError):
    """A step could not be captured: what it did has only been recorded."""


class StaticSteps:
    """Fixed-shape steps of one layer: `open`, then the model's `update` and `attend`, then `close`.

    What these do on the device may also be a repetition of what an earlier step did there, as long as `version` is
    the same.
    """

    def __init__(self, layer: KVQLayer):
        self.layer = layer
        self.is_open = False
        #: Tokens that every row has got since the layer's states were written.
        self.appended = 0
        #: Tokens that every row may get until the host must act.
        self.left = 0
        #: Another number whenever what a recorded step has fixed has changed: addresses, widths, rows.
        self.version = -1
        #: int64 [2, rows] on the device: packed pages, and exact recent tokens.
        self.counts: torch.Tensor | None = None
        self._seen = -1
        self._fixed: tuple[list, list] = ([], [])

    def open(self) -> None:
        """Make ready for one new column.

        Raises:
            NotStaticError: that column needs an ordinary step.
        """
        layer = self.layer
        if self._seen != layer.changes or self.appended == self.left:
            layer.settle()
            self._synchronize()
        self.is_open = True
        layer.forget_query(has_run=False)

    def close(self) -> None:
        """After the step: every row has one token more."""
        self.is_open = False
        self.appended += 1
        self.layer.columns = self._length
        self.layer.changes += 1
        self._seen = self.layer.changes

    def abandon(self, has_run: bool) -> None:
        """Instead of `close`: the step has failed somewhere, and the layer holds what it held before.

        `has_run` tells whether the device has done what came before that.
        """
        self.is_open = False
        self.layer.columns = self._length
        self.layer.changes += 1
        self.layer.forget_query(has_run)

    def take(self) -> None:
        """Tell the layer's states of the tokens that came, and pack the pages that have become full."""
        layer, count = self.layer, self.appended
        if self.is_open or not count:
            return
        self.appended = 0
        layer.states = [dataclasses.replace(state, recent=state.recent + count) for state in layer.states]
        layer.count_appended(count)
        for rows in layer._runs():
            nothing = (x[rows, :, :0] for x in layer.recent)
            layer.states[rows] = [layer._store(rows, slice(0, 0), *nothing)] * (rows.stop - rows.start)
        # Whatever has moved, `open` is to find out.
        self._seen = -1

    def nbytes(self) -> int:
        """Bytes held for these steps alone."""
        return 0 if self.counts is None else self.counts.nbytes

    # --- on the device -----------------------------------------------------------------------------------------------

    def update(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Put [rows, heads, 1, dim] behind the recent tokens."""
        layer = self.layer
        layer._check_shapes(keys, values)
        if keys.shape[2] != 1:
            raise NotStaticError(f"{keys.shape[2]} columns come at once")
        place = self.counts[1, :, None, None, None]
        for store, x in zip(layer.recent, (keys, values)):
            store.scatter_(2, place.expand(-1, x.shape[1], 1, x.shape[3]), x.detach().to(store.dtype))
        self.counts[1] += 1
        layer.columns = self._length + 1
        return KVHandle(layer, False, keys), KVHandle(layer, True, values)

    def parts(self, query: torch.Tensor) -> Iterator[tuple[slice, list[Part]]]:
        """All tokens, the new one too, of rows whose pages have one width."""
        layer = self.layer
        for rows in self._width_runs():
            pages, recent = self.counts[:, rows]
            parts: list[Part] = [layer._packed_part(rows, layer.states[rows.start], None, pages)]
            if layer.sink_tokens:
                parts.append(ExactPart(*(x[rows] for x in layer.sink)))
            parts.append(ExactPart(*(x[rows] for x in layer.recent), held=recent))
            reason = None if query.device.type == "cpu" else why_plain(query, parts, layer.kernel)
            if reason is not None:
                # It would go through all room there is, held or not.
                raise NotStaticError(f"attention runs in plain torch: {reason}")
            yield rows, parts

    @property
    def _length(self) -> int:
        """Columns after the steps so far."""
        return self._columns + self.appended

    # --- on the host -------------------------------------------------------------------------------------------------

    def _synchronize(self) -> None:
        """Find out where everything is, and tell the device how many tokens there are."""
        layer = self.layer
        if not layer.is_initialized:
            raise NotStaticError("the cache is empty")
        if any(state.sink < layer.sink_tokens for state in layer.states):
            raise NotStaticError("the first tokens are still coming")
        if any(state.short for state in layer.states):
            raise NotStaticError("there are pages that are not full")
        # The token that completes a page comes before the page is packed.
        most = layer.window + layer.page_tokens
        if layer.recent[0].shape[2] == most - 1:
            with torch.inference_mode(False):
                layer.recent = tuple(torch.cat([x, x[:, :, :1]], dim=2) for x in layer.recent)
        for state in layer.states:
            layer._make_room(state.tokens(layer.page_tokens) + 1)
        self.left = min(layer.recent[0].shape[2], most) - max(state.recent for state in layer.states)
        if self.left < 1:
            raise NotStaticError("there is no room for exact tokens")
        counts = torch.tensor([[s.pages for s in layer.states], [s.recent for s in layer.states]])
        if self.counts is None or (self.counts.shape, self.counts.device) != (counts.shape, layer.device):
            with torch.inference_mode(False):
                self.counts = torch.empty_like(counts, device=layer.device)
        self.counts.copy_(counts)
        held = [self.counts, *layer.tensors()]
        fixed = [(x.data_ptr(), x.shape) for x in held], [state.bits for state in layer.states]
        if fixed != self._fixed:
            self._fixed, self.version = fixed, next(_versions)
        self._columns, self._seen = layer.columns, layer.changes

    def _width_runs(self) -> Iterator[slice]:
        states = self.layer.states
        return runs(len(states), lambda row: states[row].bits)
