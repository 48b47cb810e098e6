# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
import dataclasses
import math

import numpy as np
import pytest
import torch

from conftest import kv
from hf_kvq.codecs import WIDTHS, BlockCodec
from hf_kvq.ops import byte_orders
from hf_kvq.transforms import HadamardRotation
from simulation import Page, Rules


DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [
    # key_dim, value_dim, group
    (32, 32, 16),
    (64, 64, 128),
    (80, 80, 32),
    (96, 96, 64),
    (128, 128, 128),
    (256, 256, 128),
    (48, 24, 32),
    (40, 64, 48),
]


def codecs(rules: Rules) -> tuple[BlockCodec, BlockCodec]:
    transform = HadamardRotation(rules.value_dim) if rules.hadamard else None
    common = (rules.heads, rules.page)
    axis = "channel" if rules.channel else "token"
    orders = byte_orders("cpu", rules.key_dim)
    return (
        BlockCodec(*common, rules.key_dim, rules.dtype, axis, rules.group, None, orders[0], 1.0, rules.centered),
        BlockCodec(*common, rules.value_dim, rules.dtype, "token", rules.group, transform, orders[1]),
    )


@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channel", [True, False])
@pytest.mark.parametrize(("key_dim", "value_dim", "group"), SHAPES)
def test_bytes_and_values_equal_simulation(dtype, channel, key_dim, value_dim, group, centered):
    rules = Rules(2, key_dim, value_dim, dtype, group=group, channel=channel, centered=centered)
    data = kv(rules, rules.page)
    page = Page(rules, [(data[0][0, :, t], data[1][0, :, t]) for t in range(rules.page)])
    for bits in WIDTHS:
        blocks = [codec.encode(x, bits) for codec, x in zip(codecs(rules), data)]
        assert [b.shape[-1] for b in blocks] == [codec.nbytes(bits) for codec in codecs(rules)]
        assert sum(b.shape[-1] for b in blocks) == rules.page_bytes(bits)
        assert torch.equal(torch.cat(blocks, -1)[0], page.content(bits))
        for codec, block, wanted in zip(codecs(rules), blocks, page.visible(bits)):
            got = codec.decode(block[:, None], bits)[0].to(dtype)
            torch.testing.assert_close(got, wanted, rtol=max(torch.finfo(dtype).eps, 1e-6), atol=1e-5)


@pytest.mark.parametrize("channel", [True, False])
@pytest.mark.parametrize("hadamard", [True, False])
@pytest.mark.parametrize("centered", [True, False])
def test_shrinking_equals_encoding_at_once(channel, hadamard, centered):
    rules = Rules(3, 48, 80, torch.bfloat16, group=32, channel=channel, hadamard=hadamard, centered=centered)
    for codec, x in zip(codecs(rules), kv(rules, rules.page, batch=4)):
        block = codec.encode(x, 16)
        for bits in (8, 4, 2):
            block = codec.shrink(block, bits)
            assert torch.equal(block, codec.encode(x, bits))


@pytest.mark.parametrize("order", [(-1, 4), (-2, 4), (-2, 2)])
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_byte_order_only_moves_bytes(order, bits):
    plain = BlockCodec(2, 32, 24, torch.bfloat16, "channel", 16)
    ordered = dataclasses.replace(plain, byte_order=order)
    x = torch.randn(3, 2, 32, 24, generator=torch.Generator().manual_seed(0))
    block, moved = plain.encode(x, bits), ordered.encode(x, bits)
    n, (dim, count) = plain.code_bytes(bits), order
    codes = block[:, :n].reshape(3, 2, -1, 24)
    for place, got in np.ndenumerate(moved[:, :n].reshape(3, 2, -1).numpy()):
        # The word's position, line by line, and the byte in it.
        word, byte = divmod(place[2], count)
        at = divmod(word, 24) if dim == -2 else divmod(word, codes.shape[2])[::-1]
        row, column = (at[0] * count + byte, at[1]) if dim == -2 else (at[0], at[1] * count + byte)
        assert got == codes[place[0], place[1], row, column]
    assert torch.equal(moved[:, n:], block[:, n:])
    assert torch.equal(ordered.decode(moved[:, None], bits), plain.decode(block[:, None], bits))
    if bits > 2:
        assert torch.equal(ordered.shrink(moved, bits // 2), ordered.encode(x, bits // 2))


def test_ranges_never_change_when_codes_shrink():
    rules = Rules(2, 32, 32, group=16, centered=False)
    for codec, x in zip(codecs(rules), kv(rules, rules.page)):
        ranges = [codec.encode(x, bits)[..., codec.code_bytes(bits) :] for bits in (8, 4, 2)]
        assert torch.equal(ranges[0], ranges[1]) and torch.equal(ranges[0], ranges[2])


def test_centered_codes_stand_for_the_centers_of_quarters():
    codec = BlockCodec(1, 16, 1, torch.float32, "channel", 16, centered=True)
    x = torch.arange(16.0).view(1, 1, 16, 1)
    back = codec.decode(codec.encode(x, 2)[:, None], 2)
    # Of 0 to 15 the quarters have the centers 15 / 8 * (1, 3, 5, 7), and four numbers lie in each.
    assert torch.equal(back.flatten(), torch.tensor([1.875, 5.625, 9.375, 13.125]).repeat_interleave(4))
    assert torch.equal(codec.encode(x, 4), BlockCodec(1, 16, 1, torch.float32, "channel", 16).encode(x, 4))


@pytest.mark.parametrize("bits", WIDTHS)
def test_many_blocks_decode_in_order(bits):
    rules = Rules(2, 32, 48, group=16)
    for codec, x in zip(codecs(rules), kv(rules, 3 * rules.page, batch=2)):
        blocks = codec.encode(x.unflatten(2, (3, -1)).transpose(1, 2), bits)
        whole = codec.decode(blocks, bits)
        assert whole.shape == x.shape
        for i in range(3):
            part = codec.decode(blocks[:, i : i + 1], bits)
            assert torch.equal(whole[:, :, i * rules.page : (i + 1) * rules.page], part)
        assert float((whole - x).abs().mean()) < {16: 1e-9, 8: 0.02, 4: 0.3, 2: 1.5}[bits]


@pytest.mark.parametrize("dim", [16, 64, 80])
@pytest.mark.parametrize("dtype", DTYPES)
def test_hadamard_block_equals_simulation(dim, dtype):
    # The blocks of these rotations are powers of 4 and the data lies on a grid, so that rotating is exact.
    rules = Rules(2, dim, dim, dtype, group=32, hadamard=True)
    data = kv(rules, rules.page, grid=True)
    page = Page(rules, [(data[0][0, :, t], data[1][0, :, t]) for t in range(rules.page)])
    keys, values = codecs(rules)
    for bits in WIDTHS:
        content = torch.cat([keys.encode(data[0], bits), values.encode(data[1], bits)], dim=-1)[0]
        assert torch.equal(content, page.content(bits))
        back = values.restore(values.decode(content[None, None, keys.nbytes(bits) :], bits), bits)[0]
        wanted = page.visible(bits)[1]
        torch.testing.assert_close(back.to(dtype), wanted, rtol=2 * torch.finfo(dtype).eps, atol=2e-5)


@pytest.mark.parametrize("axis", ["token", "channel"])
@pytest.mark.parametrize("group", [16, 24, 128])
def test_byte_formula(axis, group):
    codec = BlockCodec(3, 48, 40, torch.float16, axis, group)
    groups = 3 * (48 * math.ceil(40 / group) if axis == "token" else 40 * math.ceil(48 / group))
    assert codec.nbytes(16) == 3 * 48 * 40 * 2
    for bits in (8, 4, 2):
        assert codec.nbytes(bits) == 3 * 48 * 40 * bits // 8 + groups * 2 * 2


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("axis", ["token", "channel"])
def test_constant_and_broken_groups(bits, axis):
    codec = BlockCodec(1, 16, 16, torch.float32, axis, 16)
    x = torch.randn(1, 1, 16, 16)
    lines = x if axis == "token" else x.transpose(-1, -2)
    lines[0, 0, 3] = 0.3
    lines[0, 0, 5, 7] = float("nan")
    lines[0, 0, 6, 7] = float("inf")
    back = codec.decode(codec.encode(x, bits)[:, None], bits)
    got = back if axis == "token" else back.transpose(-1, -2)
    assert torch.equal(got[0, 0, 3], lines[0, 0, 3])
    assert not got[0, 0, 5].isfinite().any() and not got[0, 0, 6].isfinite().all()
    keep = [i for i in range(16) if i not in (5, 6)]
    assert bool(got[0, 0, keep].isfinite().all())
