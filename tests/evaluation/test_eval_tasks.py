# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from conftest import forward, generate, random_ids, tiny_model
from hf_kvq.evaluation.attention import attention_errors
from hf_kvq.evaluation.methods import Method, exact_cache
from hf_kvq.evaluation.tasks import (
    RECALL_LEAD,
    Items,
    common_words,
    copy_items,
    generated_items,
    phone_book_items,
    recall_items,
    text_items,
)


WORDS = ["alpha", "bravo", "charlie", "delta", "foxtrot", "hotel"]


@pytest.fixture(scope="module")
def tokenizer():
    """A character a token, so that words differ in length."""
    characters = [chr(i) for i in range(32, 127)]
    backend = Tokenizer(models.WordLevel({c: i + 1 for i, c in enumerate(characters)} | {"\n": 100}, unk_token=" "))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=" ")


def text_of(tokenizer, ids) -> str:
    return "".join(tokenizer.convert_ids_to_tokens(ids.tolist()))


def rows_of(tokenizer, items: Items) -> list[str]:
    """Each row's text without padding."""
    masks = items.mask if items.mask is not None else torch.ones_like(items.ids)
    return [text_of(tokenizer, ids[mask.bool()]) for ids, mask in zip(items.ids, masks)]


def answers_of(tokenizer, items: Items) -> list[list[str]]:
    """The texts of each row's answers."""
    scored = items.ids[:, items.start :]
    return [
        [text_of(tokenizer, ids[numbers == k]) for k in range(1, int(numbers.max()) + 1)]
        for ids, numbers in zip(scored, items.answers)
    ]


def test_common_words():
    assert common_words("the cat sees them, them sees Them sees often") == ["sees", "them", "often"]


def test_text_is_cut_into_rows(tokenizer):
    items = text_items("abcdefgh", tokenizer, 3, rows=2)
    assert rows_of(tokenizer, items) == ["abc", "def"]
    assert items.start == 1 and items.counts.all() and items.counts.shape == (2, 2)
    with pytest.raises(ValueError, match="has 8 tokens, but 3 x 3 are wanted"):
        text_items("abcdefgh", tokenizer, 3, rows=3)


def test_copy_lists_words_twice(tokenizer):
    items = copy_items(WORDS, tokenizer, rows=5, length=4, seed=3)
    rows, answers = rows_of(tokenizer, items), answers_of(tokenizer, items)
    for row, (answer,) in zip(rows, answers):
        first, second = row[: len(row) // 2], row[len(row) // 2 :]
        assert first == second == " " + answer
        assert sorted(first.split()) == sorted(set(first.split())) and set(first.split()) <= set(WORDS)
    assert len(set(rows)) == 5
    assert items.fingerprint == copy_items(WORDS, tokenizer, 5, 4, seed=3).fingerprint
    assert items.fingerprint != copy_items(WORDS, tokenizer, 5, 4, seed=4).fingerprint


def test_recall_has_text_in_between(tokenizer):
    filler = torch.stack([torch.full((RECALL_LEAD + 30,), 5), torch.full((RECALL_LEAD + 30,), 6)])
    items = recall_items(WORDS, filler, tokenizer, 3)
    for row, (answer,), token in zip(rows_of(tokenizer, items), answers_of(tokenizer, items), (5, 6)):
        before, between = (text_of(tokenizer, torch.tensor([token])) * n for n in (RECALL_LEAD, 30))
        assert row == f"{before} {answer}{between} {answer}"


def test_phone_book_asks_for_all_numbers(tokenizer):
    items = phone_book_items(WORDS, tokenizer, rows=3, entries=4, seed=1)
    for row, answers in zip(rows_of(tokenizer, items), answers_of(tokenizer, items)):
        book, again = row.removeprefix("The phone book:\n").split("\n\nAgain:\n")
        assert sorted(book.split("\n")) == sorted(again.split("\n"))
        assert [line.partition(":")[2] for line in again.split("\n")] == answers
        assert all(answer.strip().isdecimal() and len(answer.strip()) == 4 for answer in answers)
    assert len(set(rows_of(tokenizer, items))) == 3


def test_padding_comes_first(tokenizer):
    items = phone_book_items(WORDS, tokenizer, rows=4, entries=3)
    assert items.mask is not None
    assert (items.mask.diff(dim=1) >= 0).all() and items.mask[:, -1].all()
    # Whoever is longest needs none.
    assert items.mask.all(dim=1).any()


def test_an_answer_is_right_as_a_whole():
    items = Items(torch.zeros(2, 7, dtype=torch.long), 1, torch.tensor([[0, 1, 1, 0, 2, 2], [0, 0, 0, 0, 1, 1]]))
    hit = torch.tensor([[0, 1, 1, 0, 1, 0], [1, 1, 1, 1, 1, 1]], dtype=torch.bool)
    assert items.right(hit) == [True, False, True]


def test_generated_items_are_the_greedy_continuation():
    model, prompts = tiny_model(dtype=torch.bfloat16), random_ids(2, 20)
    items = generated_items(model, prompts, 12)
    assert torch.equal(items.ids, generate(model, 12, input_ids=prompts).sequences)
    assert items.start == items.prefill == 20 and items.counts.shape == (2, 12)


def test_words_must_suffice(tokenizer):
    with pytest.raises(ValueError, match="6 different words, but 7 are wanted"):
        copy_items(WORDS, tokenizer, 1, 7)


# ---- Attention errors


def outputs(model, layer: int, ids, cache, chunk: int) -> list[torch.Tensor]:
    """What an attention layer gives out in an ordinary run."""
    found = []
    hook = model.model.layers[layer].self_attn.register_forward_hook(lambda *a: found.append(a[2][0]))
    for part in ids.split(chunk, dim=1):
        forward(model, cache, part)
    hook.remove()
    return found


def test_the_first_layer_has_the_error_of_an_ordinary_run():
    model, ids, method = tiny_model(), random_ids(1, 96), Method("kivi", {"residual": 16})
    found = attention_errors(model, ids, {"x": method.build(model, 96)}, chunk=32)["x"]
    assert found.shape == (3, 3)
    here = outputs(model, 0, ids, method.build(model, 96), 32)
    true = outputs(model, 0, ids, exact_cache(model), 32)
    expected = [((a - b).norm() / b.norm()).item() for a, b in zip(here, true)]
    assert found[0].tolist() == pytest.approx(expected, abs=1e-6)
    assert expected[1] > 0.01
    # In a later layer an ordinary run has the errors of earlier ones on top.
    last = outputs(model, 2, ids, method.build(model, 96), 32)
    true = outputs(model, 2, ids, exact_cache(model), 32)
    assert found[2, 1] < ((last[1] - true[1]).norm() / true[1].norm()).item()


def test_the_exact_cache_has_no_attention_error():
    model, ids = tiny_model(), random_ids(2, 40)
    hooks = [dict(module._forward_hooks) for module in model.modules()]
    found = attention_errors(model, ids, {"x": exact_cache(model)}, chunk=16)["x"]
    assert found.abs().max() == 0
    # No hook is left.
    assert [dict(module._forward_hooks) for module in model.modules()] == hooks


@pytest.mark.parametrize("arch", ["qwen3", "phi3", "gpt_neox", "mixed"])
def test_attention_layers_are_found(arch):
    model, ids = tiny_model(arch), random_ids(1, 64)
    method = Method("pmkvq", {"fbit": 2, "initial_bits": 2, "window": 16, "group_size": 16})
    found = attention_errors(model, ids, {"x": method.build(model, 64)}, chunk=16)["x"]
    assert found.shape == (3, 4)
    quantized = [1] if arch == "mixed" else [0, 1, 2]
    for layer in range(3):
        assert (found[layer, -1] > 1e-3) == (layer in quantized)
