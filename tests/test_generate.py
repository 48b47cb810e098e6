# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Whole models: what comes out equals the stock cache where nothing is lost, and the simulation where something is."""

import copy

import pytest
import torch
from transformers import DynamicCache

from conftest import (
    PAD,
    forward,
    generate,
    left_padded,
    make_cache,
    random_ids,
    storage_bytes,
    tiny_model,
)
from hf_kvq import BudgetExceededError
from hf_kvq.registration import cache_argument
from simulation import Rules, Simulation, assert_equal


# Nothing is ever quantized, though tokens do move into pages; or nothing ever leaves the window.
LOSSLESS = {"paged": {"fbit": 16}, "window": {"fbit": 2, "window": 500}}


def assert_same_logits(got, wanted, tolerance=1e-4):
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


def recorded(cache):
    """Let a cache note the K and V each of its layers is given; returns those notes."""
    notes = [[] for _ in cache.layers]
    for layer, note in zip(cache.layers, notes):

        def update(keys, values, *args, _original=layer.update, _note=note, **kwargs):
            _note.append((keys.clone(), values.clone()))
            return _original(keys, values, *args, **kwargs)

        layer.update = update
    return notes


def stock_copy(cache, model):
    """An ordinary cache that holds what a quantized cache stands for."""
    copied = DynamicCache(config=model.config)
    cache.nbytes()
    for i in range(len(cache.layers)):
        copied.update(*cache.dequantize(i), i)
    return copied


# --- lossless --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("arch", ["llama", "gpt_neox", "mixed"])
def test_lossless_equals_the_stock_cache(arch, attention):
    model = tiny_model(arch, attention)
    prompts = {
        "plain": {"inputs": random_ids(2, 40)},
        "left padded": left_padded(3, 40, [0, 7, 33]),
        "in chunks": {"inputs": random_ids(1, 41), "prefill_chunk_size": 16},
        "padded, in chunks": {**left_padded(2, 40, [21, 0]), "prefill_chunk_size": 7},
        "one token": {"inputs": random_ids(1, 1)},
    }
    for name, prompt in prompts.items():
        wanted = generate(model, 27, **prompt)
        for options in LOSSLESS.values():
            cache = make_cache(model, **options)
            got = generate(model, 27, cache=cache, **prompt)
            assert torch.equal(got.sequences, wanted.sequences), name
            assert_same_logits(got.logits, wanted.logits)
            packed = sum(layer.states[0].pages for layer in cache.quantized_layers)
            assert bool(packed) == ("window" not in options)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_right_padding_behaves_as_with_the_stock_cache(attention):
    model = tiny_model("llama", attention)
    mask = (torch.arange(30) < torch.tensor([30, 22, 5])[:, None]).long()
    prompt = {"input_ids": random_ids(3, 30) * mask + PAD * (1 - mask), "attention_mask": mask}
    wanted = generate(model, 30, **prompt)
    for options in LOSSLESS.values():
        got = generate(model, 30, cache=make_cache(model, **options), **prompt)
        assert torch.equal(got.sequences, wanted.sequences)
        assert_same_logits(got.logits, wanted.logits)


@pytest.mark.parametrize("options", LOSSLESS.values(), ids=LOSSLESS)
def test_several_turns_on_one_cache(options):
    model, ids = tiny_model(), random_ids(2, 3)
    caches = [DynamicCache(config=model.config), make_cache(model, **options)]
    for turn, new in enumerate((0, 1, 17, 2, 30)):
        ids = torch.cat([ids, random_ids(2, new, seed=turn)], dim=1)
        outs = [generate(model, 11, inputs=ids, cache=cache) for cache in caches]
        assert torch.equal(outs[0].sequences, outs[1].sequences)
        assert_same_logits(outs[1].logits, outs[0].logits)
        assert caches[0].get_seq_length() == caches[1].get_seq_length()
        ids = outs[0].sequences
    assert caches[1].get_seq_length() == 107


@pytest.mark.parametrize("options", LOSSLESS.values(), ids=LOSSLESS)
def test_padding_in_a_later_turn(options):
    model = tiny_model()
    caches = [DynamicCache(config=model.config), make_cache(model, **options)]
    ids, mask = random_ids(3, 60), torch.ones(3, 60, dtype=torch.long)
    mask[0, :6] = mask[1, 30:41] = mask[2, 55:58] = 0
    for start, stop in ((0, 20), (20, 29), (29, 50), (50, 51), (51, 60)):
        wanted, got = (forward(model, cache, ids[:, start:stop], mask[:, :stop]) for cache in caches)
        tokens = mask[:, start:stop].bool()
        assert_same_logits(got[tokens], wanted[tokens])


def test_embeddings_instead_of_ids():
    model = tiny_model()
    ids = random_ids(2, 50)
    embeddings = model.get_input_embeddings()(ids)
    for options in LOSSLESS.values():
        caches = [DynamicCache(config=model.config), make_cache(model, **options)]
        a, b = (generate(model, 20, inputs_embeds=embeddings[:, :30], cache=cache) for cache in caches)
        assert torch.equal(a.sequences, b.sequences)
        name = cache_argument(model)
        a, b = (model(inputs_embeds=embeddings[:, 30:], **{name: cache}).logits for cache in caches)
        assert_same_logits(b, a)


@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_masks_of_four_dimensions(kind):
    # Two prompts packed into one row, as block-diagonal masks do.
    model = tiny_model()
    visible = torch.ones(40, 40).tril().bool()
    visible[25:, :10] = False
    mask = visible if kind == "bool" else torch.zeros(40, 40).masked_fill(~visible, torch.finfo(torch.float32).min)
    ids = random_ids(1, 40)
    caches = [DynamicCache(config=model.config), make_cache(model, fbit=16)]
    for start, stop in ((0, 27), (27, 28), (28, 40)):
        part = mask[None, None, start:stop, :stop]
        wanted, got = (
            model(input_ids=ids[:, start:stop], attention_mask=part, **{cache_argument(model): c}).logits
            for c in caches
        )
        assert_same_logits(got, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_close_as_it_can_be(dtype):
    model = tiny_model(dtype=dtype)
    ids = random_ids(2, 80)
    wanted = forward(model, DynamicCache(config=model.config), ids)
    for fbit, bound in ((16, 0.1), (8, 0.2), (4, 1.0), (2, 3.0)):
        cache = make_cache(model, fbit=fbit, initial_bits=fbit)
        got = torch.cat([forward(model, cache, ids[:, i : i + 5]) for i in range(0, 80, 5)], dim=1)
        assert got.dtype == dtype and bool(got.isfinite().all())
        assert float((got - wanted).float().abs().max()) < bound
        assert cache.dequantize(0)[0].dtype == dtype


# --- quantized -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("arch", ["llama", "qwen3", "gpt_neox"])
@pytest.mark.parametrize("channel", [True, False])
def test_models_fill_the_cache_as_the_simulation_does(arch, attention, channel):
    model = tiny_model(arch, attention)
    rules = Rules(4 if arch == "gpt_neox" else 2, 16, 16, fbit=2, max_length=120, window=8, channel=channel)
    cache = make_cache(model, **rules.options())
    notes = recorded(cache)
    prompt = left_padded(3, 60, [0, 7, 40])
    generate(model, 50, cache=cache, prefill_chunk_size=25, **prompt)
    assert cache.nbytes() == 3 * 3 * rules.budget
    columns = cache.get_seq_length()
    assert columns == 109
    valid = torch.cat([prompt["attention_mask"].bool(), torch.ones(3, 49, dtype=torch.bool)], dim=1)
    for layer, note in zip(cache.layers, notes):
        assert len(note) == 3 + 49
        simulation = Simulation(rules, 3)
        simulation.update(*(torch.cat(side, dim=2) for side in zip(*note)), valid)
        assert_equal(layer, simulation)
        assert layer.states[0].bits == 2 and layer.states[2].bits > 2


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("fbit", [8, 4, 2])
@pytest.mark.parametrize("more", [{}, {"key_codec": "token", "group_size": 12}, {"transform": "hadamard"}], ids=str)
def test_attention_over_packed_tokens_equals_attention_over_their_values(attention, fbit, more):
    model = tiny_model("qwen2", attention)
    ids, mask = random_ids(3, 90), torch.ones(3, 90, dtype=torch.long)
    mask[1, :20] = mask[2, 30:50] = 0
    cache, start = make_cache(model, fbit=fbit, initial_bits=fbit, **more), 0
    for stop in (50, 51, 52, 70, 90):
        stock = stock_copy(cache, model) if start else DynamicCache(config=model.config)
        wanted, got = (forward(model, c, ids[:, start:stop], mask[:, :stop]) for c in (stock, cache))
        tokens = mask[:, start:stop].bool()
        assert_same_logits(got[tokens], wanted[tokens])
        assert bool(got.isfinite().all())
        start = stop
    assert cache.layer_bits() == [fbit] * 3


def test_error_grows_as_widths_shrink():
    # And it is there at all: tokens that are read back are really quantized.
    model = tiny_model()
    ids = random_ids(2, 120)
    wanted = forward(model, DynamicCache(config=model.config), ids).log_softmax(-1)
    divergences = []
    for fbit in (16, 8, 4, 2):
        cache = make_cache(model, fbit=fbit, initial_bits=fbit)
        got = torch.cat([forward(model, cache, ids[:, i : i + 8]) for i in range(0, 120, 8)], dim=1).log_softmax(-1)
        divergences.append(float((wanted.exp() * (wanted - got)).sum(-1).mean()))
    assert divergences[0] < 1e-6 < divergences[1] < divergences[2] / 3 < divergences[3] / 9
    assert divergences[3] < 1


def test_no_loss_before_the_budget_binds():
    model = tiny_model()
    ids = random_ids(1, 120)
    caches = [DynamicCache(config=model.config), make_cache(model, fbit=4, max_length=120)]
    lossless = 0
    for i in range(0, 120, 4):
        wanted, got = (forward(model, cache, ids[:, i : i + 4]) for cache in caches)
        assert_same_logits(got, wanted, 1e-4)
        if caches[1].layer_bits() != [16] * 3:
            break
        lossless += caches[1].layers[0].states[0].pages > 0
        for layer in range(3):
            keys, values = caches[1].dequantize(layer)
            assert_same_logits(keys, caches[0].layers[layer].keys)
            assert_same_logits(values, caches[0].layers[layer].values)
    assert lossless > 2


# --- rows of a padded batch ------------------------------------------------------------------------------------------


def huge_padding(arch: str, attention: str):
    """A model in which padding that leaks anywhere cannot go unnoticed."""
    model = copy.deepcopy(tiny_model(arch, attention)).double()
    model.get_input_embeddings().weight[PAD] = 1e4
    return model


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("arch", ["llama", "gpt_neox"])
@pytest.mark.parametrize("fbit", [16, 4, 2])
def test_left_padded_rows_equal_rows_alone_in_generate(arch, attention, fbit):
    model = huge_padding(arch, attention)
    pads = [0, 11, 36]
    prompt = left_padded(3, 40, pads)
    options = {"fbit": fbit, "window": 8, "group_size": 16, "max_length": 72}
    request = {"cache_implementation": "pmkvq", "cache_config": options}
    batch = generate(model, 33, **request, **prompt)
    assert batch.cache.layers[0].states[0].bits == fbit
    for row, pad in enumerate(pads):
        alone = generate(model, 33, inputs=prompt["input_ids"][row : row + 1, pad:], **request)
        assert torch.equal(batch.sequences[row, pad:], alone.sequences[0])
        assert batch.cache.layer_bits()[0] <= alone.cache.layer_bits()[0]
        assert_same_logits(batch.logits[row : row + 1], alone.logits, 1e-5)
        for mine, own in zip(batch.cache.layers, alone.cache.layers):
            assert mine.states[row] == own.states[0]
            assert_same_logits(mine.keys[row : row + 1, :, pad:], own.keys, 1e-5)
            assert_same_logits(mine.values[row : row + 1, :, pad:], own.values, 1e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("fbit", [16, 2])
@pytest.mark.parametrize("where", ["left", "right", "second chunk", "everywhere"])
def test_padded_rows_equal_rows_alone_in_forward(attention, fbit, where):
    model = huge_padding("llama", attention)
    cuts, mask = [0, 33, 34, 60, 80], torch.ones(3, 80, dtype=torch.long)
    if where == "everywhere":
        mask = (torch.rand(3, 80, generator=torch.Generator().manual_seed(0)) < 0.7).long()
    else:
        low, high = {"left": (0, 20), "right": (68, 80), "second chunk": (36, 50)}[where]
        mask[1, low:high] = 0
        mask[2, (low + high) // 2 : high] = 0
    ids = random_ids(3, 80) * mask + PAD * (1 - mask)
    options = {"fbit": fbit, "max_length": 80}
    cache, alone = make_cache(model, **options), [make_cache(model, **options) for _ in range(3)]
    for start, stop in zip(cuts, cuts[1:]):
        logits = forward(model, cache, ids[:, start:stop], mask[:, :stop])
        for row in range(3):
            tokens = mask[row, start:stop].bool()
            if tokens.any():
                own = forward(model, alone[row], ids[row : row + 1, start:stop][:, tokens])
                assert_same_logits(logits[row][tokens], own[0], 1e-5)
    for row in range(3):
        for mine, own in zip(cache.layers, alone[row].layers):
            mine.settle(), own.settle()
            assert mine.states[row] == own.states[0]
            tokens = mask[row].bool()
            assert_same_logits(mine.keys[row][:, tokens], own.keys[0], 1e-5)
            assert_same_logits(mine.values[row][:, tokens], own.values[0], 1e-5)


def test_rows_that_leave_do_not_change_the_others():
    model = huge_padding("llama", "sdpa")
    prompt = left_padded(3, 40, [0, 11, 30])
    ids, mask = prompt["input_ids"], prompt["attention_mask"]
    more, longer = random_ids(3, 30, seed=1), torch.cat([mask, torch.ones(3, 30, dtype=torch.long)], dim=1)
    whole, part = make_cache(model, fbit=2, max_length=70), make_cache(model, fbit=2, max_length=70)
    forward(model, whole, ids, mask)
    whole.batch_select_indices(torch.tensor([1, 2]))
    forward(model, part, ids[1:], mask[1:])
    for i in range(30):
        a, b = (forward(model, c, more[1:, i : i + 1], longer[1:, : 41 + i]) for c in (whole, part))
        assert_same_logits(a, b, 1e-6)


# --- budgets ---------------------------------------------------------------------------------------------------------


def test_bytes_stay_within_the_budget_of_a_run():
    model = tiny_model()
    rules = Rules(2, 16, 16, fbit=2, max_length=150, window=8)
    cache = make_cache(model, **rules.options())
    ids, widths = random_ids(2, 150), set()
    for i in range(150):
        forward(model, cache, ids[:, i : i + 1])
        # Attention has stored the tokens already: no layer holds them twice.
        assert storage_bytes(cache) == cache.nbytes() == 3 * 2 * rules.budget
        assert cache.layer_bits() == [rules.width(rules.pages(i + 1))] * 3
        widths.add(cache.layer_bits()[0])
    assert widths == {16, 8, 4, 2}


def test_turns_beyond_the_budget_grow_and_warn_once(warnings_log):
    model, ids = tiny_model(), random_ids(1, 5)
    cache = make_cache(model, fbit=2, max_length=50)
    for turn in range(12):
        out = generate(model, 11, inputs=ids, cache=cache)
        ids = torch.cat([out.sequences, random_ids(1, 3, seed=turn)], dim=1)
        assert bool(out.logits.isfinite().all())
    assert cache.get_seq_length() > 150 and cache.layer_bits() == [2] * 3
    assert len(warnings_log) == 1


def test_an_error_in_generate_loses_nothing():
    model, ids = tiny_model(), random_ids(2, 30)
    cache, twin = (make_cache(model, fbit=16, max_length=40, on_overflow="error") for _ in range(2))
    with pytest.raises(BudgetExceededError, match="row 0 would hold 41 tokens"):
        generate(model, 30, inputs=ids, cache=cache)
    assert {cache.get_seq_length(i) for i in range(3)} == {40}
    cache.crop(-10)
    forward(model, twin, ids)
    more = random_ids(2, 5, seed=1)
    assert_same_logits(forward(model, cache, more), forward(model, twin, more))
    assert [layer.states for layer in cache.layers] == [layer.states for layer in twin.layers]


# --- copies, prefixes and modes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("fbit", [16, 2])
def test_a_prefix_can_be_used_again(fbit):
    model, prefix = tiny_model(), random_ids(1, 50)
    stored = make_cache(model, fbit=fbit, max_length=100)
    forward(model, stored, prefix)
    size, length = stored.nbytes(), stored.get_seq_length()
    outs = []
    for _ in range(3):
        ids = torch.cat([prefix, random_ids(1, 4, seed=7)], dim=1)
        outs.append(generate(model, 20, inputs=ids, cache=copy.deepcopy(stored)))
        assert (stored.nbytes(), stored.get_seq_length()) == (size, length)
    assert torch.equal(outs[0].logits, outs[1].logits) and torch.equal(outs[0].logits, outs[2].logits)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.enable_grad, torch.no_grad])
def test_modes_can_change_between_calls(attention, mode):
    model, ids = copy.deepcopy(tiny_model("llama", attention)).requires_grad_(True), random_ids(2, 100)
    logits = []
    for modes in ((torch.no_grad,) * 4, (mode, torch.enable_grad, mode, torch.no_grad)):
        cache = make_cache(model, fbit=2, max_length=100)
        for i, enter in enumerate(modes):
            with enter():
                out = forward(model, cache, ids[:, 25 * i : 25 * i + 25])
            cache = copy.deepcopy(cache)
        logits.append(out.detach().clone())
        assert not any(x.requires_grad for x in cache.dequantize(0))
    assert_same_logits(logits[1], logits[0], 1e-6)


def test_broken_numbers_stay_in_their_row():
    model, ids = tiny_model(), random_ids(3, 60)
    caches = [make_cache(model, fbit=4, max_length=80) for _ in range(2)]
    for cache in caches:
        forward(model, cache, ids)
    for layer in caches[1].layers:
        # As if something had gone wrong in the middle row.
        layer.recent[0][1] = float("nan")
    more = random_ids(3, 5, seed=1)
    good, bad = (forward(model, cache, more) for cache in caches)
    assert not bool(bad[1].isfinite().any())
    assert torch.equal(good[[0, 2]], bad[[0, 2]])


# --- the real model --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("options", LOSSLESS.values(), ids=LOSSLESS)
def test_real_model_lossless(real_model, options):
    model, tokenizer = real_model
    tokenizer.padding_side = "left"
    texts = [
        "The capital of France is",
        "Once upon a time, in a small village by the sea, there lived a fisherman who",
    ]
    prompt = tokenizer(texts, return_tensors="pt", padding=True)
    wanted = generate(model, 40, **prompt)
    cache = make_cache(model, **options)
    got = generate(model, 40, cache=cache, **prompt)
    assert torch.equal(got.sequences, wanted.sequences)
    assert_same_logits(got.logits, wanted.logits, 2e-4)


@pytest.mark.slow
def test_real_model_keeps_its_wits(real_model):
    model, tokenizer = real_model
    text = " ".join(f"Line {i}: the number of apples in box {i} is {i * 37 % 101}." for i in range(12))
    ids = tokenizer(text, return_tensors="pt").input_ids
    exact = forward(model, DynamicCache(config=model.config), ids).log_softmax(-1)
    divergences = {}
    for fbit in (16, 8, 4, 2):
        cache = make_cache(model, fbit=fbit, initial_bits=fbit, window=32, group_size=32, max_length=ids.shape[1])
        got = [forward(model, cache, ids[:, i : i + 32]) for i in range(0, ids.shape[1], 32)]
        got = torch.cat(got, dim=1).log_softmax(-1)
        divergences[fbit] = float((exact.exp() * (exact - got)).sum(-1).mean())
    assert divergences[16] < 1e-6
    assert divergences[8] < 1e-3 and divergences[4] < 0.2
    assert divergences[8] < divergences[4] < divergences[2]
