# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""`hf-kvq calibrate`: measure on text which layers deserve how many bits, and save the plan."""

from __future__ import annotations

import argparse

import torch

from ..bundled import load_model
from ..calibration import calibrate_fbits, fingerprint, load_texts, token_blocks
from ..calibration.fbits import DEFAULT_LENGTH, DEFAULT_SAMPLES
from ..hub import KVQPlan, PlanError
from ..hub.cards import summary
from .options import CommandError, parse_cache_config, parse_device, positive_int, validate_cache_config


def add_calibrate_command(commands: argparse._SubParsersAction, dtypes: tuple[str, ...], model_help: str) -> None:
    """Add the command to the parser of `hf-kvq`."""
    parser = commands.add_parser(
        "calibrate",
        help="measure which layers deserve how many bits, and save a plan",
        description="Measure on text which layers deserve how many bits, choose the widths that a budget buys, and "
        "save them as a plan that `generate` finds next to the model, or that `hf-kvq push` shares.",
    )
    parser.set_defaults(parser=parser, run=calibrate)
    parser.add_argument("model", metavar="MODEL", help=model_help)
    parser.add_argument("--method", choices=("pmkvq",), default="pmkvq", help="default: pmkvq")
    parser.add_argument("--max-length", type=positive_int, required=True, metavar="N", help="tokens per request")
    parser.add_argument(
        "--budget", required=True, metavar="SIZE", help="per request, everything counted: 3bits, 512MiB, or bytes"
    )
    parser.add_argument("-o", "--output", required=True, metavar="FOLDER", help="where to save the plan")
    parser.add_argument(
        "--data",
        default="bundled",
        metavar="SOURCE",
        help="a .txt, .jsonl or .parquet file, or a dataset of the Hub (default: English essays out of a package)",
    )
    parser.add_argument(
        "--samples", type=positive_int, default=DEFAULT_SAMPLES, metavar="N", help=f"default: {DEFAULT_SAMPLES}"
    )
    parser.add_argument(
        "--sample-length",
        type=positive_int,
        default=DEFAULT_LENGTH,
        metavar="N",
        help=f"tokens of each (default: {DEFAULT_LENGTH})",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="which parts of the text (default: 0)")
    parser.add_argument("--dtype", choices=dtypes, default="auto", help="of the model (default: as it was saved)")
    parser.add_argument("--device", default="auto", help="such as cpu or cuda:0 (default: a GPU if there is one)")
    parser.add_argument(
        "--cache-config", action="append", default=[], metavar="KEY=VALUE", help="another option of the cache"
    )


def calibrate(arguments: argparse.Namespace) -> int:
    """Calibrate, save, and say what was chosen; returns the exit status."""
    config = validate_cache_config(arguments.method, parse_cache_config(arguments.cache_config))
    device = parse_device(arguments.device)
    try:
        model, tokenizer = load_model(arguments.model, dtype=arguments.dtype)
        model.to(device)
        texts = load_texts(arguments.data)
        blocks = token_blocks(texts, tokenizer, arguments.samples, arguments.sample_length, arguments.seed)
        chosen = calibrate_fbits(model, arguments.max_length, arguments.budget, blocks.to(device), config)
        plan = KVQPlan.of(
            model,
            chosen,
            calibration={
                "dataset": arguments.data,
                "n_samples": arguments.samples,
                "seq_len": arguments.sample_length,
                "seed": arguments.seed,
                "fingerprint": fingerprint(blocks),
                "budget": arguments.budget,
            },
        )
        plan.save_pretrained(arguments.output)
    except torch.OutOfMemoryError as error:
        raise CommandError(f"out of memory: lower --sample-length, or use --device cpu ({error})") from error
    except (ImportError, OSError, PlanError, ValueError, TypeError, RuntimeError) as error:
        raise CommandError(error) from error
    print(summary(plan))
    return 0
