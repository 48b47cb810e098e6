# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Every way to generate on every cache: the ordinary cache's output where nothing is lost, the simulation's content
where something is. `scripts/compatibility.py` writes down what passed."""

import copy
import functools
import pickle
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    DynamicCache,
    LlamaConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    TextIteratorStreamer,
)
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from conftest import feed, forward, generate, kv, left_padded, paired, random_ids, tiny_model
from hf_kvq import KIVICache, MixKVQCache, PMKVQCache
from hf_kvq.registration import cache_argument
from programs import Notes, assert_as_simulated
from simulation import Rules, assert_equal


CACHES = {"pmkvq": PMKVQCache, "mixkvq": MixKVQCache, "kivi": KIVICache}
# No more than 80 tokens come in a test.
LOSSLESS = {
    "pmkvq": {"fbit": 16, "window": 8, "group_size": 16},
    "mixkvq": {"residual": 96, "group_size": 16},
    "kivi": {"residual": 96, "group_size": 16},
}
QUANTIZING = {
    "pmkvq": {"fbit": 2, "window": 8, "group_size": 16, "max_length": 50},
    "mixkvq": {"residual": 16, "group_size": 16, "sink_tokens": 4, "target_bits": 4},
    "kivi": {"residual": 16, "group_size": 16, "sink_tokens": 4, "bits": 2},
}
# With full attention only, with sliding windows, with convolutions.
RUNS = [
    ("llama", "pmkvq"),
    ("llama", "mixkvq"),
    pytest.param("llama", "kivi", marks=pytest.mark.slow),
    ("mixed", "pmkvq"),
    pytest.param("mixed", "mixkvq", marks=pytest.mark.slow),
    ("lfm2", "pmkvq"),
    pytest.param("lfm2", "mixkvq", marks=pytest.mark.slow),
]


class NoRepeats(LogitsProcessor):
    """Forbids the token that came last."""

    def __call__(self, input_ids, scores):
        return scores.scatter(1, input_ids[:, -1:], float("-inf"))


class AfterTokens(StoppingCriteria):
    """Ends row `i` once it has `limits[i]` tokens."""

    def __init__(self, *limits: int):
        self.limits = torch.tensor(limits)

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.shape[1] >= self.limits


class Collector(BaseStreamer):
    def __init__(self):
        self.tokens = []

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.tokens.append("end")


class Letters:
    """As much of a tokenizer as a streamer needs."""

    def decode(self, ids, **kwargs):
        return "".join(f"{i} " for i in torch.as_tensor(ids).flatten().tolist())


def batch() -> dict[str, torch.Tensor]:
    return left_padded(2, 30, [0, 11])


def single() -> dict[str, torch.Tensor]:
    """A prompt that repeats itself, so that looking up finds something."""
    return {"inputs": random_ids(1, 13).repeat(1, 2)}


def plain(model, request, prompt=batch, new_tokens=20, **kwargs):
    return generate(model, new_tokens, **prompt(), **kwargs, **request)


def seeded(model, request, **kwargs):
    torch.manual_seed(5)
    return plain(model, request, do_sample=True, **kwargs)


@functools.cache
def draft(model_name: str):
    """The first layer of a model: close to it, but not the same."""
    model = copy.deepcopy(tiny_model(model_name))
    model.model.layers, model.config = model.model.layers[:1], copy.deepcopy(model.config)
    model.config.num_hidden_layers = 1
    model.config.layer_types = None
    model.model.config = model.config
    return model


def assisted(model, request, **kwargs):
    # A weak draft model: some of its tokens are taken, others are not.
    kwargs["assistant_model"] = draft("llama")
    return plain(model, request, single, **kwargs)


def streamed(model, request):
    collector, prompt = Collector(), single()
    out = plain(model, request, lambda: prompt, streamer=collector)
    assert collector.tokens == [*out.sequences[0].tolist(), "end"]
    text = TextIteratorStreamer(Letters(), timeout=30)
    again = plain(model, {k: v for k, v in request.items() if k != "cache"}, lambda: prompt, 4, streamer=text)
    assert "".join(text).split() == [str(i) for i in again.sequences[0].tolist()]
    return out


def embedded(model, request):
    prompt = batch()
    embeddings = model.get_input_embeddings()(prompt["input_ids"])
    return plain(model, request, lambda: {"inputs_embeds": embeddings, "attention_mask": prompt["attention_mask"]})


def dictionary(model, request):
    return plain(model, request, output_scores=True, output_hidden_states=True, repetition_penalty=1.3)


def continued(model, request):
    """Three turns on one cache."""
    ids, cache = random_ids(2, 5), cache_from(model, request)
    for turn, more in enumerate((0, 9, 1)):
        ids = torch.cat([ids, random_ids(2, more, seed=turn)], dim=1)
        out = generate(model, 12, inputs=ids, cache=cache)
        ids = out.sequences
    return out


def reused(model, request):
    """A prefix that is read once, and continued twice: alone, and as a batch of three."""
    prefix, stored = random_ids(1, 40), cache_from(model, request)
    forward(model, stored, prefix)
    ids = torch.cat([prefix.repeat(3, 1), random_ids(3, 4, seed=7)], dim=1)
    several = copy.deepcopy(stored)
    several.batch_repeat_interleave(3)
    outs = [generate(model, 12, inputs=x, cache=c) for x, c in ((ids[:1], copy.deepcopy(stored)), (ids, several))]
    assert stored.get_seq_length() == 40 and torch.equal(outs[0].sequences[0], outs[1].sequences[0])
    return outs[1]


def contrastive(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
    """Contrastive search in short, as a custom way to generate: rows fork, and one of each fork survives."""
    name = cache_argument(model)
    mask, cache, width = kwargs["attention_mask"], kwargs[name], 3
    logits, chosen = [forward(model, cache, input_ids, mask)[:, -1]], []
    for _ in range(generation_config.max_length - input_ids.shape[1]):
        candidates = logits[-1].topk(width).indices
        cache.batch_repeat_interleave(width)
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        every = forward(model, cache, candidates.view(-1, 1), mask.repeat_interleave(width, dim=0))[:, -1]
        # Some rule that is neither the first nor always the same.
        best = every.view(-1, width, every.shape[-1]).amax(-1).argmin(-1)
        rows = torch.arange(len(best)) * width + best
        cache.batch_select_indices(rows)
        logits.append(every[rows])
        chosen.append(candidates.flatten()[rows])
    sequences = torch.cat([input_ids, torch.stack(chosen, dim=1)], dim=1)
    return GenerateDecoderOnlyOutput(sequences=sequences, logits=tuple(logits[:-1]), **{name: cache})


def cache_from(model, request):
    """The cache that a request by name asks for, as an object."""
    if not request:
        return DynamicCache(config=model.config)
    return CACHES[request["cache_implementation"]](model.config, request["cache_config"])


MODES = {
    "greedy": plain,
    "sampling": functools.partial(seeded, top_k=20, top_p=0.9, temperature=1.5),
    "several sequences": functools.partial(seeded, num_return_sequences=3),
    "beam search": functools.partial(plain, num_beams=3, num_return_sequences=2),
    "beam sampling": functools.partial(seeded, num_beams=3),
    "assisted": assisted,
    "assisted sampling": lambda model, request: (torch.manual_seed(5), assisted(model, request, do_sample=True))[1],
    "prompt lookup": functools.partial(plain, prompt=single, prompt_lookup_num_tokens=4),
    "streaming": streamed,
    "prefill in chunks": functools.partial(plain, prefill_chunk_size=7),
    "embeddings": embedded,
    "stopping criteria": lambda model, request: plain(model, request, stopping_criteria=[AfterTokens(36, 47)]),
    "logits processors": lambda model, request: plain(
        model, request, logits_processor=LogitsProcessorList([NoRepeats()])
    ),
    "scores and states": dictionary,
    "several turns": continued,
    "a prefix used again": reused,
    "custom_generate": functools.partial(plain, new_tokens=12, custom_generate=contrastive),
}
# What the ordinary cache cannot do either: rows of layers with a state can be reordered, but not repeated.
IMPOSSIBLE = {("lfm2", "a prefix used again"), ("lfm2", "custom_generate")}
every_mode = pytest.mark.parametrize("mode", MODES)
every_run = pytest.mark.parametrize(("model", "cache"), RUNS)


def run(mode: str, model: str, request: dict) -> SimpleNamespace:
    try:
        return MODES[mode](tiny_model(model), request)
    except AttributeError as error:
        if (model, mode) not in IMPOSSIBLE:
            raise
        assert "'LinearAttentionLayer' object has no attribute 'batch_repeat_interleave'" in str(error)
        pytest.skip("the ordinary cache cannot either")


@functools.cache
def ordinary(mode: str, model: str) -> SimpleNamespace:
    return run(mode, model, {})


def assert_same_logits(got, wanted, tolerance=1e-4):
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


@every_mode
@every_run
def test_lossless_equals_the_ordinary_cache(mode, model, cache):
    wanted = ordinary(mode, model)
    got = run(mode, model, {"cache_implementation": cache, "cache_config": LOSSLESS[cache]})
    assert type(got.cache) is CACHES[cache]
    assert torch.equal(got.sequences, wanted.sequences)
    assert_same_logits(got.logits, wanted.logits)
    assert got.cache.get_seq_length() == wanted.cache.get_seq_length()


@every_mode
@every_run
def test_quantized_equals_the_simulation(mode, model, cache, monkeypatch):
    """Whatever a mode does to the cache, it holds what the simulation holds after the same."""
    Notes(monkeypatch)
    out = run(mode, model, {"cache_implementation": cache, "cache_config": QUANTIZING[cache]})
    assert bool(out.logits.isfinite().all())
    assert all(layer.bits() == 2 and layer.states[0].pages >= 2 for layer in out.cache.quantized_layers)
    # They are all given the same program, and simulating it takes a while.
    assert_as_simulated(out.cache.quantized_layers[-1])


# --- drafts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fbit", [8, 2])
def test_drafts_that_fit_the_window_leave_no_trace(fbit):
    """Tokens that are taken back before they leave the window change neither pages nor widths.

    Pages may be packed earlier by as many tokens as there were drafts, so this holds once these have come.
    """
    rules = Rules(fbit=fbit, max_length=100, window=8)
    tokens, random = kv(rules, 200), torch.Generator().manual_seed(0)
    cache, layer, simulation = paired(rules)
    start = 0
    while start < 150:
        drafted = int(torch.randint(1, 9, (1,), generator=random))
        taken = int(torch.randint(0, drafted, (1,), generator=random)) + 1
        wrong = [x + 100.0 for x in kv(rules, drafted - taken, seed=start)]
        feed(cache, [torch.cat([x[:, :, start : start + taken], y], dim=2) for x, y in zip(tokens, wrong)])
        cache.crop(taken - drafted)
        start += taken
    feed(cache, [x[:, :, start : start + 8] for x in tokens])
    simulation.update(*(x[:, :, : start + 8] for x in tokens))
    assert layer.states[0].pages == (start + 8 - 9) // 16 and layer.bits() == fbit
    assert_equal(layer, simulation)


@pytest.mark.parametrize("cache", CACHES)
def test_what_is_cropped_within_the_exact_tokens_and_comes_again_changes_nothing(cache):
    rules = Rules()
    data = kv(rules, 70, 2)
    whole = CACHES[cache](LlamaConfig(num_hidden_layers=1), QUANTIZING[cache])
    whole.update(*(x[:, :, :60] for x in data), 0)
    (layer,) = whole.layers
    contents = whole.dequantize(0)
    exact = layer.states[0].recent
    assert exact >= 8 and layer.states[0].pages >= 2 and not torch.equal(contents[0], data[0][:, :, :60])
    for n in range(1, exact + 1):
        again = copy.deepcopy(whole)
        again.crop(-n)
        assert all(torch.equal(x, y[:, :, : 60 - n]) for x, y in zip(again.dequantize(0), contents))
        again.update(*(x[:, :, 60 - n : 60] for x in data), 0)
        again.nbytes()  # settles
        assert again.layers[0].states == layer.states
        assert all(torch.equal(x, y) for x, y in zip(again.dequantize(0), contents))


def test_assisted_decoding_picks_what_greedy_decoding_picks():
    model = tiny_model()
    request = {"cache_implementation": "pmkvq", "cache_config": {**QUANTIZING["pmkvq"], "fbit": 8}}
    wanted = plain(model, request, single, 40)
    for kwargs in ({"assistant_model": draft("llama")}, {"prompt_lookup_num_tokens": 4}):
        got = plain(model, request, single, 40, **kwargs)
        assert torch.equal(got.sequences, wanted.sequences)
        assert got.cache.layer_bits() == wanted.cache.layer_bits() == [8] * 3


@pytest.mark.parametrize("where", ["argument", "generation config"])
def test_the_draft_model_gets_an_ordinary_cache_of_its_own(where, monkeypatch):
    model, assistant, kinds = copy.deepcopy(tiny_model()), copy.deepcopy(draft("llama")), []
    request = {"cache_implementation": "pmkvq", "cache_config": QUANTIZING["pmkvq"]}
    if where == "generation config":
        if cache_argument(model) != "cache":
            pytest.skip("this version of transformers refuses any name of a cache together with an assistant")
        model.generation_config.update(**request)
        assistant.generation_config.update(**request)
    original = assistant.model.forward

    def note(*args, **kwargs):
        kinds.append(type(kwargs[cache_argument(assistant)]))
        return original(*args, **kwargs)

    monkeypatch.setattr(assistant.model, "forward", note)
    given = {"cache": PMKVQCache(model.config, QUANTIZING["pmkvq"])} if where == "argument" else {}
    out = plain(model, given, single, assistant_model=assistant)
    assert isinstance(out.cache, PMKVQCache) and len(out.cache.layers) == 3
    assert set(kinds) == {DynamicCache} and len(kinds) > 10


@pytest.mark.parametrize("family", ["qwen3_next", "jamba"])
def test_what_cannot_roll_back_refuses_drafts_as_it_does_without_us(family):
    model, messages = tiny_model(family), []
    for request in ({}, {"cache_implementation": "pmkvq", "cache_config": LOSSLESS["pmkvq"]}):
        with pytest.raises(ValueError) as error:
            plain(model, request, single, prompt_lookup_num_tokens=4)
        messages.append(str(error.value))
    assert messages[0] == messages[1] and "assisted" in messages[0].lower()


# --- the cache as an object ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("model", ["llama", "mixed", "lfm2"])
def test_pickled_caches_go_on_as_copies_do(cache, model):
    model, prompt = tiny_model(model), batch()
    stored = CACHES[cache](model.config, QUANTIZING[cache])
    with torch.enable_grad():
        forward(model, stored, prompt["input_ids"], prompt["attention_mask"])
    loaded = pickle.loads(pickle.dumps(stored))
    mask = torch.cat([prompt["attention_mask"], torch.ones(2, 9, dtype=torch.long)], dim=1)
    logits = [forward(model, c, random_ids(2, 9, seed=1), mask) for c in (stored, loaded)]
    assert torch.equal(logits[0], logits[1]) and loaded.nbytes() == stored.nbytes()
    assert loaded.padding is loaded.quantized_layers[0].padding


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("model", ["llama", "mixed", "lfm2"])
def test_an_ordinary_cache_can_be_taken_over(cache, model):
    model, prompt = tiny_model(model), batch()
    given = DynamicCache(config=model.config)
    forward(model, given, *prompt.values())
    contents = [layer.keys.clone() for layer in given.layers if hasattr(layer, "keys")]
    filled = CACHES[cache](model.config, LOSSLESS[cache])
    filled.fill(given, prompt["attention_mask"])
    assert filled.get_seq_length() == 30 and filled.padding.rows[1] == ((0, 11),)
    mask = torch.cat([prompt["attention_mask"], torch.ones(2, 9, dtype=torch.long)], dim=1)
    got = forward(model, filled, random_ids(2, 9, seed=1), mask)
    assert all(
        torch.equal(a, layer.keys) for a, layer in zip(contents, (x for x in given.layers if hasattr(x, "keys")))
    )
    assert_same_logits(got, forward(model, given, random_ids(2, 9, seed=1), mask))
    with pytest.raises(ValueError, match="takes an empty cache"):
        filled.fill(given)
    with pytest.raises(ValueError, match="but was given DynamicLayer"):
        CACHES[cache](tiny_model("mixed").config).fill(DynamicCache(config=tiny_model().config))


@pytest.mark.parametrize("cache", CACHES)
def test_keys_and_values_keep_apart_in_every_operation(cache):
    # Of different sizes, so that a mix-up cannot go unnoticed.
    one = CACHES[cache](LlamaConfig(num_hidden_layers=1), {**QUANTIZING[cache], "group_size": 16})
    g = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 2, 60, 16, generator=g), torch.randn(2, 2, 60, 24, generator=g) + 50
    one.update(keys, values, 0)
    one.reorder_cache(torch.tensor([1, 0]))
    one.batch_repeat_interleave(2)
    one.batch_select_indices(torch.tensor([0, 3]))
    one.crop(-7)
    got = one.dequantize(0)
    assert got[0].shape == (2, 2, 53, 16) and got[1].shape == (2, 2, 53, 24)
    assert float((got[0] - keys[[1, 0], :, :53]).abs().max()) < 3
    assert float((got[1] - values[[1, 0], :, :53]).abs().max()) < 3


@pytest.mark.parametrize("name", ["key_cache", "value_cache", "seen_tokens", "get_usable_length"])
def test_members_of_older_caches_say_what_to_use(name):
    cache = PMKVQCache(tiny_model().config)
    with pytest.raises(
        AttributeError, match=rf"'PMKVQCache' object has no attribute '{name}'; use (dequantize|get_seq)"
    ):
        getattr(cache, name)
    with pytest.raises(AttributeError, match="no attribute 'something'$"):
        cache.something  # noqa: B018
    assert not hasattr(copy.deepcopy(cache), name)


# --- attention weights -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_attention_weights_come_out_where_they_are_asked_for(family):
    model = tiny_model(family, "eager")
    wanted, got = (
        plain(model, request, new_tokens=12, output_attentions=True)
        for request in ({}, {"cache_implementation": "pmkvq", "cache_config": LOSSLESS["pmkvq"]})
    )
    assert_same_logits(got.logits, wanted.logits)
    assert [len(step) for step in got.attentions] == [len(model.model.layers)] * 12
    for a, b in zip(sum(got.attentions, ()), sum(wanted.attentions, ())):
        assert_same_logits(a, b)
