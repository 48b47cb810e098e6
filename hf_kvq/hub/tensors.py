# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""kvq.safetensors: bytes from tensors, and tensors from bytes that are what the plan says they are."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

import safetensors.torch
import torch

from .errors import PlanError


TENSORS_FILE = "kvq.safetensors"
MAX_TENSORS_BYTES = 2**30

_MAX_HEADER_BYTES = 2**24
_NAME = re.compile(r"[0-9A-Za-z_][0-9A-Za-z_.-]{0,254}")
_DTYPES = {
    torch.bfloat16: "BF16",
    torch.bool: "BOOL",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.int8: "I8",
    torch.uint8: "U8",
}


def to_bytes(tensors: dict[str, torch.Tensor]) -> bytes:
    """The file that holds these tensors; the same tensors give the same bytes.

    Raises:
        PlanError: a name, a dtype or a value cannot be stored, or there is too much.
    """
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in _DTYPES:
            raise PlanError(f"tensor {name!r} must be a torch.Tensor of {', '.join(_DTYPES.values())}")
    _check_values(tensors)
    if sum(tensor.nbytes for tensor in tensors.values()) > MAX_TENSORS_BYTES - _MAX_HEADER_BYTES:
        raise PlanError(f"its tensors take more than {MAX_TENSORS_BYTES >> 20} MiB")
    # Clones: safetensors refuses tensors that share memory.
    own = {name: tensors[name].detach().cpu().clone(memory_format=torch.contiguous_format) for name in sorted(tensors)}
    return safetensors.torch.save(own, metadata={"format": "pt"})


def declaration(tensors: dict[str, torch.Tensor], data: bytes) -> dict[str, Any]:
    """What a plan says about its tensors file."""
    entries = {name: {"dtype": _DTYPES[x.dtype], "shape": list(x.shape)} for name, x in tensors.items()}
    return {"file": TENSORS_FILE, "size": len(data), "sha256": hashlib.sha256(data).hexdigest(), "entries": entries}


def from_bytes(data: bytes, declared: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Tensors of a file, once it is known to be the declared one.

    Raises:
        PlanError: the file is another one, damaged, or holds something else than what is declared.
    """
    if len(data) != declared["size"]:
        raise PlanError(f"it has {len(data):,} bytes, not the {declared['size']:,} that the plan says; fetch it again")
    if (digest := hashlib.sha256(data).hexdigest()) != declared["sha256"]:
        raise PlanError(f"its sha256 is {digest[:12]}..., not {declared['sha256'][:12]}... as the plan says")
    _check_header(data, declared["entries"])
    try:
        tensors = safetensors.torch.load(data)
    except Exception as error:  # the reader's own kinds of error are not documented
        raise PlanError(f"it is no valid safetensors file: {error}") from error
    if {name: (_DTYPES.get(x.dtype), list(x.shape)) for name, x in tensors.items()} != {
        name: (entry["dtype"], entry["shape"]) for name, entry in declared["entries"].items()
    }:
        raise PlanError("it does not hold the tensors that the plan lists")
    _check_values(tensors)
    return tensors


def _check_header(data: bytes, entries: dict[str, Any]) -> None:
    """Look at names, dtypes and shapes before anything is allocated."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or not 2 <= length <= min(len(data) - 8, _MAX_HEADER_BYTES):
        raise PlanError("it is no safetensors file, or cut off: its header is not there")
    try:
        header = json.loads(data[8 : 8 + length])
        found = {name: (x["dtype"], x["shape"]) for name, x in header.items() if name != "__metadata__"}
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        raise PlanError(f"its header cannot be read: {error!r:.200}") from error
    if found != {name: (entry["dtype"], entry["shape"]) for name, entry in entries.items()}:
        raise PlanError("its header does not list the tensors that the plan lists")


def _check_values(tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise PlanError(f"tensor name {ascii(name)[:80]} must consist of letters, digits, '_', '.' and '-'")
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise PlanError(f"tensor {name!r} holds numbers that are not finite")
