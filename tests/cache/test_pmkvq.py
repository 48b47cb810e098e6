# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
import copy
from dataclasses import replace

import pytest
import torch
from transformers import Cache, DynamicCache, LlamaConfig, LlavaConfig, PreTrainedConfig
from transformers.cache_utils import DynamicSlidingWindowLayer
from transformers.utils import logging

import hf_kvq
from conftest import (
    CONFIGS,
    cache_of,
    feed,
    forward,
    generate,
    kv,
    left_padded,
    make_cache,
    random_ids,
    storage_bytes,
    tiny_model,
)
from hf_kvq import BudgetExceededError, KIVICache, KVQPlan, MixKVQCache, PMKVQCache, PMKVQConfig
from simulation import Rules, Simulation, assert_equal, max_length_for


LLAMA = LlamaConfig(num_hidden_layers=3, max_position_embeddings=96)
RULES = Rules(fbit=2, max_length=96)


def test_is_a_cache_of_transformers():
    cache = PMKVQCache(LLAMA)
    assert isinstance(cache, Cache) and isinstance(cache, hf_kvq.KVQCache)
    assert len(cache) == len(cache.layers) == 3
    assert cache.get_seq_length() == 0 and not cache.is_initialized
    assert cache.is_croppable and not cache.is_compileable and cache.is_sliding == [False] * 3
    assert cache.get_mask_sizes(5, 0) == (5, 0)
    feed(cache, kv(RULES, 20))
    assert cache.is_initialized and cache.get_seq_length(2) == 20 and cache.get_mask_sizes(5, 1) == (25, 0)


@pytest.mark.parametrize("config", [None, {}, {"fbit": 2}, PMKVQConfig(fbit=2)])
def test_config_as_object_or_dict(config):
    before = copy.deepcopy(config)
    cache = PMKVQCache(LLAMA, config)
    assert cache.config == PMKVQConfig.of(config) and config == before
    if config is not None and not isinstance(config, dict):
        assert cache.config is config


@pytest.mark.parametrize(
    ("option", "argument", "wanted"), [(None, None, 96), (None, 40, 40), (60, 40, 60), (60, None, 60)]
)
def test_where_the_length_comes_from(option, argument, wanted):
    cache = PMKVQCache(LLAMA, RULES.options(max_length=option), max_length=argument)
    feed(cache, kv(RULES, 10))
    assert cache.nbytes() == 3 * replace(RULES, max_length=wanted).budget


def test_without_any_length_it_says_so():
    config = PreTrainedConfig(num_hidden_layers=2)
    with pytest.raises(ValueError, match="give max_length or budget_bytes"):
        PMKVQCache(config)
    assert PMKVQCache(config, max_length=100).layers and PMKVQCache(config, {"budget_bytes": 10**6}).layers


def test_widths_of_layers():
    cache = cache_of(RULES, 4, fbit=[2, 4, 2, 16], boundary_layers=1)
    feed(cache, kv(RULES, 96))
    assert cache.layer_bits() == [8, 4, 2, 16]
    assert [report["bits"] for report in cache.summary()] == [8, 4, 2, 16]


def test_repr_in_every_state():
    cache = PMKVQCache(LLAMA, RULES.options())
    assert "empty" in repr(cache)
    feed(cache, kv(RULES, 96, 2))
    assert "2 x 96 tokens" in repr(cache) and "3 at 2 bits" in repr(cache)
    cache.reset()
    assert "empty" in repr(cache)


def test_looking_changes_nothing():
    # Where attention is not ours (eager), new tokens are stored late: that must not show.
    data = kv(RULES, 90)
    simulation = Simulation(RULES)
    simulation.update(*data)
    for look in ("nbytes", "exact_nbytes", "true_bits", "layer_bits", "summary", "__repr__"):
        cache = PMKVQCache(LLAMA, RULES.options())
        for i in range(3):
            cache.update(*data, i)
        before = [x.clone() for x in cache.dequantize(2)]
        getattr(cache, look)()
        for mine, now, wanted in zip(before, cache.dequantize(2), simulation.visible()):
            torch.testing.assert_close(now, wanted)
            assert torch.equal(mine, now)


# --- models of other kinds -------------------------------------------------------------------------------------------


def test_composite_config_uses_the_text_model():
    config = LlavaConfig(text_config=LLAMA)
    assert len(PMKVQCache(config).layers) == 3


@pytest.mark.parametrize("cache_class", [PMKVQCache, MixKVQCache, KIVICache])
def test_model_without_full_attention_keeps_its_ordinary_cache(cache_class, monkeypatch):
    # A script that goes through models with one kind of cache goes on, and is told.
    messages, logger = [], logging.get_logger("hf_kvq.cache.base")
    logger.warning_once.__func__.cache_clear()
    monkeypatch.setattr(logger, "warning", lambda message, *a, **k: messages.append(str(message)))
    model, prompt = tiny_model("sliding"), left_padded(2, 30, [0, 13])
    wanted, cache = generate(model, 20, **prompt), cache_class(model.config)
    got = generate(model, 20, cache=cache, **prompt)
    assert torch.equal(got.logits, wanted.logits) and cache.quantized_layers == []
    assert len(messages) == 1 and "nothing to quantize" in messages[0] and "DynamicSlidingWindowLayer" in messages[0]
    assert repr(cache) == f"{cache_class.__name__}(nothing to quantize, 3 ordinary layers)"
    assert cache.layer_bits() == [16] * 3 and cache.true_bits() != cache.true_bits()
    assert cache.nbytes() == cache.exact_nbytes() == storage_bytes(cache) > 0
    assert [report["kind"] for report in cache.summary()] == ["DynamicSlidingWindowLayer"] * 3
    beams = [generate(model, 20, num_beams=3, cache=c, **prompt) for c in (None, cache_class(model.config))]
    assert torch.equal(beams[0].sequences, beams[1].sequences)


def test_mixed_model_quantizes_what_it_can():
    model = tiny_model("mixed")
    cache = make_cache(model, fbit=2, max_length=60)
    kinds = [type(layer) for layer in cache.layers]
    assert kinds[0] is kinds[2] is DynamicSlidingWindowLayer and len(cache.quantized_layers) == 1
    forward(model, cache, random_ids(2, 60))
    assert cache.layer_bits() == [16, 2, 16]
    assert [report["bits"] for report in cache.summary()] == [16, 2, 16]
    assert cache.nbytes() == storage_bytes(cache) == sum(report["nbytes"] for report in cache.summary())
    assert cache.exact_nbytes() > 0
    rules = Rules(2, 16, 16, max_length=60, window=8)
    assert cache.layers[1].nbytes() == 2 * rules.budget


def test_a_width_per_quantized_layer():
    config = CONFIGS["mixed"]()
    cache = PMKVQCache(config, RULES.options(fbit=[4]))
    assert [layer.fbit for layer in cache.quantized_layers] == [4]
    with pytest.raises(ValueError, match="lists 3 layers, but the model has 1 that are quantized, of 3"):
        PMKVQCache(config, RULES.options(fbit=[4, 4, 4]))


def test_layers_of_several_widths_share_a_byte_budget():
    fbits = (2, 8, 4)
    layers = [replace(RULES, fbit=fbit) for fbit in fbits]
    budget = sum(layer.bytes_for(150, layer.fbit) for layer in layers) + 17
    length = max_length_for(layers, budget)
    cache = PMKVQCache(LLAMA, RULES.options(fbit=list(fbits), budget_bytes=budget, max_length=None))
    feed(cache, kv(RULES, length))
    assert cache.layer_bits() == list(fbits) and length >= 150
    assert cache.nbytes() == sum(layer.bytes_for(length, layer.fbit) for layer in layers) <= budget


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"fbit": [4, 4]}, ValueError, "lists 2 layers, but the model has 3"),
        ({"fbits": 4}, ValueError, "did you mean 'fbit'"),
        ({"kernel": "triton"}, RuntimeError, "kernel='triton'"),
        ("pmkvq", TypeError, "PMKVQConfig or a dict"),
    ],
)
def test_impossible_options_fail_at_construction(options, error, message):
    with pytest.raises(error, match=message):
        PMKVQCache(LLAMA, options)


def test_too_small_a_budget_stores_nothing():
    least = 3 * RULES.bytes_for(RULES.sink + RULES.window + RULES.page, 2)
    cache = PMKVQCache(LLAMA, RULES.options(budget_bytes=least - 1, max_length=None))
    for _ in range(2):
        with pytest.raises(ValueError, match=f"budget_bytes={least - 1} is too small"):
            cache.update(*kv(RULES, 40), 0)
        assert cache.get_seq_length() == 0 and cache.nbytes() == storage_bytes(cache) == 0
    cache = PMKVQCache(LLAMA, RULES.options(budget_bytes=least, max_length=None))
    feed(cache, kv(RULES, 21))
    assert cache.nbytes() <= least


@pytest.mark.parametrize("axis", [0, 1, 3])
@pytest.mark.parametrize("side", [0, 1])
def test_shapes_that_do_not_go_on(axis, side):
    cache = PMKVQCache(LLAMA, RULES.options())
    simulation = Simulation(RULES, 2)
    feed(cache, kv(RULES, 60, 2), None, [simulation])
    data = kv(RULES, 3, 2)
    data[side] = torch.cat([data[side]] * 2, dim=axis)
    with pytest.raises(ValueError, match=rf"the new {('keys', 'values')[side]} have shape .* goes on with"):
        cache.update(*data, 0)
    for layer in cache.layers:
        assert_equal(layer, simulation)
    feed(cache, kv(RULES, 3, 2), None, [simulation])
    for layer in cache.layers:
        assert_equal(layer, simulation)


def test_keys_and_values_of_different_lengths():
    for held in (0, 20):
        cache = PMKVQCache(LLAMA, RULES.options())
        if held:
            feed(cache, kv(RULES, held))
        keys, values = kv(RULES, 5)
        with pytest.raises(ValueError, match="the new values have shape"):
            cache.update(keys, values[:, :, :4], 0)
        assert cache.get_seq_length() == held


@pytest.mark.parametrize("arch", ["llama", "mixed"])
def test_overflow_error_at_the_prompt_leaves_all_layers_empty(arch):
    model = tiny_model(arch)
    cache = make_cache(model, max_length=40, on_overflow="error")
    with pytest.raises(BudgetExceededError, match="row 0 would hold 41 tokens"):
        forward(model, cache, random_ids(2, 41))
    assert {layer.get_seq_length() for layer in cache.layers} == {0}
    ids = random_ids(2, 40)
    wanted = forward(model, make_cache(model, max_length=40), ids)
    torch.testing.assert_close(forward(model, cache, ids), wanted, rtol=0, atol=0)


@pytest.mark.parametrize("arch", ["llama", "mixed"])
def test_overflow_error_in_a_model_leaves_all_layers_alike(arch):
    model = tiny_model(arch)
    cache = make_cache(model, max_length=40, on_overflow="error")
    twin = make_cache(model, max_length=40)
    ids = random_ids(2, 60)
    for c in (cache, twin):
        forward(model, c, ids[:, :30])
    with pytest.raises(BudgetExceededError, match="row 0 would hold 41 tokens"):
        forward(model, cache, ids[:, 30:41])
    assert {layer.get_seq_length() for layer in cache.layers} == {30}
    for i, layer in enumerate(twin.layers):
        assert torch.equal(cache.layers[i].keys, layer.keys) and torch.equal(cache.layers[i].values, layer.values)
    torch.testing.assert_close(*(forward(model, c, ids[:, 30:40]) for c in (cache, twin)), rtol=0, atol=0)


# --- layers that are used in another way -----------------------------------------------------------------------------


def test_layers_may_be_filled_in_any_order_and_left_out():
    cache = PMKVQCache(LlamaConfig(num_hidden_layers=6), RULES.options())
    data = kv(RULES, 70)
    for i in (5, 0, 2):
        cache.update(*data, i)
    for i in range(6):
        assert cache.get_seq_length(i) == (70 if i in (5, 0, 2) else 0)
    for i in (5, 0, 2):
        simulation = Simulation(RULES)
        simulation.update(*data)
        cache.layers[i].settle()
        assert_equal(cache.layers[i], simulation)
    assert cache.nbytes() == 3 * RULES.budget
    cache.crop(-10)
    assert cache.get_seq_length(5) == 60
    cache.reorder_cache(torch.tensor([0, 0]))
    assert cache.dequantize(2)[0].shape[0] == 2


def test_at_most_one_layer_holds_a_prompt_exactly():
    cache = PMKVQCache(LLAMA, RULES.options())
    data = kv(RULES, 90)
    for i in range(3):
        cache.update(*[x.clone() for x in data], i)
        exact = 90 * RULES.token_bytes
        assert storage_bytes(cache) <= 3 * RULES.budget + exact
    assert cache.nbytes() == storage_bytes(cache) == 3 * RULES.budget


def test_empty_cache_allows_all_operations():
    cache = PMKVQCache(LLAMA, RULES.options())
    cache.crop(0)
    cache.crop(-5)
    cache.reorder_cache(torch.tensor([0]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0]))
    cache.reset()
    assert cache.nbytes() == 0 and copy.deepcopy(cache).get_seq_length() == 0
    feed(cache, kv(RULES, 30))
    assert cache.get_seq_length() == 30


# --- smoothed keys -------------------------------------------------------------------------------------------------


SMOOTHED = {"key_codec": "token", "transform": "lambda", "window": 8, "group_size": 16, "max_length": 60}


def smoothed_plan(model, layers=3, scale=None, **options):
    if scale is None:
        scale = torch.rand(layers, 2, 16, generator=torch.Generator().manual_seed(0)) * 8 + 0.1
    return KVQPlan.of(model, PMKVQConfig(**{**SMOOTHED, **options}), tensors={"key_scale": scale})


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("fbit", [8, 2])
def test_smoothed_keys_are_attended_to_in_their_own_size(attention, fbit):
    model = tiny_model("qwen3", attention)
    cache = PMKVQCache(model.config, {"plan": smoothed_plan(model, fbit=fbit)})
    ids = random_ids(2, 70)
    forward(model, cache, ids[:, :60])
    assert cache.layer_bits() == [fbit] * 3
    stock = DynamicCache(config=model.config)
    for i in range(3):
        stock.update(*cache.dequantize(i), i)
    got, wanted = forward(model, cache, ids[:, 60:]), forward(model, stock, ids[:, 60:])
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)


def test_smoothing_loses_nothing_before_the_budget_binds():
    model, ids = tiny_model(), random_ids(1, 60)
    cache = PMKVQCache(model.config, {"plan": smoothed_plan(model, fbit=16)})
    stock = DynamicCache(config=model.config)
    forward(model, cache, ids), forward(model, stock, ids)
    for i in range(3):
        keys, values = cache.dequantize(i)
        assert torch.equal(keys, stock.layers[i].keys) and torch.equal(values, stock.layers[i].values)


def test_the_scale_of_all_factors_does_not_matter():
    model, ids = tiny_model(), random_ids(1, 60)
    scale = torch.rand(3, 2, 16, generator=torch.Generator().manual_seed(1)) + 0.5
    caches = [PMKVQCache(model.config, {"plan": smoothed_plan(model, scale=x)}) for x in (scale, 4 * scale)]
    for cache in caches:
        forward(model, cache, ids)
    for i in range(3):
        torch.testing.assert_close(*(cache.dequantize(i)[0] for cache in caches))


def test_smoothing_needs_factors_and_keys_per_token():
    model = tiny_model()
    with pytest.raises(ValueError, match="needs the factors of a plan"):
        PMKVQCache(model.config, SMOOTHED)
    with pytest.raises(ValueError, match="key_codec='token'"):
        PMKVQConfig(transform="lambda")
    plan = smoothed_plan(model)
    with pytest.raises(ValueError, match="transform='none'"):
        PMKVQCache(model.config, {"plan": plan, "key_codec": "channel"})
    assert PMKVQCache(model.config, {"plan": plan, "fbit": 2}).config.transform == "lambda"
    off = PMKVQCache(model.config, {"plan": plan, "transform": "none"})
    forward(model, off, random_ids(1, 60))
    assert off.layers[0].layout.keys.transform is None


def test_factors_of_another_number_of_heads_are_refused():
    cache = PMKVQCache(tiny_model().config, {"plan": smoothed_plan(tiny_model())})
    with pytest.raises(ValueError, match=r"\(2, 16\) factors.*\(3, 16\)"):
        cache.update(torch.zeros(1, 3, 20, 16), torch.zeros(1, 3, 20, 16), 0)
