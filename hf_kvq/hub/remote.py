# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Where plans are: folders and repositories of the Hub. Every error says where, and what to do."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import (
    CommitInfo,
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    constants,
    hf_hub_download,
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ..version import __version__
from . import cards
from .errors import PlanError, PlanUnavailableError
from .schema import PLAN_FILE
from .tensors import TENSORS_FILE


if TYPE_CHECKING:
    from .plan import KVQPlan

LIBRARY = {"library_name": "hf_kvq", "library_version": __version__}

_COMMIT = re.compile(r"[0-9a-f]{40}")
# The client's own network errors have this base; which library it comes from depends on the client's version.
_NETWORK_ERRORS = tuple(base for base in HfHubHTTPError.__bases__ if base is not OSError)


@dataclass
class Folder:
    """A plan on this machine."""

    path: Path

    def read(self, name: str, most: int) -> bytes:
        """A file's bytes.

        Raises:
            PlanUnavailableError: it is not there, or cannot be read.
            PlanError: it has more than `most` bytes.
        """
        file = self.path / name
        try:
            return _read(file, most)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and name == PLAN_FILE:
                raise PlanUnavailableError(f"there is no {name} in {self.path}{_others(self._plans())}") from error
            raise PlanUnavailableError(f"{file} cannot be read: {error.strerror or error}") from error

    def describe(self, name: str) -> str:
        return str(self.path / name)

    def _plans(self) -> list[str]:
        found = self.path.glob(f"kvq/**/{PLAN_FILE}")
        return sorted(file.parent.relative_to(self.path).as_posix() for file in found)


@dataclass
class Repository:
    """A plan on the Hub. All files come from the commit that the first one came from."""

    id: str
    subfolder: str
    revision: str | None
    client: dict[str, Any] = field(default_factory=dict)

    def read(self, name: str, most: int) -> bytes:
        """A file's bytes; see `Folder.read`."""
        with explained(self.id, self._path(name), self.revision, self.client.get("token")):
            try:
                file = hf_hub_download(
                    self.id,
                    name,
                    subfolder=self.subfolder or None,
                    revision=self.revision,
                    **LIBRARY,
                    **self.client,
                )
            except EntryNotFoundError as error:
                if isinstance(error, LocalEntryNotFoundError) or name != PLAN_FILE:
                    raise
                raise PlanUnavailableError(f"{self._missing(name)}{_others(self._plans())}") from error
        commit = Path(file).parts[-2 - len(Path(self.subfolder).parts)]
        if _COMMIT.fullmatch(commit):
            self.revision = commit
        return _read(Path(file), most)

    def describe(self, name: str) -> str:
        return f"{self._path(name)} of {self.id} at {self.revision or 'main'}"

    def _path(self, name: str) -> str:
        return f"{self.subfolder}/{name}" if self.subfolder else name

    def _missing(self, name: str) -> str:
        return f"repository {self.id} has no {self._path(name)} at revision {self.revision or 'main'}"

    def _plans(self) -> list[str]:
        """Other folders with plans, to name them in an error; none if there is no way to know."""
        try:
            files = HfApi(token=self.client.get("token")).list_repo_files(self.id, revision=self.revision)
        except (OSError, *_NETWORK_ERRORS):
            return []
        return sorted(file[: -len(PLAN_FILE) - 1] for file in files if file.endswith(f"/{PLAN_FILE}"))


def open_source(
    name: str | os.PathLike, subfolder: str = "", revision: str | None = None, **client: Any
) -> Folder | Repository:
    """Where a plan is, by what the user calls it.

    Raises:
        PlanUnavailableError: it looks like a folder, and there is none.
        ValueError: `subfolder` leads elsewhere.
    """
    subfolder = clean_path(subfolder, "subfolder")
    folder = Path(name).expanduser()
    if folder.is_dir():
        return Folder(folder / subfolder)
    if isinstance(name, os.PathLike) or re.match(r"[./~\\]|[A-Za-z]:", name) or name.count("/") > 1:
        raise PlanUnavailableError(f"there is no folder {name}")
    return Repository(name, subfolder, revision, client)


def push(
    plan: KVQPlan,
    repo_id: str,
    path_in_repo: str | None,
    private: bool | None,
    token: str | bool | None,
    revision: str | None,
    create_pr: bool,
    commit_message: str,
) -> CommitInfo:
    """Upload a plan in one commit on top of what was looked at; see `KVQPlan.push_to_hub`."""
    prefix = clean_path(path_in_repo or "", "path_in_repo")
    api = HfApi(token=token, **LIBRARY)
    with explained(repo_id, None, revision, token):
        if not create_pr:
            api.create_repo(repo_id, private=private, exist_ok=True)
            if revision is not None and not revision.startswith("refs/"):
                api.create_branch(repo_id, branch=revision, exist_ok=True)
        info = api.repo_info(repo_id, revision=revision)
        present = {file.rfilename for file in info.siblings or []}
        readme = None
        if cards.README in present:
            file = hf_hub_download(repo_id, cards.README, revision=info.sha, token=token, **LIBRARY)
            readme = Path(file).read_bytes()
        is_own = not prefix and "config.json" not in present
        wanted: dict[str, bytes | None] = {TENSORS_FILE: None, **plan.files()}
        if prefix:
            wanted = {f"{prefix}/{name}": data for name, data in wanted.items()}
        wanted |= cards.changes(plan, repo_id, readme, is_own)
        return api.create_commit(
            repo_id,
            [
                CommitOperationDelete(path) if data is None else CommitOperationAdd(path, data)
                for path, data in wanted.items()
                if data is not None or path in present
            ],
            commit_message=commit_message,
            revision=revision,
            create_pr=create_pr,
            parent_commit=info.sha,
        )


def clean_path(path: str, name: str) -> str:
    """A relative path within a repository, without a slash at its end.

    Raises:
        ValueError: it leads elsewhere.
    """
    path = path.removesuffix("/")
    parts = path.split("/")
    if path and (any(part in ("", ".", "..") for part in parts) or re.search(r"[\\:\x00-\x1f]", path)):
        raise ValueError(f"{name} must be a plain path within the repository, such as 'kvq/pmkvq'; got {path!r}")
    return path


@contextmanager
def explained(repo: str, file: str | None, revision: str | None, token: str | bool | None) -> Iterator[None]:
    """Turn the client's errors into one of ours that says where it happened, and what to do."""
    try:
        yield
    except (PlanError, PlanUnavailableError):
        raise
    except (OSError, ValueError, *_NETWORK_ERRORS) as error:
        where = f"{f'{file} of {repo}' if file else repo} at revision {revision or 'main'}"
        login = "check what your token may do" if token else "log in with `hf auth login`, or pass token="
        raise PlanUnavailableError(f"{where}: {_reason(error, repo, login)}") from error


def _reason(error: BaseException, repo: str, login: str) -> str:
    # From the special to the general: many of these classes derive from others.
    if isinstance(error, GatedRepoError):
        return f"the repository is gated; ask for access at {constants.ENDPOINT}/{repo}, then {login}"
    if isinstance(error, RepositoryNotFoundError):
        return f"there is no repository {repo}, or it is private; check the name, or {login}"
    if isinstance(error, RevisionNotFoundError):
        return "the repository has no such branch, tag or commit"
    if isinstance(error, LocalEntryNotFoundError):
        return f"it is not in the cache, and the Hub {_why(error)}"
    if isinstance(error, EntryNotFoundError):
        return "the repository has no such file at this revision"
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set; unset it to reach the Hub"
    if isinstance(error, HFValidationError):
        return f"{repo!r} is neither a folder nor the id of a repository"
    if isinstance(error, HfHubHTTPError):
        return f"{_status(error)}; {login}"
    if isinstance(error, ValueError):
        # With force_download, the client hides the reason behind one of these.
        return _line(error) if error.__cause__ is None else _reason(error.__cause__, repo, login)
    return f"{_line(error)}; check the network, HF_ENDPOINT and the disk"


def _why(error: Exception) -> str:
    if constants.HF_HUB_OFFLINE:
        return "must not be asked: HF_HUB_OFFLINE is set; fetch it once without"
    if error.__cause__ is None:
        return "must not be asked: local_files_only is set; fetch it once without"
    return f"cannot be reached ({_line(error.__cause__)}); check the network, a proxy and HF_ENDPOINT"


def _status(error: HfHubHTTPError) -> str:
    status = getattr(error.response, "status_code", None)
    if status == 412:
        return "somebody else changed the repository meanwhile; try again"
    if status in (401, 403):
        return f"the Hub refuses this ({status}): {_line(error)}"
    return f"the Hub answered {status}: {_line(error)}"


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:297]}..."


def _others(plans: list[str]) -> str:
    return f"; it has plans in {', '.join(plans[:8])}: choose one with subfolder=" if plans else ""


def _read(path: Path, most: int) -> bytes:
    if (size := path.stat().st_size) > most:
        raise PlanError(f"it has {size:,} bytes, and at most {most:,} are expected")
    return path.read_bytes()
