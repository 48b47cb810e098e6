# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Fused attention on a CPU, against a float64 oracle that bounds the error of each output by itself (`oracle.py`).

A kernel may be off by what its rounding of coefficients to 16 bits comes to, at most half of 1 / 32512 of the largest
coefficient per code, and by float32's own rounding. Everything that it must not look at holds NaN.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from oracle import assert_within, check, oracle
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig

import hf_kvq.ops
import hf_kvq_kernels
import simulation
from conftest import cache_of, generate, kv, left_padded, tiny_model
from hf_kvq import KIVICache, KIVIConfig, KVQPlan, MixKVQCache, MixKVQConfig, PMKVQCache, PMKVQConfig
from hf_kvq.codecs import BlockCodec
from hf_kvq.codecs.tiered import TieredBlock, TieredKeyCodec
from hf_kvq.ops import ExactPart, PackedPart, byte_orders
from hf_kvq.transforms import HadamardRotation
from hf_kvq_kernels import DTYPES, PageLayout
from hf_kvq_kernels._ops import NAMESPACE


pytestmark = pytest.mark.skipif(
    hf_kvq_kernels.why_not(torch.empty(1, 1, 1, 16), None) is not None, reason="the CPU kernels cannot be built here"
)

FP32, BF16, FP16 = DTYPES

# What `hf_kvq.ops.attend` adds to the error of the op: its output has the query's dtype.
OUTPUT_EPS = {FP32: 2.0**-24, BF16: 2.0**-8, FP16: 2.0**-11}
# "cpu" against "torch" inside layers: both are within the oracle's bounds of the truth, which are about 1e-3 of the
# largest value at 8 bits and less elsewhere; and both round to the dtype.
LAYER_TOLERANCE = {FP32: 2e-3, BF16: 2e-2, FP16: 4e-3}


@dataclass(frozen=True)
class Case:
    """One call. `held` has the tokens of each page, `exact` the length, dtype and strides of each exact piece."""

    bits: tuple[int, int] = (4, 4)
    rows: int = 1
    heads: int = 2
    group: int = 2
    queries: int = 1
    dims: tuple[int, int] = (32, 32)
    tokens: int = 32
    held: tuple[int, ...] = (32, 32)
    per_channel: bool = True
    groups: tuple[int, int] = (32, 32)
    dtype: torch.dtype = FP32
    query_dtype: torch.dtype = FP32
    exact: tuple[tuple[int, torch.dtype, str], ...] = ()
    mask: str = "none"
    #: Which dimensions of masks do not broadcast: rows, query heads, queries, tokens.
    mask_dims: tuple[bool, bool, bool, bool] = (True, True, True, True)
    softcap: float = 0.0
    #: Least and most UINT4 and BF16 channels of a page and head, if keys are in tiers.
    tiers: tuple[int, int] | None = None
    scaling: float = 0.2
    seed: int = 0

    @property
    def layout(self) -> PageLayout:
        ranges = int(self.per_channel), *self.groups
        return PageLayout(self.heads, self.tokens, *self.dims, *self.bits, *ranges, DTYPES.index(self.dtype))

    @property
    def codecs(self) -> tuple[BlockCodec, BlockCodec]:
        axes = "channel" if self.per_channel else "token", "token"
        orders = byte_orders("cpu", self.dims[0])
        return tuple(
            BlockCodec(self.heads, self.tokens, dim, self.dtype, axis, group, byte_order=order)
            for dim, axis, group, order in zip(self.dims, axes, self.groups, orders)
        )


class Maker:
    """Random inputs of a case. All memory around them is NaN, whatever the dtype."""

    def __init__(self, case: Case):
        self.case = case
        self.generator = torch.Generator().manual_seed(case.seed)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def nan(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """All bits set, also for a bit behind the end."""
        size = torch.Size(shape).numel() * dtype.itemsize
        return torch.full((size + 64,), 255, dtype=torch.uint8).view(dtype)[: size // dtype.itemsize].view(shape)

    def amid_nan(self, x: torch.Tensor, kind: str = "plain") -> torch.Tensor:
        """The same numbers, with strides of some kind."""

        def room(*shape: int) -> torch.Tensor:
            return self.nan(x.dtype, *shape)

        if kind == "plain":
            to = room(x.shape[0], *(n + 1 for n in x.shape[1:]))[:, : x.shape[1], : x.shape[2], : x.shape[3]]
        elif kind == "contiguous":
            to = room(*x.shape)
        elif kind == "token first":
            to = room(x.shape[0], x.shape[2] + 1, x.shape[1] + 1, x.shape[3])[:, 1:, 1:].transpose(1, 2)
        elif kind == "strided":
            to = room(x.shape[0] * 2, x.shape[1], x.shape[2] * 3, x.shape[3] + 2)[::2, :, 1::3, 2:]
        elif kind == "channels apart":
            to = room(x.shape[0], x.shape[1], x.shape[3], x.shape[2]).transpose(2, 3)
        else:
            return x[:1, :1].expand(x.shape) if kind == "expanded" else x[:, :, :1].expand(x.shape)
        return to.copy_(x)

    def keys(self, *shape: int) -> torch.Tensor:
        """Channels differ in size and offset, as keys' do."""
        size = torch.rand(shape[-1], generator=self.generator) + 0.2
        return self.normal(*shape) * size + self.normal(shape[-1])

    def mask(self, tokens: int, strided: bool = False) -> torch.Tensor | None:
        case = self.case
        full = case.rows, case.heads * case.group, case.queries, tokens
        shape = [n if own else 1 for n, own in zip(full, case.mask_dims)]
        if case.mask == "none":
            return None
        visible = torch.rand(shape, generator=self.generator) < 0.7
        if case.mask == "bool":
            mask = visible
        else:
            dtype = {"additive": FP32, "fp16": FP16, "bf16": BF16, "minus infinity": FP32}[case.mask]
            mask = self.normal(*shape).to(dtype) * (case.mask != "minus infinity")
            mask = mask.masked_fill(~visible, float("-inf"))
        if strided:
            mask = self.amid_nan(mask, "token first" if case.rows % 2 else "strided")
        return mask

    def pages(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        case, (key_codec, value_codec) = self.case, self.case.codecs
        shape = case.rows, len(case.held), case.heads, case.tokens
        keys, values = self.keys(*shape, case.dims[0]), self.normal(*shape, case.dims[1]) + 0.5
        for page, held in enumerate(case.held):
            # Tokens that are there no more: crops leave their numbers in groups that others share.
            values[:, page, :, held:] = float("nan")
            if case.bits[0] == 16 or not case.per_channel:
                keys[:, page, :, held:] = float("nan")
            else:
                keys[:, page, :, -(-held // case.groups[0]) * case.groups[0] :] = float("nan")
        keys, values = keys.to(case.dtype), values.to(case.dtype)
        packed_values, records = value_codec.encode(values, case.bits[1]), []
        if case.tiers is None:
            packed_keys = key_codec.encode(keys, case.bits[0])
        else:
            codec = TieredKeyCodec(*shape[2:], case.dims[0], case.dtype, case.groups[0], key_codec.byte_order)
            blocks = [codec.encode(row, self.tiers(len(case.held))) for row in keys]
            packed_keys = torch.stack([block.dense for block in blocks])
            records = [x for block in blocks for x in self.records(block)]
        bytes_ = torch.cat([packed_keys, packed_values], dim=-1)
        assert bytes_.shape[2] == case.layout.key_bytes() + case.layout.value_bytes()
        room = torch.full((case.rows + 1, len(case.held) + 2, bytes_.shape[2] + 16), 255, dtype=torch.uint8)
        pages = room[: case.rows, 1 : 1 + len(case.held), : bytes_.shape[2]]
        pages.copy_(bytes_)
        return pages, records

    def tiers(self, pages: int) -> torch.Tensor:
        """Any number of channels, so that no two pages and heads have the same."""
        case, (uint4, bf16) = self.case, self.case.tiers
        order = torch.rand(pages, case.heads, case.dims[0], generator=self.generator).argsort(-1)
        n_uint4, n_bf16 = (
            torch.randint(0, n + 1, (pages, case.heads, 1), generator=self.generator) for n in (uint4, bf16)
        )
        return torch.where(order < n_uint4, 1, torch.where(order < n_uint4 + n_bf16, 2, 0))

    def records(self, block: TieredBlock) -> list[torch.Tensor]:
        """The tensors, each a part of a larger one; counts of pages that are not there are garbage."""
        longer = []
        for x in (block.low, block.low_channel, block.exact, block.exact_channel, block.counts):
            room = self.nan(x.dtype, len(x) + 16, *x.shape[1:])
            room[: len(x)] = x
            longer.append(room)
        return longer

    def arguments(self) -> dict[str, Any]:
        """Everything that the op takes."""
        case = self.case
        shape = case.rows, case.heads * case.group, case.queries, case.dims[0]
        arguments = {
            "query": self.amid_nan(self.normal(*shape).to(case.query_dtype), "strided"),
            **dict.fromkeys(("pages", "page_mask", "page_starts")),
            **{"layout": None, "records": [], "keys": [], "values": [], "masks": []},
            "scaling": case.scaling,
            "softcap": case.softcap,
        }
        if case.held:
            arguments["pages"], arguments["records"] = self.pages()
            arguments["layout"] = case.layout
            arguments["page_mask"] = self.mask(sum(case.held), strided=True)
            if any(held < case.tokens for held in case.held):
                starts = [0, *itertools.accumulate(case.held)]
                arguments["page_starts"] = torch.tensor(starts, dtype=torch.int32)
        for tokens, dtype, strides in case.exact:
            for name, make, dim in (("keys", self.keys, case.dims[0]), ("values", self.normal, case.dims[1])):
                x = make(case.rows, case.heads, tokens, dim).to(dtype)
                arguments[name].append(self.amid_nan(x, strides))
            arguments["masks"].append(self.mask(tokens, strided=strides == "strided"))
        return arguments


def run(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse), found right."""
    return check(hf_kvq_kernels.attend, Maker(case).arguments())


@pytest.fixture(params=[1, 2])
def threads(request):
    """So many threads, for a test."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def ids(value: Any) -> str | None:
    return str(value).replace("torch.", "").replace(" ", "") if isinstance(value, (tuple, torch.dtype)) else None


# --- pages -----------------------------------------------------------------------------------------------------------

WIDTHS = [(16, 16), (8, 8), (4, 4), (2, 2), (2, 4), (4, 2), (8, 2), (2, 8)]
DIMS = [(16, 16), (24, 40), (40, 24), (64, 64), (80, 80), (96, 48), (112, 112), (128, 128), (256, 256)]
DIMS += [(64, 256), (128, 7), (48, 36), (20, 1)]


@pytest.mark.parametrize("dims", DIMS, ids=ids)
@pytest.mark.parametrize("bits", WIDTHS, ids=ids)
def test_head_dims(bits, dims):
    for per_channel, queries in itertools.product((True, False), (1, 2)):
        run(Case(bits, dims=dims, per_channel=per_channel, queries=queries, group=1, held=(32, 32, 32), seed=dims[0]))


@pytest.mark.parametrize("tokens", [16, 32, 48, 64, 112, 128])
@pytest.mark.parametrize("bits", WIDTHS, ids=ids)
def test_page_sizes_and_groups_of_channels(bits, tokens):
    for group in (16, 32, 48, 128, 5, tokens):
        run(Case(bits, tokens=tokens, held=(tokens, tokens), groups=(group, 32), group=3, seed=group))


@pytest.mark.parametrize("dim", [16, 64, 80, 96])
@pytest.mark.parametrize("bits", WIDTHS, ids=ids)
def test_groups_of_tokens(bits, dim):
    """Several groups per head, one for all, and a shorter last one, for keys and for values."""
    for key_group, value_group in ((4, 5), (16, 16), (32, 32), (36, 40), (128, 128), (dim, dim), (32, 7)):
        groups = key_group, value_group
        run(Case(bits, dims=(dim, dim), per_channel=False, groups=groups, tokens=48, held=(48, 48), seed=dim))


@pytest.mark.parametrize("dtype", DTYPES, ids=ids)
@pytest.mark.parametrize("bits", WIDTHS, ids=ids)
def test_dtypes(bits, dtype):
    for query_dtype, per_channel in itertools.product(DTYPES, (True, False)):
        exact = [(9, other, "plain") for other in DTYPES]
        run(Case(bits, dtype=dtype, query_dtype=query_dtype, per_channel=per_channel, exact=tuple(exact), queries=3))


@pytest.mark.parametrize("bits", WIDTHS, ids=ids)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 8])
def test_query_heads_per_kv_head(group, bits):
    for queries, heads in ((1, 3), (2, 1), (3, 2)):
        case = Case(bits, group=group, queries=queries, heads=heads, rows=2, exact=((5, FP32, "plain"),))
        run(replace(case, per_channel=queries == 2, mask="bool"))


@pytest.mark.parametrize("bits", [(16, 16), (8, 8), (2, 2)], ids=ids)
@pytest.mark.parametrize("queries", range(1, 18))
def test_numbers_of_queries(queries, bits):
    run(Case(bits, group=1, heads=1, queries=queries, mask="additive", exact=((3, BF16, "plain"),), seed=queries))


HELD = [(1,), (31, 32), (32, 5, 32), (32, 32, 17), (16, 1, 15, 32), (32, 0, 3)]


@pytest.mark.parametrize("held", HELD, ids=ids)
@pytest.mark.parametrize("bits", WIDTHS, ids=ids)
def test_pages_that_are_not_full(bits, held):
    for per_channel, mask in itertools.product((True, False), ("none", "bool")):
        case = Case(bits, held=held, per_channel=per_channel, mask=mask, groups=(16, 8), rows=2, queries=2)
        run(replace(case, exact=((4, FP32, "plain"),)))


@pytest.mark.parametrize("dtype", DTYPES, ids=ids)
@pytest.mark.parametrize("bits", [(2, 2), (2, 4), (2, 8)], ids=ids)
@pytest.mark.parametrize("tiers", [(0, 0), (6, 0), (0, 6), (5, 3), (16, 16)], ids=ids)
def test_keys_in_tiers(tiers, bits, dtype):
    case = Case(bits, tiers=tiers, dtype=dtype, rows=2, heads=3, held=(32, 32, 32), queries=2)
    run(case)
    run(replace(case, groups=(16, 16), exact=((5, dtype, "plain"),), mask="bool", seed=1))
    run(replace(case, groups=(48, 32), tokens=112, held=(112, 60), rows=2, seed=2))
    run(replace(case, dims=(256, 16), tiers=(120, 100), rows=1, held=(32, 32), seed=3))


def test_all_channels_in_one_tier():
    case = Case((2, 2), dtype=BF16)
    for tier in (0, 1, 2):
        maker = Maker(replace(case, tiers=(0, 0)))
        maker.tiers = lambda pages, tier=tier: torch.full((pages, case.heads, case.dims[0]), tier)
        check(hf_kvq_kernels.attend, maker.arguments())


# --- exact tokens ----------------------------------------------------------------------------------------------------

STRIDES = ["contiguous", "plain", "token first", "strided", "channels apart", "expanded", "one token"]


@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("dtype", DTYPES, ids=ids)
def test_strides_of_exact_pieces(dtype, strides):
    for dims, group in itertools.product([(64, 64), (17, 9), (34, 66), (2, 1), (96, 24)], (1, 3)):
        exact = tuple((tokens, dtype, strides) for tokens in (1, 33, 64))
        run(Case(dims=dims, held=(), exact=exact, rows=2, group=group, queries=2, mask="bool"))


def test_exact_pieces_beside_pages():
    exact = ((1, FP32, "plain"), (0, BF16, "contiguous"), (70, BF16, "token first"), (9, FP16, "strided"))
    for bits, dtype in itertools.product(WIDTHS, DTYPES):
        run(Case(bits, dtype=dtype, exact=exact, rows=2, queries=3, mask="additive"))
        run(Case(bits, dtype=dtype, exact=exact[::-1], held=(32, 3), group=3))


@pytest.mark.parametrize("exact", [(0,), (0, 0), (0, 5, 0)], ids=ids)
def test_empty_pieces(exact):
    pieces = tuple((n, FP32, "contiguous") for n in exact)
    out, lse = run(Case(held=(), exact=pieces, dims=(16, 24)))
    assert out.shape == (1, 4, 1, 24)
    if not any(exact):
        assert not bool(out.any()) and bool((lse == float("-inf")).all())
    run(Case(exact=pieces))


def test_views_are_not_changed():
    arguments = Maker(Case(exact=((9, BF16, "strided"),), mask="fp16", tiers=(3, 3), bits=(2, 2))).arguments()
    tensors = [x for value in arguments.values() for x in (value if isinstance(value, list) else [value])]
    tensors = [x for x in tensors if isinstance(x, torch.Tensor)]
    before = [x.untyped_storage().tolist() for x in tensors]
    hf_kvq_kernels.attend(**arguments)
    assert [x.untyped_storage().tolist() for x in tensors] == before


# --- masks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["bool", "additive", "fp16", "bf16", "minus infinity"])
@pytest.mark.parametrize(
    "mask_dims", list(itertools.product((False, True), repeat=4)), ids=lambda d: "".join(map(str, map(int, d)))
)
def test_masks(mask_dims, mask):
    exact = ((4, FP32, "plain"), (35, BF16, "strided"))
    case = Case(mask=mask, mask_dims=mask_dims, rows=2, group=3, queries=3, held=(32, 7, 32), exact=exact)
    for bits in ((4, 2), (16, 16)):
        run(replace(case, bits=bits))
        run(replace(case, bits=bits, rows=1, seed=1))


@pytest.mark.parametrize("bits", WIDTHS, ids=ids)
@pytest.mark.parametrize("hidden", [False, float("-inf")], ids=["bool", "additive"])
def test_queries_that_see_nothing(hidden, bits):
    """Alone, and beside others that see something; everywhere, or in some parts only."""
    arguments = Maker(Case(bits, queries=5, rows=2, held=(32, 32, 9), exact=((40, FP32, "plain"),))).arguments()
    masks = [torch.zeros(2, 4, 5, n) if hidden else torch.ones(2, 4, 5, n, dtype=torch.bool) for n in (73, 40)]
    masks[0][0] = masks[1][0] = hidden
    masks[0][1, 2, 3] = masks[1][1, 2, 3] = hidden
    masks[0][1, 0] = masks[1][1, 1] = hidden
    masks[0][1, 3, :, :70] = masks[1][1, 3] = hidden
    arguments["page_mask"], arguments["masks"] = masks[0], [masks[1]]
    out, lse = check(hf_kvq_kernels.attend, arguments)
    for nothing in ((0,), (1, 2, 3)):
        assert not bool(out[nothing].any()) and bool((lse[nothing] == float("-inf")).all())
    assert bool(lse[1, [0, 1, 3]].isfinite().all())


@pytest.mark.parametrize("bits", WIDTHS, ids=ids)
def test_hidden_tokens_count_for_nothing(bits):
    """Whatever their keys are, NaN too, the result is the same bits."""
    case = Case(bits, per_channel=False, exact=((40, FP32, "plain"),), queries=2, held=(32, 32, 32))
    arguments = Maker(case).arguments()
    arguments["page_mask"] = ((torch.arange(96) < 32) | (torch.arange(96) >= 67))[None, None, None]
    arguments["masks"] = [(torch.arange(40) % 3 > 0)[None, None, None]]
    wanted = check(hf_kvq_kernels.attend, arguments)
    size = case.layout.key_bytes()
    arguments["pages"][:, 1, :size] = 255
    arguments["pages"][:, 1, size:] = arguments["pages"][:, 0, size:]
    arguments["keys"][0][:, :, ::3] = float("nan")
    arguments["values"][0][:, :, ::3] = 1e30
    got = hf_kvq_kernels.attend(**arguments)
    assert all(torch.equal(x, y) for x, y in zip(got, wanted))


@pytest.mark.parametrize("softcap", [0.5, 5.0, 50.0])
def test_softcap(softcap):
    for bits, mask in itertools.product(WIDTHS, ("none", "bool", "additive")):
        case = Case(bits, softcap=softcap, mask=mask, scaling=2.0, exact=((40, FP32, "plain"),), queries=3)
        run(case)
        run(replace(case, per_channel=False, held=(32, 9)))


# --- numbers of all kinds --------------------------------------------------------------------------------------------


def of_keys(arguments: dict[str, Any], case: Case, change: Any) -> dict[str, Any]:
    """The same arguments with pages of other keys and values: `change(keys, values)`, [rows, pages, heads, ...]."""
    shape = case.rows, len(case.held), case.heads, case.tokens
    maker = Maker(case)
    keys, values = change(*(maker.normal(*shape, dim) for dim in case.dims))
    packed = [codec.encode(x, bits) for codec, x, bits in zip(case.codecs, (keys, values), case.bits)]
    return {**arguments, "pages": torch.cat(packed, dim=-1)}


@pytest.mark.parametrize("bits", WIDTHS, ids=ids)
@pytest.mark.parametrize("per_channel", [True, False])
def test_scores_far_apart(per_channel, bits):
    """Up to 1e5 apart, the largest anywhere: nothing overflows, and what is far below counts as nothing."""
    case = Case(bits, per_channel=per_channel, held=(32,) * 4, queries=2, scaling=1.0)
    arguments = Maker(case).arguments()
    for order in ([0.0, 1.0, 2.0, 3.0], [3.0, 2.0, 1.0, 0.0], [1.0, 3.0, 0.0, 2.0]):
        for size in (1e2, 1e4):
            offset = (torch.tensor(order) * size)[:, None, None, None]
            changed = of_keys(arguments, case, lambda k, v, offset=offset: (k + offset, v))
            changed["query"] = (
                torch.rand(arguments["query"].shape, generator=torch.Generator().manual_seed(1)) / 8 + 0.1
            )
            out, lse = check(hf_kvq_kernels.attend, changed)
            assert bool(out.isfinite().all()) and float(lse.amax()) > 5 * size


def test_exact_scores_far_apart():
    query, key, value = (torch.randn(1, 2, n, 16, generator=torch.Generator().manual_seed(n)) for n in (3, 70, 71))
    for dtype in (FP32, BF16):
        arguments = Maker(Case(held=(), exact=((70, dtype, "plain"),), group=1, dims=(16, 16))).arguments()
        arguments |= {"query": query * 1e4, "keys": [(key * 1e4).to(dtype)], "values": [value[:, :, :70].to(dtype)]}
        assert bool(check(hf_kvq_kernels.attend, arguments)[0].isfinite().all())


@pytest.mark.parametrize("dtype", DTYPES, ids=ids)
@pytest.mark.parametrize("bits", WIDTHS, ids=ids)
def test_numbers_near_the_limits_of_their_dtype(bits, dtype):
    largest = min(torch.finfo(dtype).max, 2.0**126)
    case = Case(bits, dtype=dtype, held=(32, 32), queries=2, scaling=1.0)
    arguments = Maker(case).arguments()
    arguments["query"] = arguments["query"] / largest
    changed = of_keys(
        arguments, case, lambda k, v: ((k.clamp(-4, 4) / 4 * largest).to(dtype), (v / 5 * largest).to(dtype))
    )
    assert bool(check(hf_kvq_kernels.attend, changed)[0].isfinite().all())
    tiny = torch.finfo(dtype).tiny
    arguments["query"] = arguments["query"] * largest
    changed = of_keys(arguments, case, lambda k, v: ((k * tiny).to(dtype), (v * tiny).to(dtype)))
    check(hf_kvq_kernels.attend, changed)


def test_every_number_of_sixteen_bits():
    """All bit patterns of both dtypes, as exact values of the one token that is seen."""
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    for dtype in (BF16, FP16):
        value = bits.view(dtype).view(1, 64, 1, 1024)
        arguments = Maker(Case(held=(), exact=((1, dtype, "plain"),), heads=64, group=1, dims=(4, 1024))).arguments()
        arguments["values"] = [value]
        for values in (value, value[:, :, :, :1023].contiguous()):
            out, _ = hf_kvq_kernels.attend(**{**arguments, "values": [values]})
            assert torch.equal(out.nan_to_num(nan=12345.0), values.float().nan_to_num(nan=12345.0))
            assert torch.equal(out.isnan(), values.isnan())


def test_constant_groups_are_exact():
    for bits, per_channel in itertools.product(WIDTHS, (True, False)):
        case = Case(bits, per_channel=per_channel, group=1, heads=1, held=(32,))
        arguments = of_keys(Maker(case).arguments(), case, lambda k, v: (torch.ones_like(k), torch.full_like(v, 1.75)))
        out, _ = check(hf_kvq_kernels.attend, arguments)
        torch.testing.assert_close(out, torch.full_like(out, 1.75), rtol=1e-6, atol=0)


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize("bits", WIDTHS, ids=ids)
def test_broken_numbers_stay_visible_where_they_are(bits, side, broken, threads):
    """One broken number in one page of KV head 1 in row 1: its queries show it, and nothing else changes."""
    some = ((9, FP32, "plain"),)
    for per_channel, dtype, exact in ((True, FP32, ()), (False, BF16, ()), (True, BF16, some), (False, FP32, some)):
        case = Case(
            bits, rows=2, heads=3, per_channel=per_channel, dtype=dtype, held=(32,) * 3, exact=exact, queries=3
        )
        case = replace(case, groups=(16, 16))

        def change(keys, values, hurt):
            x = keys if side == "key" else values
            x[1, 1, 1, 20, 5] = broken if hurt else 0.5
            return keys.to(dtype), values.to(dtype)  # noqa: B023

        good, bad = (
            of_keys(Maker(case).arguments(), case, lambda k, v, hurt=hurt: change(k, v, hurt))
            for hurt in (False, True)
        )
        wanted, got = hf_kvq_kernels.attend(**good), hf_kvq_kernels.attend(**bad)
        hurt = torch.zeros(2, 6, dtype=torch.bool)
        hurt[1, 2:4] = True
        for x, y in zip(got, wanted):
            assert torch.equal(x[~hurt], y[~hurt])
        out, lse = got[0][hurt], got[1][hurt]
        if side == "value":
            # In the channels of its own group.
            own = slice(0, 16) if bits[1] < 16 else slice(5, 6)
            assert not bool(out[..., own].isfinite().any()) and torch.equal(lse, wanted[1][hurt])
            rest = torch.ones(32, dtype=torch.bool)
            rest[own] = False
            assert torch.equal(out[..., rest], wanted[0][hurt][..., rest])
        elif broken != broken:
            assert bool(out.isnan().all()) and bool(lse.isnan().all())
        elif bits[0] < 16:
            assert bool(out.isnan().all())
        else:
            # A score of +inf is the only one that counts, and inf - inf is NaN; one of -inf is a hidden token.
            score = bad["query"][1, 2:4, :, 5].sign() * broken
            assert torch.equal(out.isnan().any(-1), score > 0) and torch.equal(out.isnan().all(-1), score > 0)


@pytest.mark.parametrize("bits", [(8, 8), (4, 4), (2, 2)], ids=ids)
def test_zero_times_infinity_is_visible_too(bits):
    case = Case(bits, held=(32,), heads=1)
    arguments = Maker(case).arguments()

    def change(keys, values):
        keys[0, 0, 0, 20, 5] = float("inf")
        return keys, values

    arguments = of_keys(arguments, case, change)
    arguments["query"][..., 5] = 0.0
    out, lse = hf_kvq_kernels.attend(**arguments)
    assert bool(out.isnan().all()) and bool(lse.isnan().all())


def test_weights_are_precise():
    """Two tokens, of scores 0 and -x, and every x down to where the second one counts for nothing."""
    x = torch.linspace(0, 86, 2000)
    query, key, value = (torch.zeros(1, 1, n, 4) for n in (2000, 2, 2))
    query[0, 0, :, 0], key[0, 0, 1, 0], value[0, 0, 1] = x, -1.0, 1.0
    out, lse = hf_kvq_kernels.attend(query, [key], [value], [None], None, None, None, [], None, 1.0)
    small = (-x.double()).exp()
    torch.testing.assert_close(out[0, 0, :, 0].double(), small / (1 + small), rtol=5e-7, atol=0)
    torch.testing.assert_close(lse[0, 0].double(), small.log1p(), rtol=0, atol=3e-7)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_broken_numbers_in_exact_tokens_tiers_queries_and_masks(broken):
    case = Case(
        (2, 2), rows=2, heads=2, group=3, queries=2, tiers=(4, 4), exact=((40, FP32, "plain"),), mask="additive"
    )
    wanted = run(case)

    def hurt(name: str, change: Any) -> torch.Tensor:
        arguments = Maker(case).arguments()
        change(arguments)
        out, lse = hf_kvq_kernels.attend(**arguments)
        broken_rows = ~out.isfinite().all(-1)
        assert torch.equal(out[~broken_rows], wanted[0][~broken_rows]), name
        assert torch.equal(lse[~broken_rows], wanted[1][~broken_rows]), name
        return broken_rows

    def own_head(row: int, head: int) -> torch.Tensor:
        rows = torch.zeros(2, 6, 2, dtype=torch.bool)
        rows[row, 3 * head : 3 * head + 3] = True
        return rows

    def exact_value(arguments):
        arguments["values"][0][1, 1, 35, 31] = broken

    def exact_key(arguments):
        arguments["keys"][0][0, 1, 35, 31] = float("nan")
        arguments["masks"][0][:] = 0.0

    def query(arguments):
        arguments["query"][1, 4, 1, 7] = broken

    def mask(arguments):
        arguments["masks"][0][1, 4, 0, 3] = broken

    def record(arguments):
        arguments["records"][5 + 2][0, :] = float("nan")
        arguments["page_mask"][:] = 0.0

    assert torch.equal(hurt("exact value", exact_value), own_head(1, 1))
    wanted = check(
        hf_kvq_kernels.attend, {**(a := Maker(case).arguments()), "masks": [torch.zeros_like(a["masks"][0])]}
    )
    assert torch.equal(hurt("exact key", exact_key), own_head(0, 1))
    wanted = run(case)
    one = torch.zeros(2, 6, 2, dtype=torch.bool)
    one[1, 4, 1] = True
    assert torch.equal(hurt("query", query), one)
    one[:] = False
    one[1, 4, 0] = True
    assert torch.equal(hurt("mask", mask), one)
    arguments = Maker(case).arguments()
    arguments["page_mask"][:] = 0.0
    wanted = check(hf_kvq_kernels.attend, arguments)
    counts = Maker(case).arguments()["records"][5 + 4][:, :, 1].flatten().tolist()
    assert torch.equal(hurt("record", record), own_head(1, next(i for i, n in enumerate(counts) if n) % 2))


# --- threads, repetition, chance -------------------------------------------------------------------------------------


def random_case(seed: int) -> Case:
    r = random.Random(seed)
    tokens = r.choice((16, 32, 48, 64, 128))
    bits = r.choice(WIDTHS)
    held = tuple(tokens if r.random() < 0.7 else r.randint(1, tokens) for _ in range(r.randint(0, 5)))
    tiers = (r.randint(0, 10), r.randint(0, 6)) if bits[0] == 2 and r.random() < 0.5 else None
    exact = tuple(
        (r.choice((0, 1, 5, 31, 32, 33, 80)), r.choice(DTYPES), r.choice(STRIDES))
        for _ in range(r.randint(not held, 3))
    )
    per_channel = tiers is not None or r.random() < 0.5
    return Case(
        bits=bits,
        rows=r.choice((1, 1, 2, 3)),
        heads=r.choice((1, 2, 3)),
        group=r.choice((1, 2, 3, 4, 5, 8)),
        queries=r.choice((1, 1, 2, 3, 7)),
        dims=(4 * r.randint(4, 24), r.randint(1, 100)),
        tokens=tokens,
        held=held,
        per_channel=per_channel,
        groups=(r.choice((16, 32, 48, 64)) if per_channel else 4 * r.randint(1, 30), r.randint(1, 128)),
        dtype=r.choice(DTYPES),
        query_dtype=r.choice(DTYPES),
        exact=exact,
        mask=r.choice(("none", "bool", "additive", "fp16", "bf16", "minus infinity")),
        mask_dims=tuple(r.random() < 0.6 for _ in range(4)),
        softcap=r.choice((0.0, 0.0, 3.0)),
        tiers=tiers,
        scaling=r.choice((0.05, 0.2, 1.0)),
        seed=seed,
    )


@pytest.mark.parametrize("start", range(0, 200, 40))
def test_anything(start, threads):
    for seed in range(start + threads - 1, start + 40, 2):
        case = random_case(seed)
        try:
            run(case)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from None


@pytest.mark.parametrize("case", [Case(), *map(random_case, range(200, 230))], ids=lambda case: str(case.seed))
def test_threads_and_repetition(case):
    """Twice the same is the same bits; more threads add up in another order."""
    arguments, before, results = Maker(case).arguments(), torch.get_num_threads(), []
    wanted = oracle(**arguments)
    try:
        for threads in (1, 1, 2, 2, 3, 16):
            torch.set_num_threads(threads)
            results.append(hf_kvq_kernels.attend(**arguments))
            assert_within(results[-1][0], wanted.out, wanted.out_bound, f"output with {threads} threads")
            assert_within(results[-1][1], wanted.lse, wanted.lse_bound, f"lse with {threads} threads")
    finally:
        torch.set_num_threads(before)
    for a, b in ((0, 1), (2, 3)):
        assert all(torch.equal(x, y) for x, y in zip(results[a], results[b]))


def test_rows_do_not_depend_on_each_other():
    """The same bits alone and in a batch."""
    case = Case((2, 2), rows=3, tiers=(5, 5), held=(32, 12), exact=((7, BF16, "plain"),), mask="bool", queries=2)
    arguments = Maker(case).arguments()
    out, lse = check(hf_kvq_kernels.attend, arguments)
    for row in range(3):
        one = slice(row, row + 1)
        alone = {
            **arguments,
            **{name: arguments[name][one] for name in ("query", "pages", "page_mask")},
            **{name: [x[one] for x in arguments[name]] for name in ("keys", "values", "masks")},
            "records": arguments["records"][5 * row : 5 * row + 5],
        }
        got = hf_kvq_kernels.attend(**alone)
        assert torch.equal(got[0], out[one]) and torch.equal(got[1], lse[one])


@pytest.mark.parametrize("kernel", ["cpu", "torch"])
@pytest.mark.parametrize(
    "case",
    [
        Case((4, 4), rows=3, heads=2, held=(32,) * 3, exact=((9, FP32, "plain"), (40, FP32, "plain"))),
        Case(
            (2, 2),
            rows=3,
            held=(32,) * 3,
            exact=((9, FP32, "plain"),),
            mask="bool",
            mask_dims=(True, False, True, True),
            queries=2,
        ),
        Case((16, 16), rows=3, held=(32,) * 2, dtype=BF16, per_channel=False),
        Case((2, 2), rows=3, held=(32,) * 3, tiers=(4, 4), exact=((9, FP32, "plain"),)),
    ],
    ids=["plain", "mask", "16 bits, pages only", "tiers"],
)
def test_rows_that_hold_less_than_there_is_room_for(case, kernel):
    if kernel == "torch" and case.tiers:
        pytest.skip("plain torch reads tiers through the cache")
    # What is not held is NaN here, and held by the rows before.
    arguments = Maker(case).arguments()
    pages = torch.tensor([len(case.held), 1, 0])
    tokens = [torch.tensor([n, n - 3, 0]) for n, *_ in case.exact]
    wanted = []
    for row in range(case.rows):
        own = {name: arguments[name][row : row + 1] for name in ("query", "pages")}
        own["pages"] = own["pages"][:, : int(pages[row])]
        own["records"] = arguments["records"][5 * row : 5 * row + 5]
        for name, dim in (("keys", 2), ("values", 2), ("masks", 3)):
            own[name] = [
                x if x is None else x[row : row + 1].narrow(dim, 0, int(n[row]))
                for x, n in zip(arguments[name], tokens)
            ]
        mask = arguments["page_mask"]
        own["page_mask"] = None if mask is None else mask[row : row + 1, ..., : 32 * int(pages[row])]
        wanted.append(hf_kvq_kernels.attend(**{**arguments, **own}))
    for row in range(case.rows):
        arguments["pages"][row, int(pages[row]) :] = 255
        for x, y, n in zip(arguments["keys"], arguments["values"], tokens):
            x[row, :, int(n[row]) :] = y[row, :, int(n[row]) :] = float("nan")
    wanted, wanted_lse = (torch.cat(parts) for parts in zip(*wanted))
    if kernel == "cpu":
        got = hf_kvq_kernels.attend(**arguments, page_held=pages, held=tokens)
        assert torch.equal(got[0], wanted) and torch.equal(got[1], wanted_lse)
    else:
        parts = [ExactPart(*x) for x in zip(*(arguments[name] for name in ("keys", "values", "masks")), tokens)]
        page_part = PackedPart(arguments["pages"], *case.codecs, case.bits, arguments["page_mask"], held=pages)
        got = hf_kvq.ops.attend(arguments["query"], [page_part, *parts], case.scaling, "torch")
        torch.testing.assert_close(got.float(), wanted, atol=1e-3, rtol=1e-3)


# --- torch's view of the operator ------------------------------------------------------------------------------------

OPERATOR_CASES = {
    "pages": Case(),
    "tiers": Case((2, 2), tiers=(4, 4), held=(32, 7), mask="bool", dtype=BF16, query_dtype=BF16),
    "exact": Case(held=(), exact=((9, FP16, "plain"),), dims=(16, 24), mask="additive"),
    "all": Case((16, 16), exact=((9, FP16, "plain"), (0, FP32, "contiguous")), dims=(16, 24)),
}


def positional(arguments: dict[str, Any]) -> tuple:
    names = ("query", "keys", "values", "masks", "pages", "page_mask", "page_starts", "records")
    layout = list(arguments["layout"] or ())
    return *(arguments[name] for name in names), layout, arguments["scaling"], arguments["softcap"], None, []


@pytest.mark.parametrize("case", OPERATOR_CASES.values(), ids=OPERATOR_CASES)
def test_operator_is_what_torch_expects(case):
    op = getattr(torch.ops, NAMESPACE).attend.default
    torch.library.opcheck(op, positional(Maker(case).arguments()))


def test_who_watches_sees_the_operator():
    class Watch(TorchDispatchMode):
        seen = ()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen += (func,)
            return func(*args, **(kwargs or {}))

    arguments = Maker(Case()).arguments()
    wanted = hf_kvq_kernels.attend(**arguments)
    with Watch() as watch:
        got = hf_kvq_kernels.attend(**arguments)
    assert getattr(torch.ops, NAMESPACE).attend.default in watch.seen
    assert all(torch.equal(*pair) for pair in zip(got, wanted))


@pytest.mark.parametrize("device", ["meta", "fake"])
@pytest.mark.parametrize("case", OPERATOR_CASES.values(), ids=OPERATOR_CASES)
def test_shapes_without_data(case, device):
    arguments = Maker(case).arguments()
    wanted = hf_kvq_kernels.attend(**arguments)
    with torch._subclasses.FakeTensorMode() as mode:
        convert = (
            mode.from_tensor
            if device == "fake"
            else lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        )
        if device == "meta":
            mode.__exit__(None, None, None)
        moved = {
            name: [x if x is None else convert(x) for x in value]
            if isinstance(value, list)
            else convert(value)
            if isinstance(value, torch.Tensor)
            else value
            for name, value in arguments.items()
        }
        got = hf_kvq_kernels.attend(**moved)
        if device == "meta":
            mode.__enter__()
    for x, y in zip(got, wanted):
        assert x.shape == y.shape and x.dtype == y.dtype and x.device.type == ("cpu" if device == "fake" else "meta")


@pytest.mark.parametrize("case", OPERATOR_CASES.values(), ids=OPERATOR_CASES)
def test_compiled_function(case):
    arguments = Maker(case).arguments()
    wanted = hf_kvq_kernels.attend(**arguments)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(arguments):
        out, lse = hf_kvq_kernels.attend(**arguments)
        return out * 2, lse

    out, lse = compiled(arguments)
    assert torch.equal(out, wanted[0] * 2) and torch.equal(lse, wanted[1])


# --- hf_kvq.ops ------------------------------------------------------------------------------------------------------


def parts_of(case: Case, hadamard: bool = False) -> tuple[torch.Tensor, list, dict[str, Any]]:
    """What `hf_kvq.ops.attend` takes, and the arguments of the op that this must come to."""
    arguments, (keys, values) = Maker(case).arguments(), case.codecs
    if hadamard:
        values = replace(values, transform=HadamardRotation(case.dims[1]))
    parts = [ExactPart(*x) for x in zip(arguments["keys"], arguments["values"], arguments["masks"])]
    if case.held:
        short = {i: held for i, held in enumerate(case.held) if held < case.tokens}
        parts.insert(0, PackedPart(arguments["pages"], keys, values, case.bits, arguments["page_mask"], short))
    return arguments["query"], parts, arguments


@pytest.mark.parametrize(("exact", "query_dtype"), [((), FP32), ((9,), BF16), ((0, 5), FP16)], ids=ids)
@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("bits", WIDTHS, ids=ids)
def test_attend_over_parts(bits, hadamard, exact, query_dtype):
    for mask, held in itertools.product(("none", "bool", "additive"), ((32, 32), (32, 5))):
        case = Case(
            bits, exact=tuple((n, FP32, "plain") for n in exact), query_dtype=query_dtype, mask=mask, held=held
        )
        case = replace(case, dims=(16, 24), groups=(16, 8), queries=3, rows=2)
        query, parts, arguments = parts_of(case, hadamard)
        turn = torch.from_numpy(simulation.hadamard(24)) if hadamard and bits[1] < 16 else None
        wanted = oracle(**arguments, restore=turn)
        got = hf_kvq.ops.attend(query, parts, 0.2, "cpu")
        assert got.dtype == query_dtype
        assert_within(got, wanted.out, 1.01 * wanted.out_bound + OUTPUT_EPS[query_dtype] * wanted.out.abs(), "output")
        plain = hf_kvq.ops.attend(query, parts, 0.2, "torch")
        bound = 1.01 * wanted.out_bound + 2 * OUTPUT_EPS[query_dtype] * wanted.out.abs()
        assert_within(plain, got.double(), bound + 1e-6, "plain torch")


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("exact", [(), (9,)], ids=ids)
def test_softcap_and_sinks_of_parts(exact, hadamard):
    """A sink is a score of its own, beside those of the tokens, that comes with no value."""
    sinks = torch.tensor([-50.0, 0.0, 2.0, 50.0])
    for bits, softcap in itertools.product([(4, 4), (16, 16)], (None, 1.5)):
        case = Case(
            bits, exact=tuple((n, FP32, "plain") for n in exact), dims=(16, 24), mask="bool", queries=3, rows=2
        )
        query, parts, arguments = parts_of(case, hadamard)
        turn = torch.from_numpy(simulation.hadamard(24)) if hadamard and bits[1] < 16 else None
        wanted = oracle(**{**arguments, "softcap": softcap or 0.0}, restore=turn)
        share = (wanted.lse - sinks.double()[:, None]).sigmoid()[..., None]
        bound = 1.1 * wanted.out_bound + (wanted.lse_bound[..., None] + 1e-6) * wanted.out.abs()
        got = hf_kvq.ops.attend(query, parts, 0.2, "cpu", softcap, sinks)
        assert_within(got, wanted.out * share, bound, "output")
        plain = hf_kvq.ops.attend(query, parts, 0.2, "torch", softcap, sinks)
        assert_within(plain, wanted.out * share, bound + 1e-5, "plain torch")


@pytest.mark.parametrize("hadamard", [False, True])
def test_parts_where_nothing_is_seen(hadamard):
    query, parts, _ = parts_of(Case(exact=((9, FP32, "plain"),), queries=3), hadamard)
    masks = [torch.ones(1, 1, 3, 64, dtype=torch.bool), torch.ones(1, 1, 3, 9, dtype=torch.bool)]
    masks[0][..., 0, :] = masks[1][..., 0, :] = masks[0][..., 1, :] = masks[1][..., 2, :] = False
    parts = [replace(part, mask=mask) for part, mask in zip(parts, masks)]
    got, wanted = (hf_kvq.ops.attend(query, parts, 0.2, kernel) for kernel in ("cpu", "torch"))
    assert not bool(got[:, :, 0].any()) and bool(got.isfinite().all())
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)


def test_what_kernels_refuse():
    query, parts, _ = parts_of(Case())
    part = parts[0]
    cases = {
        "float64": (query.double(), parts),
        "16 bits": (query, [replace(part, bits=(16, 4))]),
        "multiples of 4": (query, [replace(part, keys=replace(part.keys, axis="token", group_size=6))]),
        "another kind of device": (query, [replace(part, keys=replace(part.keys, byte_order=(-2, 2)))]),
        "keys and values of torch.float64": (query, [ExactPart(*(torch.zeros(1, 2, 3, 32).double(),) * 2)]),
    }
    for reason, (q, p) in cases.items():
        with pytest.raises(RuntimeError, match=reason):
            hf_kvq.ops.attend(q, p, 0.2, "cpu")
    with torch.enable_grad(), pytest.raises(RuntimeError, match="gradients"):
        hf_kvq.ops.attend(query.float().requires_grad_(), parts, 0.2, "cpu")
    with torch.no_grad():
        hf_kvq.ops.attend(query.float().requires_grad_(), parts, 0.2, "cpu")
    odd = Case(dims=(18, 32))
    assert "multiples of 4" in hf_kvq_kernels.why_not(query, odd.layout)
    assert "multiple of 16 tokens" in hf_kvq_kernels.why_not(query, replace(odd, dims=(16, 16), tokens=40).layout)
    assert hf_kvq_kernels.why_not(query, replace(odd, dims=(16, 16)).layout) is None
    assert hf_kvq.ops.require_kernel("cpu") == "cpu"


# --- whole layers ----------------------------------------------------------------------------------------------------


@pytest.fixture
def watched(monkeypatch):
    """Every call of the op is held against the oracle; returns the number of calls, in a list."""
    calls, original = [], hf_kvq_kernels.attend
    names = ("query", "keys", "values", "masks", "pages", "page_mask", "page_starts", "records", "layout", "scaling")

    def attend(*arguments):
        calls.append(arguments[4] is not None)
        return check(original, dict(zip((*names, "softcap"), arguments)))

    monkeypatch.setattr(hf_kvq_kernels, "attend", attend)
    return calls


def caches(kind: str, **options: Any) -> list:
    """The same cache twice, with kernels and without."""
    shape = {"num_attention_heads": QUERY_HEADS, "num_key_value_heads": HEADS, "head_dim": KEY_DIM}
    model = LlamaConfig(num_hidden_layers=1, hidden_size=QUERY_HEADS * KEY_DIM, **shape)
    made = {
        "pmkvq": lambda kernel: PMKVQCache(model, {**pmkvq_options(model, {**PMKVQ, **options}), "kernel": kernel}),
        "mixkvq": lambda kernel: MixKVQCache(model, MixKVQConfig(**{**FIXED, **MIXED, **options, "kernel": kernel})),
        "kivi": lambda kernel: KIVICache(model, KIVIConfig(**{**FIXED, **options, "kernel": kernel})),
    }[kind]
    return [made("cpu"), made("torch")]


def pmkvq_options(model: LlamaConfig, options: dict[str, Any]) -> dict[str, Any]:
    """The options, or a plan with them where factors for the keys are needed."""
    if options.get("transform") != "lambda":
        return options
    scale = torch.linspace(0.2, 5, HEADS * KEY_DIM).view(1, HEADS, KEY_DIM)
    return {"plan": KVQPlan.of(model, PMKVQConfig(**options), tensors={"key_scale": scale})}


PMKVQ = {"window": 6, "group_size": 16, "max_length": 150, "sink_tokens": 2, "fbit": 2}
FIXED = {"residual": 32, "group_size": 32, "sink_tokens": 3}
MIXED = {"target_bits": 4.0}
KINDS = {
    "pmkvq": ("pmkvq", {}),
    "pmkvq, lossless": ("pmkvq", {"fbit": 16}),
    "pmkvq, fixed 8": ("pmkvq", {"fbit": 8, "initial_bits": 8}),
    "pmkvq, per token, hadamard": ("pmkvq", {"fbit": 4, "key_codec": "token", "transform": "hadamard"}),
    "pmkvq, per token, lambda": ("pmkvq", {"fbit": 2, "key_codec": "token", "transform": "lambda"}),
    "mixkvq": ("mixkvq", {}),
    "mixkvq, other groups": ("mixkvq", {"residual": 48, "group_size": 32, "value_bits": 4}),
    "kivi": ("kivi", {"bits": 2}),
    "kivi 4": ("kivi", {"bits": 4, "group_size": 16}),
}
HEADS, KEY_DIM, VALUE_DIM, QUERY_HEADS = 2, 16, 24, 6


def step(made: list, data: tuple[torch.Tensor, torch.Tensor, torch.Tensor], valid=None, mask=None) -> None:
    """New tokens for both caches, and attention of their queries."""
    query, keys, values = data
    outs = []
    for cache in made:
        if valid is not None:
            cache.observe_padding(valid, keys.shape[2])
        layer = cache.layers[0]
        handles = cache.update(keys, values, 0)
        layer.observe_query(query)
        outs.append(layer.attend(query, mask, 0.4))
        del handles
        layer.settle()
    torch.testing.assert_close(*outs, rtol=LAYER_TOLERANCE[query.dtype], atol=4 * LAYER_TOLERANCE[query.dtype])
    seen = outs[0].isfinite().all()
    assert bool(seen)


def assert_same_state(made: list) -> None:
    a, b = (cache.layers[0] for cache in made)
    assert a.summary() == b.summary() and a.states == b.states
    for x, y in ((a.keys, b.keys), (a.values, b.values)):
        assert torch.equal(x, y)


class Stream:
    """Queries, keys and values, as many as one asks for."""

    def __init__(self, batch: int, dtype: torch.dtype, seed: int = 0):
        self.batch, self.dtype, self.generator = batch, dtype, torch.Generator().manual_seed(seed)
        self.size = torch.rand(KEY_DIM, generator=self.generator) * 2 + 0.2

    def take(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        shapes = (QUERY_HEADS, KEY_DIM), (HEADS, KEY_DIM), (HEADS, VALUE_DIM)
        q, k, v = (torch.randn(self.batch, h, tokens, d, generator=self.generator) for h, d in shapes)
        return q.to(self.dtype), (k * self.size).to(self.dtype), v.to(self.dtype)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=ids)
@pytest.mark.parametrize("kind", KINDS)
def test_prompt_decoding_and_crops(kind, dtype, watched):
    stream, made = Stream(2, dtype), caches(KINDS[kind][0], **KINDS[kind][1])
    for tokens, crop in ((40, 0), (1, 0), (1, 0), (17, 5), (1, 0), (40, 30), (1, 0), (3, 0), (20, 9), (1, 0)):
        step(made, stream.take(tokens))
        for cache in made:
            if crop:
                cache.crop(-crop)
    assert_same_state(made)
    assert sum(watched) > 5


@pytest.mark.parametrize("kind", KINDS)
def test_padded_batches_and_other_rows(kind, watched):
    stream, made = Stream(3, FP32), caches(KINDS[kind][0], **KINDS[kind][1])
    valid = torch.ones(3, 400, dtype=torch.bool)
    valid[0, :13] = valid[1, 30:41] = valid[2, :38] = False
    for tokens in (60, 1, 9, 1):
        columns = made[0].get_seq_length() + tokens
        mask = torch.arange(columns) <= torch.arange(columns - tokens, columns)[:, None]
        mask = mask & valid[:, None, None, :columns]
        mask[..., torch.arange(tokens), torch.arange(columns - tokens, columns)] = True
        step(made, stream.take(tokens), valid[:, :columns], mask)
    for order in ([2, 0, 0], [1, 2, 0]):
        for cache in made:
            cache.reorder_cache(torch.tensor(order))
        valid = valid[order]
        step(made, stream.take(2))
    for cache in made:
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([0, 3]))
    stream.batch = 2
    step(made, stream.take(50))
    step(made, stream.take(1))
    assert_same_state(made)
    assert sum(watched) > 5


@pytest.mark.parametrize("seed", range(12))
def test_random_histories(seed, watched):
    r = random.Random(seed)
    kind = KINDS[list(KINDS)[seed % len(KINDS)]]
    stream, made = Stream(2, r.choice((FP32, BF16, FP16)), seed), caches(kind[0], **kind[1])
    for _ in range(14):
        tokens = r.choice((1, 1, 1, 2, 7, 30))
        if made[0].get_seq_length() + tokens > 150:
            break
        step(made, stream.take(tokens))
        if r.random() < 0.3:
            crop = r.randint(1, 25)
            for cache in made:
                cache.crop(-crop)
        if r.random() < 0.2:
            order = torch.tensor([r.randrange(2), r.randrange(2)])
            for cache in made:
                cache.reorder_cache(order)
    assert_same_state(made)


def test_all_widths_of_one_cache(watched):
    """A progressive cache goes through all widths under the same queries."""
    rules = simulation.Rules(fbit=2, max_length=150)
    made = [cache_of(rules, kernel=kernel) for kernel in ("cpu", "torch")]
    query, seen = torch.randn(1, 4, 150, 16, generator=torch.Generator().manual_seed(0)), set()
    for token in range(150):
        new = [x[:, :, :1] for x in kv(rules, 1, seed=token)]
        for cache in made:
            cache.update(*new, 0)
        if token % 7 == 0:
            outs = [cache.layers[0].attend(query[:, :, token : token + 1], None, 0.3) for cache in made]
            torch.testing.assert_close(*outs, rtol=2e-3, atol=2e-2)
            seen.add(made[0].layers[0].states[0].bits)
    assert seen == {16, 8, 4, 2}


@pytest.mark.parametrize("kind", ["pmkvq", "pmkvq, per token, hadamard", "mixkvq, other groups", "kivi"])
def test_small_models_say_the_same(kind, watched):
    name, options = KINDS[kind]
    options = {key: value for key, value in options.items() if key != "group_size"}
    model, prompts = tiny_model("llama"), [left_padded(2, 60, [0, 23])]
    config = {"pmkvq": PMKVQConfig, "mixkvq": MixKVQConfig, "kivi": KIVIConfig}[name]
    cache = {"pmkvq": PMKVQCache, "mixkvq": MixKVQCache, "kivi": KIVICache}[name]
    base = {"pmkvq": {**PMKVQ, "max_length": 84}, "mixkvq": {**FIXED, **MIXED}, "kivi": FIXED}[name]
    for prompt in prompts:
        got, wanted = (
            generate(model, 12, cache=cache(model.config, config(**{**base, **options, "kernel": kernel})), **prompt)
            for kernel in ("cpu", "torch")
        )
        assert torch.equal(got.sequences, wanted.sequences)
        torch.testing.assert_close(got.logits, wanted.logits, rtol=5e-3, atol=5e-3)
    assert any(watched)


REAL = {
    "16 bits": lambda kernel: (
        PMKVQCache,
        PMKVQConfig(fbit=16, max_length=200, window=16, group_size=32, kernel=kernel),
    ),
    "down to 4": lambda kernel: (
        PMKVQCache,
        PMKVQConfig(fbit=4, max_length=130, window=16, group_size=32, kernel=kernel),
    ),
    "2 bits": lambda kernel: (
        PMKVQCache,
        PMKVQConfig(fbit=2, initial_bits=2, max_length=200, window=16, group_size=32, kernel=kernel),
    ),
    "mixkvq": lambda kernel: (MixKVQCache, MixKVQConfig(residual=32, group_size=32, kernel=kernel)),
    "kivi": lambda kernel: (KIVICache, KIVIConfig(bits=4, residual=32, group_size=32, kernel=kernel)),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", REAL)
def test_a_real_model_says_the_same(kind, real_model):
    model, tokenizer = real_model
    text = "The lighthouse keeper wrote in his log every evening. " * 8 + "That night he"
    prompt = tokenizer(text, return_tensors="pt")
    made = [REAL[kind](kernel) for kernel in ("cpu", "torch")]
    got, wanted = (generate(model, 24, cache=cache(model.config, config), **prompt) for cache, config in made)
    assert torch.equal(got.sequences, wanted.sequences)
    assert got.cache.layers[0].states[0].pages > 1
    torch.testing.assert_close(got.logits, wanted.logits, rtol=1e-2, atol=5e-2)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("rows", "queries"), [(0, 1), (1, 0)])
def test_nothing_to_do(rows, queries, threads):
    codec = BlockCodec(2, 32, 32, FP32, "channel", 32, byte_order=byte_orders("cpu", 32)[0])
    values = BlockCodec(2, 32, 32, FP32, "token", 32, byte_order=byte_orders("cpu", 32)[1])
    x = torch.randn(1, 1, 2, 32, 32)
    pages = torch.cat([codec.encode(x, 4), values.encode(x, 4)], dim=-1)[:rows]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for kernel in ("cpu", "torch"):
            part = PackedPart(pages, codec, values, (4, 4))
            out = hf_kvq.ops.attend(torch.randn(rows, 4, queries, 32), [part], 0.2, kernel)
            assert out.shape == (rows, 4, queries, 32)
    finally:
        torch.set_num_threads(before)


def test_masks_of_fewer_dimensions():
    query, keys, values, mask = torch.randn(2, 4, 3, 16), *torch.randn(2, 2, 2, 20, 16), torch.rand(3, 20) < 0.5
    arguments = (None, None, None, [], None, 0.25, 0.0)
    got = hf_kvq_kernels.attend(query, [keys], [values], [mask], *arguments)
    want = hf_kvq_kernels.attend(query, [keys], [values], [mask[None, None]], *arguments)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_what_goes_to_plain_torch():
    query, keys, values = torch.randn(1, 2, 1, 16), torch.randn(1, 1, 9, 16), torch.randn(1, 1, 9, 16)
    mixed = ExactPart(keys.bfloat16(), values)
    with pytest.raises(RuntimeError, match="keys and values of torch.bfloat16 and torch.float32"):
        hf_kvq.ops.attend(query, [mixed], 0.2, "cpu")
    assert bool(hf_kvq.ops.attend(query, [mixed], 0.2, "auto").isfinite().all())
    keys.requires_grad_()
    with torch.enable_grad():
        with pytest.raises(RuntimeError, match="no gradients"):
            hf_kvq.ops.attend(query, [ExactPart(keys, values)], 0.2, "cpu")
        hf_kvq.ops.attend(query, [ExactPart(keys, values)], 0.2, "auto").sum().backward()
    assert keys.grad is not None and float(keys.grad.abs().sum()) > 0
