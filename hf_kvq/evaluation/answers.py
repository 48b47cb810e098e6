# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Answers that a model generates freely, and whether they are right: pass@1, majority vote, length, the limit."""

from __future__ import annotations

import importlib.util
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm.auto import tqdm
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..bundled import encode_prompt
from ..registration import cache_argument
from .estimates import Estimate, bootstrap, share
from .methods import EXACT, Method, exact_cache


if TYPE_CHECKING:
    from .run import Bench

#: Says whether an answer, as `extract_answer` found it, is right.
Check = Callable[[str], bool]

_ASK = "\n\nThink step by step, and put the final answer within \\boxed{}."


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn; the defaults of temperature and top-p are the papers'.

    Args:
        problems_per_task: how many problems of a task.
        samples: answers to each problem.
        answer_tokens: the longest answer.
        temperature, top_p: of sampling.
        rows: answers that are generated together.
    """

    problems_per_task: int = 20
    samples: int = 4
    answer_tokens: int = 256
    temperature: float = 0.6
    top_p: float = 0.95
    rows: int = 8


@dataclass(frozen=True)
class Problem:
    """A question, and how an answer to it is judged."""

    question: str
    check: Check


@dataclass(frozen=True)
class Answer:
    """What was generated: the text, its tokens, and whether it was cut at the limit."""

    text: str
    tokens: int
    is_cut: bool


def load_problems(path: str | Path) -> list[Problem]:
    """Problems from a .jsonl file with a `question` (or `problem`) and an `answer` in each line.

    Answers are compared by math-verify if it is installed, else as text.

    Raises:
        ValueError: a line has no such fields.
        OSError: there is no such file.
    """
    problems = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        row = json.loads(line)
        question = row.get("question", row.get("problem"))
        if question is None or "answer" not in row:
            raise ValueError(f"line {number} of {path} has no question and answer; it has {', '.join(row)}")
        problems.append(Problem(question + _ASK, _same_as(str(row["answer"]))))
    return problems


def reasoning_problems(name: str, count: int, seed: int = 0) -> list[Problem]:
    """Problems of a procedural task of the reasoning-gym package, which checks their answers itself.

    Raises:
        ImportError: the package is not installed.
        ValueError: it has no such task.
    """
    try:
        import reasoning_gym
    except ImportError as error:
        raise ImportError("procedural tasks need reasoning-gym; run: pip install reasoning-gym") from error
    try:
        dataset = reasoning_gym.create_dataset(name, size=count, seed=seed)
    except ValueError as error:
        raise ValueError(f"reasoning-gym has no task {name!r}: {error}") from error

    def check(entry: dict[str, Any]) -> Check:
        return lambda answer: dataset.score_answer(answer, entry) >= 1

    return [Problem(entry["question"] + _ASK, check(entry)) for entry in dataset]


def problems_metric(problems: Sequence[Problem], sampling: Sampling) -> Callable[[Bench], dict[str, Any]]:
    """A metric for `evaluate`."""

    def measure(bench: Bench) -> dict[str, Any]:
        results = {}
        for method in (None, *bench.methods):
            label = EXACT if method is None else method.label
            desc = label if bench.progress else None
            seed = bench.settings.seed
            drawn = generate_answers(bench.model, bench.tokenizer, problems, method, sampling, seed, desc)
            scores = score_answers(problems, drawn)
            results[label] = {name: estimate.to_dict() for name, estimate in scores.items()}
        return {"sampling": vars(sampling), "problems": len(problems), "results": results}

    return measure


def reasoning_metric(name: str, sampling: Sampling) -> Callable[[Bench], dict[str, Any]]:
    """A metric for `evaluate`: a task of reasoning-gym."""
    problems = reasoning_problems(name, sampling.problems_per_task)
    return problems_metric(problems, sampling)


@torch.no_grad()
def generate_answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    method: Method | None,
    sampling: Sampling,
    seed: int = 0,
    desc: str | None = None,
) -> list[list[Answer]]:
    """Sampled answers to each problem, `sampling.samples` each; every method draws with the same seeds.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer; a chat template is used if there is one.
        problems: what to ask.
        method: whose cache; None for the exact one.
        sampling: how.
        seed: of sampling.
        desc: label of a progress bar; None for no bar.
    """
    questions = [encode_prompt(tokenizer, problem.question)["input_ids"][0].tolist() for problem in problems]
    prompts = [ids for ids in questions for _ in range(sampling.samples)]
    config = GenerationConfig(
        max_new_tokens=sampling.answer_tokens,
        do_sample=True,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=0,
        eos_token_id=model.generation_config.eos_token_id,
        pad_token_id=tokenizer.pad_token_id or 0,
    )
    answers: list[Answer] = []
    state = torch.random.get_rng_state()
    try:
        for start in tqdm(range(0, len(prompts), sampling.rows), desc=desc, disable=desc is None, unit="batch"):
            # A seed per batch, so that one method's longer answers do not change the next batch's draws.
            torch.manual_seed(seed + start)
            rows = prompts[start : start + sampling.rows]
            answers += _generate(model, tokenizer, rows, method, config)
    finally:
        torch.random.set_rng_state(state)
    return [answers[i : i + sampling.samples] for i in range(0, len(answers), sampling.samples)]


def score_answers(problems: Sequence[Problem], drawn: Sequence[Sequence[Answer]]) -> dict[str, Estimate]:
    """pass@1 (the share of right answers), majority vote, mean length, share cut at the limit.

    Args:
        problems: what was asked.
        drawn: for each problem its answers.
    """
    rates, votes = [], []
    for problem, answers in zip(problems, drawn, strict=True):
        found = [extract_answer(answer.text) for answer in answers]
        rates.append(sum(text is not None and problem.check(text) for text in found) / len(found))
        given = Counter(text for text in found if text is not None)
        # The first of those that are equally frequent.
        votes.append(bool(given) and problem.check(given.most_common(1)[0][0]))
    flat = [answer for answers in drawn for answer in answers]
    return {
        "pass@1": bootstrap(rates),
        "majority vote": share(sum(votes), len(votes)),
        "answer tokens": bootstrap([answer.tokens for answer in flat]),
        "cut at the limit": share(sum(answer.is_cut for answer in flat), len(flat)),
    }


def extract_answer(text: str) -> str | None:
    r"""The last \boxed{...} of a text, else what its last <answer> or "answer is" names, else its last number."""
    if (start := text.rfind("\\boxed{")) >= 0:
        depth, begin = 0, start + len("\\boxed{")
        for i, character in enumerate(text[begin:], begin):
            depth += (character == "{") - (character == "}")
            if depth < 0:
                return text[begin:i].strip()
    for pattern in (r"<answer>(.*?)</answer>", r"answer(?: is)?\s*:?\s*([^\n]+?)\.?(?:\n|$)"):
        if found := re.findall(pattern, text, re.DOTALL | re.IGNORECASE):
            return found[-1].strip()
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return numbers[-1].replace(",", "") if numbers else None


def _same_as(gold: str) -> Check:
    if importlib.util.find_spec("math_verify") is None:
        return lambda answer: _plain(answer) == _plain(gold)
    from math_verify import parse, verify

    # No time limit: it works by signals, which only the main thread may use.
    parsed = parse(f"${gold}$", parsing_timeout=None)

    def check(answer: str) -> bool:
        mine = parse(f"${answer}$", parsing_timeout=None)
        return _plain(answer) == _plain(gold) or verify(parsed, mine, timeout_seconds=None)

    return check


def _plain(text: str) -> str:
    return re.sub(r"[\s$,]|\.0*$|\.$", "", text).lower()


def _generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[list[int]],
    method: Method | None,
    config: GenerationConfig,
) -> list[Answer]:
    longest = max(map(len, rows))
    pad = config.pad_token_id
    ids = torch.tensor([[pad] * (longest - len(row)) + row for row in rows], device=model.device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=model.device)
    cache = exact_cache(model) if method is None else method.build(model, longest + config.max_new_tokens)
    out = model.generate(ids, attention_mask=mask, generation_config=config, **{cache_argument(model): cache})
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    answers = []
    for row in out[:, longest:].tolist():
        stop = next((i for i, token in enumerate(row) if token in ends), None)
        count = len(row) if stop is None else stop + 1
        text = tokenizer.decode(row[:count], skip_special_tokens=True)
        answers.append(Answer(text, count, stop is None and count >= config.max_new_tokens))
    return answers
