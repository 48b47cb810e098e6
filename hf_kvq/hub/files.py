# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Files that are there whole, or not at all."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def replace_file(path: Path, data: bytes) -> None:
    """Write a file so that nobody ever sees half of it.

    Raises:
        OSError: it cannot be written; what was there before still is.
    """
    with replacement(path) as scratch:
        scratch.write_bytes(data)


@contextmanager
def replacement(path: Path) -> Iterator[Path]:
    """A file to write, which takes the place of `path` once it is complete.

    Raises:
        OSError: it cannot be written; what was there before still is.
    """
    for number in itertools.count():
        scratch = path.with_name(f".{path.name}.{os.getpid()}-{number}")
        try:
            file = scratch.open("xb")
        except FileExistsError:
            continue
        break
    try:
        file.close()
        yield scratch
        with scratch.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
