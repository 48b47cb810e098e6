# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Every model family on both caches: the ordinary cache's output where nothing is lost, the simulation's content
where something is. `scripts/compatibility.py` writes down what passed."""

import copy
import functools
from types import SimpleNamespace

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import CompileConfig, DynamicCache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer

from conftest import forward, generate, left_padded, tiny_model
from families import BOTH, FAMILIES, IMAGE, QUANTIZED, SLIDING, STATE
from hf_kvq import MixKVQCache, PMKVQCache, registration
from hf_kvq.cache.layer import KVQLayer
from hf_kvq.capture import CapturedSteps
from hf_kvq.registration import cache_argument
from programs import Notes, assert_as_simulated, queries_seen
from recorder import record


CACHES = {"pmkvq": PMKVQCache, "mixkvq": MixKVQCache}
# No more than 64 tokens come in a test.
LOSSLESS = {
    "pmkvq": {"fbit": 16, "window": 8, "group_size": 16},
    "mixkvq": {"residual": 80, "group_size": 16},
}
QUANTIZING = {
    "pmkvq": {"fbit": 2, "window": 8, "group_size": 16, "max_length": 60},
    "mixkvq": {"residual": 16, "group_size": 16, "sink_tokens": 4, "target_bits": 4},
}
ORDINARY = {
    "DynamicSlidingWindowLayer": SLIDING,
    "LinearAttentionLayer": STATE,
    "LinearAttentionAndFullAttentionLayer": BOTH,
}
every_family = pytest.mark.parametrize("family", FAMILIES)
every_cache = pytest.mark.parametrize("cache", CACHES)


def assert_close(got, wanted, tolerance=1e-4):
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


def prompt_of(family: str) -> dict[str, torch.Tensor]:
    """A left-padded batch, with images where the model can see."""
    prompt = left_padded(2, 30, [0, 13])
    g = torch.Generator().manual_seed(0)
    if family in ("llava", "qwen2_vl"):
        prompt["input_ids"][:, 15:19] = IMAGE
        size = 8 if family == "llava" else 16
        pixels = torch.randn(2, 3, size, size, generator=g)
        if family == "llava":
            return {**prompt, "pixel_values": pixels}
        # Two frames of 4 x 4 patches of 4 x 4 pixels, merged 2 x 2.
        patches = torch.randn(2 * 16, 3 * 2 * 4 * 4, generator=g)
        prompt["mm_token_type_ids"] = (prompt["input_ids"] == IMAGE).int()
        return {**prompt, "pixel_values": patches, "image_grid_thw": torch.tensor([[1, 4, 4]] * 2)}
    return prompt


def decoder_cache(cache):
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


@every_family
@every_cache
def test_lossless_equals_the_ordinary_cache(family, cache):
    model, prompt = tiny_model(family), prompt_of(family)
    wanted = ordinary(family)
    got = generate(model, 25, cache_implementation=cache, cache_config=LOSSLESS[cache], **prompt)
    assert torch.equal(got.sequences, wanted.sequences)
    assert_close(got.logits, wanted.logits)
    mine = decoder_cache(got.cache)
    assert type(mine) is CACHES[cache]
    assert kinds_of(mine) == list(FAMILIES[family].layers)
    if model.config.is_encoder_decoder:
        # The mask is the encoder's.
        assert mine.padding.rows == [] and mine.get_seq_length() == 25
    elif cache == "pmkvq" and mine.quantized_layers:
        assert min(layer.states[0].pages for layer in mine.quantized_layers) >= 2


@every_family
def test_captured_steps_are_ordinary_steps(family, monkeypatch):
    """`generate` with a `compile_config` comes to the same, whether it can capture steps of this model or not."""
    replays = []

    def capture(function):
        result, replay = record(function)
        return result, lambda: replays.append(replay())

    monkeypatch.setattr(registration, "_WITH_GRAPHS", ("cpu",))
    monkeypatch.setattr(registration, "CapturedSteps", functools.partial(CapturedSteps, capture=capture))
    request = {"cache_implementation": "pmkvq", "cache_config": QUANTIZING["pmkvq"], **prompt_of(family)}
    got, wanted = (generate(tiny_model(family), 10, compile_config=x, **request) for x in (CompileConfig(), None))
    assert torch.equal(got.sequences, wanted.sequences)
    assert_close(got.logits, wanted.logits, 1e-5)
    # Older versions hand other things to this model at each step.
    is_old = family == "qwen2_vl" and Version(transformers.__version__) < Version("5.24")
    assert (len(replays) > 5) == (FAMILIES[family].is_captured and not is_old)


def kinds_of(cache) -> list[str]:
    """What each layer is, in the words of `families`; layers that hold nothing are none."""
    names = [type(layer).__name__ for layer in cache.layers if type(layer).__name__ != "DummyLayer"]
    return [ORDINARY.get(name, QUANTIZED) for name in names]


_ordinary = {}


def ordinary(family: str) -> SimpleNamespace:
    """What the ordinary cache makes of a family's prompt."""
    if family not in _ordinary:
        _ordinary[family] = generate(tiny_model(family), 25, **prompt_of(family))
    return _ordinary[family]


def dequantized_twin(cache):
    """A copy whose layers are all ordinary ones, and hold what attention over the cache sees."""
    if isinstance(cache, EncoderDecoderCache):
        return EncoderDecoderCache(
            dequantized_twin(cache.self_attention_cache), copy.deepcopy(cache.cross_attention_cache)
        )
    contents = {i: cache.dequantize(i) for i, layer in enumerate(cache.layers) if isinstance(layer, KVQLayer)}
    twin = DynamicCache()
    twin.layers = [DynamicLayer() if i in contents else copy.deepcopy(layer) for i, layer in enumerate(cache.layers)]
    twin.layer_class_to_replicate = None
    for i, (keys, values) in contents.items():
        twin.layers[i].update(keys, values)
    return twin


@every_family
@every_cache
def test_quantized_equals_the_simulation(family, cache, monkeypatch):
    """The cache holds what the simulation of the same keys and values holds, and attention sees just that."""
    model, wanted = tiny_model(family), FAMILIES[family]
    if family == "qwen2":
        model = copy.deepcopy(model)
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias[[3, 20]] = 30.0
    notes, mine = Notes(monkeypatch), CACHES[cache](model.config, QUANTIZING[cache])
    ids, mask = left_padded(2, 60, [0, 13]).values()
    encoder = left_padded(2, 9, [0, 4], seed=1)
    whole = EncoderDecoderCache(mine, DynamicCache()) if model.config.is_encoder_decoder else mine

    def logits(cache, start, stop):
        if model.config.is_encoder_decoder:
            decoder = {"decoder_input_ids": ids[:, start:stop], cache_argument(model): cache}
            return model(**encoder, **decoder).logits
        return forward(model, cache, ids[:, start:stop], mask[:, :stop])

    cuts = (40, 41, 52, 53, 60)
    logits(whole, 0, 40)
    for start, stop in zip(cuts, cuts[1:]):
        seen = dequantized_twin(whole)
        before = notes.dequantized
        got = logits(whole, start, stop)
        assert (notes.dequantized == before) == (wanted.reads_packed or not mine.quantized_layers)
        assert bool(got.isfinite().all())
        assert_close(got, logits(seen, start, stop))

    assert kinds_of(mine) == list(wanted.layers)
    for layer in mine.quantized_layers:
        assert_as_simulated(layer)
        assert layer.bits() == 2 and layer.states[0].pages >= 2
        assert queries_seen(layer) == [wanted.shows_queries] * 5
