# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from conftest import tiny_model
from hf_kvq.evaluation.answers import (
    Answer,
    Problem,
    Sampling,
    extract_answer,
    generate_answers,
    load_problems,
    reasoning_problems,
    score_answers,
)
from hf_kvq.evaluation.methods import Method


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{1}, no: \boxed{\frac{1}{2}} it is", r"\frac{1}{2}"),
        # What was cut is no answer.
        (r"\boxed{7} and then \boxed{unfinished", "7"),
        ("<answer> 12 </answer> or <answer>13</answer> 99", "13"),
        ("12 + 30. The answer is 42.", "42"),
        ("Final answer: blue", "blue"),
        ("first 3, then -1,234.5 apples", "-1234.5"),
        ("no idea", None),
    ],
)
def test_extract_answer(text, answer):
    assert extract_answer(text) == answer


def answers(*texts: str, tokens: int = 10) -> list[Answer]:
    return [Answer(text, tokens, text == "") for text in texts]


def test_scores_over_samples():
    problems = [Problem("a", lambda x: x == "1"), Problem("b", lambda x: x == "2")]
    drawn = [answers("1", "1", "3", ""), answers("5", "5", "2", "2", tokens=20)]
    found = score_answers(problems, drawn)
    assert found["pass@1"].mean == pytest.approx(0.5)
    # Of equally frequent answers the first counts.
    assert found["majority vote"].mean == 0.5
    assert found["answer tokens"].mean == 15
    assert found["cut at the limit"].mean == pytest.approx(1 / 8) and found["cut at the limit"].n == 8


def test_problems_of_a_file(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text(
        json.dumps({"question": "1 + 1?", "answer": 2}) + "\n\n" + json.dumps({"problem": "x", "answer": "$1,000$"})
    )
    first, second = load_problems(path)
    assert first.question.startswith("1 + 1?\n") and "boxed" in first.question
    assert first.check("2") and first.check(" 2.0") and not first.check("20")
    assert second.check("1000")
    path.write_text('{"q": 1}')
    with pytest.raises(ValueError, match="line 1 of .* it has q"):
        load_problems(path)


def test_reasoning_gym_checks_its_answers():
    pytest.importorskip("reasoning_gym")
    problems = reasoning_problems("chain_sum", 3)
    for problem in problems:
        total = eval(problem.question.split("\n")[0].split(":")[-1].split("=")[0])  # noqa: S307
        assert problem.check(str(total)) and not problem.check(str(total + 1))
    with pytest.raises(ValueError, match="no task 'nonsense'"):
        reasoning_problems("nonsense", 1)


@pytest.fixture(scope="module")
def tokenizer():
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(128)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w0")


@pytest.mark.parametrize("method", [None, Method("pmkvq", {"fbit": 4, "window": 8, "group_size": 16})])
def test_answers_are_drawn_by_seed(tokenizer, method):
    model = tiny_model()
    problems = [Problem("w1 w2 w3 w4 w5", lambda x: True), Problem("w9", lambda x: True)]
    sampling = Sampling(samples=3, answer_tokens=20, rows=4)
    drawn = generate_answers(model, tokenizer, problems, method, sampling, seed=1)
    assert [len(x) for x in drawn] == [3, 3]
    assert all(a.tokens == 20 and a.is_cut for x in drawn for a in x)
    assert len({a.text for a in drawn[0]}) > 1
    assert drawn == generate_answers(model, tokenizer, problems, method, sampling, seed=1)
    assert drawn != generate_answers(model, tokenizer, problems, method, sampling, seed=2)


def test_a_lossless_cache_draws_what_the_exact_one_draws(tokenizer):
    model, problems = tiny_model(), [Problem("w1 w2 w3", lambda x: True)]
    sampling = Sampling(samples=2, answer_tokens=24)
    exact = generate_answers(model, tokenizer, problems, None, sampling)
    assert exact == generate_answers(model, tokenizer, problems, Method("pmkvq", {"fbit": 16}), sampling)
    narrow = Method("pmkvq", {"fbit": 2, "initial_bits": 2, "window": 0, "group_size": 16})
    assert exact != generate_answers(model, tokenizer, problems, narrow, sampling)


def test_an_answer_ends_with_its_end(tokenizer):
    model, problems = tiny_model(), [Problem("w1 w2 w3", lambda x: True)]
    free = generate_answers(model, tokenizer, problems, None, Sampling(samples=1, answer_tokens=24))[0][0]
    end = tokenizer(free.text.split()[5]).input_ids[0]
    before = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = end
    try:
        found = generate_answers(model, tokenizer, problems, None, Sampling(samples=1, answer_tokens=24))[0][0]
    finally:
        model.generation_config.eos_token_id = before
    assert found.text.split() == free.text.split()[:6]
    assert found.tokens < 24 and not found.is_cut
