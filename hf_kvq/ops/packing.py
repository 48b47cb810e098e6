# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Packing pages and narrowing them, by kernels where there are some and by the codecs elsewhere: the same bytes."""

from __future__ import annotations

import torch

import hf_kvq_kernels
from hf_kvq_kernels import BYTE_ORDERS

from ..codecs import BlockCodec
from ..codecs.tiered import TieredBlock, TieredKeyCodec
from .fused import page_layout


# Tokens that the codecs convert at once; bounds their working memory.
_TOKENS_AT_ONCE = 2048


def encode_blocks(codec: BlockCodec, x: torch.Tensor, bits: int, out: torch.Tensor, kernel: str) -> None:
    """Write blocks [rows, blocks, heads, tokens, dim] to uint8 [rows, blocks, nbytes(bits)]."""
    if bits != 16 and _is_fused(codec, x, kernel):
        x = codec.prepare(x)
        order = BYTE_ORDERS.index(codec.byte_order)
        centered = codec.is_centered(bits)
        hf_kvq_kernels.quantize_(x, out, bits, codec.axis == "channel", codec.group_size, order, centered)
        return
    step = max(1, _TOKENS_AT_ONCE // codec.tokens)
    for i in range(0, x.shape[1], step):
        out[:, i : i + step] = codec.encode(x[:, i : i + step], bits)


def encode_tiers(
    codec: TieredKeyCodec, keys: torch.Tensor, tiers: torch.Tensor, out: torch.Tensor, kernel: str
) -> TieredBlock:
    """Write the regular part of one block [heads, tokens, dim] to uint8 [bytes]; its tiers are [heads, dim]."""
    if _is_fused(codec, keys, kernel):
        order = BYTE_ORDERS.index(codec.byte_order)
        keys = codec.prepare(keys, tiers)
        records = hf_kvq_kernels.quantize_tiers_(keys, tiers, out, codec.group_size, order)
        counts = torch.stack([(tiers == tier).sum(-1) for tier in (1, 2)], dim=-1).to(torch.int16)
        return TieredBlock(out[None], counts[None], *records)
    block = codec.encode(keys[None], tiers[None])
    out.copy_(block.dense[0])
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

    A page is a block of keys and one of values, neither of which goes below its floor. A narrower page never lies
    behind its wider self.
    """
    keys, values = codecs
    is_even = max(floors) <= target_bits
    if kernel != "torch" and is_even and (bits < 16 or (keys.is_plain and values.is_plain)):
        orders = [BYTE_ORDERS.index(codec.byte_order) for codec in codecs]
        if hf_kvq_kernels.why_not_packing(data.new_empty(0, dtype=keys.dtype), *orders) is None:
            layout, centered = page_layout(keys, values, (bits, bits)), keys.is_centered(target_bits)
            hf_kvq_kernels.shrink_(data, pages, layout, target_bits, *orders, centered)
            return

    def widths(width: int) -> list[int]:
        return [max(width, floor) for floor in floors]

    size, target_size = (
        sum(codec.nbytes(w) for codec, w in zip(codecs, widths(width))) for width in (bits, target_bits)
    )
    step = max(1, _TOKENS_AT_ONCE // keys.tokens)
    for i in range(0, pages, step):
        stop, width = min(i + step, pages), bits
        page = data[:, i * size : stop * size].unflatten(1, (-1, size))
        while width > target_bits:
            old, new = widths(width), widths(width // 2)
            blocks = page.tensor_split([keys.nbytes(old[0])], dim=-1)
            page = torch.cat(
                [block if old[i] == new[i] else codecs[i].shrink(block, new[i]) for i, block in enumerate(blocks)],
                dim=-1,
            )
            width //= 2
        data[:, i * target_size : stop * target_size] = page.flatten(1)


def _is_fused(codec: BlockCodec | TieredKeyCodec, x: torch.Tensor, kernel: str) -> bool:
    if kernel == "torch" or x.dtype != codec.dtype:
        return False
    return hf_kvq_kernels.why_not_packing(x, BYTE_ORDERS.index(codec.byte_order)) is None
