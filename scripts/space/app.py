# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""A Space that shows what a quantized KV cache holds, and what it does to the answer, while the answer grows.

    python app.py

`HF_KVQ_SPACE_MODEL` names the model, a Hub id; the default is SmolLM2-135M-Instruct out of a package.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gradio as gr
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from calculator import calculator_tab
from compare import Request, applicable, measure, race
from hf_kvq import KVQPlan
from hf_kvq.bundled import encode_prompt, load_model
from hf_kvq.registration import NAMES
from plans import plan_from_files, plan_from_hub
from view import numbers, page


try:
    from spaces import GPU
except ImportError:

    def GPU(duration: int) -> Any:
        """Outside of ZeroGPU there is nothing to ask for."""
        return lambda function: function


MOST_CACHES = 3
#: So many are looked at; then tokens count.
MOST_CHARACTERS = 20_000
MOST_PROMPT_TOKENS = int(os.environ.get("HF_KVQ_SPACE_PROMPT_TOKENS", 1024))
MOST_NEW_TOKENS = int(os.environ.get("HF_KVQ_SPACE_NEW_TOKENS", 512))
#: Visitors whose answers grow at the same time; more wait.
VISITORS = 8
#: Least time between two pictures.
SECONDS = 0.25

# A plan says what a cache of its own model needs; qserve is nothing without one.
CHOICES = [name for name in NAMES if name != "qserve"]
#: What visitors read, and: prompt, longest answer, final bits, window.
EXAMPLES = {
    "A story, 16 → 8 → 4 bits": [
        "Tell me a story about a lighthouse keeper who finds a message in a bottle.",
        256,
        "4",
        64,
    ],
    "The same in a hurry, 16 → 8 → 4 → 2 bits": [
        "Tell me a story about a lighthouse keeper who finds a message in a bottle.",
        160,
        "2",
        32,
    ],
    "Why the sky is blue, down to 8 bits": [
        "Explain step by step why the sky is blue, and then why sunsets are red.",
        256,
        "8",
        64,
    ],
    "Baking bread, 16 → 8 → 4 bits": [
        "Write a short guide to baking bread for somebody who has never done it.",
        256,
        "4",
        64,
    ],
}
HEADER = """# hf_kvq: more tokens in the same memory

While a language model writes, it keeps a *key* and a *value* for every token it has seen, in every layer. This **KV
cache** is what fills a GPU in long answers. `hf_kvq` holds it in fewer bits: `pmkvq` stays exact while there is room,
then halves its bits in place, 16 → 8 → 4 → 2; `mixkvq` gives more bits to the channels that matter most.
Press **Compare** and watch: colours are bits, and text is marked from the first word that differs.
"""
FOOTER = """In short answers most tokens are still in the exact window, so little is saved yet; the calculator shows
long ones. `pmkvq` sets its budget aside from the first token on, and has groups of 32 here, so that widths change
early. In code, all it takes is
`model.generate(..., cache_implementation="pmkvq")`."""


def make_request(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    names: Sequence[str],
    options: dict[str, Any],
    plan: KVQPlan | None,
    **settings: Any,
) -> Request:
    """What to do, from what a visitor filled in.

    Raises:
        ValueError: something is missing, too long or does not go together; for the visitor to read.
    """
    if not prompt or not prompt.strip():
        raise ValueError("Write a prompt first.")
    if len(prompt) > MOST_CHARACTERS:
        raise ValueError(f"The prompt has {len(prompt):,} characters; at most {MOST_CHARACTERS:,} work here.")
    if not names or len(names) > MOST_CACHES:
        raise ValueError(f"Choose one to {MOST_CACHES} caches to compare with the ordinary one.")
    if plan is not None and plan.method not in names:
        raise ValueError(f"This is a {plan.method} plan; choose {plan.method} among the caches.")
    ids = encode_prompt(tokenizer, prompt)["input_ids"]
    if ids.shape[1] > MOST_PROMPT_TOKENS:
        raise ValueError(f"The prompt has {ids.shape[1]:,} tokens; at most {MOST_PROMPT_TOKENS:,} work here.")
    ends = model.generation_config.eos_token_id
    stop = frozenset([ends] if isinstance(ends, int) else ends or [])
    return Request(ids, {name: applicable(name, options, plan) for name in names}, stop=stop, **settings)


def watch(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, request: Request
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Pages and numbers while the answers grow; the last ones have the divergences.

    Raises:
        gr.Error: what went wrong, in words.
    """
    shown, lanes = 0.0, []

    def picture(note: str) -> tuple[str, list[dict[str, Any]]]:
        return page(lanes, tokenizer, request.length, note), numbers(lanes, tokenizer)

    try:
        for lanes in race(model, request):  # noqa: B007
            if time.monotonic() - shown > SECONDS:
                yield picture("Writing …")
                shown = time.monotonic()
        _release(lanes)
        for done in measure(model, request, lanes):
            if time.monotonic() - shown > SECONDS:
                yield picture(f"Measuring how far the caches are from the ordinary one: {done:.0%}")
                shown = time.monotonic()
        yield picture(_summary(request, lanes))
    except torch.OutOfMemoryError as error:
        raise gr.Error("The GPU is full. Try a shorter prompt or answer, or fewer caches.") from error
    except (ValueError, TypeError, RuntimeError) as error:
        raise gr.Error(_in_words(error)) from error
    finally:
        # Also when the visitor has stopped or left.
        _release(lanes)


def build(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> gr.Blocks:
    """The app for a loaded model.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer.
        name: what visitors read.
    """

    @GPU(duration=120)
    def run(request: Request) -> Iterator[tuple[str, list[dict[str, Any]]]]:
        # Only the request travels to a GPU's process; the model is there already.
        yield from watch(model, tokenizer, request)

    def compare(
        prompt, names, new_tokens, fbit, window, sinks, target_bits, max_length, budget, temperature, seed, repo, files
    ):
        options = {"fbit": int(fbit), "bits": int(fbit), "window": int(window), "residual": int(window)}
        options |= {"sink_tokens": int(sinks), "target_bits": target_bits, "group_size": 32}
        options |= {"budget_bytes": int(budget * 2**20)} if budget else {}
        options |= {"max_length": int(max_length)} if max_length and not budget else {}
        try:
            plan = plan_from_hub(*repo.split(maxsplit=1)) if repo and repo.strip() else None
            plan = plan_from_files(files) if files else plan
            settings = {"new_tokens": int(new_tokens), "temperature": temperature, "seed": int(seed or 0)}
            request = make_request(model, tokenizer, prompt, names, options, plan, **settings)
        except (OSError, ValueError, TypeError) as error:
            raise gr.Error(_in_words(error)) from error
        yield from run(request)

    with gr.Blocks(title="hf_kvq: quantized KV caches") as app:
        gr.Markdown(HEADER)
        with gr.Tab("Compare"):
            first = next(iter(EXAMPLES.values()))
            prompt = gr.Textbox(first[0], lines=3, label="Prompt", max_length=MOST_CHARACTERS)
            # Examples stand above some of what they fill in.
            new_tokens = gr.Slider(16, MOST_NEW_TOKENS, 256, step=16, label="Longest answer, tokens", render=False)
            fbit = gr.Radio(["8", "4", "2"], value="4", label="Final bits (pmkvq, kivi)", render=False)
            window = gr.Slider(32, 256, 64, step=32, label="Newest tokens, exact (window)", render=False)
            gr.Examples(
                list(EXAMPLES.values()), [prompt, new_tokens, fbit, window], label="Examples",
                example_labels=list(EXAMPLES), api_visibility="private"
            )  # fmt: skip
            with gr.Row():
                names = gr.CheckboxGroup(
                    CHOICES, value=["pmkvq", "mixkvq"], label=f"Caches, beside the ordinary one (up to {MOST_CACHES})"
                )
                new_tokens.render()
            with gr.Accordion("Options", open=False):
                with gr.Row():
                    fbit.render()
                    target = gr.Slider(2, 8, 2.5, step=0.25, label="Target bits of keys (mixkvq)")
                    window.render()
                    sinks = gr.Slider(0, 64, 4, step=1, label="First tokens, exact (sink)")
                with gr.Row():
                    longest = gr.Number(
                        0, precision=0, minimum=0, maximum=10**6, label="Budget for so many tokens (pmkvq); 0: these"
                    )
                    budget = gr.Number(0, minimum=0, maximum=10**5, label="Budget in MiB instead (pmkvq)")
                    temperature = gr.Slider(0, 1.5, 0, step=0.1, label="Temperature; 0: the likeliest token")
                    seed = gr.Number(0, precision=0, minimum=0, maximum=2**31, label="Seed")
                with gr.Row():
                    repo = gr.Textbox("", label="Plan on the Hub: user/repository, and a folder after a space",
                                      placeholder="user/model kvq/pmkvq-2.25bit", max_length=200)  # fmt: skip
                    files = gr.File(file_count="multiple", file_types=[".json", ".safetensors"],
                                    label="or a plan's files", type="filepath", height=110)  # fmt: skip
            with gr.Row():
                start = gr.Button("Compare", variant="primary")
                stop = gr.Button("Stop")
            shown = gr.HTML(label="Caches side by side")
            with gr.Accordion("The same as numbers", open=False):
                facts = gr.JSON(label="Numbers", show_label=False)
            gr.Markdown(f"{FOOTER} Model here: {name}.")
            fields = [prompt, names, new_tokens, fbit, window, sinks, target, longest, budget, temperature, seed, repo,
                      files]  # fmt: skip
            running = start.click(
                compare, fields, [shown, facts], api_name="compare", concurrency_limit=VISITORS, show_progress="hidden"
            )
            stop.click(None, None, None, cancels=[running], api_visibility="private")
        with gr.Tab("Calculator"):
            calculator_tab()
    return app


def _release(lanes: list) -> None:
    """Let the caches go; what they held is noted."""
    for lane in lanes:
        lane.cache = None


def _summary(request: Request, lanes: list) -> str:
    prompt, answer = request.ids.shape[1], len(lanes[0].tokens)
    return (
        f"{prompt} tokens of prompt, {answer} of the ordinary cache's answer. KL: how far each cache's next-token "
        "distribution is from the ordinary one's while it reads the same answer, nats per token; 0 is exact."
    )


def _in_words(error: Exception) -> str:
    """An error as a visitor reads it: one line, not longer than needed."""
    text = " ".join(str(error).split())
    return text[:1].upper() + text[1:400]


def main() -> None:
    source = os.environ.get("HF_KVQ_SPACE_MODEL", "bundled")
    model, tokenizer = load_model(source, dtype="auto")
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    name = "SmolLM2-135M-Instruct" if source == "bundled" else source
    app = build(model, tokenizer, name)
    app.queue(max_size=64).launch(css_paths=[Path(__file__).with_name("style.css")], show_error=True)


if __name__ == "__main__":
    main()
