# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Estimates from a config alone, against the bytes of real caches."""

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, Gemma2Config, LlamaConfig, T5Config

from conftest import CONFIGS, forward, random_ids, storage_bytes
from hf_kvq import KIVICache, KIVIConfig, MixKVQCache, MixKVQConfig, PMKVQCache, PMKVQConfig
from hf_kvq.cache.layout import LayerShape
from hf_kvq.codecs.tiered import most_promoted, tiers_by_target
from hf_kvq.estimate import ExactLayer, cache_bytes, method_bytes, model_shapes, ordinary_bytes, weight_bytes


ARCHS = {
    **{name: CONFIGS[name] for name in ("llama", "qwen3", "gpt2", "gpt_neox", "falcon", "mixed", "lfm2", "gemma3n")},
    "gemma2": lambda: Gemma2Config(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        vocab_size=128,
        sliding_window=20,
        pad_token_id=0,
    ),
}
OPTIONS = (
    {"window": 8, "group_size": 16},
    {"window": 0, "group_size": 16, "sink_tokens": 0, "key_codec": "token"},
    {"window": 20, "group_size": 32, "sink_tokens": 5, "boundary_layers": 1, "transform": "hadamard"},
)
LENGTH = 150


def filled(config, cache, dtype=torch.float32):
    """The cache after a prompt and two more tokens, `LENGTH` in all."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    ids = random_ids(1, LENGTH)
    for part in (ids[:, :-2], ids[:, -2:-1], ids[:, -1:]):
        forward(model, cache, part)
    return cache


@pytest.mark.parametrize("options", OPTIONS, ids=["channel", "token", "boundary"])
@pytest.mark.parametrize("bits", [16, 8, 4, 2])
@pytest.mark.parametrize("arch", ARCHS)
def test_estimate_equals_the_bytes_of_a_real_cache(arch, bits, options):
    config = ARCHS[arch]()
    estimate = cache_bytes(model_shapes(config, torch.float32), LENGTH, bits, PMKVQConfig(**options))
    cache = filled(config, PMKVQCache(config, {**options, "fbit": bits}, max_length=LENGTH))
    assert estimate == cache.nbytes()


@pytest.mark.parametrize(
    "options",
    [
        KIVIConfig(residual=16, group_size=16),
        KIVIConfig(bits=4, residual=32, group_size=32, sink_tokens=5, boundary_layers=1),
        # Here it is known what the keys get.
        MixKVQConfig(residual=16, group_size=16, sink_tokens=3, target_bits=2, transform="hadamard", value_bits=4),
        MixKVQConfig(residual=16, group_size=16, sink_tokens=3, target_bits=16, boundary_layers=1),
    ],
    ids=["kivi", "kivi-boundary", "mixkvq-2", "mixkvq-16"],
)
@pytest.mark.parametrize("arch", ["llama", "gpt2", "lfm2"])
def test_estimate_equals_the_bytes_of_a_cache_that_grows(arch, options):
    config = ARCHS[arch]()
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    cache = (KIVICache if isinstance(options, KIVIConfig) else MixKVQCache)(config, options)
    shapes, ids = model_shapes(config, torch.float32), random_ids(1, 640)
    # Enough pages for the reserve of a sixteenth to show, each page in a call of its own.
    for start in range(0, 640, options.residual):
        forward(model, cache, ids[:, start : start + options.residual])
        length = start + options.residual
        assert method_bytes(shapes, length, options) == cache.nbytes(), length
    assert method_bytes(shapes, 640, options, batch=3) == 3 * cache.nbytes()


@pytest.mark.parametrize("target_bits", [2.25, 2.5, 3.0, 6.0])
def test_estimate_of_tiers_is_a_little_above_what_they_take(target_bits):
    config = ARCHS["llama"]()
    options = MixKVQConfig(residual=32, group_size=32, sink_tokens=3, target_bits=target_bits)
    cache = filled(config, MixKVQCache(config, options))
    estimate = method_bytes(model_shapes(config, torch.float32), LENGTH, options)
    assert 0.9 * estimate < cache.nbytes() <= estimate


@pytest.mark.parametrize("target_bits", [2, 2.3, 2.5, 4.1, 15.9, 16])
@pytest.mark.parametrize("dim", [16, 80])
def test_no_head_has_more_promoted_channels_than_the_estimate_counts(dim, target_bits):
    most = dict(reversed(pair) for pair in most_promoted(dim, target_bits))
    # From flat salience, where all go to 4 bits, to steep, where few take 16.
    for spread in (0.0, 1.0, 4.0, 16.0):
        salience = torch.exp(spread * torch.randn(200, dim, generator=torch.Generator().manual_seed(0)).double())
        tiers = tiers_by_target(salience, target_bits)
        for uint4, bf16 in zip((tiers == 1).sum(-1).tolist(), (tiers == 2).sum(-1).tolist()):
            assert uint4 <= most[bf16]


def test_bytes_of_thresholds_are_refused():
    shapes = model_shapes(ARCHS["llama"]())
    with pytest.raises(ValueError, match="target_bits instead"):
        method_bytes(shapes, 1000, MixKVQConfig(tau_bf16=1.0, tau_uint4=0.5))


@pytest.mark.parametrize("arch", ARCHS)
def test_ordinary_estimate_equals_the_bytes_of_an_ordinary_cache(arch):
    config = ARCHS[arch]()
    cache = filled(config, DynamicCache(config=config))
    assert ordinary_bytes(model_shapes(config, torch.float32), LENGTH) == sum(storage_bytes(x) for x in cache.layers)


def test_layers_that_are_not_full_attention_are_counted_as_they_are():
    config = ARCHS["gemma2"]()
    sliding, full = model_shapes(config)[:2]
    assert full == LayerShape(2, 24, 24, torch.bfloat16)
    assert (sliding.kind, sliding.limit, sliding.token_bytes) == ("DynamicSlidingWindowLayer", 20, 2 * 2 * 24 * 2)
    assert sliding.bytes_for(10_000) == sliding.bytes_for(20) > sliding.bytes_for(19)
    lfm2 = model_shapes(ARCHS["lfm2"]())
    assert lfm2[0].token_bytes == 0 and lfm2[0].bytes_for(1) == lfm2[0].bytes_for(10_000) > 0


def test_a_large_model_is_estimated_without_weights():
    # 2 (K and V) x 80 layers x 8 heads x 128 channels x 2 bytes, for 70 billion parameters that never exist.
    config = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    shapes = model_shapes(config)
    assert shapes == [LayerShape(8, 128, 128, torch.bfloat16)] * 80
    assert ordinary_bytes(shapes, 4096) == 2 * 80 * 8 * 128 * 2 * 4096
    # Sink and up to window + page - 1 recent tokens are exact; pages have 4 bits, and two bfloat16 per group of 128.
    pages = (4096 - 1 - 128) // 128
    page = 8 * 128 * (2 * 128 // 2) + 2 * 8 * (128 + 128) * 2
    assert cache_bytes(shapes, 4096, 4) == 80 * ((1 + 255) * 8 * 256 * 2 + pages * page)


@pytest.mark.parametrize("arch", ["llama", "gpt2", "gemma2"])
def test_bytes_of_weights_are_those_of_the_model(arch):
    config = ARCHS[arch]()
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # Tied weights are there once.
    held = {x.untyped_storage().data_ptr(): x.nbytes for x in model.parameters()}
    assert weight_bytes(config, torch.float32) == sum(held.values()) == 2 * weight_bytes(config, torch.float16)


def test_batch_multiplies_and_dtype_is_the_configs():
    config = CONFIGS["llama"]()
    config.dtype = torch.float16
    shapes = model_shapes(config)
    assert {shape.dtype for shape in shapes} == {torch.float16}
    assert cache_bytes(shapes, 1000, 4, batch=3) == 3 * cache_bytes(shapes, 1000, 4)
    assert ordinary_bytes(shapes, 1000, batch=3) == 3 * ordinary_bytes(shapes, 1000)
    assert ordinary_bytes(model_shapes(config, torch.float32), 1000) == 2 * ordinary_bytes(shapes, 1000)


def test_exact_layer_without_limit_grows():
    assert ExactLayer("any", token_bytes=10, state_bytes=3).bytes_for(1000) == 10_003


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (T5Config(), "encoder-decoder"),
        (CONFIGS["sliding"](), "nothing to quantize"),
        (LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=3, num_hidden_layers=1), "cannot run"),
    ],
)
def test_models_that_cannot_be_estimated_say_why(config, message):
    with pytest.raises(ValueError, match=message):
        model_shapes(config)
