# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Smoothing against what it promises, and against attention and quantization written out."""

import copy
import math

import pytest
import torch
import transformers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, Qwen2Config
from transformers.utils import logging

from conftest import random_ids, tiny_model
from hf_kvq.calibration import positions, smoothing
from hf_kvq.calibration.smoothing import ALPHAS, channel_scale, key_maxima, pair_maxima, smooth
from hf_kvq.registration import cache_argument
from simulation import TOKEN_PAGE, centered, dequantize, narrow, quantize16, to_numpy


OPTIONS = {"key_codec": "token", "window": 8, "group_size": 16, "fbit": 4}
SAMPLES = random_ids(2, 100)
QUERIES = 16


def found_for(model, samples=SAMPLES, stretch=1, **options):
    return smooth(model, samples, {**OPTIONS, **options}, stretch, queries=QUERIES, desc=None)


def with_key_bias(bias, **options):
    """A model whose keys are a constant [KV heads, dim], turned by their positions, and little else."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=len(bias),
        head_dim=16,
        **{"num_hidden_layers": 1, **options},
    )
    model = transformers.Qwen2ForCausalLM(config).eval().requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.k_proj.weight.mul_(0.1)
        layer.self_attn.k_proj.bias.copy_(bias.flatten())
    return model


# --- maxima of the keys ----------------------------------------------------------------------------------------------


def test_stretched_positions_show_what_slow_channels_will_do():
    # The slowest pair takes 8,192 positions for a quarter of a turn: until then its second channel only grows.
    slowest = math.pi / 2 / 8192
    bias = torch.zeros(2, 16)
    bias[:, 7] = torch.tensor([8.0, 4.0])
    model = with_key_bias(bias, rope_theta=slowest ** (-8 / 7), max_position_embeddings=8192)
    ids = random_ids(1, 8192)
    short, stretched, long = (key_maxima(model, ids[:, :n], s, None)[0] for n, s in ((2048, 1), (2048, 4), (8192, 1)))
    assert (long[:, 15] / long[:, 7] > 0.95).all()
    torch.testing.assert_close(stretched, long, rtol=0.05, atol=0.1)
    torch.testing.assert_close(short[:, 15] / long[:, 15], torch.full((2,), math.sin(math.pi / 8)), rtol=0.1, atol=0)


@pytest.mark.parametrize("arch", ["llama", "gpt2", "mixed", "deepseek_v3", "falcon"])
def test_maxima_are_those_of_an_ordinary_run(arch):
    model = tiny_model(arch)
    found = key_maxima(model, SAMPLES, 1, None)
    keys = []
    for row in SAMPLES:
        cache = DynamicCache(config=model.config)
        model(input_ids=row[None], use_cache=True, **{cache_argument(model): cache})
        keys.append([x.keys[0] for x in cache.layers if not getattr(x, "is_sliding", False)])
    wanted = torch.stack([torch.cat(layer, dim=1).abs().amax(1) for layer in zip(*keys)])
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_maxima_in_half_precision(dtype):
    found, exact = (key_maxima(tiny_model(dtype=d), SAMPLES, desc=None) for d in (dtype, torch.float32))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, exact, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("arch", ["gpt2", "falcon", "deepseek_v3"])
def test_nothing_to_stretch(arch):
    with pytest.raises(ValueError, match="do not rotate with their position.*stretch=1"):
        key_maxima(tiny_model(arch), SAMPLES, 4, None)


@pytest.mark.parametrize("stretch", [0, -4, 2.0, True])
def test_impossible_stretch(stretch):
    with pytest.raises(ValueError, match="whole number, 1 or more"):
        key_maxima(tiny_model(), SAMPLES, stretch, None)


def test_keys_that_overflow():
    model = with_key_bias(torch.full((2, 16), 6e4)).half()
    with pytest.raises(ValueError, match="not finite"):
        key_maxima(model, SAMPLES, 1, None)


# --- from maxima to factors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pairs", "wanted"),
    [
        ([2, 3, 0, 1, 4, 5], [3, 4, 3, 4, 5, 0]),
        ([1, 0, 3, 2, 4, 5], [2, 2, 4, 4, 5, 0]),
        ([0, 1, 2, 3, 5, 4], [1, 2, 3, 4, 5, 5]),
    ],
)
def test_pairs_share_the_larger_maximum(pairs, wanted):
    maxima = torch.tensor([[[1.0, 2, 3, 4, 5, 0], [10, 20, 30, 40, 50, 0]]]).repeat(2, 1, 1)
    layers = torch.stack([torch.tensor(pairs), torch.arange(6)])
    found = pair_maxima(maxima, layers)
    assert torch.equal(found[0], torch.tensor([wanted, [10.0 * x for x in wanted]]))
    assert torch.equal(found[1], maxima[1])


def test_factors():
    maxima = torch.tensor([[1.0, 4, 16, 64], [5, 5, 5, 5], [0, 2, 8, 0], [0, 0, 0, 0]])
    torch.testing.assert_close(
        channel_scale(maxima, 0.5),
        torch.tensor([[8**-0.5, 2**-0.5, 2**0.5, 8**0.5], [1, 1, 1, 1], [1, 2**-0.5, 2**0.5, 1], [1, 1, 1, 1]]),
    )
    assert torch.equal(channel_scale(maxima, 0.0), torch.ones(4, 4))
    # At 1, all channels that are used become equally large.
    smoothed = maxima / channel_scale(maxima, 1.0)
    torch.testing.assert_close(smoothed[0], torch.full((4,), 8.0))
    torch.testing.assert_close(channel_scale(1000 * maxima, 0.7), channel_scale(maxima, 0.7))


def test_factors_are_finite_in_half_precision():
    maxima = torch.tensor([[1e-30, 1e-30, 1e-30, 1e30], [torch.finfo(torch.float32).max, 1e-38, 1, 1]])
    for alpha in ALPHAS:
        scale = channel_scale(maxima, alpha)
        assert 1e-4 * (1 - 1e-6) <= scale.min() and scale.max() <= 1e4 * (1 + 1e-6)
        assert scale.half().isfinite().all() and (scale.half() > 0).all()


def rotate(x, layout):
    """RoPE of [tokens, heads, dim], by complex numbers."""
    half, neighbours = x.shape[-1] // 2, layout == "neighbours"
    pairs = x.unflatten(-1, (-1, 2)) if neighbours else torch.stack(x.chunk(2, dim=-1), dim=-1)
    angle = torch.arange(len(x))[:, None, None] * 10000 ** (-torch.arange(half) / half)
    y = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angle), angle))
    return y.flatten(-2) if neighbours else torch.cat(y.unbind(-1), dim=-1)


@pytest.mark.parametrize(("arch", "layout"), [("llama", "halves"), ("cohere", "neighbours")])
def test_factors_commute_with_rope_and_leave_scores_alone(arch, layout):
    found = found_for(tiny_model(arch), fbit=2)
    assert found.helps
    scale = found.key_scale[torch.tensor(found.alphas).argmax()]
    assert scale.max() > 1.05 * scale.min()
    g = torch.Generator().manual_seed(0)
    keys, query = torch.randn(20, len(scale), 16, generator=g), torch.randn(20, 4, 16, generator=g)
    torch.testing.assert_close(rotate(keys / scale, layout), rotate(keys, layout) / scale)
    # Query heads that share a KV head are neighbours.
    group = 4 // len(scale)
    scores = torch.einsum("qhd,khd->hqk", query, keys.repeat_interleave(group, dim=1))
    smoothed = torch.einsum(
        "qhd,khd->hqk",
        query * scale.repeat_interleave(group, dim=0),
        (keys / scale).repeat_interleave(group, dim=1),
    )
    torch.testing.assert_close(smoothed, scores)


# --- the search ------------------------------------------------------------------------------------------------------


def quantized(x, bits, is_key=False, group=16):
    """Groups along the channels of [heads, tokens, dim]."""
    codes, low, high = quantize16(to_numpy(x), group, 2)
    narrowed = (narrow(codes, bits), low, high)
    if is_key and bits == 2:
        narrowed = centered(codes, low, high, x.dtype)
    return torch.from_numpy(dequantize(*narrowed, bits, group, 2))


@pytest.mark.parametrize(("bits", "value_bits"), [(4, None), (2, None), (2, 8)])
def test_errors_equal_attention_written_out(bits, value_bits):
    model = tiny_model()
    found = found_for(model, fbit=bits, value_fbit=value_bits)
    assert found.layers == (0, 1, 2) and found.grid == ALPHAS and found.errors.shape == (3, 21)
    maxima = key_maxima(model, SAMPLES, 1, None)
    maxima = maxima.maximum(maxima.roll(8, dims=-1))
    total = torch.zeros(3, 3, 2, dtype=torch.float64)
    columns = (0, 10, 20)
    for row in SAMPLES:
        hidden = model(input_ids=row[None], use_cache=False, output_hidden_states=True).hidden_states
        for i, block in enumerate(model.model.layers):
            x = block.input_layernorm(hidden[i][0])
            q, k, v = (getattr(block.self_attn, f"{name}_proj")(x).unflatten(-1, (-1, 16)) for name in "qkv")
            q, k, v = (y.transpose(0, 1) for y in (rotate(q, "halves"), rotate(k, "halves"), v))
            # 100 tokens, 16 of them queries: a sink, then as many pages as the other 84 fill before a window of 8.
            body = slice(1, 1 + (84 - 1 - 8) // TOKEN_PAGE * TOKEN_PAGE)
            outputs = []
            for alpha in (None, *(ALPHAS[j] for j in columns)):
                keys, values = k.clone(), v.clone()
                if alpha is not None:
                    scale = channel_scale(maxima[i], alpha)[:, None]
                    keys[:, body] = quantized(k[:, body] / scale, bits, is_key=True) * scale
                    values[:, body] = quantized(v[:, body], value_bits or bits)
                keys, values = (y.double().repeat_interleave(2, dim=0) for y in (keys, values))
                scores = (q.double() @ keys.mT / 4).masked_fill(torch.ones(100, 100).triu(1).bool(), -math.inf)
                out = (scores.softmax(-1) @ values).transpose(0, 1).flatten(1)[-QUERIES:]
                outputs.append(out @ block.self_attn.o_proj.weight.double().T)
            for j, out in enumerate(outputs[1:]):
                total[i, j, 0] += (out - outputs[0]).square().sum()
                total[i, j, 1] += outputs[0].square().sum()
    wanted = total[..., 0] / total[..., 1]
    # A number between two codes may fall to either side.
    torch.testing.assert_close(found.errors[:, columns], wanted, rtol=2e-2, atol=0)
    best = found.errors.argmin(1)
    assert found.alphas == tuple(ALPHAS[j] for j in best)
    assert torch.equal(found.plain_error, found.errors[:, 0])
    assert torch.equal(found.error, found.errors[range(3), best])
    for i, alpha in enumerate(found.alphas):
        torch.testing.assert_close(found.key_scale[i], channel_scale(maxima[i], alpha), rtol=1e-4, atol=0)


def with_channel_sizes(sizes):
    """A model whose key channels have these sizes, [dim], pair by pair, and vary from token to token."""
    model = copy.deepcopy(tiny_model())
    for layer in model.model.layers:
        # What every key gets, every query gives back.
        layer.self_attn.k_proj.weight.mul_(sizes.repeat(2)[:, None])
        layer.self_attn.q_proj.weight.div_(sizes.repeat(4)[:, None])
    return model


def test_outlying_channels_are_worth_smoothing():
    flat, outlying = torch.ones(16), torch.ones(16)
    outlying[[2, 10]] = 30
    before, after = (found_for(with_channel_sizes(sizes)) for sizes in (flat, outlying))
    # Model and attention are the same; only what the codec sees is not.
    assert (after.plain_error > 10 * before.plain_error).all()
    assert (after.error < 2 * before.error).all() and all(alpha >= 0.6 for alpha in after.alphas)
    spread = after.key_scale[..., 2] / after.key_scale[..., 3]
    assert (spread > 8).all() and torch.equal(after.key_scale[..., 2], after.key_scale[..., 10])
    # Equal channels gain little, and lose nothing.
    assert (before.error <= before.plain_error).all() and (before.error > 0.5 * before.plain_error).all()


def test_it_says_when_nothing_helps(monkeypatch):
    messages = []
    monkeypatch.setattr(logging.get_logger(smoothing.__name__), "warning", lambda text, *args: messages.append(text))
    model = with_key_bias(torch.zeros(2, 16))
    model.model.layers[0].self_attn.k_proj.weight.zero_()
    found = found_for(model, fbit=2)
    assert found.alphas == (0.0,) and not found.helps and torch.equal(found.key_scale, torch.ones(1, 2, 16))
    assert found.errors[0].unique().numel() == 1 and found.errors.min() > 0
    assert len(messages) == 1 and "helps in no layer" in messages[0]
    assert found_for(tiny_model(), fbit=2).helps and len(messages) == 1


def test_widths_layer_by_layer():
    mixed, wide, narrow_ = (found_for(tiny_model(), fbit=b) for b in ((16, 4, 2), 4, 2))
    assert mixed.alphas == (0.0, wide.alphas[1], narrow_.alphas[2])
    assert (mixed.errors[0] == 0).all() and (mixed.key_scale[0] == 1).all()
    assert torch.equal(mixed.errors[1], wide.errors[1]) and torch.equal(mixed.errors[2], narrow_.errors[2])


def test_only_some_samples_are_searched_on():
    model, more = tiny_model(), random_ids(3, 100)
    found = smooth(model, more, OPTIONS, 1, search_samples=2, queries=QUERIES, desc=None)
    assert not torch.equal(found.errors, found_for(model, more[:1]).errors)
    scales = smooth(model, more, {**OPTIONS, "fbit": 16}, 1, queries=QUERIES, desc=None)
    assert (scales.errors == 0).all() and not scales.helps


@pytest.mark.parametrize("arch", ["qwen3", "phi3", "gpt_neox", "falcon", "deepseek_v3", "lfm2", "gemma3n", "gpt_oss"])
def test_other_architectures(arch):
    model = tiny_model(arch, "eager" if arch == "gpt_oss" else "sdpa")
    stretch = 1 if arch in ("falcon", "deepseek_v3") else 4
    wide, narrow_ = (found_for(model, stretch=stretch, fbit=bits) for bits in (4, 2))
    assert (wide.plain_error > 0).all() and (wide.plain_error < narrow_.plain_error).all()
    assert (wide.error <= wide.plain_error).all() and wide.key_scale.shape[0] == len(wide.layers)
    assert wide.key_scale.isfinite().all() and (wide.key_scale > 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    half, exact = (found_for(tiny_model(dtype=d), stretch=4) for d in (dtype, torch.float32))
    assert half.key_scale.dtype == torch.float32
    torch.testing.assert_close(half.plain_error, exact.plain_error, rtol=0.2, atol=0)
    torch.testing.assert_close(half.error, exact.error, rtol=0.3, atol=0)


# --- requests, and what is left behind -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "options", "message"),
    [
        (SAMPLES, {"key_codec": "channel"}, "key_codec='channel'"),
        (SAMPLES, {"transform": "hadamard"}, "transform='hadamard'"),
        ([], {}, "no samples"),
        (random_ids(1, 50), {}, "50 tokens fills no page .* before its last 16.*takes 57"),
        (random_ids(1, 16), {}, "more than 16 token ids"),
        (SAMPLES, {"fbit": (4, 4)}, "lists 2 layers"),
    ],
)
def test_impossible_requests(samples, options, message):
    with pytest.raises(ValueError, match=message):
        found_for(tiny_model(), samples, **options)


def test_encoder_decoder_models():
    config = transformers.T5Config(vocab_size=16, d_model=8, d_ff=8, num_layers=1, num_heads=2, d_kv=4)
    with pytest.raises(ValueError, match="encoder-decoder"):
        key_maxima(transformers.T5ForConditionalGeneration(config), SAMPLES, 1, None)


def test_the_progress_bars_can_be_labelled(capsys):
    smooth(tiny_model(), SAMPLES, OPTIONS, queries=QUERIES, desc="layers")
    out, err = capsys.readouterr()
    assert out == "" and "layers: maxima" in err and "layers: exponents" in err and "2/2" in err


def portrait(model):
    return {
        "modes": [module.training for module in model.modules()],
        "needed": [p.requires_grad for p in model.parameters()],
        "gradients": [p.grad for p in model.parameters()],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        "attributes": [sorted(vars(m)) for m in model.modules()],
        "config": model.config.to_dict(),
    }


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_as_it_was(fails, monkeypatch):
    torch.manual_seed(0)
    parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    config = copy.deepcopy(tiny_model().config)
    model = LlamaForCausalLM(LlamaConfig.from_dict({**config.to_dict(), "rope_parameters": parameters}))
    model.config.attention_dropout = 0.5
    model.train()
    model.model.layers[1].eval()
    model.model.embed_tokens.weight.requires_grad_(False)
    before, state = portrait(model), {name: x.clone() for name, x in model.state_dict().items()}
    buffers = {name: x.clone() for name, x in model.named_buffers()}
    if fails:
        # In the middle of the search, positions beyond what the model was made for.
        monkeypatch.setattr(smoothing, "quantization_error", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            found_for(model, random_ids(1, 200), stretch=4)
    else:
        found_for(model, random_ids(1, 200), stretch=4)
    assert portrait(model) == before
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
    assert all(torch.equal(x, buffers[name]) for name, x in model.named_buffers())


def test_models_that_are_spread_over_devices():
    accelerate = pytest.importorskip("accelerate")
    model = copy.deepcopy(tiny_model())
    wanted = found_for(model, stretch=4)
    accelerate.hooks.attach_align_device_hook(model, execution_device="cpu", offload=False)
    found = found_for(model, stretch=4)
    assert found.alphas == wanted.alphas and torch.equal(found.errors, wanted.errors)


# --- a real model ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_real_keys_gain(real_model):
    from hf_kvq.calibration import load_texts, token_blocks

    model, tokenizer = real_model
    samples = token_blocks(load_texts(), tokenizer, 1, 400)
    pairs = positions.rotary_pairs(model)
    assert pairs.tolist() == [[(i + 32) % 64 for i in range(64)]] * 30
    found = smooth(model, samples, {"key_codec": "token", "fbit": 2, "window": 32}, queries=64, desc=None)
    gain = (found.error / found.plain_error).log().mean().exp()
    assert gain < 0.7 and sum(alpha > 0 for alpha in found.alphas) >= 25
