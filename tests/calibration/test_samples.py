# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
import contextlib
import copy
import subprocess
import sys
import textwrap

import pytest
import torch
from transformers.utils import logging

from conftest import random_ids, tiny_model
from hf_kvq.calibration import sensitivity
from hf_kvq.calibration.samples import (
    explained_out_of_memory,
    is_out_of_memory,
    model_facts,
    over_parts,
    over_samples,
    remove_checkpoint,
)


SAMPLES = random_ids(4, 10)


class Counting:
    """A measurement that says how often it ran, and breaks at one of the calls."""

    def __init__(self, breaks_at: int | None = None):
        self.seen, self.breaks_at = [], breaks_at

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        if len(self.seen) == self.breaks_at:
            raise KeyboardInterrupt
        self.seen.append(ids.tolist())
        return torch.stack([ids.sum() / 7, ids.float().std()])


@pytest.fixture
def log(monkeypatch) -> list[str]:
    messages: list[str] = []
    logger = logging.get_logger("hf_kvq.calibration.samples")
    monkeypatch.setattr(logger, "warning_once", lambda message: messages.append(str(message)))
    return messages


def interrupted(folder, after: int, **kwargs) -> Counting:
    measure = Counting(breaks_at=after)
    with pytest.raises(KeyboardInterrupt):
        over_samples(measure, SAMPLES, checkpoint=folder, **kwargs)
    return measure


def test_one_result_per_sample():
    found = over_samples(Counting(), SAMPLES)
    wanted = [[ids.sum() / 7, ids.float().std()] for ids in SAMPLES]
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64))
    ragged = [SAMPLES[0], SAMPLES[1][:4]]
    assert torch.equal(over_samples(Counting(), ragged)[0], found[0])


@pytest.mark.parametrize("after", [0, 1, 3])
def test_an_interrupted_call_goes_on(tmp_path, log, after):
    folder, facts = tmp_path / "deep" / "er", {"a": [1, 2.5], "b": "x"}
    first = interrupted(folder, after, facts=facts)
    again = Counting()
    found = over_samples(again, SAMPLES, facts, folder)
    assert torch.equal(found, over_samples(Counting(), SAMPLES)) and not log
    assert first.seen + again.seen == SAMPLES.tolist()
    # Finished, and asked once more.
    assert torch.equal(over_samples(Counting(breaks_at=0), SAMPLES, facts, folder), found)
    (folder / "somebody's").touch()
    remove_checkpoint(folder)
    assert [path.name for path in folder.iterdir()] == ["somebody's"]
    (folder / "somebody's").unlink()
    remove_checkpoint(folder)
    assert not folder.exists()
    remove_checkpoint(folder)


@pytest.mark.parametrize(
    ("facts", "samples", "changed"),
    [
        ({"bits": 3, "model": "m"}, SAMPLES, "another bits;"),
        ({"bits": 4, "model": "n"}, SAMPLES, "another model;"),
        ({"bits": 4}, SAMPLES, "another model;"),
        ({"bits": 4, "model": "m"}, SAMPLES + 1, "another sample;"),
        ({"bits": 4, "model": "m"}, SAMPLES[:, :5], "another sample;"),
    ],
)
def test_other_results_are_not_used(tmp_path, log, facts, samples, changed):
    interrupted(tmp_path, 2, facts={"bits": 4, "model": "m"})
    measure = Counting()
    assert torch.equal(over_samples(measure, samples, facts, tmp_path), over_samples(Counting(), samples))
    assert measure.seen == samples.tolist() and changed in log[0] and str(tmp_path) in log[0]
    # What was measured anew replaced the old.
    over_samples(Counting(breaks_at=0), samples, facts, tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"facts": {}}', b'{"facts": 1, "result": 2}'])
def test_damaged_files_are_measured_anew(tmp_path, content):
    over_samples(Counting(), SAMPLES, {}, tmp_path)
    files = sorted(tmp_path.iterdir())
    assert len(files) == 4
    files[1].write_bytes(content)
    measure = Counting()
    assert torch.equal(over_samples(measure, SAMPLES, {}, tmp_path), over_samples(Counting(), SAMPLES))
    assert measure.seen == SAMPLES[1:2].tolist()


def test_parts_are_shared_and_kept_one_by_one(tmp_path):
    seen = []

    def measure(ids: torch.Tensor, part: int) -> torch.Tensor:
        if len(seen) == 5:
            raise KeyboardInterrupt
        seen.append((ids.tolist(), part))
        return ids[: part + 1] / 7

    with pytest.raises(KeyboardInterrupt):
        over_parts(measure, SAMPLES[:2], 3, checkpoint=tmp_path)
    assert len(list(tmp_path.iterdir())) == 5
    seen = []
    found = over_parts(measure, SAMPLES[:2], 3, checkpoint=tmp_path)
    assert seen == [(SAMPLES[1].tolist(), 2)]
    assert [[x.tolist() for x in parts] for parts in found] == [
        [(ids[: part + 1] / 7).double().tolist() for part in range(3)] for ids in SAMPLES[:2]
    ]


def test_facts_tell_models_apart():
    model = tiny_model()
    facts = model_facts(model)
    assert facts == model_facts(copy.deepcopy(model))
    changed = copy.deepcopy(model)
    changed.model.layers[1].mlp.down_proj.weight[0, 3] += 1
    others = [changed, tiny_model(dtype=torch.bfloat16), tiny_model("qwen2"), tiny_model("gpt2")]
    assert all(model_facts(other) != facts for other in others)


@pytest.mark.slow
def test_a_killed_process_leaves_whole_files_or_none(tmp_path):
    script = textwrap.dedent("""
        import os, signal, sys, torch
        from hf_kvq.calibration.samples import over_samples

        done = []

        def measure(ids):
            if len(done) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            done.append(ids)
            return ids.double() / 7

        over_samples(measure, torch.arange(40).view(4, 10), {}, sys.argv[1])
    """)
    result = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, timeout=120)
    assert result.returncode == -9, result.stderr.decode()
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["sample-00000-000.json", "sample-00001-000.json"]
    seen = []
    found = over_samples(lambda ids: seen.append(ids) or ids.double() / 7, torch.arange(40).view(4, 10), {}, tmp_path)
    assert len(seen) == 2 and torch.equal(found, torch.arange(40).view(4, 10).double() / 7)


# --- out of memory ---------------------------------------------------------------------------------------------------


def too_much() -> torch.Tensor:
    return torch.empty(2**60, dtype=torch.uint8)


def test_the_processor_runs_out_of_memory():
    with pytest.raises(MemoryError, match=r"out of memory; lower the tokens per sample \(now 10\)"):
        over_samples(lambda ids: too_much(), SAMPLES)


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (MemoryError("x"), True),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
            True,
        ),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("DefaultCPUAllocator"), False),
    ],
)
def test_what_is_out_of_memory(error, is_memory):
    assert is_out_of_memory(error) == is_memory
    with contextlib.suppress(ValueError), pytest.raises(MemoryError if is_memory else type(error)) as caught:
        with explained_out_of_memory("do less"):
            raise error
    assert ("do less" in str(caught.value)) == is_memory


def test_sensitivity_says_what_to_lower(monkeypatch):
    module = sys.modules["hf_kvq.calibration.sensitivity"]
    monkeypatch.setattr(module, "kv_gradients", lambda model, ids: too_much())
    with pytest.raises(MemoryError, match="lower the tokens per sample"):
        sensitivity(tiny_model(), random_ids(1, 60), {"window": 8, "group_size": 16}, desc=None)
