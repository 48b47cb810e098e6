# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""One measurement per sample: shared by processes, kept on disk if wanted, and clear about memory."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel
from transformers.utils import logging

from ..hub.files import replace_file
from .data import fingerprint
from .distributed import gather, world


logger = logging.get_logger(__name__)

# Weights that stand for a parameter.
_DIGITS = 8


def over_samples(
    measure: Callable[[torch.Tensor], torch.Tensor],
    samples: torch.Tensor | Sequence[torch.Tensor],
    facts: dict[str, Any] | None = None,
    checkpoint: str | os.PathLike | None = None,
    desc: str | None = None,
) -> torch.Tensor:
    """What a function finds on each sample; reduce it by `.mean(0)`, `.amax(0)` or what is wanted.

    The processes of `accelerate launch` or `torchrun` take every n-th sample each, and all get all results, in the
    order of the samples: what comes out does not depend on their number.

    Args:
        measure: from token ids, [tokens], to a tensor of the same small shape for every sample.
        samples: token ids, [samples, tokens], or a sequence of [tokens].
        facts: all else that the results depend on, plain JSON; see `model_facts`.
        checkpoint: folder that keeps the results of finished samples, so that the same call goes on where an earlier
            one was interrupted. Results that were made with other facts are not used. See `remove_checkpoint`.
        desc: label of the progress bar, which the main process shows; None for no bar.

    Returns:
        float64 [samples, ...], on the CPU.

    Raises:
        MemoryError: a sample is too long for the memory of its device.
    """
    found = over_parts(lambda ids, part: measure(ids), samples, 1, facts, checkpoint, desc)
    return torch.stack([result for (result,) in found])


def over_parts(
    measure: Callable[[torch.Tensor, int], torch.Tensor],
    samples: torch.Tensor | Sequence[torch.Tensor],
    parts: int,
    facts: dict[str, Any] | None = None,
    checkpoint: str | os.PathLike | None = None,
    desc: str | None = None,
) -> list[list[torch.Tensor]]:
    """`over_samples` for a measurement that takes long: each sample in parts, which are shared and kept one by one.

    Args:
        measure: from token ids, [tokens], and the number of a part to a tensor.
        parts: how many there are.
        samples, facts, checkpoint, desc: see `over_samples`.

    Returns:
        By sample and part, float64, on the CPU.
    """
    rank, processes = world()
    store = None if checkpoint is None else Checkpoint(Path(checkpoint), facts or {})
    items = [(i, part) for i in range(len(samples)) for part in range(parts)][rank::processes]
    unit = "sample" if parts == 1 else "part"
    found = []
    for i, part in tqdm(items, desc=desc, disable=desc is None or rank > 0, unit=unit):
        result = store.load(i, part, samples[i]) if store else None
        if result is None:
            with explained_out_of_memory(f"lower the tokens per sample (now {len(samples[i])})"):
                result = measure(samples[i], part).double().cpu()
            if store:
                store.save(i, part, samples[i], result)
        found.append(((i, part), result))
    results = iter([result for _, result in sorted(gather(found), key=lambda pair: pair[0])])
    return [[next(results) for _ in range(parts)] for _ in range(len(samples))]


def remove_checkpoint(folder: str | os.PathLike) -> None:
    """Remove the files of a checkpoint, and its folder if nothing else is in it."""
    folder = Path(folder)
    for path in folder.glob("sample-*.json"):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def model_facts(model: PreTrainedModel) -> dict[str, Any]:
    """What tells a model from others, its weights included, as plain JSON; a few weights stand for each parameter."""
    weights = [
        [name, list(x.shape), [] if x.is_meta else x.detach().reshape(-1)[:_DIGITS].float().tolist()]
        for name, x in model.named_parameters()
    ]
    return {
        "model": model.config.get_text_config(decoder=True).model_type,
        "dtype": str(model.dtype),
        "weights": weights,
    }


def model_fingerprint(model: PreTrainedModel) -> str:
    """sha256 of `model_facts`."""
    return hashlib.sha256(json.dumps(model_facts(model)).encode()).hexdigest()


class Checkpoint:
    """A folder with a file for each finished part of a sample. Each file is there whole or not at all.

    Args:
        folder: made when the first result is saved.
        facts: what the results depend on besides the sample.
    """

    def __init__(self, folder: Path, facts: dict[str, Any]):
        self.folder = folder
        # As they come back from a file.
        self.facts = json.loads(json.dumps(facts))

    def load(self, index: int, part: int, ids: torch.Tensor) -> torch.Tensor | None:
        """The result of a part of a sample; None if there is none that was made from the same."""
        try:
            values = json.loads(self._path(index, part).read_bytes())
            kept, result = dict(values["facts"]), torch.tensor(values["result"], dtype=torch.float64)
        except (OSError, ValueError, TypeError, KeyError):
            return None
        facts = self._all_facts(ids)
        if changed := [name for name in facts.keys() | kept.keys() if facts.get(name) != kept.get(name)]:
            logger.warning_once(
                f"{self.folder} was left by a calibration with another {', '.join(sorted(changed))}; it starts anew"
            )
            return None
        return result

    def save(self, index: int, part: int, ids: torch.Tensor, result: torch.Tensor) -> None:
        """Keep the result of a part of a sample."""
        self.folder.mkdir(parents=True, exist_ok=True)
        values = {"facts": self._all_facts(ids), "result": result.tolist()}
        replace_file(self._path(index, part), json.dumps(values).encode())

    def _path(self, index: int, part: int) -> Path:
        return self.folder / f"sample-{index:05}-{part:03}.json"

    def _all_facts(self, ids: torch.Tensor) -> dict[str, Any]:
        return {**self.facts, "sample": fingerprint(ids[None])}


@contextlib.contextmanager
def explained_out_of_memory(advice: str) -> Iterator[None]:
    """Turn the devices' ways of being out of memory into a `MemoryError` that says what to do."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryError(f"out of memory; {advice} ({' '.join(str(error).split())[:200]})") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory of a device or of the machine has run out."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    # On a CPU PyTorch has no class of its own for it.
    return isinstance(error, RuntimeError) and any(
        sign in str(error) for sign in ("DefaultCPUAllocator", "can't allocate memory", "not enough memory")
    )
