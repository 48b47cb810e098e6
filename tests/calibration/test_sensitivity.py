# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Sensitivities against a second derivation: models written out as functions of K and V, and numpy quantization."""

import contextlib
import copy
import math
import sys
import weakref

import pytest
import torch
import torch.nn.functional as F
from transformers import T5Config, T5ForConditionalGeneration

from conftest import kv, make_cache, random_ids, tiny_model
from hf_kvq.cache.layout import LayerLayout, LayerShape
from hf_kvq.calibration import kv_gradients, quantization_error, sensitivity
from hf_kvq.config import PMKVQConfig
from simulation import Page, Rules


OPTIONS = {"window": 8, "group_size": 16}
SAMPLES = random_ids(2, 60)
WIDTHS = (8, 4, 2)


def measure(model, samples=SAMPLES, options=OPTIONS, **kwargs):
    return sensitivity(model, samples, options, desc=None, **kwargs)


# --- the reference ---------------------------------------------------------------------------------------------------


def causal_attention(q, k, v):
    """[heads, tokens, dim] of queries; every KV head serves as many query heads as it takes."""
    k, v = (x.repeat_interleave(len(q) // len(x), dim=0) for x in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    hidden = torch.ones(scores.shape[-2:]).triu(1).bool()
    return (scores.masked_fill(hidden, -math.inf).softmax(-1) @ v).transpose(0, 1).flatten(1)


def heads(x, dim):
    return x.unflatten(-1, (-1, dim)).transpose(0, 1)


def rms_norm(x, weight):
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def rotate(x):
    """RoPE at base 10,000."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[1])[:, None] * 10000 ** (-torch.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], dim=-1)


def llama(w, ids, shift):
    """Logits; `shift(i, k, v)` may change what layer i's attention sees."""
    x = w["model.embed_tokens.weight"][ids]
    for i in range(3):
        p = {k.removeprefix(f"model.layers.{i}."): v for k, v in w.items() if k.startswith(f"model.layers.{i}.")}
        h = rms_norm(x, p["input_layernorm.weight"])
        q, k, v = (heads(h @ p[f"self_attn.{name}_proj.weight"].T, 16) for name in "qkv")
        k, v = shift(i, rotate(k), v)
        x = x + causal_attention(rotate(q), k, v) @ p["self_attn.o_proj.weight"].T
        h = rms_norm(x, p["post_attention_layernorm.weight"])
        gate, up = (h @ p[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ p["mlp.down_proj.weight"].T
    return rms_norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].T


def gpt2(w, ids, shift):
    x = w["transformer.wte.weight"][ids] + w["transformer.wpe.weight"][: len(ids)]
    for i in range(3):
        p = {k.removeprefix(f"transformer.h.{i}."): v for k, v in w.items() if k.startswith(f"transformer.h.{i}.")}

        def linear(x, name, p=p):
            return x @ p[f"{name}.weight"] + p[f"{name}.bias"]

        h = F.layer_norm(x, (64,), p["ln_1.weight"], p["ln_1.bias"])
        q, k, v = (heads(part, 16) for part in linear(h, "attn.c_attn").split(64, dim=-1))
        x = x + linear(causal_attention(q, *shift(i, k, v)), "attn.c_proj")
        h = F.layer_norm(x, (64,), p["ln_2.weight"], p["ln_2.bias"])
        x = x + linear(F.gelu(linear(h, "mlp.c_fc"), approximate="tanh"), "mlp.c_proj")
    x = F.layer_norm(x, (64,), w["transformer.ln_f.weight"], w["transformer.ln_f.bias"])
    return x @ w["lm_head.weight"].T


def quantized(keys, values, rules, bits):
    """K and V with all packed tokens quantized, [heads, tokens, dim]: sink, pages, then what is exact."""
    out = keys.clone(), values.clone()
    for page in range(rules.pages(keys.shape[1])):
        span = slice(rules.sink + page * rules.page, rules.sink + (page + 1) * rules.page)
        tokens = list(zip(keys[:, span].unbind(1), values[:, span].unbind(1)))
        for x, y in zip(out, Page(rules, tokens).visible(bits)):
            x[:, span] = y
    return out


@torch.enable_grad()
def reference(function, model, rules, ids):
    """[keys or values][layer][width] of one sample."""
    w = {name: x.double() for name, x in model.state_dict().items()}
    seen, zeros = {}, {}

    def shift(i, k, v):
        seen[i] = k.detach().float(), v.detach().float()
        zeros[i] = tuple(torch.zeros_like(x, requires_grad=True) for x in (k, v))
        return k + zeros[i][0], v + zeros[i][1]

    log_probs = function(w, ids, shift).log_softmax(-1)
    loss = -torch.stack([log_probs[t, ids[t + 1]] for t in range(len(ids) - 1)]).mean()
    out = torch.zeros(2, 3, 3, dtype=torch.float64)
    for i in range(3):
        gradients = torch.autograd.grad(loss, zeros[i], retain_graph=True)
        for j, bits in enumerate(WIDTHS):
            for side, (x, y, g) in enumerate(zip(seen[i], quantized(*seen[i], rules, bits), gradients)):
                out[side, i, j] = (g * (x - y)).abs().sum()
    return out


@pytest.mark.parametrize(("arch", "function"), [("llama", llama), ("gpt2", gpt2)])
@pytest.mark.parametrize(
    "options", [{}, {"key_codec": "token", "sink_tokens": 4, "window": 0}, {"transform": "hadamard"}]
)
def test_equals_a_slow_reference(arch, function, options):
    model = tiny_model(arch)
    rules = Rules(
        heads=2 if arch == "llama" else 4,
        sink=options.get("sink_tokens", 1),
        window=options.get("window", 8),
        channel=options.get("key_codec") != "token",
        hadamard="transform" in options,
    )
    found = measure(model, options={**OPTIONS, **options})
    assert found.layers == (0, 1, 2) and found.widths == WIDTHS and found.samples == 2
    assert found.shapes == (LayerShape(rules.heads, 16, 16, torch.float32),) * 3
    wanted = sum(reference(function, model, rules, ids) for ids in SAMPLES) / 2
    assert wanted.min() > 0
    # A value that lies between two codes may fall to either side, as one forward is float32.
    torch.testing.assert_close(torch.stack([found.keys, found.values]), wanted, rtol=2e-3, atol=0)
    assert torch.equal(found.total, found.keys + found.values)


# --- which layer is which --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", range(3))
def test_gradients_belong_to_their_layer(layer):
    model = copy.deepcopy(tiny_model())
    before = measure(model)
    # What this layer's attention says goes nowhere, so its errors cannot matter.
    model.model.layers[layer].self_attn.o_proj.weight.zero_()
    found = measure(model)
    for i in range(3):
        assert (found.total[i] == 0).all() == (i == layer)
    assert (before.total > 0).all()


@pytest.mark.parametrize("layer", range(3))
@pytest.mark.parametrize("side", ["keys", "values"])
def test_errors_belong_to_their_layer_and_side(layer, side):
    model = copy.deepcopy(tiny_model("gpt2"))
    projection = model.transformer.h[layer].attn.c_attn
    # Constant keys or values have no error, whatever their gradient.
    span = slice(64, 128) if side == "keys" else slice(128, 192)
    projection.weight[:, span] = 0
    projection.bias[span] = 1
    found = measure(model)
    for name in ("keys", "values"):
        assert ((getattr(found, name) == 0).all(dim=1)).tolist() == [name == side and i == layer for i in range(3)]


def test_scaling_values_up_and_their_output_down_changes_nothing():
    model = copy.deepcopy(tiny_model())
    before = measure(model)
    attention = model.model.layers[1].self_attn
    attention.v_proj.weight.mul_(8)
    attention.o_proj.weight.div_(8)
    torch.testing.assert_close(measure(model).total, before.total, rtol=1e-4, atol=0)


def test_layers_of_other_kinds_are_left_out():
    found = measure(tiny_model("mixed"))
    assert found.layers == (1,) and found.total.shape == (1, 3) and (found.total > 0).all()


@pytest.mark.parametrize("arch", ["qwen3", "phi3", "gpt_neox", "falcon", "deepseek_v3", "lfm2", "gemma3n", "gpt_oss"])
def test_other_architectures(arch):
    eager = arch == "gpt_oss"
    found = measure(tiny_model(arch, "eager" if eager else "sdpa"), SAMPLES[:1])
    assert (found.total[:, 0] < found.total[:, 1]).all() and (found.total[:, 1] < found.total[:, 2]).all()


def test_no_matter_how_attention_is_computed():
    eager, sdpa = (measure(tiny_model("llama", attention)).total for attention in ("eager", "sdpa"))
    torch.testing.assert_close(eager, sdpa, rtol=1e-3, atol=0)


# --- the codec -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("transform", ["none", "hadamard"])
@pytest.mark.parametrize("key_codec", ["channel", "token"])
def test_errors_are_those_of_a_filled_cache(bits, transform, key_codec):
    options = {"fbit": bits, "initial_bits": bits, "transform": transform, "key_codec": key_codec}
    rules = Rules(fbit=bits, max_length=120)
    data = kv(rules, 120)
    cache = make_cache(tiny_model(), max_length=120, **options)
    for i in range(3):
        cache.update(*data, i)
    cache.nbytes()
    layout = LayerLayout.of(
        PMKVQConfig(window=8, group_size=16, transform=transform, key_codec=key_codec),
        LayerShape(2, 16, 16, torch.float32),
    )
    sink, pages, _ = layout.split(120)
    assert pages > 1
    span = slice(sink, sink + pages * layout.page_tokens)
    for codec, x, held in zip((layout.keys, layout.values), data, cache.dequantize(1)):
        error = quantization_error(codec, x[:, :, span], bits)
        torch.testing.assert_close(x[:, :, span] - error, held[:, :, span])
        assert torch.equal(held[:, :, : span.start], x[:, :, : span.start])
        assert torch.equal(held[:, :, span.stop :], x[:, :, span.stop :])


def test_half_precision():
    exact, half = (measure(tiny_model(dtype=dtype)).total for dtype in (torch.float32, torch.bfloat16))
    torch.testing.assert_close(half, exact, rtol=0.1, atol=0)


# --- samples ---------------------------------------------------------------------------------------------------------


def test_mean_over_samples_of_any_length():
    model = tiny_model()
    rows = [SAMPLES[0], SAMPLES[1][:40]]
    alone = [measure(model, [row]) for row in rows]
    both = measure(model, rows)
    torch.testing.assert_close(both.keys, (alone[0].keys + alone[1].keys) / 2)
    torch.testing.assert_close(both.values, (alone[0].values + alone[1].values) / 2)


def test_one_sample_at_a_time_in_memory(monkeypatch):
    # The package has a function of the module's name.
    module = sys.modules["hf_kvq.calibration.sensitivity"]
    original, alive = module.kv_gradients, []

    def watched(model, ids):
        assert all(ref() is None for ref in alive)
        layers = original(model, ids)
        alive.extend(weakref.ref(x) for pairs in layers.values() for pair in pairs for x in pair)
        return layers

    monkeypatch.setattr(module, "kv_gradients", watched)
    measure(tiny_model(), random_ids(3, 40))
    assert len(alive) == 3 * 3 * 4


@pytest.mark.parametrize(
    ("samples", "kwargs", "message"),
    [
        (random_ids(1, 60), {"widths": (16, 4)}, "some of 8, 4 and 2"),
        (random_ids(1, 60), {"widths": ()}, "some of 8, 4 and 2"),
        ([], {}, "no samples"),
        (random_ids(1, 24), {}, "24 tokens fills no page.*takes 25"),
        (random_ids(1, 60)[None], {}, r"shape \(1, 60\)"),
        (random_ids(1, 1), {}, r"shape \(1,\)"),
    ],
)
def test_impossible_requests(samples, kwargs, message):
    with pytest.raises(ValueError, match=message):
        measure(tiny_model(), samples, **kwargs)


def test_the_progress_bar_can_be_labelled(capsys):
    sensitivity(tiny_model(), SAMPLES, OPTIONS, desc="layers")
    out, err = capsys.readouterr()
    assert out == "" and "layers" in err and "2/2" in err


# --- models that cannot be measured ----------------------------------------------------------------------------------


def test_a_model_that_runs_without_autograd():
    model = copy.deepcopy(tiny_model())
    model.forward = torch.no_grad()(model.forward)
    with pytest.raises(ValueError, match="no gradient reaches the keys and values of LlamaForCausalLM"):
        measure(model)


def test_a_model_that_ignores_its_cache():
    model = copy.deepcopy(tiny_model())
    forward = model.model.forward
    model.model.forward = lambda *args, **kwargs: forward(
        *args, **{**kwargs, "use_cache": False, "past_key_values": None, "cache": None}
    )
    with pytest.raises((ValueError, TypeError), match="no gradient reaches"):
        measure(model)


def test_encoder_decoder_models():
    model = T5ForConditionalGeneration(T5Config(vocab_size=16, d_model=8, d_ff=8, num_layers=1, num_heads=2, d_kv=4))
    with pytest.raises(ValueError, match="encoder-decoder"):
        measure(model)


# --- what is left behind ---------------------------------------------------------------------------------------------


def portrait(model):
    """All that could have changed."""
    return {
        "weights": {name: x.clone() for name, x in model.state_dict().items()},
        "modes": [module.training for module in model.modules()],
        "needed": [p.requires_grad for p in model.parameters()],
        "gradients": [p.grad for p in model.parameters()],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules()],
        "dtypes": [p.dtype for p in model.parameters()],
        "attributes": [sorted(vars(m)) for m in model.modules()],
        "config": model.config.to_dict(),
    }


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_as_it_was(fails):
    model = copy.deepcopy(tiny_model())
    model.config.attention_dropout = 0.5
    model.train().requires_grad_(True)
    model.model.layers[1].eval()
    model.model.embed_tokens.weight.requires_grad_(False)
    before = portrait(model)
    if fails:
        with pytest.raises(ValueError, match="fills no page"):
            measure(model, random_ids(1, 10))
    else:
        torch.testing.assert_close(measure(model).total, measure(tiny_model()).total)
    after = portrait(model)
    weights = before.pop("weights"), after.pop("weights")
    assert before == after and all(torch.equal(weights[0][name], x) for name, x in weights[1].items())


def test_gradient_checkpointing_does_not_disturb():
    model = copy.deepcopy(tiny_model()).train()
    model.gradient_checkpointing_enable()
    torch.testing.assert_close(measure(model).total, measure(tiny_model()).total)
    assert model.is_gradient_checkpointing


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, contextlib.nullcontext])
def test_in_any_autograd_mode(mode):
    model = tiny_model()
    with mode():
        found = measure(model)
    torch.testing.assert_close(found.total, measure(model).total)


def test_gradients_alone():
    layers = kv_gradients(tiny_model(), SAMPLES[0])
    assert list(layers) == [0, 1, 2]
    for tensors, gradients in layers.values():
        assert all(x.shape == (1, 2, 60, 16) and not x.requires_grad for x in (*tensors, *gradients))
        # The last token's keys and values are seen by no query that predicts anything.
        assert all((g[:, :, -1] == 0).all() and (g[:, :, 1:-1].abs().amax(-1) > 0).all() for g in gradients)
