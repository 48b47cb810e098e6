# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""`hf-kvq inspect`: what a model's cache costs at each width and context."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from typing import Any

import torch
from transformers import PretrainedConfig

from ..cache.layout import LayerShape
from ..config import PMKVQConfig
from ..estimate import ExactLayer, cache_bytes, config_dtype, model_shapes, ordinary_bytes
from .options import CommandError, load_config, parse_cache_config, validate_cache_config
from .report import format_bytes


_WIDTHS = (16, 8, 4, 2)
# The table has a column for each width and a row for each length.
_IN_THE_TABLE = ("fbit", "max_length", "budget_bytes")


def inspect(arguments: argparse.Namespace) -> int:
    """Print the table, or JSON; returns the exit status."""
    options = parse_cache_config(arguments.cache_config)
    if given := [name for name in _IN_THE_TABLE if name in options]:
        raise CommandError(f"--cache-config {given[0]} has no place here: the table shows every width and length", 2)
    config = validate_cache_config("pmkvq", options)
    model_config = load_config(arguments.model)
    dtype = config_dtype(model_config) if arguments.dtype == "auto" else getattr(torch, arguments.dtype)
    try:
        shapes = model_shapes(model_config, dtype)
    except ValueError as error:
        raise CommandError(error) from error
    contexts = [
        {
            "tokens": length,
            "ordinary": ordinary_bytes(shapes, length, arguments.batch),
            "bits": {bits: cache_bytes(shapes, length, bits, config, arguments.batch) for bits in _WIDTHS},
        }
        for length in arguments.context
    ]
    report = {
        "model": arguments.model,
        "dtype": str(dtype).removeprefix("torch."),
        "batch": arguments.batch,
        "config": {key: value for key, value in config.to_dict().items() if key not in _IN_THE_TABLE},
        "layers": [{**_facts(layer), "count": count} for layer, count in Counter(shapes).items()],
        "contexts": contexts,
    }
    print(json.dumps(report, indent=2) if arguments.json else _as_text(report, config, model_config))
    return 0


def _facts(layer: LayerShape | ExactLayer) -> dict[str, Any]:
    if isinstance(layer, ExactLayer):
        return {
            "quantized": False,
            "kind": layer.kind,
            "token_bytes": layer.token_bytes,
            "state_bytes": layer.state_bytes,
            "limit": layer.limit,
        }
    return {
        "quantized": True,
        "kind": "full attention",
        "kv_heads": layer.heads,
        "key_dim": layer.key_dim,
        "value_dim": layer.value_dim,
    }


def _as_text(report: dict[str, Any], config: PMKVQConfig, model_config: PretrainedConfig) -> str:
    requests = "1 request" if report["batch"] == 1 else f"{report['batch']} requests together"
    lines = [f"{report['model']}: cache of {requests}, {report['dtype']}"]
    lines += [f"  {_describe(layer)}" for layer in report["layers"]]
    header = ["tokens", "ordinary", *(f"{bits} bits" for bits in _WIDTHS)]
    rows = [
        [f"{row['tokens']:,}", *(format_bytes(n) for n in (row["ordinary"], *row["bits"].values()))]
        for row in report["contexts"]
    ]
    widths = [max(map(len, column)) for column in zip(header, *rows)]
    lines += ["", *("  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in (header, *rows)), ""]
    lines.append(
        f"Everything is counted: codes, (min, max), {config.sink_tokens} sink token(s) and at least {config.window} "
        "recent tokens, both exact."
    )
    longest = getattr(model_config.get_text_config(decoder=True), "max_position_embeddings", None)
    if longest and any(row["tokens"] > longest for row in report["contexts"]):
        lines.append(f"The model itself is made for up to {longest:,} tokens.")
    return "\n".join(lines)


def _describe(layer: dict[str, Any]) -> str:
    count = f"{layer['count']} layer{'s' if layer['count'] > 1 else ''}"
    if layer["quantized"]:
        keys, values = layer["key_dim"], layer["value_dim"]
        channels = f"{keys}" if keys == values else f"{keys} + {values}"
        return f"{count} of full attention, {layer['kv_heads']} KV heads of {channels} channels: quantized"
    limit = f", at most {layer['limit']:,} tokens" if layer["limit"] else ""
    return f"{count} of {layer['kind']}{limit}: kept exact"
