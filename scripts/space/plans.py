# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Plans that visitors name or upload: data only, from public repositories or their own files, and nowhere else."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub.utils import HFValidationError, validate_repo_id

from hf_kvq import KVQPlan
from hf_kvq.hub.schema import PLAN_FILE
from hf_kvq.hub.tensors import TENSORS_FILE


_MOST_BYTES = 64 * 2**20


def plan_from_hub(repo_id: str, subfolder: str = "") -> KVQPlan:
    """The plan of a public repository; this server's own token is not used, nor are its folders.

    Raises:
        ValueError: the id or the folder is none, or the plan is no good.
        OSError: there is no such plan, or no way to it.
    """
    repo_id, subfolder = repo_id.strip(), subfolder.strip().strip("/")
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ValueError(f"a plan is named like user/repository; got {repo_id!r}") from error
    if repo_id.count("/") != 1 or Path(repo_id).exists():
        raise ValueError(f"a plan is named like user/repository; got {repo_id!r}")
    if ".." in subfolder.split("/") or "\\" in subfolder:
        raise ValueError(f"the folder within {repo_id} cannot be {subfolder!r}")
    return KVQPlan.from_pretrained(repo_id, subfolder=subfolder, token=False)


def plan_from_files(paths: Sequence[str]) -> KVQPlan:
    """The plan in uploaded files: its JSON, and its tensors if it has some.

    Raises:
        ValueError: they are other files, too large, or no plan.
    """
    by_suffix = {Path(path).suffix: Path(path) for path in paths}
    names = {".json": PLAN_FILE, ".safetensors": TENSORS_FILE}
    if ".json" not in by_suffix or by_suffix.keys() - names.keys() or len(by_suffix) != len(paths):
        raise ValueError(f"a plan is {PLAN_FILE}, with {TENSORS_FILE} where it has tensors; got {len(paths)} file(s)")
    if sum(path.stat().st_size for path in by_suffix.values()) > _MOST_BYTES:
        raise ValueError(f"a plan has at most {_MOST_BYTES >> 20} MiB here")
    with TemporaryDirectory() as folder:
        for suffix, path in by_suffix.items():
            shutil.copyfile(path, Path(folder, names[suffix]))
        return KVQPlan.from_pretrained(folder)
