# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any


# Threads that spin while they wait slow each other down on few cores; set before torch starts any.
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "PYTEST_XDIST_WORKER" in os.environ:
    # Every worker has a core.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest  # noqa: E402
import torch  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging  # noqa: E402


pytest.register_assert_rewrite("simulation")

import hf_kvq.registration  # noqa: E402
import simulation as simulation_module  # noqa: E402
from families import FAMILIES, PAD, VOCAB  # noqa: E402
from hf_kvq import KVQPlan, PMKVQCache, PMKVQConfig, ops  # noqa: E402
from hf_kvq.cache import layer as layer_module  # noqa: E402
from hf_kvq.cache import layout as layout_module  # noqa: E402
from hf_kvq.registration import cache_argument  # noqa: E402
from simulation import Rules, Simulation  # noqa: E402


@pytest.fixture(autouse=True, scope="session")
def the_definition() -> None:
    """Unless a test asks for kernels by name, it is about meaning: attention by its definition, and short pages."""

    def by_definition(query: torch.Tensor, parts: list, scaling: float, kernel: str, *more: Any) -> torch.Tensor:
        return ops.attend(query, parts, scaling, "torch" if kernel == "auto" else kernel, *more)

    layer_module.attend = by_definition
    layout_module.PAGE_TOKENS = simulation_module.TOKEN_PAGE


CONFIGS = {name: family.config for name, family in FAMILIES.items()}
FULL_ATTENTION = ("llama", "qwen2", "qwen3", "mistral", "phi3", "gpt_neox")


@functools.cache
def tiny_model(
    arch: str = "llama", attention: str | None = None, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """A random model whose attention is not flat: errors in K or V show up in its logits. Shared, so not to change."""
    family = FAMILIES[arch]
    torch.manual_seed(0)
    model = family.auto.from_config(family.config(), attn_implementation=attention or family.attention).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if re.search(r"(q_proj|k_proj|qkv_proj|query_key_value|c_attn)\.weight", name):
                weight.mul_(4)
            if re.search(r"(q_norm|k_norm)\.weight", name):
                weight.mul_(2)
    return model.to(dtype).requires_grad_(False)


def save_with_words(folder: Path) -> Path:
    """Save the tiny model with a tokenizer of words into a folder, and `text.txt` of these words."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w0").save_pretrained(folder)
    tiny_model().save_pretrained(folder)
    (folder / "text.txt").write_text(" ".join(f"w{i * i % 127}" for i in range(3000)))
    return folder


def make_cache(model: PreTrainedModel | PreTrainedConfig, **options: Any) -> PMKVQCache:
    """A cache with tiny pages and windows, so that paging happens early."""
    defaults = {"window": 8, "group_size": 16, "max_length": 256}
    return PMKVQCache(getattr(model, "config", model), PMKVQConfig(**{**defaults, **options}))


def random_ids(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Token ids without the padding id."""
    return torch.randint(PAD + 1, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def left_padded(batch: int, length: int, pads: list[int], seed: int = 0) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` of rows with `pads[row]` padding tokens before their tokens."""
    mask = (torch.arange(length) >= torch.tensor(pads)[:, None]).long()
    assert mask.shape[0] == batch
    return {"input_ids": random_ids(batch, length, seed) * mask + PAD * (1 - mask), "attention_mask": mask}


def forward(
    model: PreTrainedModel, cache: Any, ids: torch.Tensor, mask: torch.Tensor | None = None, **kwargs: Any
) -> torch.Tensor:
    """Logits of `ids` after what `cache` holds; `mask` covers all columns and gives the positions."""
    if mask is not None:
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
        kwargs = {"attention_mask": mask, "position_ids": positions[:, -ids.shape[1] :], **kwargs}
    return model(input_ids=ids, use_cache=True, **{cache_argument(model): cache}, **kwargs).logits


def generate(model: PreTrainedModel, new_tokens: int = 24, **kwargs: Any) -> SimpleNamespace:
    """Greedy `generate`: its sequences, its logits ([batch, steps, vocab]), its cache, its attention weights."""
    kwargs = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True, **kwargs}
    kwargs = {cache_argument(model) if k == "cache" else k: v for k, v in kwargs.items()}
    out = model.generate(max_new_tokens=new_tokens, **kwargs)
    logits = torch.stack(out.logits, dim=1) if out.logits is not None else None
    cache, attentions = out[cache_argument(model)], out.get("attentions")
    return SimpleNamespace(sequences=out.sequences, logits=logits, cache=cache, attentions=attentions)


def kv(rules: Rules, tokens: int, batch: int = 1, seed: int = 0, grid: bool = False) -> list[torch.Tensor]:
    """Random keys and values of a layer, with a few large channels; `grid` makes sums of them exact."""
    g = torch.Generator().manual_seed(seed)
    out = []
    for dim in (rules.key_dim, rules.value_dim):
        x = torch.randn(batch, rules.heads, tokens, dim, generator=g)
        x = x * torch.where(torch.rand(dim, generator=g) < 0.1, 10.0, 1.0)
        out.append(((x * 8).round() / 8 + 0.0 if grid else x).to(rules.dtype))
    return out


def cache_of(rules: Rules, layers: int = 1, **options: Any) -> PMKVQCache:
    """An empty cache whose layers all follow these rules."""
    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=rules.heads * rules.key_dim,
        num_attention_heads=rules.heads,
        num_key_value_heads=rules.heads,
        head_dim=rules.key_dim,
    )
    options = rules.options(**options)
    if rules.smooth:
        scale = torch.from_numpy(simulation_module.key_scale(rules)).expand(layers, -1, -1)
        options = {"plan": KVQPlan.of(config, PMKVQConfig(**options), tensors={"key_scale": scale})}
    return PMKVQCache(config, options)


def feed(cache: PMKVQCache, data: list[torch.Tensor], cuts: Any = None, simulations: Any = (), valid: Any = None):
    """Update all layers of a cache with K and V in calls that end at `cuts`, and the simulations with the same.

    `valid` marks what is no padding, among all columns the cache then holds.
    """
    start = 0
    for stop in cuts if cuts is not None else [data[0].shape[2]]:
        chunk = [x[:, :, start:stop] for x in data]
        if valid is not None:
            length = cache.get_seq_length()
            cache.observe_padding(valid[:, : length + stop - start], stop - start)
        for i in range(len(cache.layers)):
            cache.update(*chunk, i)
        for simulation in simulations:
            columns = len(simulation.valid[0])
            simulation.update(*chunk, None if valid is None else valid[:, columns : columns + stop - start])
        cache.nbytes()  # settles
        start = stop


def paired(rules: Rules, batch: int = 1, **options: Any) -> tuple[PMKVQCache, Any, Simulation]:
    """A one-layer cache, its layer, and the simulation of it."""
    cache = cache_of(rules, **options)
    return cache, cache.layers[0], Simulation(rules, batch)


def storage_bytes(root: Any) -> int:
    """Bytes of all storages that are reachable from an object, each counted once."""
    seen, storages, todo = set(), {}, [root]
    while todo:
        x = todo.pop()
        if id(x) in seen or isinstance(x, (str, bytes, int, float, type, torch.dtype, torch.device, PreTrainedConfig)):
            continue
        seen.add(id(x))
        if isinstance(x, torch.Tensor):
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        elif isinstance(x, dict):
            todo += [*x.keys(), *x.values()]
        elif isinstance(x, (list, tuple, set, frozenset)):
            todo += list(x)
        todo += list(vars(x).values()) if hasattr(x, "__dict__") else []
    return sum(storages.values())


@pytest.fixture(autouse=True)
def _no_grad():
    """Tests that want gradients or inference mode say so."""
    with torch.no_grad():
        yield


@pytest.fixture(autouse=True)
def _registered():
    """Registration is global state: every test starts and ends with it done."""
    hf_kvq.registration.register()
    yield
    hf_kvq.registration.register()


@pytest.fixture
def warnings_log(monkeypatch) -> list[str]:
    """Messages that transformers' loggers warn about, "once" warnings anew in each test."""
    messages: list[str] = []
    logger = logging.get_logger("hf_kvq.cache.progressive")
    logger.warning_once.__func__.cache_clear()
    monkeypatch.setattr(logger, "warning", lambda message, *a, **k: messages.append(str(message)))
    return messages


@pytest.fixture(scope="session")
def real_model() -> tuple[PreTrainedModel, Any]:
    """SmolLM2-135M-Instruct in float32, and its tokenizer."""
    from transformers import AutoTokenizer

    from hf_kvq.bundled import bundled_model_path

    path = bundled_model_path()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval().requires_grad_(False)
    return model, AutoTokenizer.from_pretrained(path)
