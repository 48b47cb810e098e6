# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""`hf-kvq calibrate`: measure on text how to spend a budget, and save the plan."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..bundled import load_model
from ..calibration import cached_shapes, calibrate_fbits, fingerprint, load_texts, parse_budget, token_blocks
from ..calibration.distributed import is_distributed, is_main_process, leave, own_device
from ..calibration.fbits import DEFAULT_LENGTH, DEFAULT_SAMPLES, MEASURES
from ..calibration.pareto import ThresholdTrial, knee, plot_trials, write_trials
from ..calibration.samples import is_out_of_memory, remove_checkpoint
from ..calibration.smoothing import smooth
from ..calibration.thresholds import require_feasible, tune_thresholds
from ..config import MixKVQConfig, Options, PMKVQConfig
from ..hub import KVQPlan, PlanError
from ..hub.cards import summary
from .options import CommandError, parse_cache_config, parse_device, positive_int, validate_cache_config


_DEFAULT_TRIALS = 30


def add_calibrate_command(commands: argparse._SubParsersAction, dtypes: tuple[str, ...], model_help: str) -> None:
    """Add the command to the parser of `hf-kvq`."""
    parser = commands.add_parser(
        "calibrate",
        help="measure on text how to spend a budget, and save a plan",
        description="Measure on text how a model's cache spends a budget best, and save that as a plan that "
        "`generate` finds next to the model, or that `hf-kvq push` shares: for pmkvq the final width of each layer, "
        "for mixkvq the thresholds. Processes of `accelerate launch -m hf_kvq.cli calibrate` or torchrun share the "
        "work. A call that was interrupted goes on where it stopped.",
    )
    parser.set_defaults(parser=parser, run=calibrate)
    parser.add_argument("model", metavar="MODEL", help=model_help)
    parser.add_argument("--method", choices=("pmkvq", "mixkvq"), default="pmkvq", help="default: pmkvq")
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
        "--samples",
        type=positive_int,
        metavar="N",
        help=f"default: {DEFAULT_SAMPLES['kl']}, and {DEFAULT_SAMPLES['gradient']} with --measure gradient",
    )
    parser.add_argument(
        "--sample-length",
        type=positive_int,
        default=DEFAULT_LENGTH,
        metavar="N",
        help=f"tokens of each (default: {DEFAULT_LENGTH})",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="which parts of the text (default: 0)")
    parser.add_argument(
        "--measure",
        choices=tuple(MEASURES),
        default="kl",
        help="of pmkvq: what a width costs a layer, by trying each or to first order (default: kl)",
    )
    parser.add_argument(
        "--trials",
        type=positive_int,
        default=_DEFAULT_TRIALS,
        metavar="N",
        help=f"of mixkvq: pairs of thresholds, earlier ones in the storage included (default: {_DEFAULT_TRIALS})",
    )
    parser.add_argument(
        "--storage",
        metavar="FILE",
        help="of mixkvq: where trials are kept, a file or a URL of Optuna; it stays (default: OUTPUT.trials, removed "
        "when the plan is saved)",
    )
    parser.add_argument(
        "--front",
        metavar="FILE",
        help="of mixkvq: write all trials and the Pareto front as .csv, or draw them as .png",
    )
    parser.add_argument("--dtype", choices=dtypes, default="auto", help="of the model (default: as it was saved)")
    parser.add_argument("--device", default="auto", help="such as cpu or cuda:0 (default: a GPU if there is one)")
    parser.add_argument("--device-map", choices=("auto",), help="split a model that one device has no room for")
    parser.add_argument(
        "--cache-config",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="another option of the cache; transform=lambda with key_codec=token smooths the keys",
    )


def calibrate(arguments: argparse.Namespace) -> int:
    """Calibrate, save, and say what was chosen; returns the exit status."""
    config = validate_cache_config(arguments.method, parse_cache_config(arguments.cache_config))
    # Every trial of thresholds runs all samples twice.
    default = DEFAULT_SAMPLES["kl" if arguments.method == "mixkvq" else arguments.measure]
    n_samples = arguments.samples or default
    try:
        model, tokenizer = _load(arguments)
        texts = load_texts(arguments.data)
        blocks = token_blocks(texts, tokenizer, n_samples, arguments.sample_length, arguments.seed)
        method = _calibrate_mixkvq if arguments.method == "mixkvq" else _calibrate_pmkvq
        chosen, facts, tensors = method(arguments, model, blocks, config)
        if is_main_process():
            facts = {
                # Where a file lies is nobody else's business.
                "dataset": Path(arguments.data).name if Path(arguments.data).is_file() else arguments.data,
                "n_samples": n_samples,
                "seq_len": arguments.sample_length,
                "seed": arguments.seed,
                "fingerprint": fingerprint(blocks),
                "budget": arguments.budget,
                **facts,
            }
            plan = KVQPlan.of(model, chosen, calibration=facts, tensors=tensors)
            plan.save_pretrained(arguments.output)
            _remove_traces(arguments)
            print(summary(plan))
        # Nobody leaves while others still need the connection.
        leave()
    except (ImportError, OSError, PlanError, ValueError, TypeError, RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            advice = f"lower --sample-length (now {arguments.sample_length}), or use --device-map auto or --device cpu"
            raise CommandError(f"{error}: {advice}") from error
        raise CommandError(error) from error
    return 0


def _load(arguments: argparse.Namespace) -> tuple[PreTrainedModel, Any]:
    """The model, where it is to run, and its tokenizer."""
    if arguments.device_map:
        if is_distributed():
            raise CommandError("--device-map splits the model of one process; start without a launcher", 2)
        return load_model(arguments.model, dtype=arguments.dtype, device_map=arguments.device_map)
    is_free = arguments.device == "auto" and is_distributed()
    device = own_device() if is_free else parse_device(arguments.device)
    model, tokenizer = load_model(arguments.model, dtype=arguments.dtype)
    return model.to(device), tokenizer


Result = tuple[Options, dict[str, Any], dict[str, torch.Tensor]]


def _calibrate_pmkvq(
    arguments: argparse.Namespace, model: PreTrainedModel, blocks: torch.Tensor, config: PMKVQConfig
) -> Result:
    """Options, facts and tensors of a plan: a final width for each layer, and λ if it is asked for."""
    plain = dataclasses.replace(config, transform="none") if config.transform == "lambda" else config
    chosen = calibrate_fbits(
        model,
        arguments.max_length,
        arguments.budget,
        blocks,
        plain,
        arguments.measure,
        checkpoint=_checkpoint(arguments),
    )
    facts = {"measure": arguments.measure}
    if config.transform != "lambda":
        return chosen, facts, {}
    chosen = dataclasses.replace(chosen, transform="lambda")
    smoothing = smooth(model, blocks, chosen)
    return chosen, {**facts, "alphas": list(smoothing.alphas)}, {"key_scale": smoothing.key_scale}


def _calibrate_mixkvq(
    arguments: argparse.Namespace, model: PreTrainedModel, blocks: torch.Tensor, config: MixKVQConfig
) -> Result:
    """Options and facts of a plan: the best thresholds within the budget."""
    budget = parse_budget(arguments.budget, cached_shapes(model), arguments.max_length)
    require_feasible(model, arguments.max_length, budget, config)
    storage = arguments.storage or _storage(arguments)
    trials = tune_thresholds(model, blocks, arguments.max_length, config, arguments.trials, storage, arguments.seed)
    if arguments.front and is_main_process():
        _write_front(trials, arguments.front)
    best = knee(trials, nbytes=budget)
    facts = {"trials": len(trials), "kl": best.kl, "true_bits": best.true_bits, "key_bits": best.key_bits}
    return best.config(config), facts, {}


def _write_front(trials: tuple[ThresholdTrial, ...], path: str) -> None:
    write = plot_trials if Path(path).suffix == ".png" else write_trials
    write(trials, path)
    print(f"{len(trials)} trials are in {path}", file=sys.stderr)


def _checkpoint(arguments: argparse.Namespace) -> Path:
    """Where finished samples are kept until the plan is saved."""
    return Path(arguments.output).with_name(f"{Path(arguments.output).name}.samples")


def _storage(arguments: argparse.Namespace) -> Path:
    """Where trials are kept until the plan is saved, unless the user named another place."""
    return Path(arguments.output).with_name(f"{Path(arguments.output).name}.trials")


def _remove_traces(arguments: argparse.Namespace) -> None:
    remove_checkpoint(_checkpoint(arguments))
    _storage(arguments).unlink(missing_ok=True)
