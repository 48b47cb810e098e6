# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Models in wrappers (PEFT), and models whose weights are quantized: the cache is as with any other model."""

import copy

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, LlamaForCausalLM

from conftest import cache_argument, forward, generate, left_padded, random_ids, tiny_model
from hf_kvq import KVQCache, KVQPlan, MixKVQCache, PMKVQCache, PMKVQConfig


PM = {"fbit": 2, "window": 8, "group_size": 16, "max_length": 100}
MIX = {"residual": 16, "group_size": 8, "sink_tokens": 4}
METHODS = {"pmkvq": (PMKVQCache, PM), "mixkvq": (MixKVQCache, MIX)}


@pytest.fixture
def adapted():
    """A model with an adapter on its attention."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(copy.deepcopy(tiny_model()), config).eval()


def request(method: str) -> dict:
    return {**left_padded(2, 60, [0, 9]), "cache_implementation": method, "cache_config": METHODS[method][1]}


@pytest.mark.parametrize("method", METHODS)
def test_an_adapter_is_part_of_the_model(adapted, method):
    plain = generate(tiny_model(), 12, **request(method))
    with_adapter = generate(adapted, 12, **request(method))
    assert type(with_adapter.cache) is METHODS[method][0] and with_adapter.cache.layer_bits()[0] < 16
    assert not torch.allclose(with_adapter.logits, plain.logits, atol=0.1)
    with adapted.disable_adapter():
        assert torch.equal(generate(adapted, 12, **request(method)).logits, plain.logits)
    assert torch.equal(generate(adapted, 12, **request(method)).logits, with_adapter.logits)
    merged = generate(adapted.merge_and_unload(), 12, **request(method))
    # A sum in another order may bring a number to the next code.
    torch.testing.assert_close(merged.logits[:, 0], with_adapter.logits[:, 0], atol=1e-4, rtol=0)


def test_caches_plans_and_files_take_the_wrapper(adapted, tmp_path):
    assert cache_argument(adapted) == cache_argument(tiny_model())
    cache, ids = PMKVQCache(adapted.config, PM), random_ids(1, 60)
    wanted = forward(adapted, DynamicCache(config=adapted.config), ids)
    torch.testing.assert_close(forward(adapted, cache, ids), wanted, atol=1e-4, rtol=0)
    cache.save(tmp_path / "prefix")
    loaded, more = KVQCache.load(tmp_path / "prefix", adapted), random_ids(1, 20, 1)
    assert torch.equal(forward(adapted, loaded, more), forward(adapted, cache, more))
    plan = KVQPlan.of(adapted, PMKVQConfig(**PM))
    assert plan == KVQPlan.of(tiny_model(), PMKVQConfig(**PM))
    out = generate(adapted, 4, input_ids=ids, cache_implementation="pmkvq", cache_config={"plan": plan})
    assert out.cache.config.fbit == 2


def quantization(name: str):
    """A config that quantizes weights with a package, if it is installed."""
    pytest.importorskip({"quanto": "optimum.quanto", "torchao": "torchao"}.get(name, name))
    if name == "quanto":
        return transformers.QuantoConfig(weights="int8")
    if name == "bitsandbytes":
        return transformers.BitsAndBytesConfig(load_in_4bit=True)
    from torchao.quantization import Int8WeightOnlyConfig

    return transformers.TorchAoConfig(Int8WeightOnlyConfig())


@pytest.mark.parametrize("name", ["quanto", "torchao", "bitsandbytes"])
def test_quantized_weights(name, tmp_path):
    config = quantization(name)
    tiny_model().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, quantization_config=config, device_map="cpu"
    ).eval()
    assert isinstance(model, LlamaForCausalLM)
    # Some put another module in a layer's place, torchao another tensor in its weight's.
    up_proj = model.model.layers[0].mlp.up_proj
    changed = up_proj.weight.data if name == "torchao" else up_proj
    assert type(changed) not in (torch.nn.Linear, torch.Tensor)
    prompt = left_padded(2, 60, [0, 9])
    wanted = generate(model, 12, **prompt)
    assert not torch.allclose(wanted.logits, generate(tiny_model(), 12, **prompt).logits, atol=1e-3)
    exact = request("pmkvq")
    exact["cache_config"] = {**PM, "fbit": 16}
    torch.testing.assert_close(generate(model, 12, **exact).logits, wanted.logits, atol=1e-4, rtol=0)
    for method in METHODS:
        cache = generate(model, 12, **request(method)).cache
        assert cache.layer_bits() == [cache.layer_bits()[0]] * 3 and cache.layer_bits()[0] < 16
