# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Finds the plan that lies next to a model's weights, in its folder or its repository on the Hub."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies
from weakref import WeakKeyDictionary

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from tqdm.auto import tqdm
from transformers import PreTrainedModel
from transformers.utils import logging

from .errors import PlanUnavailableError
from .plan import KVQPlan
from .remote import LIBRARY, explained
from .schema import PLAN_FILE


logger = logging.get_logger(__name__)

# config.json is there in any case, and in the cache already; asked for so that the client finds something.
_PATTERNS = [f"kvq/{PLAN_FILE}", f"kvq/*/{PLAN_FILE}", "config.json"]


@dataclass
class _Memory:
    """What is known about one model: plans by where they are, and what has been logged."""

    plans: dict[tuple[Any, ...], KVQPlan | None] = field(default_factory=dict)
    said: set[str] = field(default_factory=set)


_memories: WeakKeyDictionary[PreTrainedModel, _Memory] = WeakKeyDictionary()


class _Silent(tqdm):
    def __init__(self, *args: Any, **kwargs: Any):
        kwargs.pop("name", None)
        super().__init__(*args, **{**kwargs, "disable": True})


def options_for(model: PreTrainedModel, method: str, options: Any) -> Any:
    """The options that a cache of `model` is to be made with: those given, and a plan if there is one.

    An explicit `plan` comes first, then what lies next to the model. Options in the form of an object say everything
    already; `plan=None` and the environment variable HF_KVQ_DISCOVERY=0 turn the search off.

    Raises:
        PlanError, PlanUnavailableError: as `KVQPlan.from_pretrained`; nothing found is no error.
    """
    memory = _memories.setdefault(model, _Memory())
    if options is not None and not isinstance(options, dict):
        return options
    if options and "plan" in options:
        plan = options["plan"]
        if isinstance(plan, str) and not Path(plan).expanduser().is_dir():
            if (plan,) not in memory.plans:
                memory.plans[(plan,)] = KVQPlan.from_pretrained(plan)
            return {**options, "plan": memory.plans[(plan,)]}
        return options
    if os.environ.get("HF_KVQ_DISCOVERY", "1").lower() in ("0", "false", "no", "off"):
        return options
    plan = _find(model, method, memory)
    return options if plan is None else {"plan": plan, **(options or {})}


def find(model: PreTrainedModel, method: str) -> KVQPlan | None:
    """The plan of `method` next to the model's weights: in its folder's `kvq/`, or in its repository at its revision.

    Raises:
        PlanError: there is one, but it cannot be used.
    """
    return _find(model, method, _memories.setdefault(model, _Memory()))


def _find(model: PreTrainedModel, method: str, memory: _Memory) -> KVQPlan | None:
    name, commit = getattr(model.config, "_name_or_path", ""), getattr(model.config, "_commit_hash", None)
    if name and Path(name).is_dir():
        # A look at the disk costs nothing, and a plan saved since is found.
        return _choose(Path(name), name, name, method, memory)
    if not name:
        return None
    if commit is None:
        _say(
            memory,
            f"{method} uses its own defaults, as nobody knows which revision of {name} this model is; import "
            "hf_kvq before you load it",
        )
        return None
    key = (name, commit, method)
    if key not in memory.plans:
        where = f"{name} at {commit[:12]}"
        try:
            memory.plans[key] = _choose(_fetch(name, commit), name, where, method, memory, commit)
        except PlanUnavailableError as error:
            _say(memory, f"{method} uses its own defaults, as there is no way to look for a plan: {error}", True)
            memory.plans[key] = None
    return memory.plans[key]


def _fetch(repo: str, commit: str) -> Path | None:
    """The cached snapshot of a repository, with all its plans; None if there is none in the cache while offline.

    One listing, and that only once per commit: the client keeps it on disk.
    """
    offline = constants.HF_HUB_OFFLINE or not _is_reachable(constants.ENDPOINT)
    with explained(repo, "kvq/", commit, None):
        try:
            return Path(
                snapshot_download(
                    repo,
                    revision=commit,
                    allow_patterns=_PATTERNS,
                    local_files_only=offline,
                    tqdm_class=_Silent,
                    **LIBRARY,
                )
            )
        except LocalEntryNotFoundError:
            if offline:
                return None
            raise


def _is_reachable(endpoint: str) -> bool:
    """Whether the Hub's machine answers at all: without a network the client would try for half a minute."""
    if getproxies():
        return True
    url = urlsplit(endpoint)
    try:
        socket.create_connection((url.hostname, url.port or (80 if url.scheme == "http" else 443)), timeout=3).close()
    except OSError:
        return False
    return True


def _choose(
    folder: Path | None, source: str, where: str, method: str, memory: _Memory, revision: str | None = None
) -> KVQPlan | None:
    """The plan in `kvq/` itself, else the only one of this method below it.

    Args:
        folder: where the files are.
        source, revision: what to load from.
        where: what to call it.
    """
    files = [] if folder is None else [folder / "kvq" / PLAN_FILE, *sorted(folder.glob(f"kvq/*/{PLAN_FILE}"))]
    places = [file.parent.relative_to(folder).as_posix() for file in files if _may_be(file, method)]
    if len(places) > 1 and "kvq" not in places:
        _say(
            memory,
            f"{method} uses its own defaults, as {where} has several plans for it: {', '.join(places)}. Choose one "
            "with cache_config={'plan': KVQPlan.from_pretrained(..., subfolder=...)}",
            is_warning=True,
        )
        return None
    if not places:
        _say(memory, f"{method} uses its own defaults, as no plan for it was found in {where}")
        return None
    plan = KVQPlan.from_pretrained(source, subfolder=places[0], revision=revision)
    _say(memory, f"{method} uses the plan {places[0]} of {where}: {plan!r}")
    return plan


def _may_be(file: Path, method: str) -> bool:
    """Whether a file is a plan of this method; a damaged one may be."""
    try:
        values = json.loads(file.read_bytes())
    except FileNotFoundError:
        return False
    except (OSError, ValueError, RecursionError):
        return True
    return not isinstance(values, dict) or values.get("method") in (method, None)


def _say(memory: _Memory, message: str, is_warning: bool = False) -> None:
    if message not in memory.said:
        memory.said.add(message)
        (logger.warning if is_warning else logger.info)(message)
