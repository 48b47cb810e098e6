# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""The Triton kernels in Triton's interpreter, against a float64 softmax over what the codecs decode."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch


pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parent))
# Triton decides at import whether it interprets, and other tests need its compiler: these have their own process.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the process of test_in_interpreter")

from gpu_cases import CASES, FP16, TOLERANCE, Case, build  # noqa: E402


launcher = importlib.import_module("hf_kvq_kernels.gpu.attend")


def test_in_interpreter():
    if INTERPRETED:
        pytest.skip("is in it already")
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--noconftest", "-p", "no:cacheprovider", __file__]
    run = subprocess.run(command, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]


def check(case: Case, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, expected, expected_lse = build(case)
    if arguments["layout"] is not None:
        assert launcher.why_not(arguments["query"], arguments["layout"]) is None
    monkeypatch.setattr(launcher, "_programs", lambda device: programs)
    poison_outputs(monkeypatch)
    out, lse = launcher.attend(**arguments)
    assert out.dtype == lse.dtype == torch.float32
    tolerance = TOLERANCE[arguments["query"].dtype]
    size = float(expected.abs().max())
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance * size)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=tolerance, atol=tolerance)


def poison_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory comes with NaN in it."""
    new_empty = torch.Tensor.new_empty

    def poisoned(*args, **options):
        x = new_empty(*args, **options)
        return x.fill_(torch.nan) if x.is_floating_point() else x

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)


@interpreted
@pytest.mark.parametrize("name", CASES)
def test_attend(name, monkeypatch):
    check(CASES[name], 4 if len(name) % 2 else 1, monkeypatch)


@interpreted
def test_check_notices_a_wrong_mask(monkeypatch):
    case = replace(CASES["bool mask"], exact=(), rows=1)
    right = build(case)

    def broken(case):
        arguments, *expected = right
        mask = arguments["page_mask"].clone()
        mask[..., 40] = ~mask[..., 40]
        return {**arguments, "page_mask": mask}, *expected

    monkeypatch.setitem(check.__globals__, "build", broken)
    with pytest.raises(AssertionError, match="not close"):
        check(case, 1, monkeypatch)


@interpreted
def test_splits_give_the_same(monkeypatch):
    arguments, *_ = build(Case(held=(128, 128, 128), exact=(200,)))
    monkeypatch.setattr(launcher, "_programs", lambda device: 1)
    one = launcher.attend(**arguments)
    monkeypatch.setattr(launcher, "_programs", lambda device: 64)
    many = launcher.attend(**arguments)
    torch.testing.assert_close(one, many, rtol=1e-3, atol=1e-3)


@interpreted
def test_nan_stays_visible():
    arguments, *_ = build(Case(exact=(3,)))
    arguments["query"][0, 1, 0, 5] = torch.nan
    out, lse = launcher.attend(**arguments)
    assert out[0, 1].isnan().all() and lse[0, 1].isnan().all()
    assert out[0, 0].isfinite().all()


@interpreted
def test_nothing_to_see():
    case = Case(held=(), exact=(3,), heads=2)
    arguments, *_ = build(case)
    arguments["masks"] = [torch.zeros(1, 1, 1, 3, dtype=torch.bool)]
    out, lse = launcher.attend(**arguments)
    assert (out == 0).all() and (lse == float("-inf")).all()
    for name in ("keys", "values"):
        arguments[name] = [x[:, :, :0] for x in arguments[name]]
    arguments["masks"] = [None]
    out, lse = launcher.attend(**arguments)
    assert (out == 0).all() and (lse == float("-inf")).all()


@interpreted
def test_why_not():
    query, layout = torch.zeros(1, 2, 1, 64), Case().layout()
    assert launcher.why_not(query, layout) is None
    assert launcher.why_not(query, None) is None
    for wrong, word in (
        ({"tokens": 64}, "128 tokens"),
        ({"key_group": 48}, "key groups"),
        ({"value_group": 24}, "head_dim"),
        ({"key_dim": 512}, "256"),
    ):
        assert word in launcher.why_not(query, layout._replace(**wrong))
    assert "16 queries" in launcher.why_not(torch.zeros(1, 2, 17, 64), layout)
    assert "float64" in launcher.why_not(query.double(), layout)


def test_why_not_without_a_gpu():
    if INTERPRETED:
        pytest.skip("the interpreter needs none")
    assert "GPU" in launcher.why_not(torch.zeros(1, 2, 1, 64), None)


def run_ptx(text: str, word: int) -> int:
    """What the few instructions that codes are unpacked with leave in $0."""
    registers = {"$1": word}

    def value(operand: str) -> int:
        return registers[operand] if operand in registers else int(operand, 0)

    for line in text.strip("{} ").split(";"):
        if not line.strip() or line.split()[0] == ".reg":
            continue
        name, operands = line.split(maxsplit=1)
        target, *operands = (operand.strip() for operand in operands.split(","))
        a, *more = map(value, operands)
        if name == "mov.b32":
            result = a
        elif name == "shr.b32":
            result = a >> more[0]
        elif name == "lop3.b32":
            table = more[2]
            assert table == (0xF0 & 0xCC) | 0xAA
            result = (a & more[0]) | more[1]
        elif name == "prmt.b32":
            pool = a | more[0] << 32
            result = sum((pool >> 8 * (more[1] >> 4 * i & 7) & 255) << 8 * i for i in range(4))
        elif name == "fma.rn.f16x2":
            x, y, z = (torch.tensor([n & 0xFFFF, n >> 16]).to(torch.uint16).view(FP16).double() for n in (a, *more))
            low, high = (x * y + z).to(FP16).view(torch.uint16).tolist()
            result = low | high << 16
        else:
            raise ValueError(name)
        registers[target] = result
    return registers["$0"]


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_ptx_unpacks_codes(bits):
    """The interpreter has no inline assembly; what it uses instead must be the same."""
    tiles = importlib.import_module("hf_kvq_kernels.gpu.tiles")
    words = torch.randint(0, 65536, (64, 2), generator=torch.Generator().manual_seed(0)).tolist()
    for plane, byte in ((p, b) for p in range(8 // bits) for b in range(2)):
        for low, high in words:
            codes = [word >> (8 * byte + bits * plane) & (2**bits - 1) for word in (low, high)]
            for text, expected in (
                (tiles._exact_asm.fn(bits, plane, byte), codes),
                (tiles._biased_asm.fn(bits, plane, byte), [1024 + (code << (bits * plane)) for code in codes]),
            ):
                got = run_ptx(text, low | high << 16)
                numbers = torch.tensor([got & 0xFFFF, got >> 16]).to(torch.uint16).view(FP16)
                assert numbers.tolist() == expected
