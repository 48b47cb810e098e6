# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""What a page of packed keys and values looks like."""

from __future__ import annotations

from typing import NamedTuple

import torch


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class PageLayout(NamedTuple):
    """A page: the keys' block, then the values' block, of `tokens` tokens and all KV heads.

    At 16 bits a block is [heads, tokens, dim] in `DTYPES[dtype]`. Below, a block is packed codes, then every group's
    minimum, then every group's maximum in that dtype. Codes lie in planes along the tokens: of `m = tokens * bits / 8`
    byte rows, row `i` has token `i + p * m` in its bits `p * bits` and up. (min, max) are [heads, groups] with
    [ceil(tokens / key_group), key_dim] groups for keys per channel, [tokens, ceil(dim / group)] for keys per token and
    for values. A code stands for `min + code * (max - min) / (2^bits - 1)`.

    On a CPU byte rows [m, dim] are stored as [key_dim / 4, m, 4] for keys and [m / 4, value_dim, 4] for values; on
    other devices as [m / 2, dim, 2], 16-bit words.
    """

    heads: int
    tokens: int
    key_dim: int
    value_dim: int
    key_bits: int
    value_bits: int
    #: 1 if keys have groups along the tokens of a channel, 0 if along the channels of a token.
    key_per_channel: int
    key_group: int
    value_group: int
    #: Place in `DTYPES`.
    dtype: int

    def key_groups(self) -> int:
        """Groups of keys per head."""
        if self.key_per_channel:
            return -(-self.tokens // self.key_group) * self.key_dim
        return self.tokens * -(-self.key_dim // self.key_group)

    def value_groups(self) -> int:
        """Groups of values per head."""
        return self.tokens * -(-self.value_dim // self.value_group)

    def key_bytes(self) -> int:
        """Bytes of the keys' block, behind which the values' block starts."""
        return self._block_bytes(self.key_bits, self.key_dim, self.key_groups())

    def value_bytes(self) -> int:
        """Bytes of the values' block."""
        return self._block_bytes(self.value_bits, self.value_dim, self.value_groups())

    def _block_bytes(self, bits: int, dim: int, groups: int) -> int:
        size = DTYPES[self.dtype].itemsize
        if bits == 16:
            return self.heads * self.tokens * dim * size
        return self.heads * (self.tokens * bits // 8 * dim + 2 * groups * size)
