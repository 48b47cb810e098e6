# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
import pytest
import torch

import hf_kvq_kernels
from hf_kvq.ops import byte_orders, naive, selfcheck


CPU = torch.device("cpu")
ORDERS = byte_orders("cpu", 64)


def test_right_kernels_pass():
    assert selfcheck.failure(CPU, hf_kvq_kernels.attend, ORDERS) is None


@pytest.mark.parametrize("bits", [16, 8, 4, 2])
def test_wrong_results_at_one_width_are_found(bits):
    def attend(*arguments):
        out, lse = hf_kvq_kernels.attend(*arguments)
        layout = arguments[8]
        return (out * 1.5 if layout is not None and layout.key_bits == bits else out), lse

    assert f"at {bits} bits are wrong" in selfcheck.failure(CPU, attend, ORDERS)


def test_kernels_that_raise_are_found():
    def attend(*arguments):
        raise RuntimeError("no kernel image")

    assert "RuntimeError: no kernel image" in selfcheck.failure(CPU, attend, ORDERS)


def test_it_is_found_out_once():
    calls = []

    def attend(*arguments):
        calls.append(1)
        return hf_kvq_kernels.attend(*arguments)

    for _ in range(3):
        assert selfcheck.failure(CPU, attend, ORDERS) is None
    assert len(calls) == 4


@pytest.mark.parametrize("bits", [16, 8, 4, 2])
def test_the_problem_is_worth_checking(bits):
    query, parts = selfcheck.check_parts(CPU, bits, ORDERS)
    without = naive.attend(query, parts[1:], 0.2), naive.attend(query, parts[:1], 0.2)
    for out in without:
        assert float((naive.attend(query, parts, 0.2) - out).abs().max()) > 3 * selfcheck._TOLERANCE


@pytest.fixture
def packing(monkeypatch):
    """Packs again at every check; replaces an operator by what a function makes of its arguments."""
    selfcheck.packing_failure.cache_clear()

    def replace(name, before=lambda *arguments: arguments, after=lambda *arguments: None):
        kernel = getattr(hf_kvq_kernels, name)

        def run(*arguments):
            kernel(*before(*arguments))
            after(*arguments)

        monkeypatch.setattr(hf_kvq_kernels, name, run)
        return selfcheck.packing_failure(CPU, ORDERS)

    yield replace
    selfcheck.packing_failure.cache_clear()


def test_right_packing_passes(packing):
    assert packing("shrink_") is None


def test_wrong_packing_is_found(packing):
    def after(x, out, *how):
        out[-1, -1, 7] += 1

    assert "what they pack is wrong" in packing("quantize_", after=after)


def test_wrong_narrowing_is_found(packing):
    def without_centers(*arguments):
        return *arguments[:-1], False

    assert "what they narrow is wrong" in packing("shrink_", before=without_centers)


def test_packing_that_raises_is_found(packing):
    def before(*arguments):
        raise RuntimeError("no kernel image")

    assert "RuntimeError: no kernel image" in packing("quantize_", before=before)
