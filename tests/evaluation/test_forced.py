# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
import pytest
import torch
from transformers import DynamicCache

from conftest import forward, left_padded, make_cache, random_ids, storage_bytes, tiny_model
from hf_kvq.evaluation import compare_fidelity, teacher_forced
from hf_kvq.evaluation.methods import exact_cache


def decoded(model, ids, cache):
    """Log-probabilities [tokens, vocab], one token per call."""
    return torch.cat([forward(model, cache, ids[:, i : i + 1])[0] for i in range(ids.shape[1])]).log_softmax(-1)


def test_chunks_of_one_are_decoding():
    model, ids = tiny_model(), random_ids(1, 60)
    options = {"fbit": 2, "initial_bits": 2}
    found = teacher_forced(model, ids, {"ours": make_cache(model, **options)}, chunk=1, exact=DynamicCache())["ours"]
    here, true = decoded(model, ids, make_cache(model, **options)), decoded(model, ids, DynamicCache())
    targets = ids[0, 1:]
    assert torch.allclose(found.nll[0].float(), -here[:-1].gather(1, targets[:, None])[:, 0], atol=1e-4)
    kl = torch.nn.functional.kl_div(here[:-1], true[:-1], log_target=True, reduction="none").sum(-1)
    assert torch.allclose(found.kl[0].float(), kl, atol=1e-4)
    assert kl[40:].mean() > 1e-3
    assert found.agreed[0].tolist() == (here.argmax(-1) == true.argmax(-1))[:-1].tolist()
    assert found.hit[0].tolist() == (here.argmax(-1)[:-1] == targets).tolist()


def test_the_exact_cache_diverges_by_nothing():
    model, ids = tiny_model(), random_ids(2, 90)
    found = teacher_forced(model, ids, {"16": make_cache(model, fbit=16), "again": exact_cache(model)}, chunk=16)
    assert found["again"].kl.abs().max() == 0 and found["again"].agreed.all()
    assert (found[None].kl == 0).all()
    # The exact cache is rounded as ours would be in a bfloat16 model; ours holds float32 here.
    assert found["16"].kl.abs().max() < 1e-3


def test_one_forward_would_never_read_a_cache():
    model, ids = tiny_model(), random_ids(1, 100)
    options = {"fbit": 2, "initial_bits": 2}
    whole = teacher_forced(model, ids, {"ours": make_cache(model, **options)}, chunk=100, exact=DynamicCache())
    chunks = teacher_forced(model, ids, {"ours": make_cache(model, **options)}, chunk=20, exact=DynamicCache())
    assert whole["ours"].kl.abs().max() < 1e-5
    assert chunks["ours"].kl.mean() > 1e-3


@pytest.mark.parametrize("start", [1, 17, 32, 33, 49, 79])
def test_start_leaves_the_same_scores(start):
    model, ids = tiny_model(), random_ids(2, 80)
    options = {"fbit": 4, "initial_bits": 4}
    whole = teacher_forced(model, ids, {"x": make_cache(model, **options)}, chunk=16)["x"]
    part = teacher_forced(model, ids, {"x": make_cache(model, **options)}, chunk=16, start=start)["x"]
    for name in ("nll", "kl", "agreed", "hit"):
        assert torch.allclose(getattr(part, name).double(), getattr(whole, name)[:, start - 1 :].double(), atol=1e-6)


def test_a_prompt_goes_in_at_once():
    model, ids = tiny_model(), random_ids(1, 80)
    options = {"fbit": 2, "initial_bits": 2}
    prompt = teacher_forced(model, ids, {"x": make_cache(model, **options)}, prefill=64, chunk=8)["x"]
    # A prompt attends to itself exactly, and what follows does not.
    assert prompt.kl[0, :63].mean() < 1e-3 < prompt.kl[0, 64:].mean()
    assert prompt.usage.tokens == [64, 72, 80]


def test_a_padded_row_is_the_row_alone():
    model, pads = tiny_model(), [0, 13]
    batch = left_padded(2, 90, pads)
    caches = {"x": make_cache(model, fbit=2, initial_bits=2)}
    both = teacher_forced(model, batch["input_ids"], caches, start=60, chunk=90 - 13, mask=batch["attention_mask"])[
        "x"
    ]
    for row, pad in enumerate(pads):
        ids = batch["input_ids"][row : row + 1, pad:]
        cache = make_cache(model, fbit=2, initial_bits=2)
        alone = teacher_forced(model, ids, {"x": cache}, start=60 - pad, chunk=90 - 13 - pad)["x"]
        assert torch.allclose(both.nll[row], alone.nll[0], atol=1e-4)
        assert torch.allclose(both.kl[row], alone.kl[0], atol=1e-4)


def test_usage_counts_all_bytes_over_time():
    model = tiny_model()
    batch = left_padded(2, 64, [0, 10])
    cache = make_cache(model, fbit=4, max_length=64)
    found = teacher_forced(model, batch["input_ids"], {"x": cache}, chunk=16, mask=batch["attention_mask"])
    usage, exact = found["x"].usage, found[None].usage
    assert usage.tokens == [16, 32, 48, 64]
    assert usage.nbytes[-1] == cache.nbytes() == storage_bytes(cache.layers)
    # Three layers of two heads of 16 channels, K and V; padding stands for nothing.
    assert usage.numbers == [3 * 2 * 2 * 16 * (2 * n - 10) for n in (16, 32, 48, 64)]
    assert usage.last_bits == pytest.approx(cache.true_bits())
    assert usage.mean_bits == pytest.approx(8 * sum(usage.nbytes) / sum(usage.numbers))
    # An ordinary cache holds padding, too.
    assert exact.last_bits == pytest.approx(16 * 128 / 118)


def test_fidelity_is_the_means():
    model, ids = tiny_model(), random_ids(1, 70)
    found = compare_fidelity(model, ids, {"x": make_cache(model, fbit=2)}, chunk=16)["x"]
    forced = teacher_forced(model, ids, {"x": make_cache(model, fbit=2)}, chunk=16, exact=DynamicCache())["x"]
    assert found.tokens == 69
    assert found.kl == pytest.approx(forced.kl.mean().item())
    assert found.perplexity == pytest.approx(forced.nll.mean().exp().item())
    assert found.top1 == pytest.approx(forced.agreed.double().mean().item())


@pytest.mark.parametrize("start", [0, 10])
def test_there_must_be_something_to_predict(start):
    with pytest.raises(ValueError, match="one of 1 to 9"):
        teacher_forced(tiny_model(), random_ids(1, 10), {}, start=start)
