# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Repositories of the Hub stand-in, in memory: commits, branches, tags and what is in them."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field
from urllib.parse import unquote


class HubError(Exception):
    """An answer with a status and, as the real Hub does, the kind of error in a header."""

    def __init__(self, status: int, code: str | None, message: str, **headers: str):
        super().__init__(message)
        self.status = status
        self.headers = {"X-Error-Message": message, **headers, **({"X-Error-Code": code} if code else {})}


@dataclass
class Entry:
    data: bytes | None  # None: only the xet storage has it
    sha256: str
    size: int
    is_lfs: bool

    @property
    def oid(self) -> str:
        data = self.data
        if self.is_lfs:
            data = f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {self.size}\n".encode()
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class Repo:
    owner: str
    private: bool = False
    gated: bool = False
    kind: str = "model"
    #: Of a Space.
    variables: dict[str, str] = field(default_factory=dict)
    hardware: str = "cpu-basic"
    commits: dict[str, dict[str, Entry]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)

    def commit(self, ref: str, files: dict[str, Entry]) -> str:
        sha = hashlib.sha1(f"{time.time_ns()} {len(self.commits)} {ref}".encode()).hexdigest()
        self.commits[sha], self.refs[ref] = files, sha
        return sha

    def sha(self, revision: str) -> str:
        revision = unquote(revision)
        if revision in self.commits:
            return revision
        if revision not in self.refs:
            raise HubError(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return self.refs[revision]


def entry(path: str, data: bytes) -> Entry:
    return Entry(data, hashlib.sha256(data).hexdigest(), len(data), is_lfs(path))


def is_lfs(path: str) -> bool:
    return path.endswith((".safetensors", ".bin"))
