# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""`hf-kvq eval`: what caches cost in quality, side by side, at their true bits."""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ..bundled import load_model
from ..calibration import load_texts
from ..evaluation.answers import Sampling, load_problems, problems_metric, reasoning_metric
from ..evaluation.calibrated import CALIBRATED, require_apart
from ..evaluation.methods import Method, check_labels, load_methods, parse_methods
from ..evaluation.run import METRICS, Bench, Settings, check_metrics, evaluate
from ..evaluation.suites import SUITES
from ..evaluation.write import write_report
from .options import CommandError, Parser, parse_device, positive_int


_SETTINGS = {
    "tokens": "tokens of the text",
    "rows": "sequences of every other metric",
    "prompt": "tokens of text that the exact model continues",
    "new_tokens": "tokens of its continuation",
    "chunk": "tokens per forward",
}


def add_eval_command(commands: argparse._SubParsersAction, dtypes: tuple[str, ...], model_help: str) -> None:
    """Add the command to the parser of `hf-kvq`."""
    parser: Parser = commands.add_parser(
        "eval",
        help="compare caches: quality against true bits",
        description="Compare caches on the same prompts with the same seeds: divergence from the exact cache, recall, "
        "attention errors, with confidence intervals, and true bits at the end and averaged over time. Prints a "
        "table; the folder gets results.json, results.csv, report.md and plots. A run that was interrupted goes on.",
    )
    parser.set_defaults(parser=parser, run=run_eval)
    parser.add_argument("model", metavar="MODEL", help=model_help)
    methods = parser.add_mutually_exclusive_group()
    methods.add_argument(
        "--methods",
        metavar="LIST",
        help="such as pmkvq:fbit=2,window=64,mixkvq,kivi,quanto; or a .json file with a list of "
        '{"cache": ..., "options": {...}, "label": ...}',
    )
    methods.add_argument(
        "--suite",
        choices=[*SUITES, *CALIBRATED],
        default="overview",
        help=f"a ready-made list; {' and '.join(CALIBRATED)} calibrate first (default: overview)",
    )
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="where to write (default: only print)")
    parser.add_argument(
        "--metrics", default=",".join(METRICS), metavar="LIST", help=f"some of {', '.join(METRICS)} (default: all)"
    )
    parser.add_argument("--data", default="bundled", metavar="SOURCE", help="text, as for `hf-kvq calibrate`")
    defaults = Settings()
    for name, text in _SETTINGS.items():
        default = getattr(defaults, name)
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=positive_int, default=default, metavar="N", help=f"{text} (default: {default})")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of everything that is drawn (default: 0)")
    parser.add_argument(
        "--reasoning", metavar="LIST", help="also generate answers to tasks of reasoning-gym, such as chain_sum,gcd"
    )
    parser.add_argument(
        "--problems", type=Path, metavar="FILE", help="also to those of a .jsonl file of {question, answer}"
    )
    sampling = Sampling()
    for name, text in {
        "problems_per_task": "problems of each",
        "samples": "answers to each problem",
        "answer_tokens": "longest answer",
    }.items():
        default = getattr(sampling, name)
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=positive_int, default=default, metavar="N", help=f"{text} (default: {default})")
    parser.add_argument("--dtype", choices=dtypes, default="float32", help="of the model (default: float32)")
    parser.add_argument("--device", default="auto", help="such as cpu or cuda:0 (default: a GPU if there is one)")


def run_eval(arguments: argparse.Namespace) -> int:
    """Measure, print the table and write the files; returns the exit status."""
    device = parse_device(arguments.device)
    settings = Settings(**{name: getattr(arguments, name) for name in _SETTINGS}, seed=arguments.seed)
    try:
        suite = CALIBRATED.get(arguments.suite) if arguments.methods is None else None
        methods = [] if suite else _methods(arguments)
        extra = _extra(arguments)
        metrics = [name.strip() for name in arguments.metrics.split(",") if name.strip()]
        check_metrics(metrics)
        model, tokenizer = load_model(arguments.model, dtype=arguments.dtype)
        model.to(device)
        text = "\n\n".join(load_texts(arguments.data))
        path = arguments.report / "results.json" if arguments.report else None
        # The text of a report is no place for somebody's folders.
        source = arguments.data if not Path(arguments.data).exists() else Path(arguments.data).name
        with _folder_for_plans(arguments.report) as folder:
            if suite:
                require_apart(text, tokenizer, settings.text_tokens)
                methods = suite(model, tokenizer, folder)
            report = evaluate(Bench(model, tokenizer, text, methods, settings), metrics, extra, source, path)
        print(write_report(report, arguments.report))
    except torch.OutOfMemoryError as error:
        raise CommandError(f"out of memory: compare fewer methods, or lower --rows or --chunk ({error})") from error
    except (ImportError, OSError, ValueError, TypeError, RuntimeError) as error:
        raise CommandError(error) from error
    return 0


@contextlib.contextmanager
def _folder_for_plans(report: Path | None) -> Iterator[Path]:
    """The report's folder, or one that nobody keeps."""
    if report is not None:
        yield report
        return
    with tempfile.TemporaryDirectory() as scratch:
        yield Path(scratch)


def _methods(arguments: argparse.Namespace) -> list[Method]:
    if arguments.methods is None:
        methods = SUITES[arguments.suite]
    elif arguments.methods.endswith(".json"):
        methods = load_methods(arguments.methods)
    else:
        methods = parse_methods(arguments.methods)
    available = [method for method in methods if method.is_available]
    for method in methods:
        if method not in available:
            print(f"{method.label} is left out: what it needs is not installed", file=sys.stderr)
    if not available:
        raise ValueError("no method is left to compare")
    check_labels(available)
    return available


def _extra(arguments: argparse.Namespace) -> dict[str, Callable[[Bench], dict[str, Any]]]:
    """The metrics that generate freely, which take long and so have to be asked for."""
    sampling = Sampling(arguments.problems_per_task, arguments.samples, arguments.answer_tokens)
    found = {}
    for name in filter(None, (arguments.reasoning or "").split(",")):
        found[f"reasoning {name}"] = reasoning_metric(name, sampling)
    if arguments.problems:
        found[f"problems {arguments.problems.stem}"] = problems_metric(load_problems(arguments.problems), sampling)
    return found
