# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Configs for the calculator: some that are well known, one of the Hub, or one that was pasted. Data only, never code.

What a visitor gives is JSON of limited size and numbers. Everything in it that could make transformers load anything
else (code, kernels, backbones, quantizers) is dropped, and the model is only ever built without weights.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from transformers import AutoConfig, PretrainedConfig

from hf_kvq.cache.layout import LayerShape
from hf_kvq.estimate import ExactLayer, config_dtype, model_shapes, weight_bytes


MOST_BYTES = 200_000
#: Largest number in a config, and of what a model has many: each of those takes time here.
MOST, MOST_PARTS = 2**31, 512
#: Most experts of all layers together; the largest models known have about 25,000.
MOST_EXPERTS = 2**15
_PARTS = re.compile(r"layer|block|expert|depth|stage")
_LOADS = re.compile(r"^_|auto_map|implementation|quantization|backbone|pretrained|use_kernel|hub_kernel|custom_")
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}/[A-Za-z0-9][A-Za-z0-9_.-]{0,95}")


def _facts(kind: str, hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, vocab: int, longest: int, **more):
    return {
        **{"model_type": kind, "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers},
        **{"num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab},
        **{"max_position_embeddings": longest, "dtype": "bfloat16", **more},
    }


#: The numbers that matter, from the models' own config.json.
KNOWN: dict[str, dict[str, Any]] = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": _facts("llama", 576, 1536, 30, 9, 3, 49152, 8192, tie_word_embeddings=True),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": _facts(
        "llama", 2048, 8192, 24, 32, 32, 49152, 8192, tie_word_embeddings=True
    ),
    "meta-llama/Llama-3.1-8B-Instruct": _facts("llama", 4096, 14336, 32, 32, 8, 128256, 131072),
    "meta-llama/Llama-3.3-70B-Instruct": _facts("llama", 8192, 28672, 80, 64, 8, 128256, 131072),
    "Qwen/Qwen2.5-7B-Instruct": _facts("qwen2", 3584, 18944, 28, 28, 4, 152064, 32768),
    "Qwen/Qwen3-8B": _facts("qwen3", 4096, 12288, 36, 32, 8, 151936, 40960, head_dim=128),
    "Qwen/Qwen3-32B": _facts("qwen3", 5120, 25600, 64, 64, 8, 151936, 40960, head_dim=128),
    "mistralai/Mistral-7B-Instruct-v0.3": _facts("mistral", 4096, 14336, 32, 32, 8, 32768, 32768, sliding_window=None),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B": _facts("qwen2", 5120, 13824, 48, 40, 8, 152064, 131072),
}


@dataclass(frozen=True)
class Model:
    """What the calculator needs of a model: its layers, the bytes of its weights, and the longest context it knows."""

    name: str
    layers: tuple[LayerShape | ExactLayer, ...]
    weights: int
    longest: int | None
    dtype: str

    @classmethod
    def of(cls, name: str, config: PretrainedConfig) -> Model:
        """Raises ValueError where a model cannot be estimated."""
        longest = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
        dtype = str(config_dtype(config)).removeprefix("torch.")
        return cls(name, tuple(model_shapes(config)), weight_bytes(config), longest, dtype)


def find_model(name: str | None, pasted: str | None = None) -> Model:
    """The model of a config.json that was pasted, else of a name.

    Raises:
        ValueError: there is none, or it cannot be estimated; in one sentence for a visitor.
    """
    if pasted and pasted.strip():
        return _pasted(pasted)
    name = (name or "").strip().removeprefix("https://huggingface.co/").rstrip("/")
    if name in KNOWN:
        return _known(name)
    if not _ID.fullmatch(name) or ".." in name or "--" in name:
        raise ValueError("Write the id of a model on the Hub, such as Qwen/Qwen3-8B, or paste its config.json.")
    return _from_hub(name)


@functools.lru_cache(maxsize=64)
def _known(name: str) -> Model:
    return Model.of(name, config_of(KNOWN[name]))


@functools.lru_cache(maxsize=64)
def _pasted(text: str) -> Model:
    return Model.of("the pasted config", config_of(parse(text)))


@functools.lru_cache(maxsize=64)
def _from_hub(repo_id: str) -> Model:
    # As anybody: what only the owner of this Space may read is not for its visitors.
    try:
        size = get_hf_file_metadata(hf_hub_url(repo_id, "config.json"), token=False).size
        if size is not None and size > MOST_BYTES:
            raise ValueError(f"The config of {repo_id} has {size:,} bytes; at most {MOST_BYTES:,} are read here.")
        text = Path(hf_hub_download(repo_id, "config.json", token=False)).read_text(encoding="utf-8")
    except GatedRepoError:
        raise ValueError(f"{repo_id} is gated; paste its config.json instead.") from None
    except RepositoryNotFoundError:
        raise ValueError(f"There is no model {repo_id} on the Hub, or it is private.") from None
    except EntryNotFoundError as error:
        if isinstance(error, LocalEntryNotFoundError):
            raise ValueError(_UNREACHABLE) from None
        raise ValueError(f"{repo_id} has no config.json, so transformers cannot load it.") from None
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", "an error")
        raise ValueError(f"The Hub answered {status}; try again later, or paste the config.json.") from None
    except ValueError:
        raise
    except Exception:
        # The client's own network errors have no common base.
        raise ValueError(_UNREACHABLE) from None
    return Model.of(repo_id, config_of(parse(text)))


_UNREACHABLE = "The Hub cannot be reached from here; choose a model from the list, or paste its config.json."


def parse(text: str) -> dict[str, Any]:
    """JSON of a config, or ValueError that says what is wrong with it."""
    if len(text) > MOST_BYTES:
        raise ValueError(f"This has {len(text):,} characters; at most {MOST_BYTES:,} are read.")
    try:
        content = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"This is not valid JSON: {error}.") from None
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        raise ValueError('A config.json is an object with a "model_type".')
    return content


def config_of(content: dict[str, Any]) -> PretrainedConfig:
    """A config of a model that transformers knows itself, from plain data.

    Raises:
        ValueError: it has no such model, or a number is too large.
    """
    content = _checked(content)
    kind = content.pop("model_type")
    try:
        return AutoConfig.for_model(kind, **content)
    except Exception as error:
        # Each model's config complains in its own way.
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"transformers cannot read this as a {kind[:60]!r} config: {reason}") from None


def _checked(value: Any, name: str = "", depth: int = 0) -> Any:
    if depth > 8:
        raise ValueError("This config is nested too deeply.")
    if isinstance(value, dict):
        checked = {key: _checked(item, key, depth + 1) for key, item in value.items() if not _LOADS.search(key)}
        _check_product(checked)
        return checked
    if isinstance(value, list):
        if len(value) > 4096:
            raise ValueError(f"{name} lists {len(value):,} values; at most 4,096 are read here.")
        return [_checked(item, "", depth + 1) for item in value]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        most = MOST_PARTS if _PARTS.search(name) and "size" not in name and "dim" not in name else MOST
        # Not a number is in no range.
        if not abs(value) <= most:
            raise ValueError(f"{name} is {value:,}; at most {most:,} is read here.")
    return value


def _check_product(config: dict[str, Any]) -> None:
    """Each expert of each layer is a module of its own in some models, and building them takes time."""

    def count(pattern: str) -> int:
        found = [value for name, value in config.items() if re.search(pattern, name) and isinstance(value, int)]
        return max(found, default=1)

    if count("layers?$") * count("experts$") > MOST_EXPERTS:
        raise ValueError(f"All layers together have more than {MOST_EXPERTS:,} experts; that many are not read here.")
