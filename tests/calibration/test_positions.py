# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Stretched positions against longer ordinary runs and explicit masks; rotary pairs against models' known layouts."""

import copy

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

from conftest import CONFIGS, random_ids, tiny_model
from hf_kvq.calibration.positions import feed, probed, require_rotary, rotary_pairs
from hf_kvq.registration import cache_argument


_COMMON = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
_GQA = {**_COMMON, "num_key_value_heads": 2, "head_dim": 16}
_SHORT = {**_GQA, "max_position_embeddings": 64}


def rope(rope_type, config=LlamaConfig, **parameters):
    return lambda: config(**_SHORT, rope_parameters={"rope_type": rope_type, "rope_theta": 1e4, **parameters})


def without(*names, **more):
    return {**{k: v for k, v in _GQA.items() if k not in names}, **more}


ROPES = {
    "default": rope("default"),
    "linear": rope("linear", factor=2.0),
    "dynamic": rope("dynamic", factor=2.0),
    "yarn": rope("yarn", factor=4.0, original_max_position_embeddings=16),
    "llama3": rope(
        "llama3", factor=4.0, original_max_position_embeddings=16, low_freq_factor=1.0, high_freq_factor=4.0
    ),
    "longrope": rope(
        "longrope",
        short_factor=[1.0] * 8,
        long_factor=[1.0 + i for i in range(8)],
        original_max_position_embeddings=16,
        factor=4.0,
    ),
    "partial": CONFIGS["gpt_neox"],
    "neighbours": lambda: transformers.CohereConfig(**without("head_dim")),
    "by layer type": lambda: transformers.Gemma3TextConfig(
        **_GQA,
        sliding_window=4096,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
        query_pre_attn_scalar=16,
    ),
    "table": lambda: transformers.GPTJConfig(
        vocab_size=128, n_positions=512, n_embd=64, n_layer=3, n_head=4, rotary_dim=8, pad_token_id=0
    ),
}


def build(config, dtype=torch.float32):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config()).eval().to(dtype).requires_grad_(False)


def multimodal():
    config = transformers.Qwen2VLTextConfig(
        **without("head_dim"), rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    )
    torch.manual_seed(0)
    return transformers.Qwen2VLTextModel(config).eval().requires_grad_(False)


def keys_after(model, ids, stretch=1):
    cache = DynamicCache(config=model.config)
    feed(model, ids, cache, stretch)
    return [layer.keys for layer in cache.layers]


# --- stretched positions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*ROPES, "multimodal"])
def test_every_fourth_token_of_a_longer_run(name):
    model = multimodal() if name == "multimodal" else build(ROPES[name])
    ids, filler = random_ids(1, 40)[0], random_ids(1, 157, seed=1)[0]
    filler[::4] = ids
    with probed(model):
        found, longer = keys_after(model, ids, 4)[0], keys_after(model, filler)[0]
    # Keys of the first layer depend on nothing but the token and its position.
    torch.testing.assert_close(found, longer[:, :, ::4], rtol=1e-4, atol=1e-6)
    assert not torch.allclose(found, keys_after(model, ids)[0], rtol=1e-2)


@pytest.mark.parametrize("arch", ["llama", "qwen3", "gpt_neox", "phi3"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_all_tokens_are_one_sequence(arch, attention):
    model, ids = tiny_model(arch, attention), random_ids(1, 30)[0]
    found = keys_after(model, ids, 3)
    mask = torch.full((1, 1, 30, 30), torch.finfo(torch.float32).min).triu(1)
    cache = DynamicCache(config=model.config)
    positions = 3 * torch.arange(30)[None]
    model(input_ids=ids[None], position_ids=positions, attention_mask=mask, **{cache_argument(model): cache})
    for keys, layer in zip(found, cache.layers):
        torch.testing.assert_close(keys, layer.keys, rtol=1e-4, atol=1e-5)
    # What transformers makes of such positions alone: sequences of one token.
    packed = model(input_ids=ids[None], position_ids=positions, use_cache=False, output_hidden_states=True)
    alone = model(input_ids=ids[:, None], use_cache=False, output_hidden_states=True)
    torch.testing.assert_close(packed.hidden_states[1][0], alone.hidden_states[1][:, 0], rtol=1e-4, atol=1e-5)


def test_models_without_such_positions():
    ids, cache = random_ids(1, 200)[0], DynamicCache()
    with pytest.raises(ValueError, match=r"table of 512, and this sample would need position 796.*smaller stretch"):
        feed(build(ROPES["table"]), ids, cache, 4)
    feed(build(ROPES["table"]), ids, cache)
    bloom = AutoModelForCausalLM.from_config(transformers.BloomConfig(vocab_size=128, hidden_size=64, n_layer=2))
    with pytest.raises(ValueError, match="takes no positions"):
        feed(bloom, ids, DynamicCache(), 4)
    assert (rotary_pairs(bloom) == torch.arange(8)).all()


# --- what is left behind ---------------------------------------------------------------------------------------------


def frequencies(model):
    module = model.model.rotary_emb
    buffers = {name: x.clone() for name, x in module.named_buffers()}
    return buffers, {k: v for k, v in vars(module).items() if isinstance(v, (int, float, torch.Tensor))}


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_frequencies_are_as_they_were(name, fails):
    model = build(ROPES[name])
    before, addresses = frequencies(model), [x.data_ptr() for x in model.buffers()]
    with pytest.raises(KeyError) if fails else torch.no_grad(), probed(model):
        feed(model, random_ids(1, 40)[0], DynamicCache(config=model.config), 4)
        during = frequencies(model)
        if fails:
            raise KeyError
    assert not torch.equal(during[0]["inv_freq"], before[0]["inv_freq"])
    after = frequencies(model)
    assert all(torch.equal(before[0][k], x) for k, x in after[0].items()) and before[1].keys() == after[1].keys()
    assert all(torch.as_tensor(before[1][k] == x).all() for k, x in after[1].items())
    assert addresses == [x.data_ptr() for x in model.buffers()]


def test_a_model_in_training():
    model = copy.deepcopy(tiny_model()).train().requires_grad_(True)
    model.config.attention_dropout = 0.5
    assert torch.equal(rotary_pairs(model), rotary_pairs(tiny_model()))
    assert model.training and all(p.requires_grad for p in model.parameters())


# --- which channels rotate together ----------------------------------------------------------------------------------


def halves(rotated, dim=16):
    return [(i + rotated // 2) % rotated if i < rotated else i for i in range(dim)]


def neighbours(rotated, dim=16):
    return [i ^ 1 if i < rotated else i for i in range(dim)]


LAYOUTS = {
    **{name: (CONFIGS[name], halves(16)) for name in ("llama", "qwen2", "qwen3", "phi3", "mixed", "lfm2", "gemma3n")},
    "gpt_neox": (CONFIGS["gpt_neox"], halves(8)),
    "phi": (lambda: transformers.PhiConfig(**_COMMON, partial_rotary_factor=0.75), halves(12)),
    "gptj": (ROPES["table"], neighbours(8)),
    "cohere": (ROPES["neighbours"], neighbours(16)),
    "glm": (lambda: transformers.GlmConfig(**_GQA, partial_rotary_factor=0.5), neighbours(8)),
    "gpt2": (CONFIGS["gpt2"], list(range(16))),
    "falcon": (CONFIGS["falcon"], list(range(16))),
    "deepseek_v3": (CONFIGS["deepseek_v3"], list(range(32))),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("arch", LAYOUTS)
def test_pairs(arch, dtype):
    config, wanted = LAYOUTS[arch]
    model = build(config, dtype)
    pairs = rotary_pairs(model)
    assert pairs.tolist() == [wanted] * len(pairs)
    if wanted == list(range(len(wanted))):
        with pytest.raises(ValueError, match="do not rotate with their position.*stretch=1"):
            require_rotary(model, pairs)
    else:
        require_rotary(model, pairs)


@pytest.mark.parametrize("name", [name for name in ROPES if name not in ("partial", "neighbours", "table")])
def test_pairs_of_all_kinds_of_rope(name):
    assert all(row == halves(16) for row in rotary_pairs(build(ROPES[name])).tolist())


def test_pairs_where_only_some_layers_rotate():
    model = build(lambda: transformers.SmolLM3Config(**without("head_dim"), no_rope_layers=[1, 0, 1]))
    assert rotary_pairs(model).tolist() == [halves(16), list(range(16)), halves(16)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pairs_of_keys_that_are_nearly_constant(dtype):
    model = build(CONFIGS["qwen2"])
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias.normal_(std=100, generator=torch.Generator().manual_seed(0))
    pairs = rotary_pairs(model.to(dtype))
    for row in pairs.tolist():
        # In half precision the slowest channels may seem to stand still; nobody has a wrong partner.
        assert all(j in (i, wanted) for i, (j, wanted) in enumerate(zip(row, halves(16))))
        assert row[:5] == halves(16)[:5]
    assert dtype is torch.bfloat16 or pairs.tolist() == [halves(16)] * 3


def test_slow_channels_of_a_long_context():
    model = build(
        lambda: LlamaConfig(**{**_GQA, "max_position_embeddings": 131072, "rope_theta": 5e5}), torch.bfloat16
    )
    assert rotary_pairs(model).tolist() == [halves(16)] * 3
