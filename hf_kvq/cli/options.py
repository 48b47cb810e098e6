# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Command line options that need more than argparse, and errors that fit on one line."""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from transformers import AutoConfig, PretrainedConfig

from ..bundled import bundled_model_path
from ..config import Options
from ..registration import CACHES


class CommandError(Exception):
    """Ends the command with one line on stderr and `status`: 2 for a wrong option, 1 for anything else."""

    def __init__(self, error: Exception | str, status: int = 1):
        super().__init__(" ".join(str(error).split()))
        self.status = status


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` whose errors are one line and name the nearest option."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")

    def reject(self, unknown: Sequence[str]) -> NoReturn:
        """Complain about the first of the arguments that `parse_known_args` left over."""
        name = unknown[0].partition("=")[0]
        known = [option for action in self._actions for option in action.option_strings]
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"see {self.prog} --help"
        self.error(f"unknown argument {unknown[0]!r}; {hint}")


def positive_int(text: str) -> int:
    """An integer from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return int(text)


def positive_float(text: str) -> float:
    """A finite number greater than 0."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number greater than 0, got {text!r}")
    return value


def context_list(text: str) -> list[int]:
    """Numbers of tokens, such as "2k,32768"; k stands for 1024."""
    lengths = []
    for part in text.lower().split(","):
        digits, unit = (part[:-1], 1024) if part.endswith("k") else (part, 1)
        if not digits.isdecimal() or not int(digits):
            raise argparse.ArgumentTypeError(f"expected numbers of tokens such as 2k,32768, got {text!r}")
        lengths.append(int(digits) * unit)
    return lengths


def parse_cache_config(arguments: Sequence[str]) -> dict[str, Any]:
    """Options of a cache from `key=value` pairs and JSON objects; later ones win.

    Raises:
        CommandError: an argument is neither.
    """
    options: dict[str, Any] = {}
    for argument in arguments:
        if argument.lstrip().startswith("{"):
            try:
                options |= json.loads(argument)
            except json.JSONDecodeError as error:
                raise CommandError(f"--cache-config {argument!r} is not valid JSON: {error}", status=2) from error
            continue
        key, separator, value = argument.partition("=")
        if not separator:
            raise CommandError(f"--cache-config takes key=value or a JSON object, got {argument!r}", status=2)
        options[key.strip()] = _json_or_text(value.strip())
    return options


def validate_cache_config(implementation: str, options: dict[str, Any]) -> Options:
    """The validated options of a cache implementation.

    Raises:
        CommandError: an option is unknown or impossible.
    """
    try:
        return CACHES[implementation].config_class.of(options)
    except (TypeError, ValueError) as error:
        raise CommandError(f"--cache-config: {error}", status=2) from error


def load_config(model: str) -> PretrainedConfig:
    """The config of a Hub id, a folder, a config.json or "bundled".

    Raises:
        CommandError: there is none.
    """
    if (model.startswith((".", "/", "~")) or model.count("/") > 1) and not Path(model).exists():
        raise CommandError(f"there is no file or folder {model}")
    try:
        return AutoConfig.from_pretrained(bundled_model_path() if model == "bundled" else model)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        raise CommandError(error) from error


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


def parse_device(name: str) -> torch.device:
    """The device of a name; "auto" is a GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise CommandError(f"--device: {error}", status=2) from error
