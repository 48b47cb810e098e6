# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""What `Cache.update` returns in place of K and V: a tensor that stands for them without holding them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map_only


if TYPE_CHECKING:
    from .layer import KVQLayer


class KVHandle(torch.Tensor):
    """Stands for the full keys or values of a layer: right shape, dtype and device, no storage.

    Attention that knows it asks its `layer` to attend over packed codes. Any other operation on it receives the
    dequantized tensor instead: always right, only slower. From then on the handle holds that tensor, so that nothing
    done in place is lost.
    """

    layer: KVQLayer
    is_value: bool
    dense: torch.Tensor | None
    change: int

    # Results of operations are ordinary tensors, never handles.
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, layer: KVQLayer, is_value: bool, like: torch.Tensor) -> KVHandle:
        batch, heads, _, dim = like.shape
        handle = torch.Tensor._make_wrapper_subclass(
            cls, (batch, heads, layer.columns, dim), dtype=like.dtype, device=like.device
        )
        handle.layer, handle.is_value, handle.dense, handle.change = layer, is_value, None, layer.changes
        return handle

    def dequantize(self) -> torch.Tensor:
        """The tensor this stands for, [batch, heads, columns, dim]; padding columns are zero.

        Raises:
            RuntimeError: the layer has changed since it returned this handle.
        """
        if self.dense is None:
            self.check_current()
            self.dense = self.layer.dequantize(self.is_value)
        return self.dense

    @property
    def is_current(self) -> bool:
        """Whether the layer is as it was when it returned this handle."""
        return self.change == self.layer.changes

    def check_current(self) -> None:
        """Raise `RuntimeError` if the layer has changed since it returned this handle."""
        if not self.is_current:
            raise RuntimeError(
                f"these {'values' if self.is_value else 'keys'} stand for {self.shape[2]} tokens of a cache layer "
                "that has changed since; use what `update` returned before the next `update` or other change"
            )

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None) -> Any:
        args, kwargs = tree_map_only(KVHandle, KVHandle.dequantize, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self) -> str:
        return f"KVHandle({'values' if self.is_value else 'keys'}, shape={tuple(self.shape)}, dtype={self.dtype})"
