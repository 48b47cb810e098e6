# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""The Space as its visitors meet it: started here, and driven by Gradio's own client."""

import gc
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoTokenizer

from conftest import save_with_words, tiny_model
from hf_kvq import KVQCache, KVQPlan, MixKVQConfig, PMKVQConfig
from hf_kvq.registration import cache_argument


os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
gradio = pytest.importorskip("gradio")
client_module = pytest.importorskip("gradio_client")

import app as space  # noqa: E402
import plans  # noqa: E402
from compare import new_cache  # noqa: E402


PROMPT = "w5 w9 w33 w70 w2 w41"
# prompt, caches, answer; final bits, window, sinks, target bits; length, budget; temperature, seed; plan, its files
FIELDS = [PROMPT, ["pmkvq", "kivi"], 64, "2", 32, 1, 2.5, 0, 0, 0, 0, "", None]
PLACES = {"prompt": 0, "names": 1, "new_tokens": 2, "max_length": 7, "budget": 8, "seed": 10, "repo": 11, "files": 12}


def fields(**changes):
    filled = list(FIELDS)
    for name, value in changes.items():
        filled[PLACES[name]] = value
    return filled


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(save_with_words(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def url(tokenizer):
    app = space.build(tiny_model(), tokenizer, "a tiny model")
    _, url, _ = app.queue().launch(server_name="127.0.0.1", prevent_thread_lock=True, quiet=True, show_error=True)
    yield url
    app.close()


@pytest.fixture
def client(url):
    return client_module.Client(url, verbose=False)


def alone(tokenizer, name, options, prompt=PROMPT, new_tokens=64):
    """What `generate` says with one cache."""
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    cache = new_cache(name, tiny_model(), options, ids.shape[1] + new_tokens)
    given = {cache_argument(tiny_model()): cache, "do_sample": False, "eos_token_id": None}
    out = tiny_model().generate(ids, max_new_tokens=new_tokens, **given)
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def test_a_visit(client, tokenizer):
    job = client.submit(*FIELDS, api_name="/compare")
    shown, facts = job.result(timeout=60)
    assert [entry["cache"] for entry in facts] == ["ordinary", "pmkvq", "kivi"]
    assert facts[0]["text"] == alone(tokenizer, "ordinary", {})
    pmkvq = {"fbit": 2, "window": 32, "group_size": 32, "sink_tokens": 1}
    assert facts[1]["text"] == alone(tokenizer, "pmkvq", pmkvq)
    assert facts[1]["layer_bits"] == [2, 2, 2] and facts[0]["layer_bits"] == [16, 16, 16]
    assert all(entry["kl"] > 0 and 0 < entry["top1"] <= 1 for entry in facts[1:])
    assert shown.count('role="img"') == 6 and "3 layers at 2 bits" in shown
    # It streamed.
    assert len(job.outputs()) > 1


def test_a_budget_and_a_length_are_the_budget(client):
    def bits(**changes):
        return client.predict(*fields(names=["pmkvq"], **changes), api_name="/compare")[1][1]["layer_bits"]

    assert bits(max_length=100_000) == [16, 16, 16]
    assert bits(budget=0.06) != [16, 16, 16]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": "  "}, "Write a prompt first"),
        ({"prompt": "w" * 20_001}, "20,001 characters; at most 20,000"),
        ({"prompt": "w1 " * 1025}, "The prompt has 1,025 tokens; at most 1,024 work here"),
        ({"names": []}, "Choose one to 3 caches"),
        ({"names": ["pmkvq", "mixkvq", "kivi", "kvq"]}, "Choose one to 3 caches"),
        ({"budget": 1e-4}, "is too small"),
        ({"repo": "/etc/passwd"}, "A plan is named like user/repository"),
        ({"repo": "../../etc"}, "A plan is named like user/repository"),
        ({"repo": "somebody/something ../../x"}, "cannot be"),
        ({"repo": "somebody/something"}, "somebody/something"),
    ],
)
def test_what_is_wrong_is_said(client, changes, message):
    with pytest.raises(client_module.exceptions.AppError, match=message):
        client.predict(*fields(**changes), api_name="/compare")


def test_no_other_names_get_through(client):
    for names in (["os"], ["quantized"], ["../x"]):
        with pytest.raises(client_module.exceptions.AppError, match="not in the list of choices"):
            client.predict(*fields(names=names), api_name="/compare")


def uploaded(plan, folder):
    plan.save_pretrained(folder)
    return [client_module.handle_file(str(path)) for path in sorted(folder.iterdir()) if path.suffix != ".md"]


def test_a_plan_from_files(client, tmp_path):
    plan = KVQPlan.of(tiny_model(), PMKVQConfig(fbit=(8, 2, 4), window=32, group_size=32))
    _, facts = client.predict(*fields(files=uploaded(plan, tmp_path), names=["pmkvq"]), api_name="/compare")
    assert facts[1]["layer_bits"] == [8, 2, 4]


def test_plans_that_do_not_go_together(client, tmp_path):
    plan = KVQPlan.of(tiny_model(), MixKVQConfig())
    with pytest.raises(client_module.exceptions.AppError, match="This is a mixkvq plan; choose mixkvq"):
        client.predict(*fields(files=uploaded(plan, tmp_path)), api_name="/compare")
    other = KVQPlan.of(tiny_model("qwen3"), PMKVQConfig())
    with pytest.raises(client_module.exceptions.AppError):
        client.predict(*fields(files=uploaded(other, tmp_path / "other")), api_name="/compare")


def test_files_that_are_no_plan(tmp_path):
    (tmp_path / "a.json").write_text("[1, 2")
    (tmp_path / "b.safetensors").write_bytes(b"x")
    shutil.copy(tmp_path / "a.json", tmp_path / "c.json")
    with pytest.raises(ValueError, match="a plan is"):
        plans.plan_from_files([str(tmp_path / "b.safetensors")])
    with pytest.raises(ValueError, match="a plan is"):
        plans.plan_from_files([str(tmp_path / "a.json"), str(tmp_path / "c.json")])
    with pytest.raises(ValueError):
        plans.plan_from_files([str(tmp_path / "a.json")])


def test_folders_here_are_not_plans(tmp_path, monkeypatch):
    KVQPlan.of(tiny_model(), PMKVQConfig()).save_pretrained(tmp_path / "user" / "plan")
    monkeypatch.chdir(tmp_path)
    assert KVQPlan.from_pretrained("user/plan").method == "pmkvq"
    with pytest.raises(ValueError, match="a plan is named like"):
        plans.plan_from_hub("user/plan")


def living_caches():
    gc.collect()
    return sum(isinstance(thing, KVQCache) for thing in gc.get_objects())


def test_stop_ends_it_and_frees_its_memory(client, monkeypatch):
    before, steps = living_caches(), []
    forward = type(tiny_model()).forward

    def counted(self, *args, **kwargs):
        steps.append(threading.get_ident())
        time.sleep(0.02)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(tiny_model()), "forward", counted)
    job = client.submit(*fields(new_tokens=512), api_name="/compare")
    while len(steps) < 30:
        time.sleep(0.01)
    assert living_caches() > before
    assert job.cancel()
    for _ in range(100):
        time.sleep(0.05)
        if living_caches() == before:
            break
    done = len(steps)
    time.sleep(0.3)
    assert len(steps) == done < 3 * 512
    assert living_caches() == before


def test_eight_visitors_at_once(url, tokenizer):
    before = living_caches()
    prompts = [f"w{7 * i + 3} w{11 * i + 1} w{i + 1}" for i in range(8)]
    expected = [alone(tokenizer, "ordinary", {}, prompt, 48) for prompt in prompts]
    assert len(set(expected)) == 8

    def visit(prompt):
        filled = fields(prompt=prompt, new_tokens=48, names=["pmkvq"], max_length=100_000)
        return client_module.Client(url, verbose=False).predict(*filled, api_name="/compare")[1]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(visit, prompts))
    assert [facts[0]["text"] for facts in found] == expected
    # Nothing was quantized, so this is the ordinary text too.
    assert [facts[1]["text"] for facts in found] == expected
    assert living_caches() == before


def test_a_full_gpu_is_said(tokenizer, monkeypatch):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(type(tiny_model()), "forward", full)
    wanted = space.make_request(tiny_model(), tokenizer, PROMPT, ["kivi"], {}, None, new_tokens=4)
    with pytest.raises(gradio.Error, match="The GPU is full"):
        list(space.watch(tiny_model(), tokenizer, wanted))


@pytest.mark.parametrize("note", ["Writing", "Measuring"])
def test_whoever_leaves_frees_the_caches(tokenizer, monkeypatch, note):
    monkeypatch.setattr(space, "SECONDS", 0)
    before = living_caches()
    wanted = space.make_request(tiny_model(), tokenizer, PROMPT, ["pmkvq"], {}, None, new_tokens=32)
    visit = space.watch(tiny_model(), tokenizer, wanted)
    assert any(note in shown for shown, _ in visit)
    # Those of the answers are gone by the time that new ones are measured.
    assert living_caches() == before + 1
    visit.close()
    assert living_caches() == before
