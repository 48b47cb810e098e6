# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
import hashlib
import json
import struct
import sys

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from hf_kvq.calibration import data, fingerprint, load_texts, token_blocks


BOS, EOS = 0, 1


def make_tokenizer(adds_bos: bool = True, eos: bool = True) -> PreTrainedTokenizerFast:
    """One token per word; the word w7 is token 7."""
    vocab = {"<s>": BOS, "</s>": EOS, **{f"w{i}": i for i in range(2, 200)}}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="</s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>" if eos else None, unk_token="</s>"
    )


def words(*ids: int) -> str:
    return " ".join(f"w{i}" for i in ids)


TEXTS = [words(*range(10, 17)), words(*range(20, 25)), words(*range(30, 39))]


def test_texts_follow_one_another_with_an_end_between():
    blocks = token_blocks(TEXTS, make_tokenizer(adds_bos=False), 3, 7)
    stream = [*range(10, 17), EOS, *range(20, 25), EOS, *range(30, 39)]
    cut = [stream[i : i + 7] for i in (0, 7, 14)]
    assert blocks.dtype == torch.int64 and sorted(blocks.tolist()) == sorted(cut)
    blocks = token_blocks(TEXTS, make_tokenizer(adds_bos=False, eos=False), 1, 21)
    assert blocks.tolist() == [[*range(10, 17), *range(20, 25), *range(30, 39)]]


@pytest.mark.parametrize("prefix", ["", "<s> "])
def test_one_bos_per_block_and_no_other(prefix):
    blocks = token_blocks([prefix + text for text in TEXTS], make_tokenizer(), 2, 10)
    assert blocks.shape == (2, 10)
    assert (blocks[:, 0] == BOS).all() and (blocks[:, 1:] != BOS).all()
    assert torch.equal(blocks, token_blocks(TEXTS, make_tokenizer(), 2, 10))


def test_the_seed_draws_different_blocks():
    text = words(*[2 + i % 190 for i in range(400)])
    first, again, other = (token_blocks(text, make_tokenizer(), 4, 11, seed) for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert len({tuple(block) for block in first.tolist()}) == 4


def test_fingerprint_is_of_the_ids_and_the_shape():
    blocks = torch.arange(12).view(2, 6)
    assert fingerprint(blocks) == fingerprint(blocks.clone()) == fingerprint(blocks.int())
    assert len({fingerprint(x) for x in (blocks, blocks.view(3, 4), blocks + 1, blocks.flip(0))}) == 4
    # Plans made elsewhere have to find the same one.
    assert fingerprint(blocks) == hashlib.sha256(b"(2, 6)" + struct.pack("<12q", *range(12))).hexdigest()


@pytest.mark.parametrize(
    ("n_samples", "seq_len", "message"),
    [
        (3, 10, "23 tokens, enough for 2 blocks of 10"),
        (1, 100, "enough for 0 blocks of 100"),
        (0, 10, "n_samples=0"),
        (1, 1, "seq_len=1"),
    ],
)
def test_impossible_blocks(n_samples, seq_len, message):
    with pytest.raises(ValueError, match=message):
        token_blocks(TEXTS, make_tokenizer(), n_samples, seq_len)


def test_bundled_text_is_the_default(monkeypatch):
    monkeypatch.setattr(data, "bundled_text", lambda: "essays")
    assert load_texts() == load_texts("bundled") == ["essays"]


def test_local_files(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [{"text": f"number {i}", "answer": i} for i in range(5)]
    (tmp_path / "a.txt").write_text("one\ntext\n", encoding="utf-8")
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    assert load_texts(tmp_path / "a.txt") == ["one\ntext\n"]
    for name in ("a.jsonl", "a.parquet"):
        assert load_texts(tmp_path / name) == [row["text"] for row in rows]
        assert load_texts(str(tmp_path / name), limit=2) == ["number 0", "number 1"]
        with pytest.raises(ValueError, match="no column 'texts'; it has 'text', 'answer'"):
            load_texts(tmp_path / name, column="texts")


def test_hub_datasets_are_streamed(monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        return ({"content": f"text {i}"} for i in range(10**9))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_texts("someone/texts", column="content", split="test", limit=3) == ["text 0", "text 1", "text 2"]
    assert asked == [(("someone/texts",), {"split": "test", "streaming": True})]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet"])
def test_missing_files(name, tmp_path):
    with pytest.raises(FileNotFoundError, match=name):
        load_texts(tmp_path / name)


def test_without_the_datasets_library(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "a.jsonl").write_text('{"text": "x"}')
    for source in (tmp_path / "a.jsonl", "someone/texts"):
        with pytest.raises(ImportError, match=r"pip install 'hf-kvq\[calibrate\]'"):
            load_texts(source)
