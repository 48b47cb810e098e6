# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Calibration data: texts from anywhere, packed into blocks of tokens without padding."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ..bundled import bundled_text


_LOADERS = {".jsonl": "json", ".parquet": "parquet"}


def load_texts(
    source: str | Path = "bundled", column: str = "text", split: str = "train", limit: int = 10_000
) -> list[str]:
    """Texts to calibrate on.

    Args:
        source: "bundled" (English essays that need no network), a local .txt file (one text), a local .jsonl or
            .parquet file, or the id of a dataset on the Hub, which is streamed.
        column: what the texts are called in a file or dataset.
        split: split of a Hub dataset.
        limit: at most so many texts are taken.

    Returns:
        list[str]

    Raises:
        ImportError: reading this source needs the `datasets` library.
        FileNotFoundError: a local file is not there.
        ValueError: the source has no such column.
    """
    if source == "bundled":
        return [bundled_text()]
    suffix = Path(source).suffix
    if suffix in (".txt", *_LOADERS) and not Path(source).is_file():
        raise FileNotFoundError(f"there is no file {source} to calibrate on")
    if suffix == ".txt":
        return [Path(source).read_text(encoding="utf-8")]
    datasets = _datasets(source)
    if suffix in _LOADERS:
        rows = datasets.load_dataset(_LOADERS[suffix], data_files=str(source), split="train", streaming=True)
    else:
        rows = datasets.load_dataset(str(source), split=split, streaming=True)
    return [_text(row, column, source) for row in itertools.islice(rows, limit)]


def token_blocks(
    texts: str | Iterable[str], tokenizer: PreTrainedTokenizerBase, n_samples: int, seq_len: int, seed: int = 0
) -> torch.Tensor:
    """Pack texts into blocks of tokens and draw some of them.

    Texts follow one another, an end-of-text token between them, and are cut every `seq_len` tokens; what is left over
    is dropped. If the tokenizer begins its inputs with a BOS token, every block begins with one, and has no other.

    Args:
        texts: one text or several.
        tokenizer: the model's tokenizer.
        n_samples: number of blocks.
        seq_len: tokens per block, BOS included.
        seed: which blocks are drawn, and in which order.

    Returns:
        int64 [n_samples, seq_len], no padding.

    Raises:
        ValueError: the texts are too short; the message says how many blocks they give.
    """
    if n_samples < 1 or seq_len < 2:
        raise ValueError(f"there must be 1 block of 2 tokens at least; got n_samples={n_samples}, seq_len={seq_len}")
    stream = _token_stream([texts] if isinstance(texts, str) else texts, tokenizer)
    start = _leading_tokens(tokenizer)
    size = seq_len - len(start)
    count = len(stream) // size
    if count < n_samples:
        raise ValueError(
            f"the texts have {len(stream)} tokens, enough for {count} blocks of {seq_len}, but {n_samples} are "
            "wanted; give more text, or lower n_samples or seq_len"
        )
    blocks = torch.tensor(stream[: count * size]).view(count, size)
    drawn = torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:n_samples]
    return torch.cat([torch.tensor(start, dtype=torch.long).expand(n_samples, -1), blocks[drawn]], dim=1)


def fingerprint(blocks: torch.Tensor) -> str:
    """sha256 of token ids [n_samples, seq_len], shape included, the same on every machine."""
    ids = blocks.cpu().numpy().astype("<i8")
    return hashlib.sha256(f"{tuple(ids.shape)}".encode() + ids.tobytes()).hexdigest()


def _token_stream(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens of all texts, ends marked, without any BOS."""
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    stream: list[int] = []
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        # A text may come from a chat template, which writes BOS itself.
        start = 1 if ids and bos is not None and ids[0] == bos and bos != eos else 0
        if stream and eos is not None:
            stream.append(eos)
        stream += ids[start:]
    return stream


def _leading_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """[BOS] if this tokenizer begins every input with it."""
    with_special = tokenizer("a").input_ids
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and with_special[:1] == [bos] else []


def _text(row: dict[str, Any], column: str, source: str | Path) -> str:
    if column not in row:
        raise ValueError(f"{source} has no column {column!r}; it has {', '.join(map(repr, row))}")
    return row[column]


def _datasets(source: str | Path) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            f"reading {source} needs the datasets library; run: pip install 'hf-kvq[calibrate]', or give a .txt file"
        ) from error
    return datasets
