# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Whole models on the query-aware cache and on KIVI, against the stock cache and the simulation."""

import copy
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache, LlamaConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging

import hf_kvq
from conftest import (
    PAD,
    forward,
    generate,
    kv,
    left_padded,
    random_ids,
    storage_bytes,
    tiny_model,
)
from hf_kvq import KIVICache, MixKVQCache
from simulation_mixkvq import Rules, Simulation, assert_equal, packed, queries


INF = float("inf")
ARCHS = ("llama", "qwen2", "qwen3", "phi3", "gpt_neox")
# The tiny models have 2 KV heads of 16 channels, GPT-NeoX 4.
RULES = Rules(2, 2, 16, 16, residual=32, group=20, sink=4, target_bits=4)
SMALL = {"residual": 16, "group_size": 16, "sink_tokens": 4}
LONG = {"residual": 512}
CACHES = {"mixkvq": MixKVQCache, "kivi": KIVICache}


def rules_of(arch: str, **more) -> Rules:
    return replace(RULES, **more, **({"heads": 4, "ratio": 1} if arch == "gpt_neox" else {}))


def cache_of(model, rules: Rules):
    return (MixKVQCache if rules.key_bits is None else KIVICache)(model.config, rules.options())


def assert_same_logits(got, wanted, tolerance=1e-4):
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


@pytest.fixture
def asked(monkeypatch) -> dict[int, list[torch.Tensor]]:
    """The queries that each layer gives to sdpa, call by call."""
    notes, original = defaultdict(list), ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attention(module, query, *args, **kwargs):
        notes[module.layer_idx].append(query.clone())
        return original(module, query, *args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", attention)
    return notes


@pytest.fixture
def warnings_log(monkeypatch) -> list[str]:
    """What the query-aware layer warns about, "once" warnings anew in each test."""
    messages: list[str] = []
    logger = logging.get_logger("hf_kvq.cache.tiered")
    logger.warning_once.__func__.cache_clear()
    monkeypatch.setattr(logger, "warning", lambda message, *a, **k: messages.append(str(message)))
    return messages


def recorded(cache) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Let a cache note the K and V each of its layers is given; returns those notes."""
    notes = [[] for _ in cache.layers]
    for layer, note in zip(cache.layers, notes):

        def update(keys, values, *args, _original=layer.update, _note=note, **kwargs):
            _note.append((keys.clone(), values.clone()))
            return _original(keys, values, *args, **kwargs)

        layer.update = update
    return notes


# --- against the simulation -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("more", [{}, {"key_bits": 2}, {"importance_window": "page"}], ids=["mixkvq", "kivi", "page"])
def test_models_fill_the_cache_as_the_simulation_does(arch, more, asked):
    # Queries of the prompt count, chunk by chunk, and those of padding do not.
    model, rules = tiny_model(arch), rules_of(arch, **more)
    cache = cache_of(model, rules)
    notes = recorded(cache)
    prompt = left_padded(3, 60, [0, 7, 40])
    generate(model, 50, cache=cache, prefill_chunk_size=25, **prompt)
    assert cache.get_seq_length() == 109 and cache.nbytes() == storage_bytes(cache)
    valid = torch.cat([prompt["attention_mask"].bool(), torch.ones(3, 49, dtype=torch.bool)], dim=1)
    simulations = []
    for i, (layer, note) in enumerate(zip(cache.layers, notes)):
        assert len(note) == len(asked[i]) == 3 + 49
        simulations.append(Simulation(rules, 3))
        keys, values = (torch.cat(side, dim=2) for side in zip(*note))
        simulations[-1].update(keys, values, torch.cat(asked[i], dim=2), valid)
        assert_equal(layer, simulations[-1])
        assert [state.pages for state in layer.states] == [3, 3, 2]
    if rules.key_bits is None:
        if rules.importance_window == "all":
            assert [layer.query_count for layer in cache.layers] == [[109, 102, 69]] * 3
        keys = sum(simulation.nominal_bits() for simulation in simulations) / 3
        assert cache.nominal_bits() == pytest.approx((keys, 2, (keys + 2) / 2), rel=1e-12)
        assert 3 < keys <= 4


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "more", [{}, {"tau": (3.0, 0.5), "value_bits": 4}, {"key_bits": 4}], ids=["target", "tau", "kivi"]
)
def test_logits_are_those_of_the_simulated_keys_and_values(arch, more, asked):
    # An ordinary cache that is filled anew, before each forward, with what the simulation says can be seen.
    model, rules = tiny_model(arch), rules_of(arch, **more)
    cache, simulations = cache_of(model, rules), [Simulation(rules, 3) for _ in range(3)]
    notes = recorded(cache)
    ids, mask = random_ids(3, 130), torch.ones(3, 130, dtype=torch.long)
    mask[1, :20] = mask[2, 30:50] = 0
    start, distance = 0, []
    exact = DynamicCache(config=model.config)
    for stop in (50, 51, 52, 75, 76, 100, 101, 130):
        stock = DynamicCache(config=model.config)
        if start:
            for i, simulation in enumerate(simulations):
                stock.update(*simulation.visible(), i)
        wanted, other = (forward(model, c, ids[:, start:stop], mask[:, :stop]) for c in (stock, exact))
        asked.clear()
        got = forward(model, cache, ids[:, start:stop], mask[:, :stop])
        tokens = mask[:, start:stop].bool()
        assert_same_logits(got[tokens], wanted[tokens])
        distance.append(float((got - other)[tokens].abs().max()))
        for i, simulation in enumerate(simulations):
            simulation.update(*notes[i][-1], asked[i][-1], tokens)
        start = stop
    for layer, simulation in zip(cache.layers, simulations):
        layer.settle()
        assert_equal(layer, simulation)
    assert distance[0] == 0 and min(distance[1:]) > 1e-2


# --- lossless -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("arch", ["llama", "gpt_neox", "mixed"])
def test_residual_longer_than_the_run_is_lossless(arch, name):
    model = tiny_model(arch)
    prompts = {
        "one token": {"inputs": random_ids(1, 1)},
        "padded, in chunks": {**left_padded(3, 40, [21, 0, 33]), "prefill_chunk_size": 7},
    }
    for prompt in prompts.values():
        wanted = generate(model, 20, **prompt)
        got = generate(model, 20, cache_implementation=name, cache_config=LONG, **prompt)
        assert type(got.cache) is CACHES[name]
        assert torch.equal(got.sequences, wanted.sequences)
        assert_same_logits(got.logits, wanted.logits)


def test_beams_carry_their_own_statistics():
    # The cache is reordered at each step, and yet a row holds what its tokens, fed alone, would have left.
    model = tiny_model()
    search = {"num_beams": 3, "num_return_sequences": 3, "inputs": random_ids(1, 20)}
    out = generate(model, 40, **search, cache_implementation="mixkvq", cache_config=SMALL)
    layer, alone = out.cache.layers[0], []
    for sequence in out.sequences:
        cache = MixKVQCache(model.config, SMALL)
        forward(model, cache, sequence[None, :-1])
        cache.nbytes()
        alone.append((cache.layers[0].query_sum[0].double(), packed(cache.layers[0], 0)))
    assert layer.query_count == [59] * 3 and len({x.sum().item() for x, _ in alone}) == 3
    for row in range(3):
        same = [i for i, (x, _) in enumerate(alone) if torch.allclose(layer.query_sum[row].double(), x, rtol=1e-5)]
        assert len(same) == 1
        got, wanted = packed(layer, row), alone[same[0]][1]
        assert all(torch.equal(got[name], wanted[name]) for name in ("counts", "low_channel", "exact_channel"))


def test_as_a_backend_of_the_quantized_cache():
    model, ids = tiny_model(), random_ids(1, 60)
    for name, kind in CACHES.items():
        outs = [
            generate(model, 20, inputs=ids, cache_implementation=name, cache_config=SMALL),
            generate(model, 20, inputs=ids, cache_implementation="quantized", cache_config={"backend": name, **SMALL}),
            generate(model, 20, inputs=ids, cache=kind(model.config, SMALL)),
            generate(model, 20, inputs=ids, cache_implementation=name, cache_config=kind(model.config, SMALL).config),
        ]
        assert all(type(out.cache) is kind for out in outs)
        assert all(torch.equal(out.logits, outs[0].logits) for out in outs)
        # And by default, with 32 or no sinks and pages of 128.
        cache = generate(model, 4, inputs=ids, cache_implementation=name).cache
        assert cache.layers[0].page_tokens == 128 and cache.layers[0].sink_tokens == (32 if name == "mixkvq" else 0)


def test_without_promotions_mixkvq_answers_as_kivi():
    model, prompt = tiny_model(), left_padded(2, 60, [0, 13])
    off = {"tau_bf16": INF, "tau_uint4": INF}
    mixed = generate(model, 30, cache_implementation="mixkvq", cache_config={**SMALL, **off}, **prompt)
    kivi = generate(model, 30, cache_implementation="kivi", cache_config=SMALL, **prompt)
    assert torch.equal(mixed.logits, kivi.logits) and kivi.cache.layers[0].states[0].pages == 5


def test_several_turns_on_one_cache():
    model, ids = tiny_model(), random_ids(2, 3)
    caches = [DynamicCache(config=model.config), MixKVQCache(model.config, LONG), KIVICache(model.config, LONG)]
    for turn, new in enumerate((0, 1, 17, 30)):
        ids = torch.cat([ids, random_ids(2, new, seed=turn)], dim=1)
        outs = [generate(model, 11, inputs=ids, cache=cache) for cache in caches]
        for out in outs[1:]:
            assert torch.equal(out.sequences, outs[0].sequences)
            assert_same_logits(out.logits, outs[0].logits)
        ids = outs[0].sequences


def test_error_shrinks_as_bits_grow():
    model, ids = tiny_model(), random_ids(2, 120)
    wanted = forward(model, DynamicCache(config=model.config), ids).log_softmax(-1)
    divergences = []
    for target in (2, 3, 5, 16):
        cache = MixKVQCache(model.config, {**SMALL, "target_bits": target, "value_bits": 8})
        got = torch.cat([forward(model, cache, ids[:, i : i + 8]) for i in range(0, 120, 8)], dim=1).log_softmax(-1)
        divergences.append(float((wanted.exp() * (wanted - got)).sum(-1).mean()))
        assert 2 <= cache.nominal_bits().keys <= target
    assert 1e-6 < divergences[3] < divergences[2] < divergences[1] < divergences[0] < 1


# --- queries --------------------------------------------------------------------------------------------------------


def test_sdpa_shows_its_queries_without_a_warning(warnings_log):
    model, ids = tiny_model(), random_ids(2, 60)
    cache = generate(model, 20, inputs=ids, cache_implementation="mixkvq", cache_config=SMALL).cache
    assert [layer.query_count for layer in cache.layers] == [[79, 79]] * 3
    cache = MixKVQCache(model.config, SMALL)
    for start in range(0, 60, 20):
        forward(model, cache, ids[:, start : start + 20])
    cache.nbytes()
    assert [layer.query_count for layer in cache.layers] == [[60, 60]] * 3
    assert not warnings_log


def test_eager_attention_shows_its_queries_too(warnings_log):
    prompt, caches = left_padded(2, 60, [0, 7]), []
    for attention in ("sdpa", "eager"):
        model = tiny_model("llama", attention)
        caches.append(MixKVQCache(model.config, SMALL))
        forward(model, caches[-1], prompt["input_ids"], prompt["attention_mask"])
    for sdpa, eager in zip(*(cache.layers for cache in caches)):
        assert eager.query_count == sdpa.query_count == [60, 53]
        torch.testing.assert_close(eager.query_sum.double(), sdpa.query_sum.double(), rtol=1e-4, atol=0)
    # What goes into the first layer does not depend on attention.
    for row in range(2):
        a, b = (packed(cache.layers[0], row) for cache in caches)
        assert all(torch.equal(a[name], b[name]) for name in a)
    assert not warnings_log


def test_a_model_that_hides_its_queries_ranks_by_difficulty_and_warns_once(warnings_log):
    # BLOOM computes attention by itself.
    model, ids = tiny_model("bloom"), random_ids(2, 60)
    caches = {}
    for importance in ("none", "query"):
        assert not warnings_log
        options = {**SMALL, "importance": importance}
        caches[importance] = generate(model, 20, inputs=ids, cache_implementation="mixkvq", cache_config=options).cache
    generate(model, 4, inputs=ids, cache_implementation="mixkvq", cache_config=SMALL)
    assert len(warnings_log) == 1 and "quantization difficulty alone" in warnings_log[0]
    for none, query in zip(caches["none"].layers, caches["query"].layers):
        assert query.query_count == [0, 0]
        for row in range(2):
            a, b = packed(none, row), packed(query, row)
            assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("name", CACHES)
def test_no_warning_where_queries_do_not_matter(name, warnings_log):
    options = {**SMALL, **({"importance": "none"} if name == "mixkvq" else {})}
    generate(tiny_model("bloom"), 20, inputs=random_ids(1, 40), cache_implementation=name, cache_config=options)
    assert not warnings_log


def test_a_handle_that_is_used_again_does_not_count_twice():
    model, rules = tiny_model(), RULES
    cache, simulation = MixKVQCache(LlamaConfig(num_hidden_layers=1), rules.options()), Simulation(rules)
    module = model.model.layers[0].self_attn
    for tokens, seed in ((50, 0), (1, 1), (30, 2)):
        data = [*kv(rules, tokens, seed=seed), queries(rules, tokens, seed=seed)]
        handles = cache.update(*data[:2], 0)
        simulation.update(*data)
        for scale in (1, 100, 1):
            ALL_ATTENTION_FUNCTIONS["sdpa"](module, data[2] * scale, *handles, None, scaling=0.25)
            assert_equal(cache.layers[0], simulation)


def test_a_stale_handle_does_not_count_at_all():
    # It is refused, and what it asked is not taken for what the newer tokens ask.
    model = tiny_model()
    cache, simulation = MixKVQCache(LlamaConfig(num_hidden_layers=1), RULES.options()), Simulation(RULES)
    old, new = ([*kv(RULES, n, seed=n), queries(RULES, n, seed=n)] for n in (1, 3))
    stale = cache.update(*old[:2], 0)
    cache.update(*new[:2], 0)
    with pytest.raises(RuntimeError, match="has changed since"):
        ALL_ATTENTION_FUNCTIONS["sdpa"](model.model.layers[0].self_attn, old[2], *stale, None, scaling=0.25)
    cache.layers[0].settle()
    for data in (old, new):
        simulation.update(*data[:2])
    assert_equal(cache.layers[0], simulation)


def test_layers_that_share_keys_count_their_own_queries_only():
    # In Gemma 3n the last layers attend to the keys of earlier ones.
    cache = generate(
        tiny_model("gemma3n"), 25, inputs=random_ids(2, 30), cache_implementation="mixkvq", cache_config=SMALL
    ).cache
    (layer,) = cache.quantized_layers
    layer.settle()
    assert layer.query_count == [54, 54] and layer.states[0].pages == 3


def test_what_attends_to_dequantized_keys_counts_too():
    # Packed sequences are something we have no answer to, so the original function gets the dequantized keys.
    model = tiny_model()
    cache, simulation = MixKVQCache(LlamaConfig(num_hidden_layers=1), RULES.options()), Simulation(RULES)
    module = model.model.layers[0].self_attn
    for tokens in (50, 1, 20):
        data = [*kv(RULES, tokens, seed=tokens), queries(RULES, tokens, seed=tokens)]
        handles = cache.update(*data[:2], 0)
        ALL_ATTENTION_FUNCTIONS["sdpa"](module, data[2], *handles, None, scaling=0.25, cu_seq_lens_q=torch.ones(2))
        simulation.update(*data)
        assert_equal(cache.layers[0], simulation)


# --- rows, layers and reports ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [SMALL, {**SMALL, "tau_bf16": 2.0, "tau_uint4": 0.5}], ids=["target", "tau"])
def test_left_padded_rows_equal_rows_alone_in_generate(options):
    # A model in which padding that leaks anywhere cannot go unnoticed.
    model = copy.deepcopy(tiny_model()).double()
    model.get_input_embeddings().weight[PAD] = 1e4
    pads = [0, 11, 36]
    prompt = left_padded(3, 40, pads)
    request = {"cache_implementation": "mixkvq", "cache_config": options}
    batch = generate(model, 40, **request, **prompt)
    for row, pad in enumerate(pads):
        alone = generate(model, 40, inputs=prompt["input_ids"][row : row + 1, pad:], **request)
        assert torch.equal(batch.sequences[row, pad:], alone.sequences[0])
        assert_same_logits(batch.logits[row : row + 1], alone.logits, 1e-5)
        for mine, own in zip(batch.cache.layers, alone.cache.layers):
            assert mine.states[row] == own.states[0] and mine.query_count[row] == own.query_count[0]
            a, b = packed(mine, row), packed(own, 0)
            assert all(torch.equal(a[name], b[name]) for name in ("counts", "low_channel", "exact_channel"))
            assert_same_logits(mine.keys[row : row + 1, :, pad:], own.keys, 1e-5)


def test_thresholds_go_by_the_layers_of_the_model():
    # Only the middle layer of this model is quantized, and it is layer 1.
    model = tiny_model("mixed")
    taus = [INF, [-INF, INF], INF]
    options = {**SMALL, "tau_bf16": taus, "tau_uint4": taus}
    cache = generate(model, 10, inputs=random_ids(1, 60), cache_implementation="mixkvq", cache_config=options).cache
    (layer,) = cache.quantized_layers
    assert layer is cache.layers[1] and layer.states[0].pages == 4
    assert layer.tier_counts().tolist() == [4 * 16, 0, 4 * 16]
    assert cache.nominal_bits() == (9, 2, 5.5)


@pytest.mark.parametrize("name", CACHES)
def test_repr_and_summary_in_every_state(name):
    model = tiny_model()
    cache = CACHES[name](model.config, SMALL)
    assert f"{CACHES[name].__name__}(empty, 3 layers)" == repr(cache)
    generate(model, 10, inputs=random_ids(2, 60), cache=cache)
    assert repr(cache).startswith(f"{CACHES[name].__name__}(2 x 69 tokens, 3 layers: 3 at 2 bits; ")
    assert [report["nbytes"] for report in cache.summary()] == [layer.nbytes() for layer in cache.layers]
    assert sum(report["nbytes"] for report in cache.summary()) == cache.nbytes() == storage_bytes(cache)
    cache.reset()
    assert repr(cache).endswith("(empty, 3 layers)") and cache.nbytes() == storage_bytes(cache) == 0


def test_empty_cache_allows_all_operations():
    cache = MixKVQCache(tiny_model().config, SMALL)
    cache.reorder_cache(torch.tensor([0]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0]))
    cache.crop(-3)
    cache.reset()
    copy.deepcopy(cache)
    assert cache.nbytes() == 0 and cache.get_seq_length() == 0
    assert torch.tensor(cache.nominal_bits().keys).isnan() and cache.layers[0].tier_counts().tolist() == [0, 0, 0]
    assert hf_kvq.MixKVQCache is MixKVQCache and hf_kvq.KIVICache is KIVICache


# --- the real model -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prose():
    """The bundled model in bfloat16, and 1,024 tokens of prose."""
    from hf_kvq.bundled import bundled_text, load_model

    model, tokenizer = load_model("bundled", dtype=torch.bfloat16)
    ids = tokenizer(bundled_text()[:8000], return_tensors="pt").input_ids[:, :1024]
    assert ids.shape == (1, 1024)
    return model, ids


@pytest.mark.slow
def test_real_model_loses_less_than_with_kivi(prose):
    from hf_kvq.evaluation import measure_fidelity

    model, ids = prose
    kl = {}
    for name, options in (("mixkvq", {"target_bits": 2.5}), ("kivi", {"sink_tokens": 32})):
        cache = CACHES[name](model.config, options)
        kl[name] = measure_fidelity(model, ids, cache).kl
        assert cache.layers[0].states[0].pages == 7
    # 0.0098 and 0.0472.
    assert 0 < kl["mixkvq"] < kl["kivi"] / 3


@pytest.mark.slow
@pytest.mark.parametrize("name", CACHES)
def test_real_model_lossless(real_model, name):
    model, tokenizer = real_model
    tokenizer.padding_side = "left"
    texts = ["The capital of France is", "Once upon a time, in a small village by the sea, there lived a"]
    prompt = tokenizer(texts, return_tensors="pt", padding=True)
    wanted = generate(model, 30, **prompt)
    got = generate(model, 30, cache_implementation=name, cache_config=LONG, **prompt)
    assert torch.equal(got.sequences, wanted.sequences)
    assert_same_logits(got.logits, wanted.logits, 2e-4)
