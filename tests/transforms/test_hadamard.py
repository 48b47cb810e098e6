# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
import pytest
import torch

import simulation
from hf_kvq.transforms import HadamardRotation


@pytest.mark.parametrize("dim", [1, 7, 16, 20, 32, 48, 64, 80, 96, 112, 128, 256])
def test_equals_definition_and_is_its_own_inverse(dim):
    rotation = HadamardRotation(dim)
    x = torch.randn(3, 2, dim, generator=torch.Generator().manual_seed(dim))
    matrix = torch.from_numpy(simulation.hadamard(dim))
    torch.testing.assert_close(rotation.forward(x), (x.double() @ matrix).float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rotation.inverse(rotation.forward(x)), x, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rotation.forward(x).norm(dim=-1), x.norm(dim=-1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_computes_in_float32(dtype):
    x = torch.full((1, 64), 60000.0, dtype=dtype)
    rotated = HadamardRotation(64).forward(x)
    assert rotated.dtype == torch.float32
    torch.testing.assert_close(rotated[0, 0], x[0, 0].float() * 8)


def test_spreads_an_outlier():
    x = torch.zeros(1, 64)
    x[0, 5] = 64.0
    assert torch.allclose(HadamardRotation(64).forward(x).abs(), torch.full((1, 64), 8.0))


def test_commutes_with_attention_over_values():
    # Sums over tokens commute with a map of the channels: that is why the output can be restored instead of V.
    rotation, g = HadamardRotation(48), torch.Generator().manual_seed(0)
    weights, values = torch.rand(2, 5, 30, generator=g), torch.randn(2, 30, 48, generator=g)
    out = rotation.inverse(weights @ rotation.forward(values))
    torch.testing.assert_close(out, weights @ values, rtol=1e-4, atol=1e-4)
