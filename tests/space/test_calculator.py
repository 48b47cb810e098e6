# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""The Space's calculator: numbers against real caches, what fits, and what a visitor may not do."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM

from conftest import forward, random_ids


gr = pytest.importorskip("gradio")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "hub"))

from loopback import closed_port_fixture, hub_fixture  # noqa: E402, F401

import calculator  # noqa: E402
import models  # noqa: E402
from calculator import METHODS, figure, report, room, sizes, what_fits  # noqa: E402
from hf_kvq.cache.layout import LayerShape  # noqa: E402
from hf_kvq.registration import CACHES  # noqa: E402
from models import KNOWN, Model, config_of, find_model  # noqa: E402


TINY = {
    **{"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "dtype": "float32"},
}


@pytest.fixture(autouse=True)
def nothing_kept() -> None:
    models._from_hub.cache_clear()


@pytest.mark.parametrize("name", [name for name in METHODS if name != "ordinary"])
def test_sizes_are_what_caches_hold(name: str):
    config = config_of(TINY)
    options = METHODS[name]
    kind = next(cache for cache in CACHES.values() if cache.config_class is type(options))
    # Pages of the tests' own size hold in conftest alone, so that keys per channel are what is compared.
    cache = kind(config, options, max_length=448)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    ids = random_ids(1, 448)
    for start in range(0, 448, 64):
        forward(model, cache, ids[:, start : start + 64])
    found = sizes(Model.of("tiny", config), [448], 1)[name][0]
    assert 0.95 * found < cache.nbytes() <= found
    if name not in ("mixkvq", "kvq"):
        assert found == cache.nbytes()
    assert sizes(Model.of("tiny", config), [448], 3)[name] == [3 * found]


def test_known_models_are_what_is_published():
    llama = find_model("meta-llama/Llama-3.1-8B-Instruct")
    assert llama.layers == (LayerShape(8, 128, 128, torch.bfloat16),) * 32
    # 8,030,261,248 parameters, 135M with tied embeddings: 134,515,008.
    assert llama.weights == 2 * 8_030_261_248 and llama.longest == 131072
    assert find_model("HuggingFaceTB/SmolLM2-135M-Instruct").weights == 2 * 134_515_008
    assert find_model("Qwen/Qwen3-8B").weights == 2 * 8_190_735_360
    assert find_model("Qwen/Qwen2.5-7B-Instruct").weights == 2 * 7_615_616_512
    assert sizes(llama, [1024])["ordinary"] == [128 * 2**20]


@pytest.mark.slow
@pytest.mark.parametrize("name", KNOWN)
def test_every_known_model_can_be_calculated(name: str):
    model = find_model(name)
    assert model.longest and len(model.layers) == KNOWN[name]["num_hidden_layers"]
    assert sizes(model, [4096])["pmkvq 4"][0] < sizes(model, [4096])["ordinary"][0]


def test_what_fits_is_the_last_that_does():
    model = find_model("meta-llama/Llama-3.1-8B-Instruct")
    free = room(model, 24)
    assert free == int(24e9 * 0.9) - model.weights
    for name, (longest, requests) in what_fits(model, 24, 2, 8192).items():
        assert sizes(model, [longest], 2)[name][0] <= free < sizes(model, [longest + 1], 2)[name][0]
        assert sizes(model, [8192], requests)[name][0] <= free < sizes(model, [8192], requests + 1)[name][0]
    fits = what_fits(model, 24, 1, 8192)
    assert fits["pmkvq 2"][0] > fits["pmkvq 4"][0] > 3 * fits["ordinary"][0]
    assert what_fits(model, 8, 1, 8192) == dict.fromkeys(METHODS, (0, 0))
    assert "do not fit" in report(model, 8, 1, 8192)


def test_figures_are_sound_and_say_what_they_show():
    model = Model.of("<b>tiny</b>", config_of(TINY))
    page = report(model, 24, 2, 5000)
    charts = re.findall(r"<svg class.*?</svg>", page)
    assert len(charts) == 2 and figure(model, 2, 24) in page
    for chart in map(ElementTree.fromstring, charts):
        assert chart.get("role") == "img" and all(name in chart.get("aria-label") for name in METHODS)
    assert charts[1].count("<polyline") == charts[0].count("<rect") == len(METHODS)
    assert "<b>tiny" not in page and "&lt;b&gt;tiny" in page
    ElementTree.fromstring(f"<div>{page}</div>")


@pytest.mark.parametrize("pasted", [json.dumps(TINY), json.dumps({**TINY, "quantization_config": {"a": 1}})])
def test_a_config_can_be_pasted(pasted: str):
    assert find_model("ignored", pasted).layers == (LayerShape(2, 16, 16, torch.float32),) * 2


def test_nothing_that_is_pasted_loads_anything(monkeypatch: pytest.MonkeyPatch):
    loads = {
        **{"auto_map": {"AutoModelForCausalLM": "evil--code.Model", "AutoConfig": "evil--code.Config"}},
        **{"_attn_implementation": "evil/kernel", "attn_implementation": "evil/kernel"},
        **{"quantization_config": {"quant_method": "evil"}, "backbone": "evil/backbone", "_name_or_path": "/etc"},
    }
    config = config_of({**TINY, **loads, "rope_scaling": None})
    assert not any("evil" in str(value) for value in vars(config).values())
    assert not getattr(config, "name_or_path", None)


@pytest.mark.parametrize(
    ("name", "pasted", "message"),
    [
        ("../../etc/passwd", "", "Write the id"),
        ("/etc/passwd", "", "Write the id"),
        ("./tests", "", "Write the id"),
        ("org/name/resolve", "", "Write the id"),
        ("a/..b", "", "Write the id"),
        ("org/..", "", "Write the id"),
        ("gpt2", "", "Write the id"),
        (None, None, "Write the id"),
        ("", "{", "not valid JSON"),
        ("", "[" * 100_000, "not valid JSON"),
        ("", "[1]", "model_type"),
        ("", '{"model_type": 3}', "model_type"),
        ("", '{"model_type": "evil/model"}', "cannot read this"),
        ("", " " * 200_000 + "{}", "200,002 characters"),
        ("", json.dumps({**TINY, "num_hidden_layers": 10**6}), "num_hidden_layers is 1,000,000"),
        ("", json.dumps({**TINY, "hidden_size": 10**12}), "hidden_size is"),
        ("", json.dumps({**TINY, "hidden_size": -(10**12)}), "hidden_size is"),
        ("", '{"model_type": "llama", "hidden_size": NaN}', "hidden_size is nan"),
        ("", '{"model_type": "llama", "hidden_size": 1e99}', "hidden_size is"),
        ("", json.dumps({**TINY, "num_hidden_layers": 500, "num_local_experts": 500}), "more than 32,768 experts"),
        ("", json.dumps({**TINY, "num_key_value_heads": 3}), "cannot run"),
        ("", json.dumps({**TINY, "num_attention_heads": "many"}), "LlamaConfig|llama"),
        ("", json.dumps({"model_type": "t5"}), "encoder-decoder"),
    ],
)
def test_what_cannot_be_is_said(name: str | None, pasted: str | None, message: str):
    with pytest.raises(ValueError, match=message) as caught:
        find_model(name, pasted)
    assert "\n" not in str(caught.value)[:80]


class TestHub:
    def test_the_config_of_a_model_is_read_without_a_token(self, hub, monkeypatch):
        monkeypatch.setenv("HF_TOKEN", "hf_user_me")
        hub.add("me/tiny", {"config.json": json.dumps(TINY).encode()})
        hub.add("me/secret", {"config.json": json.dumps(TINY).encode()}, private=True)
        assert find_model("me/tiny").layers == find_model("", json.dumps(TINY)).layers
        assert find_model(" https://huggingface.co/me/tiny/ ") == find_model("me/tiny")
        with pytest.raises(ValueError, match="no model me/secret on the Hub, or it is private"):
            find_model("me/secret")

    def test_errors_are_readable(self, hub):
        hub.add("me/gated", {"config.json": b"{}"}, gated=True)
        hub.add("me/none", {"README.md": b"hello"})
        hub.add("me/large", {"config.json": b" " * 300_000})
        for name, message in {
            "me/gated": "is gated; paste its config.json",
            "me/none": "has no config.json",
            "me/large": "300,000 bytes; at most 200,000",
            "me/nobody": "no model me/nobody",
        }.items():
            with pytest.raises(ValueError, match=message):
                find_model(name)

    def test_without_the_hub(self, hub, closed_port, monkeypatch):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(ValueError, match="cannot be reached from here"):
            find_model("me/tiny")


def test_the_tab_has_labels_and_answers():
    with gr.Blocks() as app:
        calculator.calculator_tab()
    fields = [x for x in app.blocks.values() if isinstance(x, (gr.Dropdown, gr.Number, gr.Textbox, gr.HTML))]
    assert len(fields) == 6 and all(field.label for field in fields)
    assert "2 requests" in calculator._report_of("", json.dumps(TINY), 24, 4096.0, 2.0)
    for wrong in ((23, 4096, 1), (24, 0, 1), (24, None, 1), (24, 4096, 10**9)):
        with pytest.raises(gr.Error):
            calculator._report_of("Qwen/Qwen3-8B", "", *wrong)
