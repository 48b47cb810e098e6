# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Packing pages and narrowing them, by kernels where there are some and by the codecs elsewhere: the same bytes."""

from __future__ import annotations

import torch
from transformers.utils import logging

import hf_kvq_kernels
from hf_kvq_kernels import BYTE_ORDERS

from ..codecs import BlockCodec
from ..codecs.tiered import TieredBlock, TieredKeyCodec
from . import selfcheck
from .fused import page_layout


logger = logging.get_logger(__name__)

# Tokens that the codecs convert at once; bounds their working memory.
_TOKENS_AT_ONCE = 2048


def encode_blocks(codec: BlockCodec, x: torch.Tensor, bits: int, out: torch.Tensor, kernel: str) -> None:
    """Write blocks [rows, blocks, heads, tokens, dim] to uint8 [rows, blocks, nbytes(bits)]."""
    is_fused, step = bits != 16 and _is_fused(codec, x, kernel), max(1, _TOKENS_AT_ONCE // codec.tokens)
    if is_fused and codec.is_plain:
        step = max(1, x.shape[1])
    for i in range(0, x.shape[1], step):
        data, slots = x[:, i : i + step], out[:, i : i + step]
        if not is_fused:
            slots.copy_(codec.encode(data, bits))
            continue
        how = codec.axis == "channel", codec.group_size, BYTE_ORDERS.index(codec.byte_order), codec.is_centered(bits)
        hf_kvq_kernels.quantize_(codec.prepare(data), slots, bits, *how)


def encode_tiers(
    codec: TieredKeyCodec, keys: torch.Tensor, tiers: torch.Tensor, out: torch.Tensor, kernel: str
) -> TieredBlock:
    """Write the regular part of blocks [rows, heads, tokens, dim] to uint8 [rows, bytes].

    Args:
        tiers: of each block's channels, [rows, heads, dim].

    Returns:
        All blocks; `dense` is `out`, or equal to it.
    """
    if _is_fused(codec.dense, keys, kernel):
        order = BYTE_ORDERS.index(codec.byte_order)
        keys = codec.prepare(keys, tiers)
        *records, counts = hf_kvq_kernels.quantize_tiers_(keys, tiers, out, codec.group_size, order)
        return TieredBlock(out, counts, *records)
    block = codec.encode(keys, tiers)
    out.copy_(block.dense)
    return block


def shrink_pages(
    data: torch.Tensor,
    pages: int,
    codecs: tuple[BlockCodec, BlockCodec],
    bits: int,
    target_bits: int,
    kernel: str,
    floors: tuple[int, int] = (2, 2),
) -> None:
    """Bring the first pages of uint8 [rows, bytes] from `bits` to `target_bits`, in place.

    A page is a block of keys and one of values, neither of which goes below its floor.
    """
    keys, values = codecs
    old, new = ([max(width, floor) for floor in floors] for width in (bits, target_bits))
    size, target_size = (sum(codec.nbytes(w) for codec, w in zip(codecs, widths)) for widths in (old, new))
    # A narrower page never lies behind its wider self, but where groups of one or two elements make it larger: then
    # all pages are read before the first is written.
    in_place, is_even = target_size <= size, max(floors) <= target_bits
    if in_place and is_even and (bits < 16 or (keys.is_plain and values.is_plain)):
        sample = data.new_empty(0, dtype=keys.dtype)
        if all(_is_fused(codec, sample, kernel) for codec in codecs):
            layout, orders = page_layout(keys, values, (bits, bits)), (BYTE_ORDERS.index(c.byte_order) for c in codecs)
            hf_kvq_kernels.shrink_(data, pages, layout, target_bits, *orders, keys.is_centered(target_bits))
            return
    step = max(1, _TOKENS_AT_ONCE // keys.tokens if in_place else pages)
    for i in range(0, pages, step):
        stop = min(i + step, pages)
        page = data[:, i * size : stop * size].unflatten(1, (-1, size))
        sides = page.tensor_split([keys.nbytes(old[0])], dim=-1)
        narrowed = [_narrowed(*side, kernel) for side in zip(codecs, sides, old, new)]
        data[:, i * target_size : stop * target_size] = torch.cat(narrowed, dim=-1).flatten(1)


def _narrowed(codec: BlockCodec, blocks: torch.Tensor, bits: int, target_bits: int, kernel: str) -> torch.Tensor:
    """Blocks uint8 [rows, blocks, bytes] at another width."""
    if bits == 16 > target_bits:
        # What has been narrowed and what comes in narrow must be quantized by the same means.
        x = blocks.view(codec.dtype).unflatten(-1, (codec.heads, codec.tokens, codec.dim))
        out = blocks.new_empty(*blocks.shape[:2], codec.nbytes(target_bits))
        encode_blocks(codec, x, target_bits, out, kernel)
        return out
    while bits > target_bits:
        bits //= 2
        blocks = codec.shrink(blocks, bits)
    return blocks


def _is_fused(codec: BlockCodec, x: torch.Tensor, kernel: str) -> bool:
    if kernel == "torch" or x.dtype != codec.dtype:
        return False
    order, along = BYTE_ORDERS.index(codec.byte_order), codec.tokens if codec.axis == "channel" else codec.dim
    if hf_kvq_kernels.why_not_packing(x, order, codec.tokens, along, codec.group_size) is not None:
        return False
    if x.device.type == "cpu":
        return True
    wrong = selfcheck.packing_failure(x.device, (codec.byte_order, codec.byte_order))
    if wrong is not None:
        logger.warning_once(
            f"a quantized cache is packed in plain torch, which is slower; its kernels cannot be used: {wrong}"
        )
    return wrong is None
