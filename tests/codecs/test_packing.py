# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
import numpy as np
import pytest
import torch

import simulation
from hf_kvq.codecs import pack, packed_size, unpack


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 9, 16, 20, 31, 64, 80])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_round_trip_and_layout(bits, n, dim):
    shape = [3, 2, 5]
    shape[dim] = n
    codes = torch.randint(0, 2**bits, shape, generator=torch.Generator().manual_seed(n), dtype=torch.int32)
    packed = pack(codes, bits, dim)
    assert packed.dtype == torch.uint8
    assert packed.shape[dim] == packed_size(n, bits) == -(-n * bits // 8)
    assert np.array_equal(packed.numpy(), simulation.pack(codes.numpy(), bits, dim))
    assert torch.equal(unpack(packed, bits, n, dim).int(), codes)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_extreme_codes_do_not_touch_their_neighbours(bits):
    codes = torch.zeros(16, dtype=torch.int32)
    for i in range(16):
        alone = codes.clone()
        alone[i] = 2**bits - 1
        assert torch.equal(unpack(pack(alone, bits), bits, 16).int(), alone)


@pytest.mark.parametrize("bits", [4, 2])
def test_works_on_views_and_leaves_input_alone(bits):
    base = torch.randint(0, 2**bits, (6, 24), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    before, view = base.clone(), base[::2, 1:].T
    assert torch.equal(unpack(pack(view, bits, 0), bits, 23, 0), view)
    assert torch.equal(base, before)


@pytest.mark.parametrize("bits", [16, 3, 1, 0])
def test_other_widths_are_refused(bits):
    with pytest.raises(ValueError, match="8, 4 or 2"):
        pack(torch.zeros(8, dtype=torch.int32), bits)
    with pytest.raises(ValueError, match="8, 4 or 2"):
        unpack(torch.zeros(8, dtype=torch.uint8), bits, 8)
