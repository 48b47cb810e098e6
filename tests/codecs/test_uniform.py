# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
import numpy as np
import pytest
import torch

import simulation
from hf_kvq.codecs import WIDTHS, dequantize, equivalent_right_shift, narrow, quantize
from hf_kvq.codecs.uniform import clip_groups


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_shift_equals_requantization_for_all_codes(bits):
    codes = torch.arange(2 ** (2 * bits))
    # code / (2^2b - 1) * (2^b - 1) to the nearest integer, exactly; the ratio is odd, so there are no ties.
    wanted = (2 * codes + 2**bits + 1) // (2 * (2**bits + 1))
    shifted = equivalent_right_shift(codes, bits)
    assert shifted.dtype == torch.int32
    assert torch.equal(shifted.long(), wanted)
    assert torch.equal(equivalent_right_shift(codes.to(torch.int32), bits).long(), wanted)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_shift_leaves_its_input_alone(bits):
    codes = torch.arange(2 ** (2 * bits), dtype=torch.int32)
    before = codes.clone()
    equivalent_right_shift(codes, bits)
    assert torch.equal(codes, before)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_codes_nest_for_all_16_bit_codes(bits):
    codes = torch.arange(65536)
    direct = torch.from_numpy(simulation.narrow(codes.numpy(), bits))
    stepwise = codes
    for width in WIDTHS[1 : WIDTHS.index(bits) + 1]:
        stepwise = equivalent_right_shift(stepwise, width)
    assert torch.equal(stepwise.long(), direct)
    assert torch.equal(narrow(codes, 16, bits).long(), direct)


@pytest.mark.parametrize("bits", [16, 1, 3, 0, "4"])
def test_shift_refuses_other_widths(bits):
    with pytest.raises(ValueError, match="8, 4 or 2"):
        equivalent_right_shift(torch.zeros(3, dtype=torch.int32), bits)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize(("shape", "group", "dim"), [((3, 80), 64, -1), ((2, 33, 20), 16, 1), ((7,), 128, 0)])
def test_quantize_equals_simulation(dtype, bits, shape, group, dim):
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    codes, low, high = quantize(x, bits, group, dim)
    code16, lows, highs = simulation.quantize16(simulation.to_numpy(x), group, dim)
    assert np.array_equal(codes.numpy(), simulation.narrow(code16, bits) if bits < 16 else code16)
    assert low.dtype == high.dtype == dtype
    assert np.array_equal(simulation.to_numpy(low), lows)
    assert np.array_equal(simulation.to_numpy(high), highs)

    back = dequantize(codes, low, high, bits, group, dim)
    wanted = torch.from_numpy(simulation.dequantize(codes.numpy(), lows, highs, bits, group, dim)).to(dtype)
    assert back.dtype == dtype
    torch.testing.assert_close(back, wanted, rtol=max(torch.finfo(dtype).eps, 1e-6), atol=1e-5)


@pytest.mark.parametrize("bits", WIDTHS)
def test_error_is_at_most_half_a_step(bits):
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(2))
    codes, low, high = quantize(x, bits)
    # Reaching the width from the 16-bit code adds half a 16-bit step.
    bound = (high - low) / 2 * (1 / (2**bits - 1) + 1 / 65535) + 1e-6
    assert bool(((dequantize(codes, low, high, bits) - x).abs() <= bound).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("value", [0.0, 0.5, -0.0007, 3.0, 6e4])
def test_constant_groups_are_exact(dtype, bits, value):
    x = torch.full((2, 20), value, dtype=dtype)
    assert torch.equal(dequantize(*quantize(x, bits, 16), bits, 16), x)


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        (torch.float32, [3e38, -3e38, 1.0]),
        (torch.float32, [3.4e38, 3.3e38, 0.0]),
        (torch.float32, [1e-45, 0.0, 3e-45]),
        (torch.float32, [1e-38, -1e-38, 1e-39]),
        (torch.float32, [1.0, 1.0000001, 1.0]),
        (torch.bfloat16, [3.3e38, -3.3e38, 1.0]),
        (torch.bfloat16, [1e-40, -1e-40, 0.0]),
        (torch.float16, [65504.0, -65504.0, 1.0]),
        (torch.float16, [6e-8, 0.0, 1.2e-7]),
        (torch.float16, [1000.0, 1000.5, 1001.0]),
    ],
)
def test_extreme_finite_values_stay_finite(bits, dtype, values):
    x = torch.tensor([values], dtype=dtype)
    assert bool(x.isfinite().all())
    codes, low, high = quantize(x, bits)
    back = dequantize(codes, low, high, bits)
    assert bool(back.isfinite().all())
    assert codes.min() >= 0 and codes.max() <= 2**bits - 1
    # Beyond 2^126 values saturate; below, no error is larger than the range of the group.
    clipped = x.float().clamp(-(2.0**126), 2.0**126)
    spread = clipped.max() - clipped.min()
    assert bool(((back.float() - clipped).abs() <= spread * 1.01).all())


@pytest.mark.parametrize("bits", WIDTHS)
def test_tiny_fp16_ranges_keep_their_relative_precision(bits):
    x = torch.linspace(0, 2e-6, 32).to(torch.float16)[None]
    back = dequantize(*quantize(x, bits, 32), bits, 32).float()
    step = float(x.max() - x.min()) / (2**bits - 1)
    assert float((back - x.float()).abs().max()) <= step / 2 + 6e-8


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_broken_groups_stay_visible_and_alone(dtype, bits, bad):
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(3)).to(dtype)
    broken = x.clone()
    broken[1, 20] = bad
    good, back = (dequantize(*quantize(y, bits, 16), bits, 16) for y in (x, broken))
    assert not bool(back[1, 16:].isfinite().all())
    good[1, 16:] = back[1, 16:] = 0
    assert torch.equal(good, back)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [-1, -2])
@pytest.mark.parametrize(("share", "group"), [(0.5, 16), (0.85, 24), (0.9, 100)])
def test_clipping_moves_only_what_lies_outside(dtype, dim, share, group):
    x = torch.randn(3, 40, 48, generator=torch.Generator().manual_seed(4)).to(dtype)
    got = clip_groups(x, share, group, dim)
    wanted = simulation.clip(x.float().numpy(), share, group, dim % 3, dtype)
    assert got.dtype == dtype and torch.equal(got.float(), torch.from_numpy(wanted))
    for before, after in zip(x.float().split(group, dim=dim), got.float().split(group, dim=dim)):
        low, high = before.amin(dim, keepdim=True), before.amax(dim, keepdim=True)
        # Edges are rounded to the dtype.
        slack = 2 * torch.finfo(dtype).eps * before.abs().max()
        assert bool((after.amax(dim) - after.amin(dim) <= share * (high - low).squeeze(dim) + slack).all())
        inside = (before - (low + high) / 2).abs() < share / 2 * (high - low) - slack
        assert torch.equal(after[inside], before[inside]) and not bool((after == before).all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_clipping_hides_nothing_and_leaves_constants(bad):
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(3))
    x[1, 20], x[2, :16] = bad, 0.1
    got = clip_groups(x, 0.8, 16, -1)
    assert (
        not bool(got[1, 16:].isfinite().all()) and bool(got[0].isfinite().all()) and bool(got[1, :16].isfinite().all())
    )
    assert torch.equal(got[2, :16], x[2, :16])
    extreme = torch.tensor([[torch.finfo(torch.float32).max, -torch.finfo(torch.float32).max, 0.0, 1.0]])
    assert bool(clip_groups(extreme, 0.9, 4, -1).isfinite().all())


@pytest.mark.parametrize(("bits", "group"), [(3, 16), (1, 16), (32, 16), (4, 0), (4, -1)])
def test_impossible_arguments(bits, group):
    with pytest.raises(ValueError, match="must be"):
        quantize(torch.zeros(1, 16), bits, group)
    with pytest.raises(ValueError, match="must be"):
        dequantize(torch.zeros(1, 16), torch.zeros(1, 1), torch.zeros(1, 1), bits, group)


def test_functions_trace_without_graph_breaks():
    def round_trip(x):
        codes, low, high = quantize(x, 4, 16)
        return dequantize(equivalent_right_shift(codes, 2), low, high, 2, 16)

    x = torch.randn(2, 40)
    torch.testing.assert_close(torch.compile(round_trip, backend="eager", fullgraph=True)(x), round_trip(x))
