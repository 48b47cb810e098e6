# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import simulation_mixkvq
from conftest import kv
from hf_kvq.codecs import BlockCodec
from hf_kvq.codecs.tiered import (
    BF16,
    TIER_BITS,
    UINT2,
    UINT4,
    TieredKeyCodec,
    sensitivity,
    tiers_by_target,
    tiers_by_threshold,
)
from hf_kvq.ops import byte_orders
from simulation_mixkvq import Page, Rules


DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INF = float("inf")
SHAPES = [
    # heads, dim, tokens, group
    (2, 64, 128, 32),
    (1, 80, 64, 48),
    (3, 96, 32, 100),
    (1, 128, 16, 5),
    (1, 256, 16, 16),
    (2, 7, 48, 32),
]


def codec_of(rules: Rules) -> TieredKeyCodec:
    order = byte_orders("cpu", rules.key_dim)[0]
    return TieredKeyCodec(rules.heads, rules.residual, rules.key_dim, rules.dtype, rules.group, order)


def pages_of(rules: Rules, count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, list[Page]]:
    """Keys [count, heads, tokens, dim] of pages, random tiers [count, heads, dim], and the same pages simulated."""
    keys, values = kv(rules, rules.residual, count, seed)
    shape = (count, rules.heads, rules.key_dim)
    tiers = torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(seed))
    pages = []
    for key, value, tier in zip(keys, values, tiers):
        pages.append(Page(rules, [(key[:, t], value[:, t]) for t in range(rules.residual)], np.ones(1)))
        pages[-1].tiers = tier.numpy()
    return keys, tiers, pages


# --- bytes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim", "tokens", "group"), SHAPES)
def test_bytes_and_values_equal_simulation(dtype, heads, dim, tokens, group):
    rules = Rules(heads, 1, dim, 16, dtype, residual=tokens, group=group)
    keys, tiers, pages = pages_of(rules, 3)
    codec = codec_of(rules)
    block = codec.encode(keys, tiers)
    size = codec.dense.nbytes(2)
    assert torch.equal(block.dense, torch.stack([page.regular()[:size] for page in pages]))
    records = [page.records() for page in pages]
    assert torch.equal(block.counts, torch.stack([page.pop("counts") for page in records]))
    for name in records[0]:
        got, wanted = getattr(block, name), torch.cat([page[name] for page in records])
        assert got.dtype == wanted.dtype and torch.equal(got, wanted), name
    got, wanted = codec.decode(block), torch.stack([page.visible()[0] for page in pages])
    assert got.dtype == torch.float32
    rtol = max(torch.finfo(dtype).eps, 1e-5)
    torch.testing.assert_close(got.to(dtype), wanted, rtol=rtol, atol=1e-6 * float(wanted.abs().max()))
    exact = (tiers == BF16)[:, :, None].expand_as(keys)
    assert torch.equal(got.to(dtype)[exact], keys[exact]) and bool(exact.any())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim", "tokens", "group"), SHAPES)
def test_one_tier_alone_is_the_ordinary_codec(dtype, heads, dim, tokens, group):
    rules = Rules(heads, 1, dim, 16, dtype, residual=tokens, group=group)
    keys, _, _ = pages_of(rules, 2)
    codec, ordinary = (
        codec_of(rules),
        BlockCodec(heads, tokens, dim, dtype, "channel", group, byte_order=byte_orders("cpu", dim)[0]),
    )
    for tier, bits in ((UINT2, 2), (UINT4, 4)):
        block = codec.encode(keys, torch.full((2, heads, dim), tier))
        whole = ordinary.encode(keys, bits)
        if bits == 2:
            assert torch.equal(block.dense, whole)
            assert block.low.numel() == 0
        assert block.exact.numel() == 0
        wanted = ordinary.decode(whole[:, None], bits)
        torch.testing.assert_close(codec.decode(block), wanted, rtol=1e-5, atol=1e-6 * float(wanted.abs().max()))
    block = codec.encode(keys, torch.full((2, heads, dim), BF16))
    assert torch.equal(codec.decode(block).to(dtype), keys) and not bool(block.dense.any())


def test_a_channel_does_not_depend_on_its_neighbours():
    rules = Rules(2, 1, 64, 16)
    keys, tiers, _ = pages_of(rules, 2)
    codec = codec_of(rules)
    wanted = codec.decode(codec.encode(keys, tiers))
    for tier in (UINT2, UINT4, BF16):
        other = tiers.clone()
        other[:, :, 1::2] = tier
        got = codec.decode(codec.encode(keys, other))
        assert torch.equal(got[..., 0::2], wanted[..., 0::2])


def test_pages_can_be_encoded_one_by_one():
    rules = Rules(2, 1, 24, 16)
    keys, tiers, _ = pages_of(rules, 4)
    tiers[1], tiers[2, :, ::2] = UINT2, UINT2  # no records, and fewer
    codec = codec_of(rules)
    wanted, alone = codec.encode(keys, tiers), [codec.encode(keys[i : i + 1], tiers[i : i + 1]) for i in range(4)]
    assert len({int(block.counts.sum()) for block in alone} | {0}) == 4
    for name, x in vars(wanted).items():
        assert torch.equal(x, torch.cat([getattr(block, name) for block in alone])), name


def test_pages_can_be_decoded_one_by_one():
    rules = Rules(2, 1, 24, 16)
    keys, tiers, _ = pages_of(rules, 3)
    tiers[1] = UINT2  # a page without any record
    codec = codec_of(rules)
    wanted = codec.decode(codec.encode(keys, tiers))
    for i in range(3):
        assert torch.equal(codec.decode(codec.encode(keys[i : i + 1], tiers[i : i + 1])), wanted[i : i + 1])
    empty = codec.encode(keys[:0], tiers[:0])
    assert codec.decode(empty).shape == (0, 2, 32, 24)


def test_inputs_are_left_alone():
    rules = Rules(2, 1, 24, 16)
    keys, tiers, _ = pages_of(rules, 2)
    before = keys.clone(), tiers.clone()
    codec = codec_of(rules)
    block = codec.encode(keys, tiers)
    stored = {name: x.clone() for name, x in vars(block).items()}
    codec.decode(block)
    assert torch.equal(keys, before[0]) and torch.equal(tiers, before[1])
    assert all(torch.equal(getattr(block, name), x) for name, x in stored.items())


@pytest.mark.parametrize("dim", [257, 512])
def test_channel_numbers_are_bytes(dim):
    with pytest.raises(ValueError, match=f"256 at most; got {dim}"):
        TieredKeyCodec(1, 16, dim, torch.float32, 16)


# --- tiers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_sensitivity_is_the_2_bit_step(dtype):
    rules = Rules(2, 1, 24, 16, dtype, residual=64, group=20)
    keys, _, pages = pages_of(rules, 3)
    got = codec_of(rules).sensitivity(keys)
    assert got.dtype == torch.float64
    # With an importance of 1 the salience is the sensitivity.
    assert np.array_equal(got.numpy(), np.stack([page.salience for page in pages]))
    low, high = torch.tensor([-1.0, 0.0, 2.0]), torch.tensor([2.0, 0.0, 2.75])
    assert sensitivity(low, high).tolist() == [1.0, 0.0, 0.25]


def test_thresholds():
    salience = torch.tensor([[0.0, 0.5, 1.0, 1.5, 2.0, 3.0, INF]] * 3).double()
    one, many = (torch.tensor(x).double() for x in (2.0, [[2.0], [0.5], [INF]]))
    got = tiers_by_threshold(salience, one, torch.tensor(0.5).double())
    assert got.tolist() == [[UINT2, UINT2, UINT4, UINT4, UINT4, BF16, BF16]] * 3
    # tau_uint4 > tau_bf16 in the second head.
    got = tiers_by_threshold(salience, many, torch.tensor([[1.0], [2.5], [-INF]]).double())
    assert got[1].tolist() == [UINT2, UINT2, *[BF16] * 5] and got[2].tolist() == [UINT4] * 7
    for row, tau_bf16, tau_uint4 in zip(got.tolist(), (2.0, 0.5, INF), (1.0, 2.5, -INF)):
        assert row == simulation_mixkvq.tiers_by_threshold(salience[0].tolist(), tau_bf16, tau_uint4)


def spent(tiers: torch.Tensor) -> torch.Tensor:
    """Average bits of each head."""
    return torch.tensor(TIER_BITS)[tiers].double().mean(-1)


SALIENCE = st.lists(
    st.one_of(
        st.floats(0, 100, width=32),
        st.sampled_from([0.0, 1.0, 12.0, 144.0, 1e300, 1e-300]),
    ),
    min_size=1,
    max_size=40,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(salience=SALIENCE, target=st.integers(200, 1600).map(lambda n: n / 100))
def test_target_equals_simulation_and_is_never_exceeded(salience, target):
    got = tiers_by_target(torch.tensor(salience).double(), target)
    assert float(spent(got)) <= target + 1e-12
    assert got.tolist() == simulation_mixkvq.tiers_by_target(torch.tensor(salience).double().tolist(), target)


@pytest.mark.parametrize("dim", [16, 64, 80, 96, 100, 128, 256])
def test_any_target_is_kept_and_nearly_used_up(dim):
    salience = torch.rand(4, dim, generator=torch.Generator().manual_seed(dim)).double()
    for hundredths in range(200, 1601, 7):
        bits = spent(tiers_by_target(salience, hundredths / 100))
        assert bool((bits <= hundredths / 100 + 1e-12).all()), hundredths
        # What is left does not pay for one more promotion.
        assert bool((bits > hundredths / 100 - 12 / dim).all()), hundredths


@pytest.mark.parametrize("target", [2.3, 2.1, 2.7, 3.3, 3.9])
def test_targets_that_floats_miss_by_a_hair(target):
    # (2.3 - 2) * 80 is 23.99999999999999, but 24 is what the user means.
    assert spent(tiers_by_target(torch.ones(80).double(), target)).item() == pytest.approx(target, rel=1e-12)


def test_more_bits_never_demote_a_channel():
    salience = torch.randn(8, 64, generator=torch.Generator().manual_seed(1)).mul(2).exp().double()
    tiers = [tiers_by_target(salience, target / 8) for target in range(16, 129)]
    assert all(bool((more >= less).all()) for less, more in zip(tiers, tiers[1:]))
    assert not bool(tiers[0].any()) and bool((tiers[-1] == BF16).all())


def test_target_extremes():
    for salience in (torch.rand(3, 5, 32).double(), torch.zeros(2, 64).double(), torch.full((1, 16), INF).double()):
        assert bool((tiers_by_target(salience, 2) == UINT2).all())
        assert bool((tiers_by_target(salience, 16) == BF16).all())
    # As many bits as UINT4 everywhere costs: all at UINT4 when they matter alike, else the best ones more.
    assert bool((tiers_by_target(torch.ones(64).double(), 4) == UINT4).all())
    assert tiers_by_target(torch.tensor([100.0, 1, 1, 1, 1, 1, 1]).double(), 4).tolist() == [2, 0, 0, 0, 0, 0, 0]


def test_equal_channels_are_promoted_in_order():
    assert tiers_by_target(torch.ones(8).double(), 3).tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    # 12 times the salience is worth the way to BF16 as much as 1 is worth the way to UINT4; that comes first.
    salience = torch.tensor([12.0, 1.0, 1.0, 1.0]).double()
    assert tiers_by_target(salience, 4).tolist() == [1, 1, 1, 1]
    assert tiers_by_target(salience.flip(0), 6.5).tolist() == [1, 1, 1, 1]
    assert tiers_by_target(salience, 7).tolist() == [2, 1, 1, 1]
    assert tiers_by_target(torch.tensor([12.01, 1.0, 1.0, 1.0]).double(), 5.5).tolist() == [2, 0, 0, 0]


def test_heads_do_not_share_their_bits():
    salience = torch.rand(2, 3, 64, generator=torch.Generator().manual_seed(2)).double()
    salience[0, 0] *= 1000
    tiers = tiers_by_target(salience, 3.0)
    for index in np.ndindex(2, 3):
        assert torch.equal(tiers[index], tiers_by_target(salience[index], 3.0))


def test_the_order_is_that_of_the_error_saved_per_bit():
    # Of all ways to spend the same bits, none leaves less error energy; by trying them all.
    energy = torch.tensor([1.0, 1 / 25, 0.0])
    g = torch.Generator().manual_seed(3)
    ways = torch.cartesian_prod(*[torch.arange(3)] * 6)
    for _ in range(20):
        salience = torch.randn(6, generator=g).mul(2).exp().double()
        for target in (2.5, 3.4, 4.7, 7.0, 10.0):
            chosen = tiers_by_target(salience, target)
            equal = ways[spent(ways) <= spent(chosen) + 1e-9]
            best = (energy[equal].double() * salience**2).sum(-1).min()
            assert float((energy[chosen].double() * salience**2).sum()) <= float(best) * (1 + 1e-9)
