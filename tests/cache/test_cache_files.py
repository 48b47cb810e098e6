# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Prefixes that are used again: copies in memory, and files that any process on any device can go on from."""

import copy
import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from transformers import DynamicCache

from conftest import CONFIGS, cache_argument, forward, generate, left_padded, random_ids, storage_bytes, tiny_model
from hf_kvq import KIVICache, KVQCache, KVQPlan, MixKVQCache, PMKVQCache, PMKVQConfig
from hf_kvq.cache import files, layout
from hf_kvq.cache.base import tensors_of
from hf_kvq.cli import main


PM = {"window": 8, "group_size": 16, "max_length": 256}
MIX = {"residual": 16, "group_size": 8, "sink_tokens": 4}
CACHES = {
    "pmkvq 16": (PMKVQCache, {**PM, "fbit": 16}),
    "pmkvq 2": (PMKVQCache, {**PM, "fbit": 2, "max_length": 100}),
    "pmkvq layers": (PMKVQCache, {**PM, "fbit": [8, 4, 2], "max_length": 100}),
    "pmkvq token": (PMKVQCache, {**PM, "fbit": 4, "key_codec": "token", "max_length": 100}),
    "pmkvq hadamard": (PMKVQCache, {**PM, "fbit": 2, "transform": "hadamard", "max_length": 100}),
    "pmkvq budget": (PMKVQCache, {**PM, "fbit": 2, "max_length": None, "budget_bytes": 40_000}),
    "pmkvq outgrown": (PMKVQCache, {**PM, "fbit": 4, "max_length": 12}),
    "mixkvq": (MixKVQCache, {**MIX, "target_bits": 5}),
    "mixkvq tau": (MixKVQCache, {**MIX, "tau_bf16": 2.0, "tau_uint4": 0.5, "value_bits": 4}),
    "mixkvq page": (MixKVQCache, {**MIX, "importance_window": "page"}),
    "pmkvq pairs": (PMKVQCache, {**PM, "fbit": [4, 2, 8], "value_fbit": 2, "max_length": 100}),
    "pmkvq rotated": (
        PMKVQCache,
        {**PM, "fbit": 2, "key_codec": "token", "transform": "hadamard_kv", "max_length": 100},
    ),
    "mixkvq rotated": (MixKVQCache, {**MIX, "transform": "hadamard", "key_clip": 0.85}),
    "kivi": (KIVICache, {**MIX, "bits": 4}),
}
#: Models with other layers beside the quantized ones, and MLA.
MIXED = ["mixed", "gpt_oss", "lfm2", "gemma3n", "deepseek_v3"]


def lambda_plan(model) -> KVQPlan:
    scale = torch.rand(3, 2, 8, generator=torch.Generator().manual_seed(1)) + 0.5
    config = PMKVQConfig(fbit=4, key_codec="token", transform="lambda", window=8, group_size=16, max_length=100)
    return KVQPlan.of(model, config, tensors={"key_scale": torch.cat([scale, scale], dim=-1)})


def cache_for(model, name: str) -> KVQCache:
    if name == "lambda":
        return PMKVQCache(model.config, lambda_plan(model))
    kind, options = CACHES[name]
    return kind(model.config, options)


def filled(model, name: str = "pmkvq 2", rows: int = 3, columns: int = 90) -> tuple[KVQCache, dict]:
    """A cache after a padded prompt, and that prompt."""
    cache, prompt = cache_for(model, name), left_padded(rows, columns, [0, 5, 40][:rows])
    forward(model, cache, prompt["input_ids"], prompt["attention_mask"])
    return cache, prompt


def go_on(model, cache, prompt: dict, tokens: int, seed: int = 9) -> torch.Tensor:
    """Logits of more tokens behind the prompt, in calls of 1 to 20."""
    mask, logits = prompt["attention_mask"], []
    for ids in random_ids(mask.shape[0], tokens, seed).split([1, 1, 20, tokens - 22], dim=1):
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
        logits.append(forward(model, cache, ids, mask))
    return torch.cat(logits, dim=1)


def saved(cache, tmp_path: Path, name: str = "prefix.safetensors") -> Path:
    cache.save(tmp_path / name)
    return tmp_path / name


def assert_alike(one: KVQCache, other: KVQCache) -> None:
    assert type(one) is type(other) and one.layer_bits() == other.layer_bits()
    assert one.get_seq_length() == other.get_seq_length() and one.padding.rows == other.padding.rows
    for i, (layer, twin) in enumerate(zip(one.layers, other.layers)):
        if layer in one.quantized_layers:
            assert layer.states == twin.states
        held = [tensors_of([vars(x)[name] for name in sorted(vars(x))]) for x in (layer, twin)]
        if layer in one.quantized_layers:
            held = one.dequantize(i), other.dequantize(i)
        assert len(held[0]) == len(held[1]) and all(torch.equal(x, y) for x, y in zip(*held))


# --- files: what comes back ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*CACHES, "lambda"])
def test_a_loaded_cache_goes_on_as_the_saved_one(name, tmp_path):
    model = tiny_model()
    cache, prompt = filled(model, name)
    loaded = KVQCache.load(saved(cache, tmp_path), model)
    assert_alike(cache, loaded)
    assert loaded.nbytes() <= cache.nbytes() and loaded.nbytes() == storage_bytes(loaded.layers) - scales(loaded)
    wanted = go_on(model, cache, prompt, 60)
    assert torch.equal(go_on(model, loaded, prompt, 60), wanted)
    assert_alike(cache, loaded)
    for change in (
        lambda x: x.crop(-70),
        lambda x: x.reorder_cache(torch.tensor([2, 0, 0])),
        lambda x: x.batch_select_indices(torch.tensor([1, 2])),
        lambda x: x.batch_repeat_interleave(2),
    ):
        change(cache), change(loaded)
        assert_alike(cache, loaded)
    again = {"attention_mask": torch.ones(4, cache.get_seq_length(), dtype=torch.long)}
    for row, runs in enumerate(cache.padding.rows):
        for low, high in runs:
            again["attention_mask"][row, low:high] = 0
    assert torch.equal(go_on(model, cache, again, 40), go_on(model, loaded, again, 40))


def scales(cache: KVQCache) -> int:
    """Bytes of λ, which the layers share with nobody but do not count, as the plan owns it."""
    held = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
        for layer in cache.quantized_layers
        for x in (getattr(layer, "key_scale", None), getattr(layer.layout.keys.transform, "scale", None))
        if x is not None
    }
    return sum(held.values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["pmkvq 2", "mixkvq"])
def test_dtypes(name, dtype, tmp_path):
    model = tiny_model(dtype=dtype)
    cache, prompt = filled(model, name)
    loaded = KVQCache.load(saved(cache, tmp_path), model)
    assert_alike(cache, loaded)
    assert torch.equal(go_on(model, cache, prompt, 40), go_on(model, loaded, prompt, 40))


@pytest.mark.parametrize("name", ["pmkvq 2", "mixkvq"])
def test_saved_at_any_length(name, tmp_path):
    # In the sink, in the window, while all is 16 bits, at every width behind that.
    model, ids, widths = tiny_model(), random_ids(1, 160), set()
    prompt = {"attention_mask": torch.ones(1, 0, dtype=torch.long)}
    cache = cache_for(model, name)
    for start, stop in ((0, 1), (1, 3), (3, 9), (9, 25), (25, 60), (60, 98)):
        prompt["attention_mask"] = torch.ones(1, stop, dtype=torch.long)
        forward(model, cache, ids[:, start:stop], prompt["attention_mask"])
        widths.add(cache.layer_bits()[0])
        loaded, twin = KVQCache.load(saved(cache, tmp_path), model), copy.deepcopy(cache)
        assert_alike(cache, loaded)
        assert torch.equal(go_on(model, loaded, prompt, 50), go_on(model, twin, prompt, 50))
    assert widths == ({16, 8, 4, 2} if name == "pmkvq 2" else {16, 2})


def test_rows_of_different_widths_and_cropped_pages(tmp_path):
    model = tiny_model()
    cache, prompt = cache_for(model, "pmkvq 2"), left_padded(3, 70, [0, 30, 60])
    forward(model, cache, prompt["input_ids"], prompt["attention_mask"])
    assert len({state.bits for state in cache.layers[0].states}) > 1
    cache.crop(-33)
    kept = prompt["attention_mask"][:, :37]
    forward(model, cache, random_ids(3, 30, 4), torch.cat([kept, torch.ones(3, 30).long()], 1))
    cache.crop(-19)
    assert any(state.short for state in cache.layers[0].states)
    loaded = KVQCache.load(saved(cache, tmp_path), model)
    assert_alike(cache, loaded)
    prompt = {"attention_mask": torch.cat([kept, torch.ones(3, 11).long()], 1)}
    assert torch.equal(go_on(model, cache, prompt, 80), go_on(model, loaded, prompt, 80))


@pytest.mark.parametrize("arch", MIXED)
@pytest.mark.parametrize("name", ["pmkvq 2", "mixkvq"])
def test_models_with_other_layers(arch, name, tmp_path):
    model = tiny_model(arch, "eager" if arch == "gpt_oss" else "sdpa")
    cache, prompt = cache_for(model, name), {"attention_mask": torch.ones(2, 60, dtype=torch.long)}
    forward(model, cache, random_ids(2, 60), prompt["attention_mask"])
    loaded = KVQCache.load(saved(cache, tmp_path), model)
    assert_alike(cache, loaded)
    assert torch.equal(go_on(model, cache, prompt, 40), go_on(model, loaded, prompt, 40))
    assert {type(layer) for layer in cache.layers} == {type(layer) for layer in loaded.layers}


def test_search_and_assisted_decoding_on_a_loaded_cache(tmp_path):
    model, ids = tiny_model("mixed"), random_ids(1, 40)
    path = prefix_file(model, "pmkvq 2", ids[:, :-1], tmp_path)
    fresh = generate(model, input_ids=ids, cache=DynamicCache(config=model.config)).sequences.shape
    for beams, more in ((2, {"num_beams": 2}), (1, {"prompt_lookup_num_tokens": 3, "output_logits": False})):
        caches = [KVQCache.load(path, model), cache_for(model, "pmkvq 2")]
        forward(model, caches[1], ids[:, :-1])
        for cache in caches:
            cache.batch_repeat_interleave(beams)
        runs = [generate(model, input_ids=ids, cache=cache, **more).sequences for cache in caches]
        assert torch.equal(*runs) and runs[0].shape == fresh


def prefix_file(model, name: str, ids: torch.Tensor, tmp_path: Path) -> Path:
    cache = cache_for(model, name)
    forward(model, cache, ids)
    return saved(cache, tmp_path)


def test_the_file_holds_tokens_and_nothing_else(tmp_path):
    # No reserved room, and no bytes that memory happened to hold before.
    model, prompt = tiny_model(), left_padded(3, 60, [0, 5, 59])
    sizes, contents = [], []
    for max_length in (100, 5000, 5000):
        cache = PMKVQCache(model.config, {**PM, "fbit": 16, "sink_tokens": 4, "max_length": max_length})
        forward(model, cache, prompt["input_ids"], prompt["attention_mask"])
        for layer in cache.layers:
            for row, state in enumerate(layer.states):
                for store in layer.sink:
                    store[row, :, state.sink :] = len(sizes)
                for store in layer.recent:
                    store[row, :, state.recent :] = len(sizes)
        path = saved(cache, tmp_path)
        contents.append(safetensors.torch.load_file(path))
        sizes.append(path.stat().st_size)
    assert max(sizes) < 1.2 * cache.exact_nbytes() and max(sizes) - min(sizes) < 16
    for other in contents[1:]:
        assert other.keys() == contents[0].keys()
        assert all(torch.equal(x, other[name]) for name, x in contents[0].items())


@pytest.mark.parametrize("name", ["pmkvq layers", "pmkvq token", "mixkvq", "kivi"])
def test_another_kind_of_device(name, tmp_path, monkeypatch):
    # Packed codes lie as the device's kernels want them; a file is the same from wherever, and comes back anywhere.
    model, real = tiny_model(), layout.byte_orders
    made = {}
    for kind in ("cpu", "cuda"):
        monkeypatch.setattr(layout, "byte_orders", lambda device, dim, kind=kind: real(kind, dim))
        made[kind], prompt = filled(model, name)
        saved(made[kind], tmp_path, kind)
    assert (
        safetensors.torch.load_file(tmp_path / "cpu").keys() == safetensors.torch.load_file(tmp_path / "cuda").keys()
    )
    for key, x in safetensors.torch.load_file(tmp_path / "cpu").items():
        assert torch.equal(x, safetensors.torch.load_file(tmp_path / "cuda")[key]), key
    assert not torch.equal(made["cpu"].layers[0].body.data, made["cuda"].layers[0].body.data)
    for source, target in (("cpu", "cuda"), ("cuda", "cpu")):
        monkeypatch.setattr(layout, "byte_orders", lambda device, dim, kind=target: real(kind, dim))
        loaded = KVQCache.load(tmp_path / source, model)
        pages = [
            x.layers[0].body.pages(slice(0, 1), state.bits)[:, : state.pages]
            for x, state in ((x, x.layers[0].states[0]) for x in (loaded, made[target]))
        ]
        assert torch.equal(*pages) and pages[0].numel()
        assert_alike(loaded, made[target])
        moved = copy.deepcopy(made[source]).to("cpu")
        assert_alike(moved, made[target])
        wanted = go_on(model, copy.deepcopy(made[target]), prompt, 40)
        assert torch.equal(go_on(model, loaded, prompt, 40), wanted)
        assert torch.equal(go_on(model, moved, prompt, 40), wanted)


@pytest.mark.parametrize("arch, name", [("llama", "mixkvq"), ("mixed", "pmkvq 2")])
def test_layers_follow_their_tokens(arch, name, tmp_path):
    # As if the file had been loaded to another device than the model's.
    model = tiny_model(arch)
    cache, prompt = filled(model, name)
    for layer in cache.layers:
        layer.device = torch.device("meta")
    twin = cache_for(model, name)
    forward(model, twin, prompt["input_ids"], prompt["attention_mask"])
    assert torch.equal(go_on(model, cache, prompt, 40), go_on(model, twin, prompt, 40))
    assert {layer.device.type for layer in cache.layers} == {"cpu"}


# --- files: what is refused -----------------------------------------------------------------------------------------


OTHERS = {
    "model_type": lambda: CONFIGS["qwen2"](),
    "layers": lambda: changed("num_hidden_layers", 4),
    "kv_heads": lambda: changed("num_key_value_heads", 4),
    "head_dim": lambda: changed("head_dim", 32),
    "quantized_layers": lambda: changed("layer_types", ["full_attention", "sliding_attention", "full_attention"], 8),
    "name": lambda: changed("_name_or_path", "me/another-model"),
}


def changed(option: str, value, sliding_window: int | None = None):
    config = CONFIGS["llama"]()
    config._name_or_path, config.sliding_window = "me/this-model", sliding_window
    setattr(config, option, value)
    return config


@pytest.mark.parametrize("what", OTHERS)
def test_another_model_is_refused(what, tmp_path):
    config = changed("vocab_size", 128)
    cache = PMKVQCache(config, PM)
    for i in range(3):
        cache.update(torch.rand(1, 2, 20, 16), torch.rand(1, 2, 20, 16), i)
    path = saved(cache, tmp_path)
    KVQCache.load(path, config)
    with pytest.raises(ValueError, match=rf"made by .*this-model.*, and the model is .*; they differ in .*{what}"):
        KVQCache.load(path, OTHERS[what]())


def test_another_dtype_kind_or_format_is_refused(tmp_path):
    model = tiny_model()
    path = saved(filled(model)[0], tmp_path)
    with pytest.raises(ValueError, match="holds a cache in float32, and the model computes in bfloat16"):
        KVQCache.load(path, tiny_model(dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="a pmkvq cache, not one for MixKVQCache; use PMKVQCache.load"):
        MixKVQCache.load(path, model)
    assert isinstance(PMKVQCache.load(path, model.config), PMKVQCache)
    rewrite(path, lambda facts, tensors: facts.update(format_version=2))
    with pytest.raises(ValueError, match="has format version 2, written by hf_kvq .*, and this one reads version 1"):
        KVQCache.load(path, model)


def test_what_is_no_cache_file(tmp_path):
    model = tiny_model()
    with pytest.raises(FileNotFoundError, match="nowhere"):
        KVQCache.load(tmp_path / "nowhere", model)
    with pytest.raises(OSError):
        KVQCache.load(tmp_path, model)
    safetensors.torch.save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="other.safetensors cannot be used: .* holds no cache of hf_kvq"):
        KVQCache.load(tmp_path / "other.safetensors", model)
    (tmp_path / "text").write_bytes(b"hello" * 100)
    with pytest.raises(ValueError, match="text cannot be used"):
        KVQCache.load(tmp_path / "text", model)


def test_what_cannot_be_saved(tmp_path):
    model = tiny_model()
    cache = cache_for(model, "mixkvq")
    with pytest.raises(ValueError, match="empty; fill it"):
        cache.save(tmp_path / "x")
    cache.update(torch.rand(1, 2, 5, 16), torch.rand(1, 2, 5, 16), 0)
    with pytest.raises(ValueError, match="middle of a forward pass"):
        cache.save(tmp_path / "x")
    with pytest.raises(FileNotFoundError):
        saved(filled(model)[0], tmp_path / "missing")
    assert not list(tmp_path.iterdir())


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    model = tiny_model()
    cache, _ = filled(model)
    path = saved(cache, tmp_path)
    before = path.read_bytes()

    def fail(tensors, file, metadata):
        Path(file).write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(files.safetensors.torch, "save_file", fail)
    with pytest.raises(OSError, match="no space left"):
        cache.save(path)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == [path.name]


def rewrite(path: Path, change, sign: bool = True) -> None:
    """Change what a file says or holds; its checksum then is right again."""
    with safe_open(path, "pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    facts = json.loads(metadata["hf_kvq_cache"])
    change(facts, tensors)
    metadata["hf_kvq_cache"] = json.dumps(facts)
    if sign:
        metadata["hf_kvq_sha256"] = files._checksum(metadata["hf_kvq_cache"], tensors)
    safetensors.torch.save_file(tensors, path, metadata)


@pytest.mark.parametrize("name", ["pmkvq 2", "mixkvq"])
def test_damage_is_noticed(name, tmp_path):
    model = tiny_model()
    cache, _ = filled(model, name)
    path = saved(cache, tmp_path)
    data, broken = path.read_bytes(), tmp_path / "broken"
    places = torch.randint(len(data), (60,), generator=torch.Generator().manual_seed(0)).tolist()
    for at in [0, 7, 8, 9, *places]:
        for damaged in (data[:at], data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :], data + bytes(at % 5 + 1)):
            broken.write_bytes(damaged)
            with pytest.raises(ValueError, match="broken cannot be used|holds a cache in|was made by"):
                KVQCache.load(broken, model)


HOSTILE = {
    "a row more": lambda facts, tensors: facts["layers"][0]["states"].append(facts["layers"][0]["states"][0]),
    "more pages": lambda facts, tensors: facts["layers"][0]["states"][0].update(pages=10**6),
    "negative": lambda facts, tensors: facts["layers"][0]["states"][0].update(pages=-1),
    "fractions": lambda facts, tensors: facts["layers"][0]["states"][0].update(recent=1.5),
    "another width": lambda facts, tensors: facts["layers"][0]["states"][0].update(bits=3),
    "sixteen bits": lambda facts, tensors: facts["layers"][0]["states"][0].update(bits=16),
    "short pages": lambda facts, tensors: facts["layers"][0]["states"][0].update(short=[[99, 1]]),
    "more columns": lambda facts, tensors: facts.update(columns=91),
    "endless": lambda facts, tensors: facts.update(columns=2**60),
    "padding": lambda facts, tensors: facts.update(padding=[[], [[0, 4]], [[0, 40]]]),
    "padding backwards": lambda facts, tensors: facts.update(padding=[[], [[5, 0]], [[0, 40]]]),
    "padding of text": lambda facts, tensors: facts.update(padding=[[], ["ab"], [[0, 40]]]),
    "batch": lambda facts, tensors: facts.update(batch=2),
    "fewer layers": lambda facts, tensors: facts["layers"].pop(),
    "no layers": lambda facts, tensors: facts.pop("layers"),
    "plan": lambda facts, tensors: facts["plan"]["config"].update(window=-1),
    "unknown option": lambda facts, tensors: facts["plan"]["config"].update(wndow=1),
    "kernel": lambda facts, tensors: facts["plan"]["config"].update(kernel="cpu"),
    "max_length": lambda facts, tensors: facts.update(max_length=2**80),
    "fewer sinks": lambda facts, tensors: set_(tensors, "layers.1.sink_keys", lambda x: x[:, :, :0]),
    "fewer heads": lambda facts, tensors: set_(tensors, "layers.1.sink_values", lambda x: x[:, :1]),
    "other values": lambda facts, tensors: set_(tensors, "layers.1.recent_values", lambda x: x[..., :8]),
    "other dtype": lambda facts, tensors: set_(tensors, "layers.1.recent_keys", lambda x: x.half()),
    "integers": lambda facts, tensors: set_(tensors, "layers.1.recent_keys", lambda x: x.int()),
    "fewer bytes": lambda facts, tensors: set_(tensors, "layers.2.pages", lambda x: x[:-1]),
    "pages of floats": lambda facts, tensors: set_(tensors, "layers.2.pages", lambda x: x.float()),
    "no pages": lambda facts, tensors: tensors.pop("layers.2.pages"),
    "one more": lambda facts, tensors: tensors.update({"layers.7.x": torch.zeros(1)}),
}
MIX_HOSTILE = {
    "channels": lambda facts, tensors: set_(tensors, "layers.0.low_channel", lambda x: x + 200),
    "one channel twice": lambda facts, tensors: set_(tensors, "layers.0.low_channel", lambda x: x * 0),
    "counts": lambda facts, tensors: set_(tensors, "layers.0.counts", lambda x: x - 1),
    "other counts": lambda facts, tensors: set_(tensors, "layers.0.counts", lambda x: x.flip(-1)),
    "large counts": lambda facts, tensors: set_(tensors, "layers.0.counts", lambda x: x + 30000),
    "sums": lambda facts, tensors: set_(tensors, "layers.0.query_sum", lambda x: -x - 1),
    "fewer sums": lambda facts, tensors: set_(tensors, "layers.0.query_sum", lambda x: x[1:]),
    "query_count": lambda facts, tensors: facts["layers"][0].update(query_count=[1, -2, 3]),
    "exact": lambda facts, tensors: set_(tensors, "layers.0.exact", lambda x: x[:-1]),
}


def set_(tensors, name: str, change) -> None:
    tensors[name] = change(tensors[name]).contiguous()


@pytest.mark.parametrize("attack", [*HOSTILE, *MIX_HOSTILE])
def test_hostile_files_are_refused(attack, tmp_path):
    model, name = tiny_model(), "mixkvq" if attack in MIX_HOSTILE else "pmkvq 2"
    path = saved(filled(model, name)[0], tmp_path)
    rewrite(path, lambda facts, tensors: None)
    KVQCache.load(path, model)
    rewrite(path, {**HOSTILE, **MIX_HOSTILE}[attack])
    with pytest.raises(ValueError, match="prefix.safetensors cannot be used: .+"):
        KVQCache.load(path, model)


STOCK_HOSTILE = {
    "method": lambda layer: layer.update(update=1),
    "window": lambda layer: layer.update(sliding_window=3),
    "length": lambda layer: layer.update(cumulative_length=7),
    "text": lambda layer: layer.update(keys="abc"),
    "tensor of nobody": lambda layer: layer.update(keys={"tensor": "nothing"}),
}


@pytest.mark.parametrize("attack", STOCK_HOSTILE)
def test_hostile_stock_layers_are_refused(attack, tmp_path):
    model = tiny_model("mixed")
    path = prefix_file(model, "pmkvq 2", random_ids(1, 30), tmp_path)
    rewrite(path, lambda facts, tensors: STOCK_HOSTILE[attack](facts["layers"][0]))
    with pytest.raises(ValueError, match="prefix.safetensors cannot be used: .+"):
        KVQCache.load(path, model)


JUNK = (None, True, -1, 0, 3, 2**70, 0.5, "", "x" * 300, [], [[]], [1, 2], {}, {"a": 1})


@pytest.mark.parametrize("arch, name", [("llama", "pmkvq 2"), ("llama", "mixkvq"), ("mixed", "kivi")])
def test_anything_in_place_of_anything(arch, name, tmp_path):
    # Every value of the header in turn: it is refused, or what comes back is a cache that works.
    model = tiny_model(arch)
    cache = cache_for(model, name)
    forward(model, cache, random_ids(1, 40))
    path = saved(cache, tmp_path)
    data, tried, loaded = path.read_bytes(), 0, 0
    with safe_open(path, "pt") as file:
        leaves = list(leaves_of(json.loads(file.metadata()["hf_kvq_cache"])))
    for n, place in enumerate(leaves):
        for junk in JUNK[n % 5 :: 5]:
            path.write_bytes(data)
            rewrite(path, lambda facts, tensors, place=place, junk=junk: put(facts, place, junk))
            tried += 1
            try:
                twin = KVQCache.load(path, model)
            except ValueError:
                continue
            loaded += 1
            assert torch.isfinite(forward(model, twin, random_ids(1, 20))).all(), (place, junk)
    assert tried > 60 and loaded < tried / 2


def leaves_of(value, place=()):
    """Paths to all values, containers included; of equal layers only the first."""
    yield place
    items = enumerate(value[:1]) if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
    for key, item in items:
        yield from leaves_of(item, (*place, key))


def put(facts, place, junk) -> None:
    if not place:
        facts.clear()
        return
    for key in place[:-1]:
        facts = facts[key]
    facts[place[-1]] = junk


# --- the command ----------------------------------------------------------------------------------------------------


def test_the_command_shows_a_file(tmp_path, capsys):
    model = tiny_model()
    cache, _ = filled(model, "pmkvq layers")
    path = saved(cache, tmp_path)
    assert main(["show", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "3 rows x 90 tokens" in shown and "1 layer at 8 bits, 1 at 4, 1 at 2" in shown and "pmkvq" in shown
    assert main(["show", str(path), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (
        facts["columns"] == 90 and facts["exact_nbytes"] == cache.exact_nbytes() and facts["layer_bits"] == [8, 4, 2]
    )
    path.write_bytes(path.read_bytes()[:100])
    assert main(["show", str(path)]) == 1
    text, error = capsys.readouterr()
    assert not text and error.startswith("hf-kvq show: error: ") and error.count("\n") == 1


# --- prefixes in memory -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pmkvq 2", "pmkvq layers", "mixkvq", "kivi"])
def test_one_prefix_many_continuations(name):
    # REUSE-01: `generate` works on copies, and the prefix stays what it is.
    model, prefix = tiny_model(), random_ids(1, 70)
    cache = cache_for(model, name)
    forward(model, cache, prefix)
    before, bytes_before = copy.deepcopy(cache), cache.nbytes()
    for seed in (1, 1, 2):
        ids = torch.cat([prefix, random_ids(1, 6, seed)], dim=1)
        fresh = cache_for(model, name)
        forward(model, fresh, prefix)
        wanted = generate(model, 12, input_ids=ids, cache=fresh)
        out = generate(model, 12, input_ids=ids, cache=copy.deepcopy(cache))
        assert torch.equal(out.logits, wanted.logits) and torch.equal(out.sequences, wanted.sequences)
        assert_alike(cache, before)
        assert cache.nbytes() == bytes_before == storage_bytes(cache.layers)


@pytest.mark.parametrize("name", ["pmkvq 2", "mixkvq", "kivi"])
def test_one_prefix_a_batch_of_continuations(name):
    model, prefix = tiny_model(), random_ids(1, 70)
    cache = cache_for(model, name)
    forward(model, cache, prefix)
    batch = copy.deepcopy(cache)
    batch.batch_repeat_interleave(3)
    suffixes = random_ids(3, 6, 5)
    ids = torch.cat([prefix.expand(3, -1), suffixes], dim=1)
    together = generate(model, input_ids=ids, cache=batch)
    for row in range(3):
        alone = generate(model, input_ids=ids[row : row + 1], cache=copy.deepcopy(cache))
        assert torch.equal(alone.sequences[0], together.sequences[row])
        torch.testing.assert_close(alone.logits[0], together.logits[row], atol=1e-4, rtol=0)
    assert cache.get_seq_length() == 70


@pytest.mark.parametrize("name", ["pmkvq 16", "pmkvq 2", "mixkvq"])
def test_a_cache_filled_outside_generate(name):
    # REUSE-04: whichever way the last token comes, its position is the right one.
    model, ids = tiny_model(), random_ids(1, 50)
    cache = cache_for(model, name)
    forward(model, cache, ids[:, :-1])
    routes = {
        "all ids": {"input_ids": ids},
        "all ids and mask": {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        "the last token, and a mask for all": {"input_ids": ids[:, -1:], "attention_mask": torch.ones_like(ids)},
    }
    wanted = generate(model, input_ids=ids, cache=copy.deepcopy(cache)).logits
    if name == "pmkvq 16":
        torch.testing.assert_close(wanted, generate(model, input_ids=ids).logits, atol=1e-4, rtol=0)
    step, length = copy.deepcopy(cache), ids.shape[1]
    by_hand = forward(model, step, ids[:, -1:], position_ids=torch.tensor([[length - 1]]))[:, -1]
    torch.testing.assert_close(wanted[:, 0], by_hand, atol=1e-5, rtol=0)
    for route, inputs in routes.items():
        out = generate(model, cache=copy.deepcopy(cache), **inputs).logits
        torch.testing.assert_close(out, wanted, atol=1e-5, rtol=0, msg=route)
    # Without a mask, an ordinary cache tells generate what it holds; so does ours.
    assert same_outcome(model, ids[:, -1:], cache, ids[:, :-1])


def same_outcome(model, last: torch.Tensor, cache: KVQCache, prefix: torch.Tensor) -> bool:
    """Whether the last token alone leads where it leads with an ordinary cache: to as many tokens, or an error."""
    ordinary = DynamicCache(config=model.config)
    forward(model, ordinary, prefix)
    outcomes = []
    for held in (ordinary, copy.deepcopy(cache)):
        try:
            model.generate(last, max_new_tokens=3, do_sample=False, **{cache_argument(model): held})
            outcomes.append(held.get_seq_length())
        except (ValueError, RuntimeError, IndexError) as error:
            outcomes.append(type(error))
    return outcomes[0] == outcomes[1]
