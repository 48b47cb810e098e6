# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Model cards, their picture, evaluation results, and what `hf-kvq show` prints."""

import re
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import ModelCard, parse_eval_result_entries
from loopback import hub_fixture, make_plan, plan_fixture  # noqa: F401

from conftest import CONFIGS
from hf_kvq import KIVIConfig, KVQPlan, MixKVQConfig, PMKVQConfig
from hf_kvq.hub import cards


FILE, ME = "kvq_config.json", "hf_user_me"
EXAMPLES = Path(__file__).parents[2] / "docs" / "plans"

SCALE = torch.linspace(0.25, 3.0, 96).view(3, 2, 16)
LAMBDA = PMKVQConfig(fbit=4, transform="lambda", key_codec="token")
FIDELITY = {
    "dataset": "me/novels",
    "tokens": 4096,
    "true_bits": 4.25,
    "perplexity": 20.5,
    "exact_perplexity": 19.75,
    "kl": 0.012,
    "top1": 0.97,
    "openai/gsm8k:main": 41.5,
    "exact_openai/gsm8k:main": 43,
    "Idavidrein/gpqa:gpqa_diamond": 20,
    "openai/gsm8k:unknown": "not run",
    "patience": 3,
}
PLANS = {
    "pmkvq": lambda: make_plan(fidelity=FIDELITY),
    "one width": lambda: make_plan(config=PMKVQConfig(fbit=4), calibration={}, fidelity={}),
    "from 8 bits": lambda: make_plan(config=PMKVQConfig(fbit=4, initial_bits=8)),
    "lambda": lambda: make_plan(config=LAMBDA, tensors={"key_scale": SCALE, "other": torch.zeros(2)}),
    "values apart": lambda: make_plan(config=PMKVQConfig(fbit=4, value_fbit=(4, 2, 2))),
    "mixkvq": lambda: make_plan(config=MixKVQConfig(target_bits=2.75), fidelity={"true_bits": 4.0}),
    "kivi": lambda: make_plan(config=KIVIConfig(bits=4), base_model=None),
    "odd": lambda: make_plan(
        calibration={"läyers\n|": [1, None, "\ud800", True], "x": "\x1b[2J <b>`*a*", "dataset": "a/b\n---\n"},
        fidelity={"dataset": "\ud800\n---\nx", "kl": 1e-9, "true_bits": "many", "top1": True, "\x1b|": "|"},
    ),
}


def page(plan: KVQPlan) -> dict[str, str]:
    return {name: data.decode() for name, data in cards.page(plan, "me/tiny-kvq").items()}


def tables(text: str) -> list[list[list[str]]]:
    """Cells of the tables of a Markdown text."""
    found = re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE)
    return [[re.split(r"(?<!\\)\|", row)[1:-1] for row in table.splitlines()] for table in found]


# --- the card --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLANS)
def test_cards_are_well_formed(name):
    plan = PLANS[name]()
    files = page(plan)
    assert files == page(PLANS[name]())
    text = files["README.md"]
    card = ModelCard(text)
    assert card.data.library_name == "hf-kvq" and card.data.tags == cards.tags(plan) and cards.MARKER in text
    assert card.text.count(f"# {plan.method} plan for ") == 1 and "\n\n\n" not in text and text.endswith("|\n")
    assert all(re.fullmatch(r"\|.*\|", line) for line in text.splitlines() if line.startswith("|"))
    for table in tables(text):
        assert len({len(row) for row in table}) == 1 and set(table[1]) == {"---"}
    assert (cards.PLOT in files) == (f"]({cards.PLOT})" in text) == (len(set(plan.layer_widths() or ())) > 1)
    assert ("bit for bit" in text) == (plan.method == "pmkvq" and plan.config.initial_bits == 16)
    assert ("## Tensors" in text) == bool(plan.tensors) and ("## Measured" in text) == bool(plan.fidelity)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\ud800]", text) and (name == "odd" or "None" not in text)


def test_tables_of_a_card():
    text = page(PLANS["pmkvq"]())["README.md"]
    _, measured, *_ = tables(text)
    assert [[cell.strip() for cell in row] for row in measured[2:]] == [
        ["text", "", "me/novels"],
        ["tokens that were read", "", "4096"],
        ["bits per cached number, everything counted", "16", "4.25"],
        ["perplexity", "19.75", "20.5"],
        ["KL divergence from the 16-bit cache, nats per token", "0", "0.012"],
        ["share of tokens with the same most likely successor", "1", "0.97"],
        [r"Idavidrein/gpqa:gpqa\_diamond", "", "20"],
        ["openai/gsm8k:main", "43", "41.5"],
        ["openai/gsm8k:unknown", "", "not run"],
        ["patience", "", "3"],
    ]
    text = page(PLANS["lambda"]())["README.md"]
    assert r"| key\_scale | float32 \[3, 2, 16\] | λ: keys are divided by it" in text and "; 0.25 to 3 |" in text
    assert r"| other | float32 \[2\] | not used by this version" in text and "| transform | lambda |" in text


def test_layers_of_one_width_are_taken_together():
    fbits = (4, 2, 2, 2, 8, 4, 4, 2, 4, 4)
    config = CONFIGS["llama"]()
    config.num_hidden_layers = 10
    text = page(KVQPlan.of(config, PMKVQConfig(fbit=fbits)))["README.md"]
    assert "| 8 | 8 | 4 | 1 |\n| 4 | 4 | 0, 5-6, 8-9 | 5 |\n| 2 | 2 | 1-3, 7 | 4 |\n" in text


@pytest.mark.parametrize(
    ("dataset", "is_there"),
    [
        ("me/essays", True),
        ("essays", False),
        ("texts/a.txt", False),
        ("a/b.jsonl", False),
        ("a/b/c", False),
        (3, False),
    ],
)
def test_only_ids_of_the_hub_become_metadata(dataset, is_there):
    card = ModelCard(page(make_plan(calibration={"dataset": dataset}))["README.md"])
    assert card.data.datasets == ([dataset] if is_there else None)


# --- evaluation results ----------------------------------------------------------------------------------------------


def test_results_on_a_text_survive_in_the_metadata():
    card = ModelCard(page(PLANS["pmkvq"]())["README.md"])
    expected = {"bits_per_number": 4.25, "perplexity": 20.5, "kl_divergence": 0.012, "top1_agreement": 0.97}
    for _ in range(2):
        assert {result.metric_type: result.metric_value for result in card.data.eval_results} == expected
        for result in card.data.eval_results:
            assert (result.task_type, result.dataset_type, result.dataset_name) == (
                *("text-generation", "me/novels", "me/novels"),
            )
        assert card.data.model_name == "tiny-kvq"
        card = ModelCard(str(card))
    ((entry,),) = (index["results"] for index in card.data.to_dict()["model-index"])
    assert {metric["type"]: metric["value"] for metric in entry["metrics"]} == expected


def test_a_text_without_a_name_and_values_that_are_no_numbers():
    (result,) = ModelCard(page(PLANS["odd"]())["README.md"]).data.eval_results
    assert (result.metric_type, result.metric_value, result.dataset_type) == ("kl_divergence", 1e-9, "unknown")
    (result,) = ModelCard(page(make_plan(fidelity={"kl": 0}))["README.md"]).data.eval_results
    assert (result.dataset_name, result.dataset_type) == ("unknown", "unknown")
    assert ModelCard(page(make_plan(fidelity={"mine": 1}))["README.md"]).data.eval_results is None


def test_benchmarks_go_where_leaderboards_look():
    entries = parse_eval_result_entries(yaml.safe_load(page(PLANS["pmkvq"]())[cards.BENCHMARKS]))
    found = {(entry.dataset_id, entry.task_id): entry.value for entry in entries}
    assert found == {("openai/gsm8k", "main"): 41.5, ("Idavidrein/gpqa", "gpqa_diamond"): 20}
    assert {entry.notes for entry in entries} == {"KV cache quantized by hf_kvq, pmkvq, 4.25 bits per number"}
    assert all(cards.BENCHMARKS not in page(PLANS[name]()) for name in PLANS if name != "pmkvq")


# --- in repositories -------------------------------------------------------------------------------------------------


def test_a_page_comes_and_goes_with_its_plan(hub):
    PLANS["pmkvq"]().push_to_hub("me/tiny-kvq", token=ME)
    files = hub.files("me/tiny-kvq")
    assert set(files) == {".gitattributes", FILE, "README.md", "kvq_widths.svg", ".eval_results/hf_kvq.yaml"}
    assert {name: files[name] for name in page(PLANS["pmkvq"]())} == cards.page(PLANS["pmkvq"](), "me/tiny-kvq")
    before = hub.repos["me/tiny-kvq"].refs["main"]
    PLANS["pmkvq"]().push_to_hub("me/tiny-kvq", token=ME)
    assert hub.repos["me/tiny-kvq"].refs["main"] == before
    # What others measured, or put there, is theirs.
    theirs = {".eval_results/hle.yaml": b"theirs", "kvq/widths.svg": b"theirs"}
    hub.add("me/tiny-kvq", theirs)
    PLANS["mixkvq"]().push_to_hub("me/tiny-kvq", token=ME)
    files = hub.files("me/tiny-kvq")
    assert set(files) == {".gitattributes", FILE, "README.md", *theirs}
    assert {name: files[name] for name in theirs} == theirs


def test_a_page_of_somebodys_own_keeps_its_pictures(hub):
    own = {
        "README.md": b"my page ![](kvq_widths.svg)",
        "kvq_widths.svg": b"mine",
        ".eval_results/hf_kvq.yaml": b"mine",
    }
    hub.add("me/tiny-kvq", own)
    PLANS["pmkvq"]().push_to_hub("me/tiny-kvq", token=ME)
    files = hub.files("me/tiny-kvq")
    assert files["README.md"].endswith(own["README.md"]) and files[FILE] == PLANS["pmkvq"]().files()[FILE]
    assert {name: files[name] for name in list(own)[1:]} == dict(list(own.items())[1:])


@pytest.mark.parametrize("path", [None, "kvq", "kvq/pmkvq"])
@pytest.mark.parametrize("has_readme", [True, False])
def test_beside_weights_there_is_no_page(hub, path, has_readme):
    weights = {"config.json": b"{}", "model.safetensors": b"1234", **({"README.md": b"mine"} if has_readme else {})}
    hub.add("me/tiny", weights)
    PLANS["pmkvq"]().push_to_hub("me/tiny", path_in_repo=path, token=ME)
    files = hub.files("me/tiny")
    assert set(files) == {*weights, f"{path}/{FILE}" if path else FILE}
    assert files.get("README.md", b"mine").endswith(b"mine")


def test_the_examples_are_up_to_date():
    folders = [folder for folder in EXAMPLES.iterdir() if folder.is_dir()]
    assert len(folders) >= 2
    for folder in folders:
        plan = KVQPlan.from_pretrained(folder)
        files = {**plan.files(), **cards.page(plan, f"hf-kvq/{folder.name}")}
        written = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
        read = {name: path.read_bytes() for name, path in written.items()}
        assert read == files, "run scripts/example_plans.py"


# --- in a terminal ---------------------------------------------------------------------------------------------------


def test_summaries():
    lines = cards.summary(PLANS["pmkvq"]()).splitlines()
    assert lines[2:5] == [
        *("bits         8 in layers 0 (1 of 3)", "             4 in layers 1 (1 of 3)"),
        "             2 in layers 2 (1 of 3)",
    ]
    assert "             perplexity: 20.5 (16-bit cache: 19.75)" in lines and "fidelity     text: me/novels" in lines
    lines = cards.summary(PLANS["values apart"]()).splitlines()
    assert lines[2:4] == [
        *("bits         4 in layers 0 (1 of 3)", "             4 of keys, 2 of values, in layers 1-2 (2 of 3)"),
    ]
    lines = cards.summary(PLANS["lambda"]()).splitlines()
    tensors = "keys are divided by it before they are quantized, and queries multiplied; 0.25 to 3"
    assert f"tensors      key_scale float32 [3, 2, 16]: λ: {tensors}" in lines
    assert "             other float32 [2]: not used by this version of hf_kvq" in lines
    for name, make in PLANS.items():
        text = cards.summary(make())
        assert all(re.fullmatch(r"[a-z ]{13}\S.*", line) and line.isprintable() for line in text.splitlines()), name
        assert text.encode() and ("bits  " in text) == (make().method == "pmkvq")
