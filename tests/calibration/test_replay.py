# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Replayed attention against attention written out, and against candidates whose error is known."""

import math

import pytest
import torch
from transformers import DynamicCache

from conftest import random_ids, tiny_model
from hf_kvq.calibration.positions import feed
from hf_kvq.calibration.replay import attention_errors


IDS = random_ids(1, 50)[0]
QUERIES = 12
# One for each kind of mask, bias, sharing and attention function.
ARCHS = ["llama", "gpt_neox", "falcon", "mixed", "gemma3n", "gpt_oss", "diffllama", "deepseek_v3", "lfm2", "gpt2"]


def model_of(arch):
    return tiny_model(arch, "eager" if arch in ("gpt_oss", "gemma2") else "sdpa")


def exact_and_nothing(layer, keys, values):
    yield keys.clone(), values.clone()
    yield keys, torch.zeros_like(values)


@pytest.mark.parametrize("arch", ARCHS)
def test_candidates_of_known_error(arch):
    found = attention_errors(model_of(arch), IDS, QUERIES, exact_and_nothing)
    assert len(found) >= 1
    for (same, size), (changed, again) in found.values():
        assert same == 0 and size == again > 0 and changed > 1e-4 * size
    if arch == "llama":
        # Neither a bias nor a residual comes after its values.
        assert all(changed == size for _, (changed, size) in found.values())


@pytest.mark.parametrize("arch", ARCHS)
def test_everything_else_is_exact(arch):
    model, seen, outputs = model_of(arch), {}, []

    def remembered(layer, keys, values):
        seen[layer] = keys.clone(), values.clone()
        for _ in range(2):
            yield torch.zeros_like(keys), torch.ones_like(values)

    hook = model.base_model.register_forward_hook(lambda module, args, out: outputs.append(out.last_hidden_state))
    attention_errors(model, IDS, QUERIES, remembered)
    cache = DynamicCache(config=model.config)
    feed(model, IDS[:-QUERIES], cache)
    feed(model, IDS[-QUERIES:], cache)
    hook.remove()
    # Layers without a cache of their own are in there too.
    assert torch.equal(outputs[1], outputs[3])
    for layer, pair in seen.items():
        held = cache.layers[layer].keys, cache.layers[layer].values
        # Sliding layers hand out more than they keep.
        assert all(torch.equal(x[:, :, -y.shape[2] :], y[:, :, -x.shape[2] :]) for x, y in zip(pair, held))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_equals_attention_written_out(attention):
    model, offsets = tiny_model("llama", attention), {}

    def shifted(layer, keys, values):
        g = torch.Generator().manual_seed(layer)
        offsets[layer] = [torch.randn(x.shape, generator=g) for x in (keys, values)]
        yield keys + offsets[layer][0], values + offsets[layer][1]

    found = attention_errors(model, IDS, QUERIES, shifted)
    hidden = model(input_ids=IDS[None], use_cache=False, output_hidden_states=True).hidden_states
    angle = torch.arange(len(IDS))[:, None] * 10000 ** (-torch.arange(8) / 8)
    cos, sin = angle.cos().double(), angle.sin().double()
    for i, block in enumerate(model.model.layers):
        x = block.input_layernorm(hidden[i][0]).double()
        q, k, v = (
            (x @ getattr(block.self_attn, f"{name}_proj").weight.double().T).unflatten(-1, (-1, 16)).transpose(0, 1)
            for name in "qkv"
        )
        q, k = (
            torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1) for a, b in (y.chunk(2, dim=-1) for y in (q, k))
        )
        out = []
        for dk, dv in ((0, 0), (offsets[i][0][0], offsets[i][1][0])):
            keys, values = ((y + d).repeat_interleave(2, dim=0) for y, d in ((k, dk), (v, dv)))
            scores = (q @ keys.mT / math.sqrt(16)).masked_fill(torch.ones(50, 50).triu(1).bool(), -math.inf)
            y = (scores.softmax(-1) @ values).transpose(0, 1).flatten(1)
            out.append((y @ block.self_attn.o_proj.weight.double().T)[-QUERIES:])
        ((error, size),) = found[i]
        assert error == pytest.approx(float((out[1] - out[0]).square().sum()), rel=1e-4)
        assert size == pytest.approx(float(out[0].square().sum()), rel=1e-4)


def hooks_of(model):
    return [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]


@pytest.mark.parametrize("fails", [False, True])
def test_no_hook_is_left_behind(fails):
    model = tiny_model()
    before = hooks_of(model)

    def candidates(layer, keys, values):
        assert all(now == count + 2 for now, count in zip(hooks_of(model), before))
        if fails:
            raise KeyError("a candidate")
        yield keys, values

    if fails:
        with pytest.raises(KeyError, match="a candidate"):
            attention_errors(model, IDS, QUERIES, candidates)
    else:
        attention_errors(model, IDS, QUERIES, candidates)
    assert hooks_of(model) == before


def test_layers_without_candidates():
    found = attention_errors(tiny_model(), IDS, QUERIES, lambda i, k, v: [(k, v)] if i == 1 else [])
    assert {i: len(errors) for i, errors in found.items()} == {0: 0, 1: 1, 2: 0}


@pytest.mark.parametrize("ids", [IDS[:QUERIES], IDS[None]])
def test_impossible_samples(ids):
    with pytest.raises(ValueError, match="more than 12 token ids"):
        attention_errors(tiny_model(), ids, QUERIES, exact_and_nothing)
