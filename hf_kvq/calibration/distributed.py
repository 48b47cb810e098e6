# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Work shared by the processes of `accelerate launch` or `torchrun`; a process alone needs neither."""

from __future__ import annotations

import os
from typing import Any, TypeVar

import torch


T = TypeVar("T")


def world() -> tuple[int, int]:
    """Index of this process, and how many there are.

    Raises:
        ImportError: there are several, and accelerate is not installed.
    """
    if not is_distributed():
        return 0, 1
    state = _partial_state()
    return state.process_index, state.num_processes


def is_main_process() -> bool:
    """Whether this process writes files and shows progress."""
    return world()[0] == 0


def gather(items: list[T]) -> list[T]:
    """The items of all processes, those of the first process first; every process gets all of them.

    Args:
        items: small, picklable things, any number of them.
    """
    if not is_distributed():
        return items
    _partial_state()
    from accelerate.utils import gather_object

    return gather_object(items)


def wait_for_everyone() -> None:
    """Go on when all processes have come here."""
    if is_distributed():
        _partial_state().wait_for_everyone()


def leave() -> None:
    """Wait for everyone, then close the connection: its threads must not outlive the interpreter, or they abort it."""
    if is_distributed():
        wait_for_everyone()
        _partial_state().destroy_process_group()


def own_device() -> torch.device | None:
    """The device that belongs to this process; None in a process alone, which may choose."""
    return _partial_state().device if is_distributed() else None


def is_distributed() -> bool:
    """Whether a launcher started this process as one of several."""
    is_running = torch.distributed.is_available() and torch.distributed.is_initialized()
    return is_running or int(os.environ.get("WORLD_SIZE", "1")) > 1


def _partial_state() -> Any:
    """accelerate's view of the processes, which connects them on first use."""
    try:
        from accelerate import PartialState
    except ImportError as error:
        raise ImportError("several processes need accelerate; run: pip install 'hf-kvq[calibrate]'") from error
    # Without a GPU accelerate connects processes only if told that a CPU is meant.
    is_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true") or not torch.accelerator.is_available()
    return PartialState(cpu=is_cpu)
