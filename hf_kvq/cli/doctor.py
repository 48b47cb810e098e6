# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""`hf-kvq doctor`: what will and will not work for a model, and why."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

import torch

from ..doctor import Diagnosis, diagnose
from .options import load_config, parse_device


def add_doctor_command(commands: argparse._SubParsersAction, dtypes: Sequence[str], model_help: str) -> None:
    """Add the command to the parser of `hf-kvq`."""
    parser = commands.add_parser(
        "doctor",
        help="what will and will not work for a model here, from its config alone",
        description="What will and will not work for a model on this machine, and why, from its config alone. The "
        "exit status is 0 if quantized caches can be used.",
    )
    parser.set_defaults(parser=parser, run=_doctor)
    parser.add_argument("model", metavar="MODEL", help=f"{model_help}; or a config.json")
    parser.add_argument("--device", default="auto", help="such as cpu or cuda:0 (default: a GPU if there is one)")
    parser.add_argument("--dtype", choices=dtypes, default="auto", help="of the model (default: as in its config)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _doctor(arguments: argparse.Namespace) -> int:
    """Print what was found; returns the exit status."""
    config, device = load_config(arguments.model), parse_device(arguments.device)
    dtype = None if arguments.dtype == "auto" else getattr(torch, arguments.dtype)
    found = diagnose(arguments.model, config, device, dtype)
    print(json.dumps(found.to_dict(), indent=2) if arguments.json else _as_text(found))
    return 0 if found.usable else 1


def _as_text(found: Diagnosis) -> str:
    layers = ", ".join(f"{count} {kind}" for kind, count in found.layers.items())
    sizes = f"{found.kv_heads or '?'} KV heads of {found.head_dim or '?'} channels" if found.layers else ""
    lines = [
        ("model", f"{found.model} ({found.model_type}), {found.dtype} on {found.device}"),
        ("layers", f"{layers}; {sizes}" if layers else ""),
        ("attention", found.attention or "the model's own"),
        ("kernel", f"{found.kernel}" + "".join(f"; not {name}: {why}" for name, why in found.why_not.items())),
        *(("plan", plan) for plan in found.plans),
        *(("note", note) for note in found.notes),
        *(("problem", problem) for problem in found.problems),
        ("versions", ", ".join(f"{name} {version}" for name, version in found.versions.items() if version)),
        ("verdict", "quantized caches work" if found.usable else "quantized caches are of no use here"),
    ]
    return "\n".join(f"{name:<11}{text}" for name, text in lines if text)
