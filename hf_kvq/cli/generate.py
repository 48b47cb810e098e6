# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""`hf-kvq generate`: text streams, and beside it what happens in the cache."""

from __future__ import annotations

import argparse
import io
import logging
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import (
    BatchEncoding,
    Cache,
    DynamicCache,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    TextStreamer,
    set_seed,
)
from transformers.utils.logging import disable_progress_bar

from ..bundled import encode_prompt, load_model
from ..cache import BudgetExceededError, MixKVQCache
from ..hub import PlanError, PlanUnavailableError
from ..hub.discovery import options_for
from ..presets import resolve
from ..registration import CACHES, cache_argument
from .display import StatusLines, status_display
from .options import CommandError, load_config, parse_cache_config, parse_device, validate_cache_config
from .report import Snapshot, format_bytes


class Streamer(TextStreamer):
    """Prints the new text to stdout, as `display` wants it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, display: StatusLines):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.display = display

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        super().on_finalized_text(self.display.wrap(text), stream_end)


class Watcher(StoppingCriteria):
    """Looks at the cache after each token, and ends generation early once `is_stopped` is set."""

    def __init__(self, cache: Cache, display: StatusLines):
        self.cache, self.display = cache, display
        self.is_stopped = False
        self.new_tokens = 0
        self.seconds = 0.0
        self.last: Snapshot | None = None
        #: (tokens held, widths) each time the widths changed, the first ones included.
        self.changes: list[tuple[int, str]] = []
        #: What the cache had to say.
        self.notes: list[str] = []
        self._started = time.perf_counter()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.new_tokens += 1
        self.seconds = time.perf_counter() - self._started
        snapshot = Snapshot.of(self.cache)
        if self.last is None or snapshot.bits != self.last.bits:
            self.changes.append((snapshot.tokens, snapshot.widths()))
        self.last = snapshot
        self.display.show(snapshot)
        return torch.full((input_ids.shape[0],), self.is_stopped, device=input_ids.device)


def generate(arguments: argparse.Namespace) -> int:
    """Stream an answer to stdout and the cache's state to stderr; returns the exit status."""
    model, tokenizer, inputs, cache = _prepare(arguments)
    set_seed(arguments.seed)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    sampling = {"do_sample": arguments.do_sample}
    if arguments.do_sample:
        sampling["temperature"] = arguments.temperature
    failure = None
    with status_display(sys.stderr, sys.stdout) as display:
        watcher, streamer = Watcher(cache, display), Streamer(tokenizer, display)
        try:
            with _stopping_on_interrupt(watcher), _collecting_notes(watcher.notes):
                model.generate(
                    **inputs,
                    **{cache_argument(model): cache},
                    **sampling,
                    max_new_tokens=arguments.max_new_tokens,
                    streamer=streamer,
                    stopping_criteria=[watcher],
                )
        except KeyboardInterrupt:
            streamer.end()
        except (BudgetExceededError, ValueError) as error:
            # ValueError: what only shows once K and V are there, such as too small a budget.
            failure = CommandError(error, status=2)
            streamer.end()
    for name, text in _summary(watcher, inputs["input_ids"].shape[1]):
        print(f"{name:<10}{text}".rstrip(), file=sys.stderr)
    if failure is not None:
        raise failure
    return 130 if watcher.is_stopped else 0


def _prepare(arguments: argparse.Namespace) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, BatchEncoding, Cache]:
    """Everything that generation needs; what can be wrong is found before weights are loaded, where possible."""
    implementation, options = resolve(arguments.cache_implementation, parse_cache_config(arguments.cache_config))
    if implementation in CACHES:
        # Of a plan only its loading shows whether it is good.
        validate_cache_config(implementation, {key: value for key, value in options.items() if key != "plan"})
    elif options:
        raise CommandError(f"--cache-config goes with a quantized cache; {implementation} has no options", status=2)
    device = parse_device(arguments.device)
    if not sys.stderr.isatty():
        disable_progress_bar()
    _new_cache(implementation, load_config(arguments.model), options, 1)
    try:
        model, tokenizer = load_model(arguments.model, dtype=arguments.dtype)
        model.to(device)
    except (AssertionError, ImportError, OSError, RuntimeError, ValueError) as error:
        raise CommandError(error) from error
    if implementation in CACHES:
        options = _with_plan(model, implementation, options)
    inputs = _encode(tokenizer, arguments.prompt).to(device)
    max_length = inputs["input_ids"].shape[1] + arguments.max_new_tokens
    cache = _new_cache(implementation, model.config, options, max_length)
    return model, tokenizer, inputs, cache


def _with_plan(model: PreTrainedModel, implementation: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options, and the plan that lies next to the model, if there is one."""
    try:
        return options_for(model, implementation, options)
    except (PlanError, PlanUnavailableError) as error:
        raise CommandError(error) from error


def _new_cache(name: str, config: PretrainedConfig, options: dict[str, Any], max_length: int) -> Cache:
    if name == "dynamic":
        return DynamicCache(config=config.get_text_config(decoder=True))
    try:
        return CACHES[name](config, options, max_length=max_length)
    except PlanUnavailableError as error:
        raise CommandError(error) from error
    except (RuntimeError, TypeError, ValueError) as error:
        raise CommandError(error, status=2) from error


def _encode(tokenizer: PreTrainedTokenizerBase, prompt: str) -> BatchEncoding:
    inputs = encode_prompt(tokenizer, prompt)
    if not inputs["input_ids"].numel():
        raise CommandError("--prompt is empty, and this model needs at least one token to start from", status=2)
    return inputs


@contextmanager
def _stopping_on_interrupt(watcher: Watcher) -> Iterator[None]:
    """Ctrl-C ends generation after the token at hand; a second one ends it at once."""

    def stop(*_: object) -> None:
        if watcher.is_stopped:
            raise KeyboardInterrupt
        watcher.is_stopped = True

    previous = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


@contextmanager
def _collecting_notes(notes: list[str]) -> Iterator[None]:
    """Keep what hf_kvq logs for later: in the middle of the text nobody could read it."""
    logger = logging.getLogger("hf_kvq")
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: notes.append(record.getMessage())
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.propagate = propagate
        logger.removeHandler(handler)


def _summary(watcher: Watcher, prompt_tokens: int) -> Iterator[tuple[str, str]]:
    """Rows of the closing table, as (name, text)."""
    yield "", ""
    if (last := watcher.last) is not None:
        speed = f"{watcher.new_tokens / watcher.seconds:.1f} tokens per second"
        yield "tokens", f"{prompt_tokens:,} of prompt + {watcher.new_tokens:,} new, {speed}"
        for i, (tokens, widths) in enumerate(watcher.changes):
            yield "" if i else "widths", f"{widths} from token {tokens:,} on" if i else f"{widths} to begin with"
        kinds = f"{last.tokens - last.packed:,} tokens exact, {last.packed:,} packed"
        yield "held", f"{format_bytes(last.held)}, everything counted: {kinds}"
        ratio = f"{last.ordinary / last.held:.2f} times that"
        yield "ordinary", f"{format_bytes(last.ordinary)} in an ordinary cache, {ratio}"
        yield "true bits", f"{last.true_bits:.2f} per number held"
        if isinstance(watcher.cache, MixKVQCache) and last.packed:
            nominal = watcher.cache.nominal_bits()
            yield "packed", f"keys at {nominal.keys:.2f} bits on average, values at {nominal.values:g}"
    for note in watcher.notes:
        yield "note", note
    if watcher.is_stopped:
        yield "stopped", "interrupted"
