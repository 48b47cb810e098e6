# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""What a model's KV cache costs with each method, and what fits on a GPU; from the model's config alone."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import gradio as gr

from charts import bars_chart, legend, short_count, sizes_chart
from hf_kvq import KIVIConfig, MixKVQConfig, PMKVQConfig
from hf_kvq.cache.layout import LayerShape
from hf_kvq.cli.report import format_bytes
from hf_kvq.estimate import method_bytes, ordinary_bytes
from hf_kvq.presets import PRESETS
from models import KNOWN, Model, find_model


#: Options of the caches that are compared, with their defaults; None is the ordinary one.
METHODS: Mapping[str, PMKVQConfig | MixKVQConfig | KIVIConfig | None] = {
    "ordinary": None,
    **{f"pmkvq {bits}": PMKVQConfig(fbit=bits) for bits in (16, 8, 4, 2)},
    "mixkvq": MixKVQConfig(),
    "kivi": KIVIConfig(),
    "kvq": MixKVQConfig.of(PRESETS["kvq"].options),
}
GPUS = (8, 12, 16, 24, 32, 40, 48, 80, 96, 141, 192)
CONTEXTS = tuple(2**power for power in range(9, 21))
#: Share of the GPU for everything that is neither weights nor cache: activations, the allocator, the driver.
RESERVE = 0.1
MOST_TOKENS, MOST_REQUESTS = 2**24, 2**16

_SHOWN = (2048, 8192, 32768, 131072, 1048576)
_FIRST = "meta-llama/Llama-3.1-8B-Instruct"


def sizes(model: Model, tokens: Sequence[int], batch: int = 1) -> dict[str, list[int]]:
    """Bytes of the cache of `batch` requests at each number of tokens, by method."""
    return {name: [_bytes(model, name, n, batch) for n in tokens] for name in METHODS}


def room(model: Model, gpu_gb: float) -> int:
    """Bytes that a GPU of so many GB has for the cache; negative where the weights do not fit."""
    return int(gpu_gb * 10**9 * (1 - RESERVE)) - model.weights


def what_fits(model: Model, gpu_gb: float, batch: int, tokens: int) -> dict[str, tuple[int, int]]:
    """(longest context of `batch` requests, most requests of `tokens` tokens) by method.

    Neither says what the model itself can do. Searched up to `MOST_TOKENS` and `MOST_REQUESTS`.
    """
    free = room(model, gpu_gb)

    def fit(name: str) -> tuple[int, int]:
        longest = _largest(lambda n: _bytes(model, name, n, batch) <= free, MOST_TOKENS)
        return longest, max(0, min(free // _bytes(model, name, tokens, 1), MOST_REQUESTS))

    return {name: fit(name) for name in METHODS}


def figure(model: Model, batch: int, gpu_gb: float) -> str:
    """Cache size against context, as SVG with its legend."""
    free = room(model, gpu_gb)
    return legend(list(METHODS)) + sizes_chart(CONTEXTS, sizes(model, CONTEXTS, batch), free if free > 0 else None)


def report(model: Model, gpu_gb: float, batch: int, tokens: int) -> str:
    """All that the calculator shows, as HTML."""
    requests = "1 request" if batch == 1 else f"{batch:,} requests"
    fits = what_fits(model, gpu_gb, batch, tokens)
    shown = sorted({*_SHOWN, tokens})
    table = sizes(model, shown, batch)
    rows = [(name, *(format_bytes(size) for size in line)) for name, line in table.items()]
    fit_rows = [(name, f"{n:,}", f"{most:,}", _times(n, fits["ordinary"][0])) for name, (n, most) in fits.items()]
    longest = f" It is made for up to {model.longest:,} tokens." if model.longest else ""
    about = (
        f"<p><b>{html.escape(model.name)}</b>: {_describe(model)}. Weights in {model.dtype}: "
        f"{format_bytes(model.weights)}.{longest}</p>"
    )
    if room(model, gpu_gb) <= 0:
        fit = f"<p><b>The weights alone do not fit</b> on {gpu_gb:g} GB ({RESERVE:.0%} of it set aside).</p>"
    else:
        fit = bars_chart(
            f"Longest context of {requests} on {gpu_gb:g} GB", {name: n for name, (n, _) in fits.items()}
        ) + _table(("cache", f"longest, {requests}", f"requests of {tokens:,}", "longer"), fit_rows)
    return (
        f"{about}<h3>What fits on {gpu_gb:g} GB: longest context of {requests}</h3>{fit}"
        f"<h3>Bytes of the cache of {requests}</h3>{figure(model, batch, gpu_gb)}"
        f"{_table(('cache', *(f'{short_count(n)} tokens' for n in shown)), rows)}"
        '<p class="kvq-note">Everything is counted: codes, (minimum, maximum), exact first and newest tokens, room in '
        "reserve. pmkvq N: made for that many tokens, N bits at the end. mixkvq and kvq: the most they can take. "
        f"{RESERVE:.0%} of the GPU is set aside for everything else.</p>"
    )


def calculator_tab() -> None:
    """Build the calculator within the Blocks that are open."""
    gr.Markdown("What does a model's cache cost, and what fits on your GPU? Only the model's config is read.")
    name = gr.Dropdown(
        list(KNOWN),
        value=_FIRST,
        allow_custom_value=True,
        filterable=True,
        label="Model",
        info="From the list, or write any id of the Hub",
    )
    with gr.Row():
        gpu = gr.Dropdown([(f"{size} GB", size) for size in GPUS], value=24, label="GPU memory", min_width=110)
        tokens = gr.Number(
            32768, precision=0, minimum=1, maximum=MOST_TOKENS, label="Tokens per request", min_width=110
        )
        batch = gr.Number(1, precision=0, minimum=1, maximum=MOST_REQUESTS, label="Requests at once", min_width=110)
    with gr.Accordion("Or paste a config.json", open=False):
        pasted = gr.Textbox("", lines=6, max_lines=14, max_length=200_000, label="config.json",
                            placeholder='{"model_type": "llama", "num_hidden_layers": 32, ...}')  # fmt: skip
    calculate = gr.Button("Calculate", variant="primary")
    shown = gr.HTML(_report_of(_FIRST, "", 24, 32768, 1), label="Sizes and what fits")
    calculate.click(_report_of, [name, pasted, gpu, tokens, batch], shown, api_name="calculate", concurrency_limit=4)


def _report_of(name: str, pasted: str, gpu_gb: float, tokens: float, batch: float) -> str:
    try:
        if gpu_gb not in GPUS:
            raise ValueError(f"Choose the GPU's memory from the list: {', '.join(map(str, GPUS))} GB.")
        if not (tokens and 1 <= tokens <= MOST_TOKENS and batch and 1 <= batch <= MOST_REQUESTS):
            raise ValueError(f"Tokens go from 1 to {MOST_TOKENS:,}, requests from 1 to {MOST_REQUESTS:,}.")
        return report(find_model(name, pasted), gpu_gb, int(batch), int(tokens))
    except ValueError as error:
        raise gr.Error(html.escape(" ".join(str(error).split())[:400])) from error


def _bytes(model: Model, name: str, tokens: int, batch: int) -> int:
    config = METHODS[name]
    if config is None:
        return ordinary_bytes(model.layers, tokens, batch)
    return method_bytes(model.layers, tokens, config, batch)


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that fits; 0 if none does."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _times(count: int, ordinary: int) -> str:
    return f"{count / ordinary:.1f} ×" if ordinary else "–"


def _describe(model: Model) -> str:
    parts = []
    for layer, count in Counter(model.layers).items():
        many = f"{count} layer{'s' if count > 1 else ''}"
        if isinstance(layer, LayerShape):
            parts.append(f"{many} of {layer.heads} KV heads with {layer.key_dim} channels")
        else:
            parts.append(f"{many} that stay exact")
    return ", ".join(parts)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{html.escape(name)}</th>'
        + "".join(f"<td>{html.escape(x)}</td>" for x in cells)
        + "</tr>"
        for name, *cells in rows
    )
    return (
        '<div class="kvq-scroll" tabindex="0" role="region" aria-label="Table"><table class="kvq-table">'
        f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )
