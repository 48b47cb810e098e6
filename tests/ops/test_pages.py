# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Packing by kernels: the same bytes as the codecs make, for every kind of block."""

import dataclasses
import functools
import itertools

import pytest
import torch

import hf_kvq_kernels
from hf_kvq.codecs import BlockCodec
from hf_kvq.codecs.tiered import TieredBlock, TieredKeyCodec
from hf_kvq.ops import byte_orders, encode_blocks, encode_tiers, packing, shrink_pages
from hf_kvq.transforms import HadamardRotation
from hf_kvq_kernels._ops import NAMESPACE


pytestmark = pytest.mark.skipif(
    hf_kvq_kernels.why_not_packing(torch.empty(0)) is not None, reason="the CPU kernels cannot be built here"
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# tokens, dim, group
SHAPES = [(128, 64, 128), (128, 80, 32), (32, 20, 16), (48, 40, 48), (16, 128, 24)]


# What a block of keys in tiers consists of.
FIELDS = [field.name for field in dataclasses.fields(TieredBlock)]


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """Names of the kernels that ran."""
    seen = []
    for name in ("quantize_", "quantize_tiers_", "shrink_"):

        def run(name, kernel, *arguments):
            seen.append(name)
            return kernel(*arguments)

        monkeypatch.setattr(hf_kvq_kernels, name, functools.partial(run, name, getattr(hf_kvq_kernels, name)))
    return seen


def codec_of(tokens: int, dim: int, group: int, axis: str, dtype: torch.dtype, value: bool = False, **more):
    return BlockCodec(2, tokens, dim, dtype, axis, group, byte_order=byte_orders("cpu", dim)[value], **more)


def numbers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Random, with outliers, constant groups, and what is not a number."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator) * 10 ** torch.randn(shape[-1], generator=generator)
    x[0, 0, 0, :3] = 7.0
    x[0, 0, 0, :, 1] = 3.0
    x[-1, 0, 1, 5, 2] = torch.finfo(dtype).max
    x[-1, -1, 0, 3, 3] = float("nan")
    x[-1, -1, 1, 4, 4] = float("inf")
    x[-1, -1, 1, 4, 5] = -float("inf")
    return x.to(dtype)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("axis", ["token", "channel"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "dim", "group"), SHAPES)
def test_blocks(tokens, dim, group, dtype, axis, bits, calls):
    x = numbers(2, 3, 2, tokens, dim, dtype=dtype)
    for value, centered in itertools.product((False, True), (False, True)):
        codec = codec_of(tokens, dim, group, axis, dtype, value, centered=centered)
        want = codec.encode(x, bits)
        # Rows and blocks lie further apart than they are long, and nothing between them changes.
        room = torch.full((2, 4, want.shape[-1] + 6), 9, dtype=torch.uint8)
        out = room[:, :3, 2:-4]
        for data in (
            x,
            x.transpose(3, 4).contiguous().transpose(3, 4),
            x.transpose(1, 2).contiguous().transpose(1, 2),
        ):
            out.zero_()
            encode_blocks(codec, data, bits, out, "auto")
            assert same_bytes(codec, out, want, bits)
        out.fill_(9)
        assert bool((room == 9).all())
    assert calls == ["quantize_"] * 12


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "dim", "group"), SHAPES)
def test_tiers(tokens, dim, group, dtype, calls):
    x = numbers(5, 1, 2, tokens, dim, dtype=dtype)[:, 0]
    x[1:-1, 0, 3, 7] = torch.nan
    # Rows with channels in all tiers, in one, and with other numbers of them.
    tiers = torch.randint(0, 3, (5, 2, dim), generator=torch.Generator().manual_seed(0))
    tiers[1:4] = torch.arange(3)[:, None, None]
    codec = TieredKeyCodec(2, tokens, dim, dtype, group, byte_orders("cpu", dim)[0])
    want = codec.encode(x, tiers)
    # Rows lie further apart than they are long, and nothing between them changes.
    room = torch.full((5, want.dense.shape[1] + 6), 9, dtype=torch.uint8)
    out = room[:, 2:-4]
    for data in (
        x,
        x.transpose(2, 3).contiguous().transpose(2, 3),
        x.transpose(1, 2).contiguous().transpose(1, 2),
    ):
        out.zero_()
        got = encode_tiers(codec, data, tiers, out, "auto")
        assert got.dense is out
        assert_same(codec, got, want)
    out.zero_()
    alone = [encode_tiers(codec, x[i : i + 1], tiers[i : i + 1], out[i : i + 1], "auto") for i in range(5)]
    assert_same(codec, TieredBlock(*(torch.cat([getattr(block, name) for block in alone]) for name in FIELDS)), want)
    out.fill_(9)
    assert bool((room == 9).all())
    assert calls == ["quantize_tiers_"] * 8


@pytest.mark.parametrize("tier", range(3))
def test_tracing_tiers(tier):
    x, tiers = numbers(3, 1, 2, 32, 24, dtype=torch.bfloat16)[:, 0], torch.full((3, 2, 24), tier)
    codec = TieredKeyCodec(2, 32, 24, torch.bfloat16, 16, byte_orders("cpu", 24)[0])
    out = torch.zeros(3, codec.dense.nbytes(2), dtype=torch.uint8)
    op = getattr(torch.ops, NAMESPACE).quantize_tiers_.default
    order = hf_kvq_kernels.BYTE_ORDERS.index(codec.byte_order)
    torch.library.opcheck(op, (x, tiers, out, 16, order), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(("bits", "target"), [(16, 8), (16, 4), (16, 2), (8, 4), (8, 2), (4, 2)])
@pytest.mark.parametrize("axis", ["token", "channel"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("centered", [True, False])
def test_shrinking_in_place(centered, dtype, axis, bits, target, calls):
    keys = codec_of(32, 40, 32, axis, dtype, centered=centered)
    values = codec_of(32, 24, 16, "token", dtype, True)
    k, v = numbers(2, 3, 2, 32, 40, dtype=dtype), numbers(2, 3, 2, 32, 24, dtype=dtype)
    pages = torch.cat([keys.encode(k, bits), values.encode(v, bits)], dim=-1)
    want = torch.cat([keys.encode(k, target), values.encode(v, target)], dim=-1)
    data = torch.full((2, pages[0].numel() + 10), 9, dtype=torch.uint8)
    data[:, : pages[0].numel()] = pages.flatten(1)
    # The last page of each row is not one of those that shrink.
    shrink_pages(data, 2, (keys, values), bits, target, "auto")
    got = data[:, : 2 * want.shape[-1]].unflatten(1, (2, -1))
    split = keys.nbytes(target)
    assert same_bytes(keys, got[..., :split], want[:, :2, :split], target)
    assert same_bytes(values, got[..., split:], want[:, :2, split:], target)
    assert torch.equal(data[:, 2 * pages.shape[-1] : -10], pages[:, 2]) and bool((data[:, -10:] == 9).all())
    assert calls == ["shrink_"]


@pytest.mark.parametrize("kernel", ["auto", "torch"])
@pytest.mark.parametrize("group", [1, 2, 4])
def test_narrower_pages_need_not_be_smaller(group, kernel):
    codecs = [codec_of(16, 8, group, "token", torch.bfloat16, value) for value in (False, True)]
    x = numbers(1, 200, 2, 16, 8, dtype=torch.bfloat16).nan_to_num()
    old, want = (torch.cat([codec.encode(x, bits) for codec in codecs], dim=-1) for bits in (16, 8))
    assert (old.shape[2] < want.shape[2]) == (group < 4)
    data = torch.zeros(1, want.numel(), dtype=torch.uint8)
    data[:, : old.numel()] = old.flatten(1)
    shrink_pages(data, 200, codecs, 16, 8, kernel)
    assert torch.equal(data, want.flatten(1))


@pytest.mark.parametrize("kernel", ["auto", "torch"])
def test_transforms(kernel):
    codec = codec_of(32, 32, 32, "token", torch.bfloat16, True, transform=HadamardRotation(32))
    x = numbers(1, 2, 2, 32, 32, dtype=torch.bfloat16)[:, :1]
    out = torch.zeros(1, 1, codec.nbytes(4), dtype=torch.uint8)
    encode_blocks(codec, x, 4, out, kernel)
    assert torch.equal(out, codec.encode(x, 4))
    keys = codec_of(32, 32, 32, "token", torch.bfloat16)
    data = torch.cat([keys.encode(x, 16), codec.encode(x, 16)], dim=-1)[0]
    shrink_pages(data, 1, (keys, codec), 16, 8, kernel)
    want = torch.cat([keys.encode(x, 8), codec.encode(x, 8)], dim=-1)[0]
    assert torch.equal(data[:, : want.shape[1]], want)


@pytest.mark.parametrize("kernel", ["auto", "torch"])
def test_clipped_blocks(kernel, calls):
    x = numbers(1, 2, 2, 32, 32, dtype=torch.bfloat16)[:, :1]
    keys = codec_of(32, 32, 16, "channel", torch.bfloat16, clip=0.8)
    values = codec_of(32, 32, 32, "token", torch.bfloat16, True, transform=HadamardRotation(32), clip=0.7)
    for codec in (keys, values):
        out = torch.zeros(1, 1, codec.nbytes(2), dtype=torch.uint8)
        encode_blocks(codec, x, 2, out, kernel)
        assert torch.equal(out, codec.encode(x, 2))
        assert not torch.equal(out, dataclasses.replace(codec, clip=1.0).encode(x, 2))
    assert calls == (["quantize_"] * 2 if kernel == "auto" else [])
    data = torch.cat([keys.encode(x, 16), values.encode(x, 16)], dim=-1)[0]
    shrink_pages(data, 1, (keys, values), 16, 4, kernel)
    want = torch.cat([keys.encode(x, 4), values.encode(x, 4)], dim=-1)[0]
    assert torch.equal(data[:, : want.shape[1]], want)


@pytest.mark.parametrize("kernel", ["auto", "torch"])
def test_clipped_tiers(kernel):
    keys = numbers(3, 1, 2, 32, 32, dtype=torch.bfloat16)[:, 0]
    tiers = torch.arange(192).view(3, 2, 32) % 3
    codec = TieredKeyCodec(2, 32, 32, torch.bfloat16, 16, byte_orders("cpu", 32)[0], clip=0.8)
    want = codec.encode(keys, tiers)
    out = torch.zeros_like(want.dense)
    assert_same(codec, dataclasses.replace(encode_tiers(codec, keys, tiers, out, kernel), dense=out), want)
    plain = dataclasses.replace(codec, clip=1.0).encode(keys, tiers)
    clipped, whole = codec.decode(want).transpose(-1, -2), codec.decode(plain).transpose(-1, -2)
    assert torch.equal(clipped[tiers > 0].nan_to_num(), whole[tiers > 0].nan_to_num())
    assert not torch.equal(clipped[tiers == 0].nan_to_num(), whole[tiers == 0].nan_to_num())


@pytest.mark.parametrize("kernel", ["auto", "torch"])
@pytest.mark.parametrize("floors", [(4, 2), (2, 8), (8, 8), (16, 4)])
@pytest.mark.parametrize(("bits", "target"), [(16, 8), (16, 2), (8, 4), (8, 2), (4, 2)])
def test_either_side_stops_at_its_floor(floors, bits, target, kernel, calls):
    codecs = codec_of(32, 40, 32, "channel", torch.bfloat16), codec_of(32, 24, 16, "token", torch.bfloat16, True)
    data = [numbers(2, 3, 2, 32, codec.dim, dtype=torch.bfloat16).nan_to_num() for codec in codecs]

    def pages(bits: int) -> torch.Tensor:
        sides = zip(codecs, data, floors)
        return torch.cat([codec.encode(x, max(bits, floor)) for codec, x, floor in sides], dim=-1)

    held, want = pages(bits).flatten(1).clone(), pages(target)
    shrink_pages(held, 3, codecs, bits, target, kernel, floors)
    assert torch.equal(held[:, : want[0].numel()].unflatten(1, (3, -1)), want)
    assert ("shrink_" in calls) == (kernel == "auto" and max(floors) <= target)
    if bits == 16 and min(floors) < 16:
        assert bool(calls) == (kernel == "auto")


def test_plain_torch_if_asked_for_or_needed(calls):
    x = numbers(1, 2, 2, 32, 24, dtype=torch.float32)
    codec = codec_of(32, 24, 32, "channel", torch.float32)
    out = torch.zeros(1, 2, codec.nbytes(4), dtype=torch.uint8)
    encode_blocks(codec, x, 4, out, "torch")
    wide = codec_of(32, 24, 32, "channel", torch.float64)
    encode_blocks(wide, x.double(), 4, torch.zeros(1, 2, wide.nbytes(4), dtype=torch.uint8), "auto")
    assert torch.equal(out, codec.encode(x, 4))
    # Made for a GPU, and now in the memory of a CPU.
    moved = dataclasses.replace(codec, byte_order=byte_orders("cuda", 24)[0])
    encode_blocks(moved, x, 4, out, "auto")
    assert torch.equal(out, moved.encode(x, 4)) and not torch.equal(out, codec.encode(x, 4))
    data = torch.cat([moved.encode(x, 8), moved.encode(x, 8)], dim=-1).flatten(1)
    shrink_pages(data, 2, (moved, moved), 8, 4, "auto")
    assert torch.equal(data[:, : 4 * out.shape[-1]].unflatten(1, (2, 2, -1)), torch.stack([out, out], dim=2))
    assert not calls


@pytest.mark.parametrize("failure", [None, "they fail on this device"])
def test_elsewhere_kernels_are_checked_first(failure, calls, monkeypatch):
    said = []
    monkeypatch.setattr(packing.logger, "warning_once", said.append)
    monkeypatch.setattr(packing.selfcheck, "packing_failure", lambda device, orders: failure)
    monkeypatch.setattr(hf_kvq_kernels, "why_not_packing", lambda x, *how: None)
    codec = codec_of(32, 24, 32, "channel", torch.float32)
    x = torch.empty(1, 2, 2, 32, 24, device="meta")
    encode_blocks(codec, x, 4, torch.empty(1, 2, codec.nbytes(4), dtype=torch.uint8, device="meta"), "auto")
    assert calls == ([] if failure else ["quantize_"])
    assert [failure in line for line in said] == ([True] if failure else [])


def test_threads_do_not_matter():
    x = numbers(3, 5, 2, 128, 64, dtype=torch.bfloat16)
    codec = codec_of(128, 64, 32, "channel", torch.bfloat16)
    outs, threads = [], torch.get_num_threads()
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            outs.append(torch.zeros(3, 5, codec.nbytes(2), dtype=torch.uint8))
            encode_blocks(codec, x, 2, outs[-1], "auto")
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


def assert_same(codec: TieredKeyCodec, got: TieredBlock, want: TieredBlock) -> None:
    """Equal to the bit; but NaN is NaN, whatever its bits."""
    assert same_bytes(codec.dense, got.dense, want.dense, 2)
    for name in FIELDS[1:]:
        a, b = (torch.nan_to_num(getattr(block, name), nan=1.25, posinf=None, neginf=None) for block in (got, want))
        assert a.dtype == b.dtype and torch.equal(a, b), name


def same_bytes(codec: BlockCodec, got: torch.Tensor, want: torch.Tensor, bits: int) -> bool:
    """Equal to the bit; but NaN is NaN, whatever its bits."""
    n = codec.code_bytes(bits)
    ranges = [x[..., n:].contiguous().view(codec.dtype) for x in (got, want)]
    return torch.equal(got[..., :n], want[..., :n]) and torch.equal(
        *(r.nan_to_num(nan=1.25, posinf=float("inf"), neginf=-float("inf")) for r in ranges)
    )
