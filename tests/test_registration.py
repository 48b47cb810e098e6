# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
import copy
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, GenerationMixin, PreTrainedModel, masking_utils
from transformers.generation import configuration_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_kvq
from conftest import generate, make_cache, random_ids, tiny_model
from hf_kvq import PMKVQCache, PMKVQConfig, registration
from hf_kvq.cache import KVHandle
from hf_kvq.registration import cache_argument


OPTIONS = {"fbit": 4, "window": 8, "group_size": 16, "max_length": 64}


def patched() -> dict:
    """Everything of transformers that registration might change."""
    return {
        "names": configuration_utils.ALL_CACHE_IMPLEMENTATIONS,
        "prepare": GenerationMixin.__dict__["_prepare_cache_for_generation"],
        "mask": masking_utils._preprocess_mask_arguments,
        **{f"attention {k}": v for k, v in ALL_ATTENTION_FUNCTIONS._global_mapping.items()},
        **{f"local {k}": v for k, v in ALL_ATTENTION_FUNCTIONS._local_mapping.items()},
        "load": PreTrainedModel.__dict__["_load_pretrained_model"],
        **{f"mixin {k}": v for k, v in vars(GenerationMixin).items()},
        **{f"masking {k}": v for k, v in vars(masking_utils).items() if callable(v)},
        **{f"config {k}": v for k, v in vars(configuration_utils).items() if k.isupper()},
        **{f"register {k}": v for k, v in vars(type(ALL_ATTENTION_FUNCTIONS)).items()},
    }


def same(a: dict, b: dict) -> bool:
    return list(a) == list(b) and all(a[key] is b[key] for key in a)


def test_register_is_idempotent():
    before = patched()
    hf_kvq.register()
    assert same(patched(), before)
    assert configuration_utils.ALL_CACHE_IMPLEMENTATIONS.count("pmkvq") == 1


def test_unregister_restores_transformers():
    registered = patched()
    hf_kvq.unregister()
    original = patched()
    assert not same(original, registered)
    for value in original.values():
        assert "hf_kvq" not in getattr(value, "__module__", "") and not hasattr(value, "__wrapped_by_hf_kvq__")
        assert getattr(getattr(value, "__code__", None), "co_filename", "").count("hf_kvq") == 0
    hf_kvq.unregister()
    assert same(patched(), original)
    with pytest.raises(ValueError, match="pmkvq"):
        GenerationConfig(cache_implementation="pmkvq")
    for _ in range(2):
        hf_kvq.register()
        assert GenerationConfig(cache_implementation="pmkvq").cache_implementation == "pmkvq"
        hf_kvq.unregister()
        assert same(patched(), original)
    hf_kvq.register()
    assert generate(tiny_model(), 4, inputs=random_ids(1, 9), cache_implementation="pmkvq").cache.layers


def test_unregister_leaves_what_others_registered_since():
    def mine(*args, **kwargs):
        raise NotImplementedError

    hf_kvq.unregister()
    sdpa = ALL_ATTENTION_FUNCTIONS._global_mapping["sdpa"]
    hf_kvq.register()
    try:
        ALL_ATTENTION_FUNCTIONS.register("sdpa", mine)
        hf_kvq.unregister()
        assert ALL_ATTENTION_FUNCTIONS._global_mapping["sdpa"] is mine
    finally:
        ALL_ATTENTION_FUNCTIONS.register("sdpa", sdpa)
    hf_kvq.unregister()
    hf_kvq.register()
    assert ALL_ATTENTION_FUNCTIONS._global_mapping["sdpa"].__wrapped__ is sdpa


def test_caches_outlive_unregister():
    model = tiny_model()
    cache, twin = make_cache(model, fbit=2, max_length=60), make_cache(model, fbit=2, max_length=60)
    ids = random_ids(1, 58)
    with_handles = generate(model, 1, inputs=ids[:, :50], cache=twin)
    hf_kvq.unregister()
    without = generate(model, 1, inputs=ids[:, :50], cache=cache)
    torch.testing.assert_close(without.logits, with_handles.logits, rtol=1e-5, atol=1e-5)
    assert cache.layer_bits() == twin.layer_bits()
    a = model(input_ids=ids[:, 50:], **{cache_argument(model): cache}).logits
    hf_kvq.register()
    b = model(input_ids=ids[:, 50:], **{cache_argument(model): twin}).logits
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("version", ["4.57.0", "5.16.9", "6.0.0", "6.1.0.dev0"])
def test_other_versions_are_refused(version, monkeypatch):
    hf_kvq.unregister()
    before = patched()
    monkeypatch.setattr(registration.transformers, "__version__", version)
    with pytest.raises(ImportError, match=rf"{version} is installed.*pip install"):
        hf_kvq.register()
    assert same(patched(), before)


@pytest.mark.parametrize("version", ["5.17.0", "5.18.0.dev0", "5.99.1"])
def test_these_versions_are_accepted(version, monkeypatch):
    hf_kvq.unregister()
    monkeypatch.setattr(registration.transformers, "__version__", version)
    hf_kvq.register()


# --- names and options through generate ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("pmkvq", None),
        ("pmkvq", OPTIONS),
        ("pmkvq", PMKVQConfig(**OPTIONS)),
        ("quantized", {"backend": "pmkvq", **OPTIONS}),
    ],
)
def test_generation_config_round_trip(name, options, tmp_path):
    config = GenerationConfig(cache_implementation=name, cache_config=options, max_new_tokens=5)
    config.validate()
    config.save_pretrained(tmp_path)
    loaded = GenerationConfig.from_pretrained(tmp_path)
    as_json = options.to_dict() if isinstance(options, PMKVQConfig) else options
    assert (loaded.cache_implementation, loaded.cache_config) == (name, as_json)
    out = generate(tiny_model(), 5, inputs=random_ids(1, 9), generation_config=loaded)
    assert isinstance(out.cache, PMKVQCache)
    assert out.cache.config == PMKVQConfig.of(None if options is None else OPTIONS)


@pytest.mark.parametrize(
    "request_",
    [
        {"cache_implementation": "pmkvq", "cache_config": OPTIONS},
        {"cache_implementation": "pmkvq", "cache_config": PMKVQConfig(**OPTIONS)},
        {"cache_implementation": "quantized", "cache_config": {"backend": "pmkvq", **OPTIONS}},
        {"generation_config": GenerationConfig(cache_implementation="pmkvq", cache_config=OPTIONS)},
    ],
)
def test_requests_are_never_modified(request_):
    before, model, outs = copy.deepcopy(request_), tiny_model(), []
    own = copy.deepcopy(model.generation_config)
    for _ in range(3):
        outs.append(generate(model, 40, inputs=random_ids(2, 20), **request_))
        assert isinstance(outs[-1].cache, PMKVQCache) and outs[-1].cache.config == PMKVQConfig(**OPTIONS)
        assert outs[-1].cache.layer_bits() == [4] * 3
    for key in request_:
        if key == "generation_config":
            assert request_[key].to_dict() == before[key].to_dict()
        else:
            assert request_[key] == before[key]
    assert model.generation_config.to_dict() == own.to_dict()
    assert torch.equal(outs[0].sequences, outs[1].sequences) and torch.equal(outs[0].sequences, outs[2].sequences)
    assert outs[0].cache is not outs[1].cache


def test_a_name_in_the_models_own_generation_config():
    model = copy.deepcopy(tiny_model())
    model.generation_config.cache_implementation = "pmkvq"
    model.generation_config.cache_config = dict(OPTIONS)
    assert isinstance(generate(model, 4, inputs=random_ids(1, 9)).cache, PMKVQCache)
    assert model.generation_config.cache_config == OPTIONS


def test_length_comes_from_generate():
    model = tiny_model()
    options = {"fbit": 2, "window": 8, "group_size": 16}
    out = generate(model, 30, inputs=random_ids(2, 31), cache_implementation="pmkvq", cache_config=options)
    # The last token is never fed, so it needs no room.
    assert out.cache.get_seq_length() == 60
    by_hand = make_cache(model, **{**options, "max_length": 60})
    generate(model, 30, inputs=random_ids(2, 31), cache=by_hand)
    assert out.cache.nbytes() == by_hand.nbytes() and out.cache.layer_bits() == by_hand.layer_bits() == [2] * 3


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"fbits": 4}, ValueError, "did you mean 'fbit'"),
        ({"fbit": 3}, ValueError, "16, 8, 4, 2"),
        ({"fbit": [4, 4]}, ValueError, "lists 2 layers"),
        ({"window": -1}, ValueError, "at least 0"),
        ({"group_size": 100}, ValueError, "multiple of 16"),
        ({"budget_bytes": 1000}, ValueError, "too small"),
        ({"kernel": "triton"}, RuntimeError, "triton"),
        ([4], TypeError, "dict"),
    ],
)
def test_bad_options_are_one_clear_error(options, error, message):
    requests = [("pmkvq", options)]
    if isinstance(options, dict):
        requests.append(("quantized", {"backend": "pmkvq", **options}))
    for name, given in requests:
        before = copy.deepcopy(given)
        with pytest.raises(error, match=message):
            generate(tiny_model(), 4, inputs=random_ids(1, 9), cache_implementation=name, cache_config=given)
        assert given == before


def test_unknown_names_are_refused_as_before():
    for name in ("pmkvk", "mixkv"):
        with pytest.raises(ValueError, match=name):
            generate(tiny_model(), 4, inputs=random_ids(1, 9), cache_implementation=name)


def test_a_model_with_nothing_to_quantize_runs_as_it_does_without():
    model, ids = tiny_model("sliding"), random_ids(1, 9)
    outs = [generate(model, 9, inputs=ids, cache_implementation=name) for name in (None, "pmkvq")]
    assert torch.equal(outs[0].logits, outs[1].logits) and isinstance(outs[1].cache, PMKVQCache)


def test_object_and_name_together_are_refused():
    model = tiny_model()
    cache = make_cache(model)
    with pytest.raises(ValueError, match="cache_implementation"):
        generate(model, 4, inputs=random_ids(1, 9), cache=cache, cache_implementation="pmkvq")
    assert cache.get_seq_length() == 0


def test_use_cache_false_wins(monkeypatch):
    monkeypatch.setattr(PMKVQCache, "__init__", None)
    model, ids = tiny_model(), random_ids(1, 9)
    kwargs = {"max_new_tokens": 6, "do_sample": False, "use_cache": False}
    wanted = model.generate(ids, **kwargs)
    for request in ({}, {"cache_config": {"fbit": 4}}):
        assert torch.equal(model.generate(ids, cache_implementation="pmkvq", **request, **kwargs), wanted)


@pytest.mark.parametrize("name", [None, "dynamic", "static"])
def test_built_in_names_still_behave(name):
    model, ids = tiny_model(), random_ids(2, 12)
    ours = generate(model, 6, inputs=ids, cache_implementation=name)
    hf_kvq.unregister()
    stock = generate(model, 6, inputs=ids, cache_implementation=name)
    assert torch.equal(ours.logits, stock.logits) and type(ours.cache) is type(stock.cache)


def test_other_quantized_backends_still_behave():
    model, ids = tiny_model(), random_ids(1, 12)
    errors = []
    for change in (hf_kvq.register, hf_kvq.unregister):
        change()
        request = {"cache_implementation": "quantized", "cache_config": {"backend": "no such backend"}}
        with pytest.raises(Exception) as caught:
            generate(model, 4, inputs=ids, **request)
        errors.append((type(caught.value), str(caught.value)))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("keyword", ["cache", "past_key_values"])
def test_both_keywords_where_the_model_takes_them(keyword):
    model = tiny_model()
    newest = cache_argument(model)
    assert newest in ("cache", "past_key_values")
    if keyword == "cache" and newest != "cache":
        pytest.skip("this version of transformers has the old keyword only")
    cache = make_cache(model)
    for start in (0, 20):
        model(input_ids=random_ids(1, 40)[:, start : start + 20], **{keyword: cache})
    assert cache.get_seq_length() == 40


# --- attention functions of others -----------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after", "on the instance"])
def test_custom_attention_gets_plain_dequantized_tensors(when):
    seen = []

    def mine(module, query, key, value, attention_mask, scaling=None, **kwargs):
        seen.append((type(key), type(value), key.shape[2], value.shape[2], bool(key.isfinite().all())))
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, scale=scaling, is_causal=query.shape[2] > 1
        )
        return out.transpose(1, 2).contiguous(), None

    model, ids = copy.deepcopy(tiny_model()), random_ids(1, 40)
    options = {"cache_implementation": "pmkvq", "cache_config": {**OPTIONS, "fbit": 2}}
    wanted = generate(model, 20, inputs=ids, **options)
    mapping = ALL_ATTENTION_FUNCTIONS._local_mapping if when == "on the instance" else None
    try:
        if when == "before":
            hf_kvq.unregister()
            ALL_ATTENTION_FUNCTIONS.register("mine", mine)
            hf_kvq.register()
        elif when == "after":
            ALL_ATTENTION_FUNCTIONS.register("mine", mine)
        else:
            ALL_ATTENTION_FUNCTIONS["mine"] = mine
        model.set_attn_implementation("mine")
        got = generate(model, 20, inputs=ids, **options)
    finally:
        hf_kvq.unregister()
        (ALL_ATTENTION_FUNCTIONS._global_mapping if mapping is None else mapping).pop("mine", None)
    assert got.cache.layer_bits() == wanted.cache.layer_bits() == [2] * 3
    torch.testing.assert_close(got.logits, wanted.logits, rtol=1e-4, atol=1e-4)
    assert [(key_length, value_length) for _, _, key_length, value_length, _ in seen] == [
        (40 + step, 40 + step) for step in range(20) for _ in range(3)
    ]
    assert all(finite for *_, finite in seen)
    assert {kind for kinds in seen for kind in kinds[:2]} == {torch.Tensor}


def test_known_attention_reads_packed_codes(monkeypatch):
    # Nothing dequantizes a history behind the user's back on the standard path.
    def refuse(self):
        raise AssertionError("dequantized")

    monkeypatch.setattr(KVHandle, "dequantize", refuse)
    model = tiny_model()
    out = generate(model, 20, inputs=random_ids(2, 40), cache_implementation="pmkvq", cache_config=OPTIONS)
    assert out.cache.layer_bits() == [4] * 3


CAPPED, SINKS = {"softcap": 30.0}, {"s_aux": torch.ones(4)}


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        *(("sdpa", extra) for extra in (CAPPED, SINKS, {"dropout": 0.5}, {"position_bias": torch.ones(1, 4, 1, 38)})),
        *(("flash_attention_2", extra) for extra in ({"sliding_window": 8}, {"cu_seq_lens_q": torch.ones(2)})),
        *(("eager", extra) for extra in ({}, CAPPED | {"output_attentions": True}, SINKS)),
    ],
    ids=lambda x: x if isinstance(x, str) else ", ".join(x) or "nothing",
)
def test_what_we_cannot_do_goes_to_the_original(name, extra):
    # "eager" is a model's own function: that it was not told of its sinks means that it has none.
    seen = {}

    def original(module, query, key, value, attention_mask, **kwargs):
        seen.update(kwargs, key=key, value=value)
        return "out", None

    wrapped = registration._with_handles(original, registration._ATTENDED.get(name), is_eager=name == "eager")
    model = tiny_model()
    cache = make_cache(model, fbit=4, max_length=40)
    generate(model, 1, inputs=random_ids(1, 38), cache=cache)
    handles = cache.update(torch.ones(1, 2, 1, 16), torch.ones(1, 2, 1, 16), 0)
    full = cache.dequantize(0)
    assert wrapped(None, torch.ones(1, 4, 1, 16), *handles, None, scaling=0.1, **extra) == ("out", None)
    assert type(seen["key"]) is type(seen["value"]) is torch.Tensor
    assert torch.equal(seen["key"], full[0]) and torch.equal(seen["value"], full[1])
    assert all(seen[key] is value for key, value in extra.items())


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("sdpa", {"sliding_window": 8}),
        *(("flash_attention_2", extra) for extra in ({}, CAPPED, SINKS)),
        *(("eager", extra) for extra in (CAPPED, SINKS | {"sliding_window": 8})),
    ],
    ids=lambda x: x if isinstance(x, str) else ", ".join(x) or "nothing",
)
def test_what_we_can_do_is_done_over_packed_codes(name, extra):
    wrapped = registration._with_handles(None, registration._ATTENDED.get(name), is_eager=name == "eager")
    model, query = tiny_model(), 3 * torch.randn(1, 4, 1, 16, generator=torch.Generator().manual_seed(0))
    cache = make_cache(model, fbit=4, max_length=40)
    generate(model, 1, inputs=random_ids(1, 38), cache=cache)
    handles = cache.update(torch.ones(1, 2, 1, 16), torch.ones(1, 2, 1, 16), 0)
    keys, values = (x.double().repeat_interleave(2, dim=1) for x in cache.dequantize(0))
    scores = query.double() @ keys.transpose(2, 3) * 0.9
    if "softcap" in extra:
        scores = 30 * torch.tanh(scores / 30)
    if "s_aux" in extra:
        scores = torch.cat([scores, extra["s_aux"].double().view(1, 4, 1, 1)], dim=-1)
    wanted = (scores.softmax(-1)[..., :39] @ values).transpose(1, 2).float()
    module = SimpleNamespace(sinks=extra["s_aux"]) if "s_aux" in extra else None
    torch.testing.assert_close(wrapped(module, query, *handles, None, scaling=0.9, **extra)[0], wanted)


def test_keys_or_values_that_a_model_changed_are_used():
    # Some models work on what `update` returned before they attend; DiffLlama repeats parts of the values.
    model, query = tiny_model(), torch.randn(1, 4, 1, 16)
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    for change in ((1, 2), (2, 1), (2, 2)):
        cache = make_cache(model, fbit=4, max_length=40)
        generate(model, 1, inputs=random_ids(1, 38), cache=cache)
        new = torch.ones(1, 2, 1, 16)
        given = [x * factor if factor > 1 else x for x, factor in zip(cache.update(new, new, 0), change)]
        full = [x * factor for x, factor in zip(cache.dequantize(0), change)]
        got, wanted = (sdpa(model.model.layers[0].self_attn, query, *x, None, scaling=0.25)[0] for x in (given, full))
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_keys_and_values_of_different_layers():
    model, query = tiny_model(), torch.randn(1, 4, 1, 16)
    cache = make_cache(model, fbit=4, max_length=40)
    generate(model, 1, inputs=random_ids(1, 38), cache=cache)
    new = torch.ones(1, 2, 1, 16)
    given = cache.layers[0].update(new, new)[0], cache.layers[1].update(new, new)[1]
    full = cache.dequantize(0)[0], cache.dequantize(1)[1]
    sdpa, module = ALL_ATTENTION_FUNCTIONS["sdpa"], model.model.layers[0].self_attn
    got, wanted = (sdpa(module, query, *x, None, scaling=0.25)[0] for x in (given, full))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_plain_tensors_go_to_the_original_untouched():
    given = [object(), torch.ones(1), torch.ones(2), torch.ones(3), None]
    seen = []
    wrapped = registration._with_handles(lambda *args, **kwargs: seen.append((args, kwargs)), True)
    wrapped(*given, scaling=1)
    assert all(a is b for a, b in zip(seen[0][0], given)) and seen[0][1] == {"scaling": 1}


def test_stock_caches_are_not_touched():
    model, ids = tiny_model(), random_ids(2, 30)
    cache = DynamicCache(config=model.config)
    wanted = generate(model, 8, inputs=ids)
    got = generate(model, 8, inputs=ids, cache=cache)
    assert torch.equal(got.logits, wanted.logits) and type(cache.layers[0].keys) is torch.Tensor
