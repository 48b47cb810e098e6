# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""`hf-kvq push`, `pull` and `show` against a Hub on loopback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from loopback import hub_fixture, make_plan, plan_fixture  # noqa: F401
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from conftest import tiny_model
from hf_kvq import KVQPlan
from hf_kvq.cli import main


FILE, ME = "kvq_config.json", "hf_user_me"


def test_push_pull_and_show(hub, plan, tmp_path, capsys):
    hub.add("me/tiny", {"README.md": b"mine", "config.json": b"{}"})
    plan.save_pretrained(tmp_path / "plan")
    folder, out = str(tmp_path / "plan"), str(tmp_path / "out")
    assert main(["push", folder, "me/tiny", "--path-in-repo", "kvq/a", "--create-pr", "--token", ME]) == 0
    assert capsys.readouterr().out == f"{hub.url}/me/tiny/discussions/1\n"
    assert main(["pull", "me/tiny", out, "--subfolder", "kvq/a", "--revision", "refs/pr/1"]) == 0
    assert Path(out, FILE).read_bytes() == plan.files()[FILE]
    capsys.readouterr()
    assert main(["show", out]) == 0
    shown = capsys.readouterr().out
    assert "bits         8 in layers 0 (1 of 3)\n             4 in layers 1 (1 of 3)\n" in shown
    assert "dataset=me/essays" in shown and "nats per token: 0.012 (16-bit cache: 0)" in shown
    assert main(["show", out, "--json"]) == 0 and '"method": "pmkvq"' in capsys.readouterr().out
    for arguments, status in (
        (["show", "me/none"], 1),
        (["pull", "me/tiny", out], 1),
        (["push", out, "me/tiny", "--path-in-repo", "../x"], 2),
        (["push", str(tmp_path), "me/tiny"], 1),
    ):
        assert main(arguments) == status
        text, error = capsys.readouterr()
        assert not text and error.startswith(f"hf-kvq {arguments[0]}: error: ") and error.count("\n") == 1


@pytest.mark.slow
def test_everything_from_the_environment(hub, plan, tmp_path):
    # As users have it: HF_ENDPOINT, HF_HOME and HF_TOKEN, in a process of its own.
    env = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "TRANSFORMERS_"))}
    env |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": ME, "HF_HUB_DISABLE_XET": "1"}
    plan.save_pretrained(tmp_path / "plan")
    script = f"""
from hf_kvq.cli import main
assert main(["push", {str(tmp_path / "plan")!r}, "me/private", "--private"]) == 0
assert main(["pull", "me/private", {str(tmp_path / "out")!r}]) == 0
"""
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert hub.repos["me/private"].private and KVQPlan.from_pretrained(tmp_path / "out") == plan
    assert list((tmp_path / "home").rglob(FILE))


@pytest.mark.parametrize("given", [[], ["--cache-config", "window=0"]])
def test_generate_uses_the_plan_beside_the_model(plan, tmp_path, capsys, given):
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(128)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w0").save_pretrained(tmp_path)
    tiny_model().save_pretrained(tmp_path)
    plan.save_pretrained(tmp_path / "kvq")
    command = ["generate", "--model", str(tmp_path), "--prompt", "w3 w14 w15", "--no-do-sample", "--dtype", "float32"]
    assert main([*command, "--max-new-tokens", "70", *given]) == 0
    assert "1 layer at 8 bits" in capsys.readouterr().err
    assert main([*command, "--max-new-tokens", "70", *given, "--cache-config", "plan=null"]) == 0
    assert "1 layer at" not in capsys.readouterr().err
    assert main([*command, "--cache-config", f"plan={tmp_path}"]) == 1
    assert "it has plans in kvq: choose one" in capsys.readouterr().err
    (tmp_path / "kvq" / FILE).write_text("{")
    assert main([*command, "--max-new-tokens", "70"]) == 1
    assert "cannot be used: it is not valid JSON" in capsys.readouterr().err
