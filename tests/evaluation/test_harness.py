# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
import json
import sys

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from conftest import PAD, forward, generate, tiny_model
from hf_kvq.presets import resolve
from hf_kvq.registration import CACHES


lm_eval = pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.api.registry import get_model  # noqa: E402

from hf_kvq.evaluation.harness import KVQLM  # noqa: E402


SMALL = {"fbit": 2, "initial_bits": 2, "window": 8, "group_size": 16}
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["w0"], max_gen_toks: 12}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A tiny random model and its tokenizer, in a folder."""
    path = tmp_path_factory.mktemp("tiny")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(128)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="w0", pad_token="w0", eos_token="w0", bos_token="w1"
    ).save_pretrained(path)
    tiny_model().save_pretrained(path)
    return str(path)


def model(folder: str, **kwargs) -> KVQLM:
    return get_model("hf-kvq")(pretrained=folder, device="cpu", dtype="float32", **kwargs)


def words(count: int, seed: int) -> str:
    ids = torch.randint(2, 128, (count,), generator=torch.Generator().manual_seed(seed))
    return " ".join(f"w{i}" for i in ids.tolist())


def scored(lm: KVQLM, *pairs: tuple[str, str]) -> list[float]:
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    return [score for score, _ in lm.loglikelihood(requests, disable_tqdm=True)]


def by_hand(lm: KVQLM, context: str, target: str, chunk: int) -> float:
    """Log-likelihood read through a cache of its own."""
    whole, start = (lm.tok_encode(text) for text in (f"{context}{target}", context))
    ids = torch.tensor([whole])
    cache = CACHES["pmkvq"](lm.model.config, SMALL, max_length=ids.shape[1] - 1)
    logits = torch.cat([forward(lm.model, cache, part) for part in ids[:, :-1].split(chunk, dim=1)], dim=1)
    log_probs = logits[0].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return log_probs[len(start) - 1 :].sum().item()


def test_given_text_is_read_from_the_cache(folder):
    exact = model(folder)
    ours = model(folder, cache_implementation="pmkvq", cache_config=json.dumps(SMALL), score_chunk=16)
    # The second is shorter, and so padded.
    pairs = [(words(90, 1), " " + words(6, 2)), (words(70, 3), " " + words(4, 4))]
    found = scored(ours, *pairs)
    assert found == pytest.approx([by_hand(ours, *pair, 16) for pair in pairs], abs=1e-3)
    assert all(abs(a - b) > 0.01 for a, b in zip(found, scored(exact, *pairs)))
    # In one piece nothing would be read, and the score would look perfect.
    whole = model(folder, cache_implementation="pmkvq", cache_config=SMALL, score_chunk=1000)
    assert scored(whole, *pairs) == pytest.approx(scored(exact, *pairs), abs=1e-3)


def test_presets_score_as_what_they_stand_for(folder):
    pair = (words(90, 1), " " + words(6, 2))
    options = {"window": 8, "group_size": 16}
    preset = model(folder, cache_implementation="kvtuner", cache_config=options, score_chunk=16)
    name, options = resolve("kvtuner", options)
    same = model(folder, cache_implementation=name, cache_config=options, score_chunk=16)
    assert scored(preset, pair) == scored(same, pair) != scored(model(folder), pair)


def test_batches_change_nothing(folder):
    arguments = {"cache_implementation": "kivi", "cache_config": {"residual": 16}, "score_chunk": 16}
    pairs = [(words(60 + 7 * i, i), " " + words(3, 10 + i)) for i in range(3)]
    alone = scored(model(folder, batch_size=1, **arguments), *pairs)
    assert scored(model(folder, batch_size=3, **arguments), *pairs) == pytest.approx(alone, abs=1e-3)


def test_scores_that_would_not_be_of_the_cache_are_refused(folder):
    lm = model(folder, cache_implementation="quantized", cache_config={"backend": "fp8"})
    with pytest.raises(ValueError, match="can be scored through pmkvq.* not through cache_implementation='quantized'"):
        scored(lm, ("w2", " w3"))
    with pytest.raises(ValueError, match="not through"):
        lm.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, ("w2 w3",), 0)])


@pytest.mark.parametrize("given", ["[1]", 3])
def test_options_are_a_dict(folder, given):
    with pytest.raises(ValueError, match="cache_config must be a dict of options; got"):
        model(folder, cache_implementation="pmkvq", cache_config=given)


def test_a_task_end_to_end(folder, tmp_path, monkeypatch, capsys):
    """A local task of four questions through the command; the answers are those of `generate`."""
    questions = [words(60 + i, i) for i in range(4)]
    model_, tokenizer = tiny_model(), PreTrainedTokenizerFast.from_pretrained(folder)
    inputs = tokenizer(questions, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    out = generate(model_, 12, **inputs, cache_implementation="pmkvq", cache_config=SMALL, pad_token_id=PAD)
    answers = tokenizer.batch_decode(out.sequences[:, inputs["input_ids"].shape[1] :])
    answers = [text.partition("w0")[0].strip() for text in answers]
    # Three of the four are asked for as they will come.
    answers[0] = "w5"
    rows = [json.dumps({"question": q, "answer": a}) for q, a in zip(questions, answers)]
    (tmp_path / "data.jsonl").write_text("\n".join(rows))
    (tmp_path / "toy.yaml").write_text(TASK.format(name="toy", data=tmp_path / "data.jsonl"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    arguments = {
        "pretrained": folder,
        "dtype": "float32",
        "cache_implementation": "pmkvq",
        "cache_config": SMALL,
    }
    command = ["run", "--model", "hf-kvq", "--model_args", json.dumps(arguments), "--tasks", "toy"]
    command += ["--include_path", str(tmp_path), "--device", "cpu", "--batch_size", "4"]
    command += ["--output_path", str(tmp_path / "out"), "--log_samples"]
    monkeypatch.setattr(sys, "argv", ["harness", *command])
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
    (results,) = (tmp_path / "out").rglob("results_*.json")
    assert json.loads(results.read_text())["results"]["toy"]["exact_match,none"] == 0.75
