# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Two processes find what one finds."""

import json
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from conftest import random_ids, save_with_words, tiny_model
from hf_kvq.calibration import distributed, measured_sensitivity, sensitivity, tune_thresholds
from hf_kvq.cli import main


OPTIONS = {"window": 8, "group_size": 16}
TIERS = {"residual": 16, "group_size": 16, "sink_tokens": 4, "kernel": "torch"}
SAMPLES = random_ids(3, 60)

WORK = textwrap.dedent("""
    import json, sys
    from pathlib import Path

    import torch
    from transformers import AutoModelForCausalLM

    from hf_kvq.calibration import measured_sensitivity, sensitivity, tune_thresholds
    from hf_kvq.calibration.distributed import gather, is_main_process, own_device, wait_for_everyone, world
    from hf_kvq.cli import main

    folder, options, tiers, samples, command = Path(sys.argv[1]), *map(json.loads, sys.argv[2:])
    samples = torch.tensor(samples)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()
    gradient = sensitivity(model, samples, options, checkpoint=folder / "gradient", desc="bar of the gradients")
    measured = measured_sensitivity(model, samples, options, widths=(2,), desc=None)
    trials = tune_thresholds(model, samples[:1], 200, tiers, 6, folder / "trials", chunk=24, desc=None)
    gathered = gather([f"{i} of {n}" for i, n in [world()] * (1 + world()[0])])
    wait_for_everyone()
    device = str(own_device())
    status = main(command)
    if is_main_process():
        found = {
            "keys": gradient.keys.tolist(),
            "values": gradient.values.tolist(),
            "measured": measured.total.tolist(),
            "trials": [vars(trial) for trial in trials],
            "gathered": gathered,
            "device": device,
            "connected": torch.distributed.is_initialized(),
            "status": status,
        }
        (folder / "found.json").write_text(json.dumps(found))
""")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def launch(processes: int, *arguments: str) -> subprocess.CompletedProcess:
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}"]
    launcher += ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    # Whatever lets this process import the package, and no GPU: gloo on the loopback device.
    path = os.pathsep.join(filter(None, sys.path))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    return subprocess.run([*launcher, *arguments], env=env, capture_output=True, text=True, timeout=400)


@pytest.fixture
def folder(tmp_path) -> Path:
    """A tiny model with its tokenizer, and a text of its words."""
    return save_with_words(tmp_path / "model")


@pytest.mark.slow
def test_two_processes_find_what_one_finds(tmp_path, folder):
    pytest.importorskip("accelerate")
    pytest.importorskip("optuna")
    pytest.importorskip("cvxpy")
    command = [
        *("calibrate", str(folder), "--data", str(folder / "text.txt"), "--samples", "3", "--sample-length", "300"),
        *("--max-length", "600", "--budget", "9bits", "--device", "cpu", "-o", str(folder / "kvq")),
        *("--cache-config", "window=0", "--cache-config", "group_size=32"),
    ]
    (tmp_path / "work.py").write_text(WORK)
    arguments = [json.dumps(x) for x in (OPTIONS, TIERS, SAMPLES.tolist(), command)]
    result = launch(2, str(tmp_path / "work.py"), str(folder), *arguments)
    assert result.returncode == 0, result.stderr
    found = json.loads((folder / "found.json").read_text())
    assert found["gathered"] == ["0 of 2", "1 of 2", "1 of 2"] and found["status"] == 0
    # The command has closed what it opened: threads of the connection abort an interpreter that ends before them.
    assert not found["connected"]

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()
    gradient = sensitivity(model, SAMPLES, OPTIONS, desc=None)
    for side in ("keys", "values"):
        torch.testing.assert_close(torch.tensor(found[side], dtype=torch.float64), getattr(gradient, side))
    measured = measured_sensitivity(model, SAMPLES, OPTIONS, widths=(2,), desc=None).total
    torch.testing.assert_close(torch.tensor(found["measured"], dtype=torch.float64), measured, rtol=1e-4, atol=1e-8)
    # Pairs that are tried at once do not know of one another, so the last ones are others than in one process.
    trials = tune_thresholds(model, SAMPLES[:1], 200, TIERS, 4, chunk=24, desc=None)
    assert len(found["trials"]) == 6
    for one, other in zip(found["trials"], trials):
        assert one == pytest.approx(vars(other), rel=1e-4)
    # Every sample was measured by one process, and only the main one showed a bar and printed the plan.
    assert [path.name for path in sorted((folder / "gradient").iterdir())] == [
        f"sample-0000{i}-000.json" for i in range(3)
    ]
    assert result.stderr.count("bar of the gradients:   0%") == result.stdout.count("method       pmkvq") == 1
    plan = (folder / "kvq" / "kvq_config.json").read_bytes()
    assert main(command) == 0
    assert (folder / "kvq" / "kvq_config.json").read_bytes() == plan


def test_a_process_alone(monkeypatch):
    assert distributed.world() == (0, 1) and distributed.is_main_process()
    assert distributed.gather([1, 2]) == [1, 2] and distributed.own_device() is None
    distributed.wait_for_everyone()
    # Nothing was connected, and accelerate is not needed.
    assert not torch.distributed.is_initialized()
    monkeypatch.setitem(sys.modules, "accelerate", None)
    assert distributed.world() == (0, 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ImportError, match=r"several processes need accelerate.*'hf-kvq\[calibrate\]'"):
        distributed.world()


# --- a model on several devices --------------------------------------------------------------------------------------


@pytest.mark.parametrize("places", [["cpu", "cpu", "cpu"], ["cpu", "disk", "cpu"], ["disk", "disk", "disk"]])
def test_split_models(tmp_path, places):
    """accelerate's hooks move what they find elsewhere; without a GPU, elsewhere is a disk."""
    accelerate = pytest.importorskip("accelerate")
    tiny_model().save_pretrained(tmp_path / "model")
    devices = {f"model.layers.{i}": place for i, place in enumerate(places)}
    devices |= dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="sdpa")
    model = accelerate.dispatch_model(model, devices, "cpu", offload_dir=tmp_path / "disk", force_hooks=True)
    wanted = sensitivity(tiny_model(), SAMPLES[:1], OPTIONS, desc=None)
    found = sensitivity(model, SAMPLES[:1], OPTIONS, desc=None)
    torch.testing.assert_close(found.total, wanted.total)
    wanted = measured_sensitivity(tiny_model(), SAMPLES[:1], OPTIONS, (2,), desc=None)
    found = measured_sensitivity(model, SAMPLES[:1], OPTIONS, (2,), desc=None)
    torch.testing.assert_close(found.total, wanted.total, rtol=1e-4, atol=1e-8)
