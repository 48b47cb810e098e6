# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""The Triton kernels that pack and narrow pages, in Triton's interpreter: byte for byte what the codecs make."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig


pytest.importorskip("triton")
# Triton decides at import whether it interprets, and other tests need its compiler: these have their own process.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the process of test_in_interpreter")

import hf_kvq_kernels  # noqa: E402
from hf_kvq import MixKVQCache, PMKVQCache  # noqa: E402
from hf_kvq.cache import layout as layouts  # noqa: E402
from hf_kvq.codecs import BlockCodec  # noqa: E402
from hf_kvq.codecs.tiered import TieredKeyCodec  # noqa: E402
from hf_kvq.ops import encode_blocks, encode_tiers, fused, shrink_pages  # noqa: E402
from hf_kvq_kernels.gpu import pack  # noqa: E402


operators = importlib.import_module("hf_kvq_kernels.ops")
interpreter = importlib.import_module("triton.runtime.interpreter")

ORDER = hf_kvq_kernels.BYTE_ORDERS.index((-2, 2))
FP32, BF16, FP16 = DTYPES = (torch.float32, torch.bfloat16, torch.float16)
POISON = 0xAB


def test_in_interpreter():
    if INTERPRETED:
        pytest.skip("is in it already")
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--noconftest", "-p", "no:cacheprovider", __file__]
    run = subprocess.run(command, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]


class Watch:
    """Runs the programs of each launch from the last to the first, and notes which bytes they read and write."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.launches: list[dict[str, list[np.ndarray]]] = []
        builder = interpreter.InterpreterBuilder
        load, store = builder.create_masked_load, builder.create_masked_store
        set_grid_dim, set_grid_idx = builder.set_grid_dim, builder.set_grid_idx

        def begin(at, *grid):
            self.launches.append({"read": [], "written": []})
            set_grid_dim(at, *grid)

        def turned(at, *place):
            set_grid_idx(at, *(n - 1 - i for n, i in zip(at.grid_dim, place)))

        def watched_load(at, pointers, mask, *more):
            self.note("read", pointers, mask)
            return load(at, pointers, mask, *more)

        def watched_store(at, pointers, value, mask, *more):
            self.note("written", pointers, mask)
            return store(at, pointers, value, mask, *more)

        for name, function in (
            ("set_grid_dim", begin), ("set_grid_idx", turned),
            ("create_masked_load", watched_load), ("create_masked_store", watched_store),
        ):  # fmt: skip
            monkeypatch.setattr(builder, name, function)

    def note(self, what: str, pointers, mask) -> None:
        addresses = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)]
        size = pointers.get_element_ty().primitive_bitwidth // 8
        self.launches[-1][what].append((addresses[:, None] + np.arange(size, dtype=np.uint64)).ravel())

    def check(self) -> None:
        """No launch writes a byte twice, or one that it reads: the order of its programs makes no difference."""
        for launch in self.launches:
            written = np.concatenate(launch["written"])
            assert len(np.unique(written)) == len(written)
            assert not np.isin(np.concatenate(launch["read"]), written).any()


@pytest.fixture
def watch(monkeypatch) -> Watch:
    return Watch(monkeypatch)


@pytest.fixture
def operated(monkeypatch) -> Iterator[list[str]]:
    """The operators run Triton's kernels on tensors of a CPU; gives the names of those that ran."""
    names = ("quantize_", "quantize_tiers_", "shrink_")
    seen: list[str] = []

    def noted(name: str, function):
        def run(*arguments):
            seen.append(name)
            return function(*arguments)

        return run

    library = torch.library.Library(operators.NAMESPACE, "IMPL")
    for name, function in zip(names, (operators._quantize_gpu, operators._quantize_tiers_gpu, operators._shrink_gpu)):
        library.impl(name, noted(name, function), "CPU", allow_override=True)
    monkeypatch.setattr(hf_kvq_kernels, "why_not_packing", pack.why_not_packing)
    yield seen
    library._destroy()


def numbers(*shape: int, dtype: torch.dtype, broken: bool = True) -> torch.Tensor:
    """Random, with outliers, constant groups, and what is not a number."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    x = x * 10 ** torch.randn(shape[-1], generator=torch.Generator().manual_seed(1))
    x[0, 0, 0, :3] = 7.0
    x[0, 0, 0, :, 1] = 3.0
    if broken:
        x[-1, 0, 0, 5, 2] = torch.finfo(dtype).max
        x[-1, 0, -1, 6, 2] = torch.finfo(dtype).min
        x[-1, -1, 0, 3, 3], x[-1, -1, -1, 4, 4], x[-1, -1, -1, 7, 5] = torch.nan, torch.inf, -torch.inf
    return x.to(dtype)


def same_bytes(codec: BlockCodec, got: torch.Tensor, want: torch.Tensor, bits: int) -> bool:
    """Equal to the bit; but NaN is NaN, whatever its bits."""
    if bits == 16:
        return torch.equal(got, want)
    n = codec.code_bytes(bits)
    (got_codes, got), (want_codes, want) = ((x[..., :n], x[..., n:].contiguous()) for x in (got, want))
    nan = [x.view(codec.dtype).isnan().repeat_interleave(codec.dtype.itemsize, -1) for x in (got, want)]
    return torch.equal(got_codes, want_codes) and bool(((got == want) | (nan[0] & nan[1])).all())


# tokens, dim, group, dtype
SHAPES = [
    *((16, 20, 16, dtype) for dtype in DTYPES),
    (32, 24, 8, BF16),
    (128, 40, 32, FP16),
    (64, 8, 96, FP32),
]


@interpreted
@pytest.mark.parametrize("axis", ["channel", "token"])
@pytest.mark.parametrize(("tokens", "dim", "group", "dtype"), SHAPES)
def test_blocks(tokens, dim, group, dtype, axis, watch):
    x = numbers(1, 2, 2, tokens, dim, dtype=dtype)
    for bits, centered in ((8, False), (4, True), (2, False), (2, True)):
        codec = BlockCodec(2, tokens, dim, dtype, axis, group, byte_order=(-2, 2), centered=centered)
        want = codec.encode(x, bits)
        # Rows and blocks lie further apart than they are long, and nothing between them changes.
        room = torch.full((1, 3, want.shape[-1] + 8), POISON, dtype=torch.uint8)
        out = room[:, :2, 4:-4]
        pack.quantize_(x, out, bits, axis == "channel", group, ORDER, centered)
        assert same_bytes(codec, out, want, bits)
        out.fill_(POISON)
        assert bool((room == POISON).all())
    watch.check()
    assert len(watch.launches) == 4


def laid_out(x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """`x`, whose dimensions lie in memory in this order, with NaN between them."""
    room = torch.full([x.shape[i] + 1 for i in order], torch.nan, dtype=x.dtype)
    view = room[tuple(slice(x.shape[i]) for i in order)].permute([order.index(i) for i in range(len(order))])
    return view.copy_(x)


@interpreted
@pytest.mark.parametrize("axis", ["channel", "token"])
@pytest.mark.parametrize("order", [(0, 2, 1, 3, 4), (1, 3, 2, 0, 4), (4, 3, 2, 1, 0), (0, 1, 3, 4, 2)])
def test_any_strides(order, axis):
    x = numbers(2, 3, 2, 32, 20, dtype=BF16, broken=False)
    codec = BlockCodec(2, 32, 20, BF16, axis, 16, byte_order=(-2, 2))
    out = torch.full((2, 3, codec.nbytes(4)), POISON, dtype=torch.uint8)
    data = laid_out(x, order)
    assert torch.equal(data, x) and not data.is_contiguous()
    pack.quantize_(data, out, 4, axis == "channel", 16, ORDER, False)
    assert torch.equal(out, codec.encode(x, 4))


@interpreted
@pytest.mark.parametrize(("tokens", "dim", "group", "dtype"), SHAPES)
def test_tiers(tokens, dim, group, dtype, watch):
    x = numbers(5, 1, 2, tokens, dim, dtype=dtype)[:, 0]
    # Rows with channels in all tiers, in one, and with other numbers of them.
    tiers = torch.randint(0, 3, (5, 2, dim), generator=torch.Generator().manual_seed(0))
    tiers[1:4] = torch.arange(3)[:, None, None]
    codec = TieredKeyCodec(2, tokens, dim, dtype, group, (-2, 2))
    data = laid_out(x, (2, 3, 0, 1))
    for rows in (slice(5), *(slice(i, i + 1) for i in range(5))):
        want = codec.encode(x[rows], tiers[rows])
        room = torch.full((len(want.dense), want.dense.shape[1] + 8), POISON, dtype=torch.uint8)
        out = room[:, 4:-4]
        records = pack.quantize_tiers_(data[rows], tiers[rows], out, group, ORDER)
        assert same_bytes(codec.dense, out, want.dense, 2)
        for name, got in zip(("low", "low_channel", "exact", "exact_channel", "counts"), records):
            expected = getattr(want, name)
            assert got.dtype == expected.dtype and got.shape == expected.shape, name
            assert torch.equal(got.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)), name
        out.fill_(POISON)
        assert bool((room == POISON).all())
    watch.check()
    assert len(watch.launches) == 6


def pages_of(codecs: tuple[BlockCodec, BlockCodec], data: list[torch.Tensor], bits: int) -> torch.Tensor:
    return torch.cat([codec.encode(x, bits) for codec, x in zip(codecs, data)], dim=-1)


NARROWINGS = [(16, 8), (16, 4), (16, 2), (8, 4), (8, 2), (4, 2)]


@interpreted
@pytest.mark.parametrize(("bits", "target"), NARROWINGS)
@pytest.mark.parametrize(("axis", "dtype"), [("channel", BF16), ("token", FP32)])
def test_narrowing_in_place(axis, dtype, bits, target, watch, monkeypatch):
    centered = axis == "channel"
    # As few pages as can be take the way through the work space, or all of them.
    for pages, work in ((1, 0), (5, 0), (2, 1 << 20)):
        monkeypatch.setattr(pack, "_WORK_BYTES", work)
        codecs = (
            BlockCodec(2, 16, 12, dtype, axis, 16, byte_order=(-2, 2), centered=centered),
            BlockCodec(2, 16, 20, dtype, "token", 8, byte_order=(-2, 2)),
        )
        # One page more than those that shrink.
        data = [numbers(2, pages + 1, 2, 16, codec.dim, dtype=dtype) for codec in codecs]
        old, want = pages_of(codecs, data, bits), pages_of(codecs, data, target)[:, :-1]
        room = torch.full((2, old[0].numel() + 24), POISON, dtype=torch.uint8)
        arena = room[:, 4:-4]
        arena[:, : old[0].numel()] = old.flatten(1)
        end = room[:, 4 + pages * old.shape[2] :].clone()
        layout = fused.page_layout(*codecs, (bits, bits))
        pack.shrink_(arena, pages, layout, target, ORDER, ORDER, centered)
        got = arena[:, : want[0].numel()].unflatten(1, (pages, -1))
        split = codecs[0].nbytes(target)
        assert same_bytes(codecs[0], got[..., :split], want[..., :split], target)
        assert same_bytes(codecs[1], got[..., split:], want[..., split:], target)
        assert torch.equal(room[:, 4 + pages * old.shape[2] :], end) and bool((room[:, :4] == POISON).all())
    watch.check()


@interpreted
@pytest.mark.parametrize("group", [4, 2])
def test_narrower_pages_need_not_be_smaller(group):
    codecs = (BlockCodec(1, 16, 8, BF16, "token", group, byte_order=(-2, 2)),) * 2
    data = [numbers(1, 3, 1, 16, 8, dtype=BF16, broken=False)] * 2
    old, want = (pages_of(codecs, data, bits) for bits in (16, 8))
    assert old.shape[2] <= want.shape[2]
    arena = torch.zeros(1, want.numel(), dtype=torch.uint8)
    arena[:, : old.numel()] = old.flatten(1)
    pack.shrink_(arena, 3, fused.page_layout(*codecs, (16, 16)), 8, ORDER, ORDER, False)
    assert torch.equal(arena, want.flatten(1))


@interpreted
def test_the_watch_sees_pages_that_land_on_themselves(watch):
    layout = LAYOUT._replace(key_bits=8, value_bits=8)
    size = layout.key_bytes() + layout.value_bytes()
    narrow = layout._replace(key_bits=4, value_bits=4)
    data = torch.zeros(1, 2 * size, dtype=torch.uint8)
    new = pack._pages(data, 0, 2, narrow.key_bytes() + narrow.value_bytes())
    pack._narrow(pack._pages(data, 0, 2, size), new, layout, narrow, False)
    with pytest.raises(AssertionError):
        watch.check()


CODECS = [BlockCodec(2, 16, 12, BF16, axis, 16, byte_order=(-2, 2)) for axis in ("channel", "token")]
LAYOUT = fused.page_layout(*CODECS, (8, 8))


class Unlaunched:
    """A kernel that does nothing."""

    def __init__(self):
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid):
        self.grids.append(grid)
        return lambda *arguments, **options: None


@pytest.fixture
def unlaunched(monkeypatch) -> Unlaunched:
    kernel = Unlaunched()
    for name in ("quantize_kernel", "shrink_kernel", "ranges_kernel"):
        monkeypatch.setattr(pack, name, kernel)
    return kernel


@pytest.mark.parametrize(("bits", "target"), NARROWINGS)
def test_few_launches_for_many_pages(bits, target, unlaunched, monkeypatch):
    monkeypatch.setattr(pack, "_WORK_BYTES", 1 << 19)
    layout = LAYOUT._replace(heads=1, tokens=128, key_dim=128, value_dim=128, key_group=128, value_group=128)
    layout = layout._replace(key_bits=bits, value_bits=bits)
    size = layout.key_bytes() + layout.value_bytes()
    counts = []
    for pages in (500, 2000):
        unlaunched.grids.clear()
        pack.shrink_(torch.empty(1, pages * size, dtype=torch.uint8), pages, layout, target, ORDER, ORDER, False)
        # Nothing is left out, or done twice.
        assert sum(grid[0] for grid in unlaunched.grids if len(grid) == 3) == 2 * pages
        counts.append(len(unlaunched.grids))
    assert counts[1] <= 40 and counts[1] - counts[0] <= 12


def test_memory_is_there_before_anything_changes(unlaunched, monkeypatch):
    size = LAYOUT.key_bytes() + LAYOUT.value_bytes()
    data = torch.full((2, 9000 * size), POISON, dtype=torch.uint8)

    def full(*arguments, **options):
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "new_empty", full)
        with pytest.raises(torch.OutOfMemoryError):
            pack.shrink_(data, 9000, LAYOUT, 4, ORDER, ORDER, False)
    assert bool((data == POISON).all()) and not unlaunched.grids
    allocated = []

    class Allocations(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            result = function(*arguments, **(options or {}))
            if result.untyped_storage().data_ptr() != data.data_ptr():
                allocated.append((result.untyped_storage().data_ptr(), result.untyped_storage().nbytes()))
            return result

    with Allocations():
        pack.shrink_(data, 9000, LAYOUT, 4, ORDER, ORDER, False)
    assert len(set(allocated)) == 1 and allocated[0][1] <= pack._WORK_BYTES


def filled(kind, options: dict, kernel: str, pieces: tuple[int, ...]) -> MixKVQCache | PMKVQCache:
    """A cache of one layer in the memory of a CPU, with pages as a GPU has them."""
    config = LlamaConfig(
        num_hidden_layers=1, hidden_size=32, num_attention_heads=2, num_key_value_heads=2, head_dim=16, vocab_size=8
    )
    cache = kind(config, {**options, "kernel": kernel})
    x = torch.randn(2, 2, 2, sum(pieces), 16, generator=torch.Generator().manual_seed(5)).to(BF16)
    for keys, values in zip(*(side.split(pieces, dim=2) for side in x)):
        cache.update(keys, values, 0)
    cache.layers[0].settle()
    return cache


@interpreted
@pytest.mark.parametrize(
    "options",
    [
        {"key_shrink": "centered"},
        {"key_codec": "token", "window": 16, "group_size": 8},
        {"fbit": 4, "value_fbit": 2},
        {"transform": "hadamard_kv", "key_clip": 0.9},
    ],
)
def test_a_progressive_cache(options, operated, monkeypatch):
    monkeypatch.setattr(layouts, "byte_orders", lambda device_type, dim: ((-2, 2), (-2, 2)))
    pieces = (90, 1, 16, 30, 1, 62)
    if options.get("key_codec") == "token":
        # Pages of 128 tokens.
        pieces = (290, 1, 128)
    options = {"fbit": 2, "group_size": 16, "window": 16, "max_length": sum(pieces), **options}
    want = filled(PMKVQCache, options, "torch", pieces)
    assert not operated
    got = filled(PMKVQCache, options, "auto", pieces)
    assert "quantize_" in operated and got.layer_bits() == want.layer_bits() == [2]
    assert "shrink_" in operated or "transform" in options
    size = got.layers[0].states[0].pages * got.layers[0].layout.page_bytes(2)
    assert size and torch.equal(got.layers[0].body.data[:, :size], want.layers[0].body.data[:, :size])


@interpreted
def test_a_mixed_cache(operated, monkeypatch):
    monkeypatch.setattr(layouts, "byte_orders", lambda device_type, dim: ((-2, 2), (-2, 2)))
    options = {"residual": 32, "group_size": 16, "sink_tokens": 2, "target_bits": 4.0, "importance": "none"}
    want, got = (filled(MixKVQCache, options, kernel, (70, 1, 40)) for kernel in ("torch", "auto"))
    assert set(operated) == {"quantize_", "quantize_tiers_"}
    assert all(torch.equal(a, b) for a, b in zip(got.dequantize(0), want.dequantize(0)))


def test_the_operators_know_the_kernels():
    for name in ("quantize_", "quantize_tiers_", "shrink_"):
        operator = f"{operators.NAMESPACE}::{name}"
        assert torch._C._dispatch_has_kernel_for_dispatch_key(operator, "CUDA")


def test_why_not():
    x = torch.empty(0, dtype=BF16)
    assert pack.why_not_packing(x, ORDER, 128, 128, 32) is None
    assert pack.why_not_packing(x, ORDER, 128, 80, 96) is None
    for arguments, word in (
        ((x.double(), ORDER, 128, 128, 32), "float64"),
        ((x, ORDER - 1, 128, 128, 32), "another kind of device"),
        ((x, ORDER, 96, 96, 96), "got 96"),
        ((x, ORDER, 8, 8, 8), "got 8"),
        ((x, ORDER, 128, 128, 48), "got 48"),
    ):
        assert word in pack.why_not_packing(*arguments)


@interpreted
def test_codecs_where_the_kernels_cannot(operated):
    for tokens, group in ((48, 48), (32, 12)):
        codec = BlockCodec(2, tokens, 20, BF16, "token", group, byte_order=(-2, 2))
        x = numbers(1, 2, 2, tokens, 20, dtype=BF16, broken=False)
        out = torch.zeros(1, 2, codec.nbytes(4), dtype=torch.uint8)
        encode_blocks(codec, x, 4, out, "auto")
        assert torch.equal(out, codec.encode(x, 4))
        data = out.repeat_interleave(2, dim=2).flatten(1)
        data[0, : 2 * out.numel()] = torch.cat([out, out], dim=-1).flatten()
        shrink_pages(data, 2, (codec, codec), 4, 2, "auto")
        assert torch.equal(data[:, : codec.nbytes(2)], codec.encode(x, 2)[:, 0])
    assert not operated


@interpreted
def test_operators_take_what_packing_gives(operated):
    codecs = (
        BlockCodec(2, 16, 12, FP16, "channel", 16, byte_order=(-2, 2), centered=True),
        BlockCodec(2, 16, 20, FP16, "token", 8, byte_order=(-2, 2)),
    )
    data = [numbers(1, 3, 2, 16, codec.dim, dtype=FP16, broken=False) for codec in codecs]
    arena = pages_of(codecs, data, 16).flatten(1)
    shrink_pages(arena, 3, codecs, 16, 2, "auto")
    want = pages_of(codecs, data, 2).flatten(1)
    assert torch.equal(arena[:, : want.shape[1]], want) and operated == ["shrink_"]
    # Either side stops at its floor: what leaves 16 bits is quantized by the same kernel.
    arena = pages_of(codecs, data, 16).flatten(1)
    shrink_pages(arena, 3, codecs, 16, 2, "auto", (4, 2))
    want = torch.cat([codecs[0].encode(data[0], 4), codecs[1].encode(data[1], 2)], dim=-1).flatten(1)
    assert torch.equal(arena[:, : want.shape[1]], want) and operated[1:] == ["quantize_"] * 2
    codec = TieredKeyCodec(2, 16, 12, FP16, 16, (-2, 2))
    tiers = torch.arange(72).view(3, 2, 12) % 3
    want = codec.encode(data[0][0], tiers)
    out = torch.zeros_like(want.dense)
    block = encode_tiers(codec, data[0][0], tiers, out, "auto")
    assert torch.equal(out, want.dense) and torch.equal(block.counts, want.counts)
    assert torch.equal(block.exact, want.exact) and operated[3:] == ["quantize_tiers_"]
