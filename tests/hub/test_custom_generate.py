# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""The repository whose code puts a quantized cache under any `generate`."""

from importlib import metadata
from pathlib import Path

import pytest
import torch
import transformers.dynamic_module_utils as dynamic
from loopback import hub_fixture, make_plan  # noqa: F401

import hf_kvq
from conftest import cache_argument, random_ids, tiny_model
from hf_kvq import MixKVQCache, PMKVQCache, PMKVQConfig


FOLDER = Path(__file__).parents[2] / "scripts" / "kvq_generate"
OPTIONS = {"window": 8, "group_size": 16, "fbit": 2}
SHORT = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}


@pytest.fixture(autouse=True)
def environment(tmp_path, monkeypatch):
    """A folder for the code that transformers takes from repositories, and hf_kvq as if pip had installed it."""
    version = metadata.version
    monkeypatch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(metadata, "version", lambda name: hf_kvq.__version__ if name == "hf-kvq" else version(name))


@pytest.mark.parametrize("where", ["folder", "hub"])
def test_it_generates_as_the_cache_by_name_does(where, hub):
    model, ids = tiny_model(), random_ids(2, 40)
    source, about = str(FOLDER), {}
    if where == "hub":
        files = {str(path.relative_to(FOLDER)): path.read_bytes() for path in FOLDER.rglob("*") if path.is_file()}
        commit = hub.add("me/kvq-generate", files)
        source, about = "me/kvq-generate", {"revision": commit}
    request = {**SHORT, "custom_generate": source, "trust_remote_code": True, **about}
    wanted = model.generate(ids, cache_implementation="pmkvq", cache_config=OPTIONS, **SHORT)
    hf_kvq.unregister()
    out = model.generate(ids, cache_config=OPTIONS, **request)
    cache = out[cache_argument(model)]
    assert torch.equal(out.sequences, wanted.sequences) and cache.layer_bits() == [2] * 3
    assert isinstance(cache, PMKVQCache) and cache.config == PMKVQConfig(**OPTIONS)
    assert isinstance(model.generate(input_ids=ids, **request)[cache_argument(model)], PMKVQCache)
    out = model.generate(ids, **request, cache_implementation="mixkvq")
    assert isinstance(out[cache_argument(model)], MixKVQCache)


def test_nothing_runs_without_trust():
    with pytest.raises(ValueError, match="trust_remote_code"):
        tiny_model().generate(random_ids(1, 5), custom_generate=str(FOLDER), trust_remote_code=False)
