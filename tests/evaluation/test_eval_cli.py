# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
import json
import random

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from conftest import tiny_model
from hf_kvq.cli import main
from hf_kvq.evaluation.methods import Method
from hf_kvq.evaluation.run import METRICS, Settings


METHODS = "pmkvq:fbit=4,window=16,group_size=16,pmkvq:fbit=2,window=16,group_size=16,kivi:residual=32,fp8"
LABELS = [
    "pmkvq: fbit=4, window=16, group_size=16",
    "pmkvq: fbit=2, window=16, group_size=16",
    "kivi: residual=32",
    "fp8",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny random model, its tokenizer, and a text whose words are those that it knows."""
    path = tmp_path_factory.mktemp("tiny")
    numbers = [" ".join(f"{digit}" for digit in str(i)) for i in range(10)]
    letters = ["".join(random.Random(i).choices("abcdefgh", k=5)) for i in range(110)]
    known = list(dict.fromkeys(["?", ":", *numbers, *letters]))
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(known)}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Digits(True)])
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", pad_token="?").save_pretrained(path)
    tiny_model().save_pretrained(path)
    draw = random.Random(0)
    (path / "text.txt").write_text(" ".join(draw.choices(letters, k=1500)))
    return path


@pytest.fixture
def run(folder, capsys, monkeypatch):
    # The tiny model knows few words.
    small = {"tokens": 256, "chunk": 32, "rows": 2, "prompt": 96, "new_tokens": 24}
    small |= {"copy_words": 60, "recall_words": 20, "recall_distance": 100, "entries": 8}
    monkeypatch.setattr("hf_kvq.cli.evaluate.Settings", lambda **given: Settings(**{**small, **given}))

    def run(*arguments: str) -> tuple[int, str, str]:
        try:
            status = main(["eval", str(folder), "--data", str(folder / "text.txt"), *arguments])
        except SystemExit as error:
            status = error.code
        return status, *capsys.readouterr()

    return run


def test_everything(run, tmp_path):
    status, out, err = run("--methods", METHODS, "--report", str(tmp_path / "out"))
    assert status == 0
    # Older versions of transformers have no fp8 cache.
    has_fp8 = Method("fp8").is_available
    labels = LABELS if has_fp8 else LABELS[:-1]
    assert ("fp8 is left out: what it needs is not installed" in err) != has_fp8
    made = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert set(made) == {"results.json", "results.csv", "report.md", "fidelity.svg", "bits.svg", "layers.svg"}
    report = json.loads(made["results.json"])
    assert list(report["tasks"]) == list(METRICS)
    assert report["settings"]["tokens"] == 256 and report["text"]["source"] == "text.txt"
    for name, task in report["tasks"].items():
        assert set(task["results"]) == {*labels, *(["exact"] if name != "attention" else [])}
        for values in task["results"].values():
            for estimate in values.values():
                assert estimate["low"] is None or estimate["low"] <= estimate["mean"] <= estimate["high"]
    text = report["tasks"]["text"]["results"]
    assert text["exact"]["kl"]["mean"] == 0
    assert 0 < text[LABELS[0]]["kl"]["mean"] < text[LABELS[1]]["kl"]["mean"]
    # Nobody learns whose folders these are.
    assert str(tmp_path).encode() not in made["results.json"] and b"/tmp" not in made["results.json"]
    assert all(f"| {label} |" in out for label in labels)

    # Again, elsewhere: the same bytes.
    run("--methods", METHODS, "--report", str(tmp_path / "again"))
    assert made == {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()}


def test_an_interrupted_run_goes_on(run, tmp_path, monkeypatch):
    arguments = ["--methods", "kivi:residual=32", "--metrics", "text,copy", "--report", str(tmp_path)]
    run(*arguments)
    whole = (tmp_path / "results.json").read_bytes()
    cut = json.loads(whole)
    del cut["tasks"]["copy"]
    (tmp_path / "results.json").write_text(json.dumps(cut))
    calls = []
    for name in ("text", "copy"):
        measure = METRICS[name]
        monkeypatch.setitem(METRICS, name, lambda bench, n=name, m=measure: calls.append(n) or m(bench))
    run(*arguments)
    assert calls == ["copy"]
    assert (tmp_path / "results.json").read_bytes() == whole
    # Another seed is another run.
    run(*arguments, "--seed", "1")
    assert calls == ["copy", "text", "copy"]


def test_answers_are_generated_on_demand(run, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"question": "abc", "answer": 1}\n' * 2)
    arguments = ["--metrics", "", "--problems", str(path), "--samples", "2", "--answer-tokens", "8"]
    status, out, _ = run("--methods", "kivi", *arguments, "--report", str(tmp_path / "out"))
    assert status == 0
    found = json.loads((tmp_path / "out" / "results.json").read_text())["tasks"]["problems p"]
    assert found["problems"] == 2 and found["sampling"]["temperature"] == 0.6
    assert found["results"]["kivi"]["cut at the limit"] == {"mean": 1.0, "low": 0.5101, "high": 1.0, "n": 4}
    assert "| problems p | exact |" in out and "| problems p | kivi |" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "pmkv"], "unknown method 'pmkv'; did you mean 'pmkvq'?"),
        (["--methods", "pmkvq:fbits=2"], "pmkvq: fbits=2: unknown option 'fbits'"),
        (["--methods", "pmkvq,pmkvq"], "'pmkvq' is taken"),
        (["--metrics", "txt"], "unknown metric 'txt'; there are text, own"),
        (["--methods", "kivi", "--tokens", "100000"], "the text has 1500 tokens, but 1 x 100000 are wanted"),
        (["--methods", "kivi", "--suite", "paper-keys"], "not allowed with argument"),
        (["--methods", "kivi", "--problems", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(run, arguments, message):
    status, out, err = run(*arguments)
    assert status != 0 and out == ""
    assert message in err.splitlines()[-1]
