# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""torch.compile: a compiled model leaves its graphs for the cache, and comes to the same numbers."""

import copy
import shutil

import pytest
import torch
from transformers import CompileConfig

from conftest import forward, generate, left_padded, random_ids, tiny_model
from hf_kvq import MixKVQCache, PMKVQCache
from hf_kvq.codecs import dequantize, equivalent_right_shift, pack, quantize, unpack


CACHES = {
    "pmkvq": (PMKVQCache, {"fbit": 2, "window": 8, "group_size": 16, "max_length": 100}),
    "mixkvq": (MixKVQCache, {"residual": 16, "sink_tokens": 4, "group_size": 8, "target_bits": 5}),
}


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Counting:
    """A backend that runs graphs as they are, and counts them."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list) -> torch.nn.Module:
        self.graphs += 1
        return graph


def compiled(model, backend, layers: int | None = None):
    model = copy.deepcopy(model)
    if layers is not None:
        del model.model.layers[layers:]
        model.config.num_hidden_layers = layers
    plain = copy.deepcopy(model)
    model.forward = torch.compile(model.forward, backend=backend)
    return model, plain


def run(model, cache, columns: int, steps: int) -> torch.Tensor:
    """Logits of a padded prompt, and of more tokens one by one."""
    prompt = left_padded(2, columns, [0, 11])
    mask = prompt["attention_mask"]
    out = [forward(model, cache, prompt["input_ids"], mask)]
    for ids in random_ids(2, steps, 3).split(1, dim=1):
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
        out.append(forward(model, cache, ids, mask))
    return torch.cat(out, dim=1)


@pytest.mark.parametrize("name, columns", [pytest.param("pmkvq", 55, marks=pytest.mark.slow), ("mixkvq", 66)])
def test_a_compiled_model_is_the_same(name, columns, fresh_dynamo):
    backend, (kind, options) = Counting(), CACHES[name]
    model, plain = compiled(tiny_model(), backend, layers=1)
    caches = [kind(model.config, options) for _ in range(2)]
    logits = [run(x, cache, columns, 3) for x, cache in zip((model, plain), caches)]
    # One page more than behind the prompt.
    sizes = {"pmkvq": (3, 2), "mixkvq": (4, 3)}[name]
    assert tuple(state.pages for state in caches[0].layers[0].states) == sizes
    assert torch.equal(*logits) and backend.graphs >= 3
    assert caches[0].layers[0].states == caches[1].layers[0].states and caches[0].layer_bits()[0] < 16
    for pair in zip(*(cache.dequantize(0) for cache in caches)):
        assert torch.equal(*pair)
    if name == "mixkvq":
        # The queries were seen.
        assert torch.equal(*(cache.layers[0].query_sum for cache in caches)) and caches[0].layers[0].query_sum.any()


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["mixed", "qwen3"])
def test_compiled_generate(arch, fresh_dynamo):
    backend = Counting()
    model, plain = compiled(tiny_model(arch), backend)
    for method, (_, options) in CACHES.items():
        request = {**left_padded(2, 50, [0, 9]), "cache_implementation": method, "cache_config": options}
        out, wanted = generate(model, 12, **request), generate(plain, 12, **request)
        assert torch.equal(out.sequences, wanted.sequences) and backend.graphs
        torch.testing.assert_close(out.logits, wanted.logits, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor(fresh_dynamo):
    model, plain = compiled(tiny_model(dtype=torch.float64), "inductor", layers=1)
    kind, options = CACHES["pmkvq"]
    logits = [run(x, kind(model.config, options), 40, 1) for x in (model, plain)]
    torch.testing.assert_close(*logits, atol=1e-5, rtol=0)


def test_generate_does_not_compile_by_itself(monkeypatch):
    # It does for caches of fixed size; ours says that it is none.
    model = tiny_model()

    def refuse(*args, **kwargs):
        raise AssertionError("compiled")

    monkeypatch.setattr(torch, "compile", refuse)
    always = CompileConfig()
    always._compile_all_devices = True
    request = {"input_ids": random_ids(1, 40), "compile_config": always}
    for method, (kind, options) in CACHES.items():
        assert not kind(model.config, options).is_compileable
        generate(model, 3, cache_implementation=method, cache_config=options, **request)
    with pytest.raises(AssertionError, match="compiled"):
        generate(model, 3, cache_implementation="static", **request)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_codecs_are_one_graph(bits, fresh_dynamo):
    # ENV-04: nothing in them breaks a graph.
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))

    def there_and_back(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes, low, high = quantize(x, bits, 16)
        back = unpack(pack(codes, bits), bits, 32)
        return dequantize(back, low, high, bits, 16), equivalent_right_shift(codes, bits // 2) if bits > 2 else codes

    done, wanted = torch.compile(there_and_back, backend="eager", fullgraph=True)(x), there_and_back(x)
    assert all(torch.equal(*pair) for pair in zip(done, wanted))
