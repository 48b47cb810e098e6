# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Steps that are captured and replayed: the same numbers and states as ordinary steps, with a recorder for a graph."""

import copy
import functools
from typing import Any

import pytest
import torch
from transformers import CompileConfig

from conftest import FULL_ATTENTION, forward, generate, left_padded, random_ids, storage_bytes, tiny_model
from hf_kvq import BudgetExceededError, MixKVQCache, PMKVQCache, registration
from hf_kvq.cache import KIVICache, KVQCache, NotStaticError
from hf_kvq.capture import CapturedSteps
from hf_kvq.registration import cache_argument
from recorder import Recorder, record


CACHES = {
    "pmkvq": (PMKVQCache, {"fbit": 2, "window": 8, "group_size": 16, "max_length": 110}),
    "pmkvq, little room": (PMKVQCache, {"fbit": 4, "window": 8, "group_size": 16, "max_length": 60}),
    "pmkvq, per token": (PMKVQCache, {"fbit": 2, "key_codec": "token", "window": 16, "max_length": 110}),
    "pmkvq, rotated": (
        PMKVQCache,
        {"fbit": 2, "transform": "hadamard", "window": 8, "group_size": 16, "max_length": 110},
    ),
    "kivi": (KIVICache, {"bits": 2, "residual": 16, "sink_tokens": 4, "group_size": 8}),
    "mixkvq": (MixKVQCache, {"residual": 16, "sink_tokens": 4, "group_size": 8, "target_bits": 5, "kernel": "cpu"}),
    "mixkvq, page by page": (
        MixKVQCache,
        {"residual": 16, "sink_tokens": 0, "group_size": 8, "importance_window": "page", "kernel": "cpu"},
    ),
}


class Graphs:
    """Captures by recording, and counts what was captured and replayed."""

    def __init__(self):
        self.captured = self.replayed = 0

    def __call__(self, function: Any) -> Any:
        result, replay = record(function)
        self.captured += 1

        def counted() -> None:
            self.replayed += 1
            replay()

        return result, counted


def stepped(model: Any, cache: KVQCache, columns: int, steps: int, call: Any, pads: tuple[int, ...] = (0, 11)):
    """Logits of `steps` tokens, one by one, behind a padded prompt, by `call`."""
    prompt = left_padded(len(pads), columns, list(pads))
    mask = prompt["attention_mask"]
    forward(model, cache, prompt["input_ids"], mask)
    out = []
    for ids in random_ids(len(pads), steps, 3).split(1, dim=1):
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
        positions = (mask.long().cumsum(-1) - 1)[:, -1:]
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "use_cache": True}
        out.append(call(**inputs, **{cache_argument(model): cache}).logits)
    return torch.cat(out, dim=1)


def assert_same(ours: KVQCache, wanted: KVQCache) -> None:
    """The same states, and keys and values that can differ only where attention's rounding comes in."""
    for cache in (ours, wanted):
        cache.nbytes()  # settles
    for i, (one, other) in enumerate(zip(ours.layers, wanted.layers)):
        assert one.states == other.states and one.columns == other.columns
        if i == 0:
            assert all(torch.equal(*pair) for pair in zip(ours.dequantize(0), wanted.dequantize(0)))
            if isinstance(ours, MixKVQCache):
                assert torch.equal(one.query_sum, other.query_sum) and one.query_count == other.query_count
    assert ours.layer_bits() == wanted.layer_bits()


@pytest.mark.parametrize("name", CACHES)
def test_replayed_steps_are_ordinary_steps(name):
    kind, options = CACHES[name]
    model, graphs = tiny_model(), Graphs()
    steps = CapturedSteps(model, cache_argument(model), graphs)
    ours, wanted = (kind(model.config, options) for _ in range(2))
    logits = stepped(model, ours, 40, 70, steps)
    # Codes of the C kernels' queries have 16 bits.
    tolerance = 1e-3 if options.get("kernel") == "cpu" else 1e-5
    torch.testing.assert_close(logits, stepped(model, wanted, 40, 70, model), atol=tolerance, rtol=0)
    assert_same(ours, wanted)
    # Another width, or more memory, is captured anew; all other steps are repetitions.
    assert steps.refusal is None and 1 < graphs.captured < 15 and graphs.replayed >= 70 - graphs.captured - 2
    assert min(ours.layer_bits()) < 16 and ours.layers[0].states[0] != ours.layers[0].states[1]


@pytest.mark.parametrize("arch", FULL_ATTENTION)
def test_models(arch):
    model, graphs = tiny_model(arch), Graphs()
    steps = CapturedSteps(model, cache_argument(model), graphs)
    ours, wanted = (PMKVQCache(model.config, CACHES["pmkvq"][1]) for _ in range(2))
    logits = stepped(model, ours, 40, 12, steps)
    torch.testing.assert_close(logits, stepped(model, wanted, 40, 12, model), atol=1e-5, rtol=0)
    assert_same(ours, wanted)
    assert graphs.replayed >= 9


def test_a_recording_that_goes_by_the_host_is_noticed(monkeypatch):
    # What the tests above rest on: with a count that Python holds, replays go wrong.
    from hf_kvq.cache.static import StaticSteps

    def parts(self, query):
        held = int(self.layer.states[0].recent + self.appended + 1)
        for rows, found in original(self, query):
            found[-1] = type(found[-1])(found[-1].keys[:, :, :held], found[-1].values[:, :, :held])
            yield rows, found

    original = StaticSteps.parts
    monkeypatch.setattr(StaticSteps, "parts", parts)
    model, graphs = tiny_model(), Graphs()
    ours, wanted = (PMKVQCache(model.config, CACHES["pmkvq"][1]) for _ in range(2))
    steps = CapturedSteps(model, cache_argument(model), graphs)
    logits = stepped(model, ours, 40, 12, steps, (0,))
    assert graphs.replayed > 5
    assert not torch.allclose(logits, stepped(model, wanted, 40, 12, model, (0,)), atol=1e-3)


def test_the_recorder_refuses_what_a_graph_would():
    for function, what in (
        (lambda: int(torch.ones(1)), "reads"),
        (lambda: torch.tensor([1.0]), "its own numbers"),
        (lambda: torch.ones(3).nonzero(), "how many"),
    ):
        with pytest.raises(RuntimeError, match=what), Recorder():
            function()


def test_the_recorder_notices_memory_that_was_given_back():
    holder = [torch.zeros(3)]
    result, replay = record(lambda: holder[0] + 1)
    replay()
    holder[0] = torch.ones(3)
    with pytest.raises(RuntimeError, match="given back"):
        replay()


def test_recording_changes_nothing():
    x, y = torch.zeros(3), torch.ones(3)
    result, replay = record(lambda: x.add_(y) * 2)
    assert x.tolist() == [0, 0, 0] and result.tolist() == [0, 0, 0]
    replay()
    y.fill_(3)
    replay()
    assert x.tolist() == [4, 4, 4] and result.tolist() == [8, 8, 8]


# --- between the steps -----------------------------------------------------------------------------------------------


def prepared(name: str = "pmkvq", pads: tuple[int, ...] = (0, 11), steps: int = 10, **options: Any) -> tuple:
    """A model, its captured steps, and two caches: of captured and of ordinary steps."""
    kind, defaults = CACHES[name]
    model = tiny_model()
    captured = CapturedSteps(model, cache_argument(model), Graphs())
    caches = [kind(model.config, {**defaults, **options}) for _ in range(2)]
    for cache, call in zip(caches, (captured, model)):
        stepped(model, cache, 40, steps, call, pads)
    return model, captured, *caches


def more(model: Any, cache: KVQCache, call: Any, steps: int = 5, seed: int = 9) -> torch.Tensor:
    """Logits of a few more tokens of an unpadded batch."""
    rows, out = len(cache.layers[0].states), []
    for ids in random_ids(rows, steps, seed).split(1, dim=1):
        inputs = {"input_ids": ids, "position_ids": torch.full_like(ids, cache.get_seq_length())}
        out.append(call(**inputs, use_cache=True, **{cache_argument(model): cache}).logits)
    return torch.cat(out, dim=1)


@pytest.mark.parametrize("name", ["pmkvq", "mixkvq"])
@pytest.mark.parametrize("what", ["nothing", "look", "crop", "reorder", "repeat", "prompt", "copy", "reset"])
def test_whatever_happens_between_steps(name, what):
    model, captured, *caches = prepared(name, pads=(0, 0))
    done = []
    for cache, call in zip(caches, (captured, model)):
        if what == "look":
            cache.summary(), cache.true_bits(), repr(cache), cache.layers[0].keys
        elif what == "crop":
            cache.crop(-7)
        elif what == "reorder":
            cache.reorder_cache(torch.tensor([1, 0]))
        elif what == "repeat":
            cache.batch_repeat_interleave(2)
        elif what == "prompt":
            forward(model, cache, random_ids(2, 9, 4))
        elif what == "copy":
            cache = copy.deepcopy(cache)
        elif what == "reset":
            cache.reset()
            forward(model, cache, random_ids(2, 40, 4))
        done.append((more(model, cache, call), cache))
    (logits, ours), (wanted_logits, wanted) = done
    torch.testing.assert_close(logits, wanted_logits, atol=1e-3, rtol=0)
    assert_same(ours, wanted)
    assert captured.refusal is None and captured.capture.replayed > 8


def test_bytes_are_all_counted():
    _, _, ours, wanted = prepared()
    # One more exact token per row, and the counts.
    per_token = ours.layers[0].layout.shape.token_bytes
    assert ours.nbytes() - wanted.nbytes() == len(ours.layers) * 2 * (per_token + 2 * 8)
    assert ours.nbytes() == sum(storage_bytes(layer) for layer in ours.layers)


def test_saved_and_loaded(tmp_path):
    model, captured, ours, wanted = prepared(pads=(0, 0))
    ours.save(tmp_path / "cache.safetensors")
    loaded = PMKVQCache.load(tmp_path / "cache.safetensors", model)
    torch.testing.assert_close(more(model, loaded, captured), more(model, wanted, model), atol=1e-5, rtol=0)
    assert_same(loaded, wanted)


def test_an_exhausted_budget_loses_nothing():
    model, captured, ours, _ = prepared(pads=(0,), max_length=55, on_overflow="error")
    more(model, ours, captured)
    before = [x.clone() for x in ours.dequantize(1)]
    with pytest.raises(BudgetExceededError):
        more(model, ours, captured, 1)
    assert ours.get_seq_length() == 55 and captured.refusal is None
    assert all(torch.equal(*pair) for pair in zip(before, ours.dequantize(1)))


# --- what is no such step --------------------------------------------------------------------------------------------


def test_a_model_that_goes_by_the_length():
    model, graphs = tiny_model(), Graphs()

    def call(**inputs):
        inputs[cache_argument(model)].get_seq_length()
        return model(**inputs)

    call.training = False
    steps = CapturedSteps(call, cache_argument(model), graphs)
    ours, wanted = (PMKVQCache(model.config, CACHES["pmkvq"][1]) for _ in range(2))
    assert torch.equal(stepped(model, ours, 40, 9, steps), stepped(model, wanted, 40, 9, model))
    assert "length" in steps.refusal and not graphs.captured
    assert_same(ours, wanted)


def test_eager_attention_is_refused_and_right():
    model, graphs = tiny_model(attention="eager"), Graphs()
    steps = CapturedSteps(model, cache_argument(model), graphs)
    ours, wanted = (PMKVQCache(model.config, CACHES["pmkvq"][1]) for _ in range(2))
    assert torch.equal(stepped(model, ours, 40, 9, steps), stepped(model, wanted, 40, 9, model))
    assert "keys and values itself" in steps.refusal and not graphs.captured
    assert_same(ours, wanted)


@pytest.mark.parametrize("name", ["pmkvq", "mixkvq", "mixkvq, page by page"])
def test_a_failing_step_loses_nothing(name):
    model, captured, ours, wanted = prepared(name, pads=(0, 0))
    layer = model.model.layers[1]

    def fail(*args):
        raise RuntimeError("the model broke")

    # It breaks when one layer has its new token and others do not.
    handle = layer.register_forward_pre_hook(fail)
    ids = random_ids(2, 1)
    inputs = {"input_ids": ids, "position_ids": torch.full_like(ids, 50), cache_argument(model): ours}
    try:
        with pytest.raises(RuntimeError, match="the model broke"), ours.static_step():
            model(**inputs)
    finally:
        handle.remove()
    assert ours.get_seq_length() == 50
    torch.testing.assert_close(more(model, ours, captured), more(model, wanted, model), atol=1e-3, rtol=0)
    assert_same(ours, wanted)


@pytest.mark.parametrize("name", ["pmkvq", "mixkvq", "mixkvq, page by page"])
def test_a_capture_that_fails_loses_nothing(name):
    kind, options = CACHES[name]
    model, calls = tiny_model(), []

    def capture(function):
        calls.append(record(function))
        raise RuntimeError("no graphs today")

    steps = CapturedSteps(model, cache_argument(model), capture)
    ours, wanted = (kind(model.config, options) for _ in range(2))
    logits = stepped(model, ours, 40, 20, steps)
    torch.testing.assert_close(logits, stepped(model, wanted, 40, 20, model), atol=1e-3, rtol=0)
    assert_same(ours, wanted)
    assert len(calls) == 1 and steps.refusal == "no graphs today"


def test_tiers_in_plain_torch_are_refused_and_right():
    model, graphs = tiny_model(), Graphs()
    steps = CapturedSteps(model, cache_argument(model), graphs)
    options = {**CACHES["mixkvq"][1], "kernel": "torch"}
    ours, wanted = (MixKVQCache(model.config, options) for _ in range(2))
    assert torch.equal(stepped(model, ours, 40, 20, steps), stepped(model, wanted, 40, 20, model))
    assert "plain torch" in steps.refusal and not graphs.captured
    assert_same(ours, wanted)


def test_a_model_that_makes_the_host_wait():
    model, graphs = tiny_model(), Graphs()

    def call(**inputs):
        # As dynamic RoPE does it.
        return model(**{**inputs, "logits_to_keep": int(inputs["position_ids"].max()) and 1})

    call.training = False
    steps = CapturedSteps(call, cache_argument(model), graphs)
    ours, wanted = (PMKVQCache(model.config, CACHES["pmkvq"][1]) for _ in range(2))
    torch.testing.assert_close(
        stepped(model, ours, 40, 9, steps), stepped(model, wanted, 40, 9, model), atol=1e-5, rtol=0
    )
    assert "reads a number" in steps.refusal and not graphs.captured
    assert_same(ours, wanted)


def test_an_old_handle_hides_no_tokens():
    model, captured, ours, wanted = prepared(pads=(0, 0))
    keys = [torch.randn(2, 2, 1, 16) for _ in range(2)]
    for cache in (ours, wanted):
        handles = [cache.update(*keys, i) for i in range(len(cache.layers))]
        cache.nbytes(), [layer.settle() for layer in cache.layers]
    more(model, ours, captured), more(model, wanted, model)
    assert handles and ours.summary() and copy.deepcopy(ours).layers[0].states == ours.layers[0].states
    assert_same(ours, wanted)


def test_layers_that_are_not_quantized():
    model = tiny_model("mixed")
    cache = PMKVQCache(model.config, CACHES["pmkvq"][1])
    forward(model, cache, random_ids(1, 40))
    with pytest.raises(NotStaticError, match="not quantized"):
        cache.static_step()


def test_padding_in_the_new_column():
    model, captured, ours, wanted = prepared()
    ids, done = random_ids(2, 1, 5), []
    for cache, call in ((ours, captured), (wanted, model)):
        mask = torch.ones(2, 51, dtype=torch.long)
        mask[1, :11] = mask[0, 50] = 0
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": torch.tensor([[50], [39]])}
        done.append(call(**inputs, use_cache=True, **{cache_argument(model): cache}).logits[1])
    torch.testing.assert_close(*done, atol=1e-5, rtol=0)
    assert_same(ours, wanted)


# --- generate --------------------------------------------------------------------------------------------------------


@pytest.fixture
def graphs(monkeypatch):
    """CPUs have graphs."""
    graphs = Graphs()
    monkeypatch.setattr(registration, "_WITH_GRAPHS", ("cpu",))
    monkeypatch.setattr(registration, "CapturedSteps", functools.partial(CapturedSteps, capture=graphs))
    return graphs


@pytest.mark.parametrize("request_kind", ["plain", "padded", "sampled", "beams", "preset"])
def test_generate_captures_if_asked(graphs, request_kind):
    model, (_, options) = tiny_model(), CACHES["pmkvq"]
    request: dict[str, Any] = {
        "input_ids": random_ids(2, 40),
        "cache_implementation": "pmkvq",
        "cache_config": options,
    }
    if request_kind == "padded":
        request |= left_padded(2, 40, [0, 9])
    elif request_kind == "sampled":
        request |= {"do_sample": True}
    elif request_kind == "beams":
        request |= {"num_beams": 2}
    elif request_kind == "preset":
        request |= {"cache_implementation": "rotatekv", "cache_config": {"window": 8, "group_size": 16}}
    results = []
    for config in (CompileConfig(), None):
        torch.manual_seed(0)
        results.append(generate(model, 24, compile_config=config, output_logits=request_kind != "beams", **request))
        if config is not None:
            replayed = graphs.replayed
    # Beams are reordered, which moves everything at every step.
    assert graphs.replayed == replayed <= 21 and (replayed > 10) == (request_kind != "beams")
    ours, wanted = results
    assert torch.equal(ours.sequences, wanted.sequences)
    assert isinstance(ours.cache, KVQCache)
    if ours.logits is not None:
        torch.testing.assert_close(ours.logits, wanted.logits, atol=1e-5, rtol=0)


def test_generate_does_not_capture_unasked(graphs):
    model, (_, options) = tiny_model(), CACHES["pmkvq"]
    request = {"input_ids": random_ids(1, 40), "cache_implementation": "pmkvq", "cache_config": options}
    generate(model, 5, **request)
    generate(model, 5, compile_config=CompileConfig(), disable_compile=True, **request)
    assert not graphs.captured


def test_other_caches_are_compiled_as_ever(graphs, monkeypatch):
    seen = []

    def compiled(function, **options):
        seen.append(options)
        return function

    monkeypatch.setattr(torch, "compile", compiled)
    model = copy.deepcopy(tiny_model())
    config = CompileConfig()
    config._compile_all_devices = True
    generate(model, 5, input_ids=random_ids(1, 20), cache_implementation="static", compile_config=config)
    assert len(seen) == 1 and not graphs.captured


@pytest.mark.slow
def test_real_model(graphs, real_model):
    model, tokenizer = real_model
    inputs = tokenizer("The history of the printing press begins", return_tensors="pt")
    request = {**inputs, "cache_implementation": "pmkvq", "cache_config": {"fbit": 4, "window": 8, "max_length": 200}}
    ours = generate(model, 24, compile_config=CompileConfig(), **request)
    wanted = generate(model, 24, **request)
    assert torch.equal(ours.sequences, wanted.sequences) and graphs.replayed >= 20
