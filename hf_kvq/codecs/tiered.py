# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Key channels in three tiers, BF16, UINT4 and UINT2, by query magnitude x quantization difficulty (MixKVQ)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .block import BlockCodec
from .packing import pack, packed_size, unpack
from .uniform import clip_groups, decode_groups, group_range, narrow, quantize, scale_of


UINT2, UINT4, BF16 = 0, 1, 2

#: Bits of one element in each tier, as the paper counts them.
TIER_BITS = (2, 4, 16)

# A channel at 16 bits instead of 4 saves 1/25 of its 2-bit error energy for 12 bits, one at 4 instead of 2 saves 24/25
# for 2 bits. Spending bits where they save most makes the thresholds differ by sqrt(144).
_BF16_OVER_UINT4 = 12.0


def sensitivity(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Quantization difficulty `S_d = (max_d - min_d) / (2^B - 1)` with B = 2, float64 (MixKVQ, section 4.1)."""
    return (high.double() - low.double()) / 3


def tiers_by_threshold(salience: torch.Tensor, tau_bf16: torch.Tensor, tau_uint4: torch.Tensor) -> torch.Tensor:
    """Tier of each channel given its salience `A_d = I_d * S_d`: BF16 above `tau_bf16`, else UINT4 above `tau_uint4`.

    BF16 is tested first: published pairs have tau_uint4 > tau_bf16, which leaves no channel at UINT4.
    """
    tiers = torch.where(salience > tau_uint4, UINT4, UINT2)
    return torch.where(salience > tau_bf16, BF16, tiers)


def tiers_by_target(salience: torch.Tensor, target_bits: float) -> torch.Tensor:
    """Tiers whose average does not exceed `target_bits` per key element, in every head of its own.

    Channels are promoted in the order of the error energy that a bit spent on them saves; a channel's way up is
    UINT2 -> UINT4 -> BF16.

    Args:
        salience: [..., dim], not negative.
        target_bits: 2 to 16.
    """
    dim = salience.shape[-1]
    # Candidates for one promotion each, in the same currency: to UINT4 at a cost of 2, to BF16 at a cost of 12.
    worth = torch.cat([salience, salience / _BF16_OVER_UINT4], dim=-1)
    order = worth.sort(dim=-1, descending=True, stable=True).indices
    cost = torch.where(order < dim, TIER_BITS[1] - TIER_BITS[0], TIER_BITS[2] - TIER_BITS[1])
    affordable = cost.cumsum(-1) <= _to_spend(dim, target_bits)
    promoted = torch.zeros_like(worth, dtype=torch.long).scatter(-1, order, affordable.long())
    return promoted[..., :dim] + promoted[..., dim:]


def most_promoted(dim: int, target_bits: float) -> list[tuple[int, int]]:
    """Most (UINT4, BF16) channels of a head that `tiers_by_target` may choose, for each number of BF16 channels."""
    spend, to_uint4, to_bf16 = _to_spend(dim, target_bits), TIER_BITS[1] - TIER_BITS[0], TIER_BITS[2] - TIER_BITS[0]
    return [
        (min(dim - n, int((spend - n * to_bf16) // to_uint4)), n) for n in range(min(dim, int(spend // to_bf16)) + 1)
    ]


def _to_spend(dim: int, target_bits: float) -> float:
    """Bits above 2 that a head may spend on a key; (2.3 - 2) * 80 is a hair less than 24 in floating point."""
    return (target_bits - TIER_BITS[0]) * dim + 1e-6


@dataclass(frozen=True)
class TieredBlock:
    """One row's pages of keys: a regular part for all channels, and records for the channels that have more bits.

    Records are sorted by page, head and channel. `counts` says how many of them each page and head has.

    Args:
        dense: uint8 [pages, bytes]; 2-bit codes and (min, max) of all channels. For a UINT4 channel the codes are its
            upper two bits; a BF16 channel's are empty.
        counts: int16 [pages, heads, 2]; number of UINT4 and of BF16 channels.
        low, low_channel: uint8 [n, tokens / 4] and [n]; the lower two bits of UINT4 channels.
        exact, exact_channel: [m, tokens] in the model's dtype and uint8 [m]; BF16 channels.
    """

    dense: torch.Tensor
    counts: torch.Tensor
    low: torch.Tensor
    low_channel: torch.Tensor
    exact: torch.Tensor
    exact_channel: torch.Tensor


@dataclass(frozen=True)
class TieredKeyCodec:
    """Codec of key pages, [heads, tokens, dim], with channels in tiers.

    Args:
        heads, tokens, dim, dtype, group_size, byte_order: as in `BlockCodec`; groups run along the tokens.
        clip: as there, of UINT2 channels.
    """

    heads: int
    tokens: int
    dim: int
    dtype: torch.dtype
    group_size: int
    byte_order: tuple[int, int] | None = None
    clip: float = 1.0

    def __post_init__(self):
        if self.dim > 256:
            raise ValueError(f"channel lists are bytes, so head_dim can be 256 at most; got {self.dim}")

    @property
    def dense(self) -> BlockCodec:
        """Layout of the regular part."""
        return BlockCodec(
            self.heads, self.tokens, self.dim, self.dtype, "channel", self.group_size, byte_order=self.byte_order
        )

    @property
    def low_bytes(self) -> int:
        return packed_size(self.tokens, 2)

    def sensitivity(self, keys: torch.Tensor) -> torch.Tensor:
        """[..., heads, tokens, dim] -> float64 [..., heads, dim], over the whole page."""
        low, high = group_range(keys.to(self.dtype), -2)
        return sensitivity(low, high).squeeze(-2)

    def prepare(self, keys: torch.Tensor, tiers: torch.Tensor) -> torch.Tensor:
        """Keys [..., heads, tokens, dim] with tiers [..., heads, dim] as they are quantized: UINT2 ones clipped."""
        if self.clip == 1:
            return keys
        return torch.where(tiers[..., None, :] == UINT2, clip_groups(keys, self.clip, self.group_size, -2), keys)

    def encode(self, keys: torch.Tensor, tiers: torch.Tensor) -> TieredBlock:
        """Pages [pages, heads, tokens, dim] with the tier of each channel, [pages, heads, dim], as bytes."""
        keys = self.prepare(keys.to(self.dtype), tiers)
        code4, low, high = quantize(keys, 4, self.group_size, -2)
        tier = tiers[..., None, :]
        # The upper bits of a UINT4 channel are `code >> 2`, not its 2-bit code: with the lower ones they are exact.
        codes = torch.where(tier == UINT4, code4 >> 2, narrow(code4, 4, 2))
        codes, low, high = (x.masked_fill(tier == BF16, 0) for x in (codes, low, high))
        by_channel = code4.transpose(-1, -2), keys.transpose(-1, -2)
        uint4, bf16 = (tiers == t for t in (UINT4, BF16))
        return TieredBlock(
            dense=self.dense.join(pack(codes, 2, dim=-2), low, high),
            counts=torch.stack([uint4.sum(-1), bf16.sum(-1)], dim=-1).to(torch.int16),
            low=pack(by_channel[0][uint4] & 3, 2),
            low_channel=uint4.nonzero()[:, -1].to(torch.uint8),
            exact=by_channel[1][bf16],
            exact_channel=bf16.nonzero()[:, -1].to(torch.uint8),
        )

    def decode(self, block: TieredBlock) -> torch.Tensor:
        """Inverse of `encode`: float32 [pages, heads, tokens, dim]."""
        codes, low, high = self.dense.fields(block.dense, 2)
        codes = unpack(codes, 2, self.tokens, dim=-2)
        at_low = self._places(block.counts[..., 0], block.low_channel)
        at_exact = self._places(block.counts[..., 1], block.exact_channel)
        # [pages, heads, dim, groups], so that a channel is one index away.
        low, high = (r.transpose(-1, -2).float() for r in (low, high))
        step = scale_of(low, high, 2)
        fine = scale_of(low[at_low], high[at_low], 4)
        step[at_low] = 4 * fine
        low, step = low.transpose(-1, -2), step.transpose(-1, -2)
        keys = decode_groups(codes, low, step, self.group_size, -2)
        by_channel = keys.transpose(-1, -2)
        fine = fine.repeat_interleave(self.group_size, dim=-1)[:, : self.tokens]
        by_channel[at_low] += unpack(block.low, 2, self.tokens).float() * fine
        by_channel[at_exact] = block.exact.float()
        return keys

    def _places(self, counts: torch.Tensor, channel: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Page, head and channel of each record."""
        pages, heads = counts.shape
        place = torch.arange(pages * heads, device=counts.device).repeat_interleave(counts.flatten().long())
        return place // heads, place % heads, channel.long()
