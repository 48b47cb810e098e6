# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""A Hub on loopback: as much of its HTTP protocol as huggingface_hub uses for models and Spaces, in memory.

The token `hf_user_NAME` belongs to the user NAME. What the real Hub answers where is noted at each route.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from store import Entry, HubError, Repo, entry, is_lfs


ROUTES: list[tuple[str, re.Pattern, Callable]] = []


class Hub(ThreadingHTTPServer):
    """Start with `with Hub() as hub`; `hub.url` is the endpoint, `hub.requests` what was asked for."""

    daemon_threads = True

    def __init__(self, port: int = 0):
        super().__init__(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.repos: dict[str, Repo] = {}
        self.lfs: dict[str, bytes] = {}
        self.requests: list[str] = []
        #: Folder of hf_xet's local storage, and xet hashes by sha256.
        self.xet: str | None = None
        self.xet_hashes: dict[str, str] = {}
        #: Called once, right before the next commit is made.
        self.before_commit: Callable[[], None] | None = None
        #: Serve other sizes or no X-Repo-Commit, as a bad proxy does.
        self.dropped_headers: set[str] = set()

    def __enter__(self) -> Hub:
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()
        self.server_close()

    def add(self, repo_id: str, files: dict[str, bytes], ref: str = "main", **options: Any) -> str:
        """Put files into a repository from behind; returns the commit."""
        repo = self.repos.setdefault(repo_id, Repo(repo_id.split("/")[0]))
        for name, value in options.items():
            setattr(repo, name, value)
        old = repo.commits.get(repo.refs.get(ref, ""), {})
        return repo.commit(ref, {**old, **{path: entry(path, data) for path, data in files.items()}})

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes | None]:
        """What a repository holds."""
        repo = self.repos[repo_id]
        return {path: item.data for path, item in repo.commits[repo.sha(revision)].items()}


def route(methods: str, pattern: str) -> Callable[[Callable], Callable]:
    def add(function: Callable) -> Callable:
        pattern_ = pattern.replace("/api/models/ID", "/api/(?:models|spaces)/ID").replace("^ID", "(?:/spaces)?/ID")
        pattern_ = pattern_.replace("ID", r"(?P<repo_id>[^/]+/[^/]+)").replace("REV", r"(?P<rev>[^/]+)")
        ROUTES.append((methods, re.compile(pattern_), function))
        return function

    return add


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *args: Any) -> None:
        pass

    def serve(self) -> None:
        url = urlsplit(self.path)
        self.query = {key: values[0] for key, values in parse_qs(url.query).items()}
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.requests.append(f"{self.command} {self.path}")
        try:
            for methods, pattern, function in ROUTES:
                if self.command in methods.split("|") and (match := pattern.fullmatch(url.path)):
                    return function(self, **match.groupdict())
            raise HubError(404, None, f"no route for {self.command} {self.path}")
        except HubError as error:
            self.answer({"error": str(error)}, error.status, **error.headers)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = serve

    def answer(self, body: Any = None, status: int = 200, **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            if name not in self.server.dropped_headers:
                self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    @property
    def user(self) -> str | None:
        match = re.fullmatch(r"Bearer hf_user_(\w+)", self.headers.get("Authorization", ""))
        return match.group(1) if match else None

    def repo(self, repo_id: str, write: bool = False) -> Repo:
        """A repository, if the user may see it: a hidden one is reported as missing."""
        repo = self.server.repos.get(repo_id)
        is_other = repo is not None and repo.kind != ("space" if "/spaces/" in self.path else "model")
        if repo is None or is_other or repo.private and self.user != repo.owner:
            raise HubError(404 if self.user else 401, "RepoNotFound", "Repository not found")
        if write and self.user != repo.owner and "create_pr" not in self.query:
            raise HubError(403 if self.user else 401, None, "You have no permission to write here")
        return repo

    def contents(self, repo_id: str, rev: str) -> tuple[str, dict[str, Entry]]:
        repo = self.repo(repo_id)
        return (sha := repo.sha(rev)), repo.commits[sha]


@route("GET", "/api/whoami-v2")
def whoami(self: Handler) -> None:
    if self.user is None:
        raise HubError(401, None, "Invalid username or password.")
    self.answer({"name": self.user, "type": "user", "orgs": [], "auth": {"type": "access_token"}})


@route("POST", "/api/repos/create")
def create(self: Handler) -> None:
    asked = json.loads(self.body)
    repo_id = f"{asked.get('organization') or self.user}/{asked['name']}"
    if self.user is None:
        raise HubError(401, None, "Invalid username or password.")
    spaces = "spaces/" if asked.get("type") == "space" else ""
    url = {"url": f"{self.server.url}/{spaces}{repo_id}"}
    if repo_id in self.server.repos:
        return self.answer({"error": "You already created this model repo", **url}, 409)
    if repo_id.split("/")[0] != self.user:
        raise HubError(403, None, "You have no rights to create a model under this namespace")
    private = asked.get("visibility") == "private" or bool(asked.get("private"))
    kind = asked.get("type") or "model"
    if kind == "space" and not asked.get("sdk"):
        raise HubError(400, None, "A Space needs an sdk")
    self.server.add(repo_id, {".gitattributes": b"*.safetensors filter=lfs\n"}, private=private, kind=kind)
    self.answer(url)


@route("POST", "/api/validate-yaml")
def validate(self: Handler) -> None:
    self.answer({"errors": [], "warnings": []})


@route("GET|HEAD", "/api/models/ID(/revision/REV)?")
def info(self: Handler, repo_id: str, rev: str | None) -> None:
    sha, files = self.contents(repo_id, rev or "main")
    siblings = [{"rfilename": path} for path in files]
    self.answer(
        {
            "id": repo_id,
            "modelId": repo_id,
            "sha": sha,
            "siblings": siblings,
            "tags": [],
            "private": self.server.repos[repo_id].private,
        }
    )


@route("POST", "/api/spaces/ID/(?P<what>variables|hardware)")
def settings(self: Handler, repo_id: str, what: str) -> None:
    repo, asked = self.repo(repo_id, write=True), json.loads(self.body)
    if what == "variables":
        repo.variables[asked["key"]] = asked["value"]
        return self.answer({key: {"key": key, "value": value} for key, value in repo.variables.items()})
    if asked["flavor"] != "cpu-basic" and not repo.owner.endswith("pro"):
        raise HubError(402, None, "Payment required")
    repo.hardware = asked["flavor"]
    self.answer({"stage": "BUILDING", "hardware": {"current": None, "requested": repo.hardware}})


@route("GET", "/api/models/ID/tree/REV(?P<sub>/.*)?")
def tree(self: Handler, repo_id: str, rev: str, sub: str | None) -> None:
    _, files = self.contents(repo_id, rev)
    if self.repo(repo_id).gated:
        raise HubError(403 if self.user else 401, "GatedRepo", "Access to this model is restricted")
    self.answer([describe(path, item) for path, item in sorted(files.items()) if path.startswith((sub or "/")[1:])])


def describe(path: str, item: Entry) -> dict[str, Any]:
    lfs = {"lfs": {"oid": item.sha256, "size": item.size, "pointerSize": 130}} if item.is_lfs else {}
    return {"type": "file", "path": path, "size": item.size, "oid": item.oid, **lfs}


@route("POST|DELETE", "/api/models/ID/(?P<kind>branch|tag)/REV")
def ref(self: Handler, repo_id: str, kind: str, rev: str) -> None:
    repo, asked = self.repo(repo_id, write=True), json.loads(self.body or b"{}")
    # A tag's name comes in the body, and the path says what it points at; a branch is the other way round.
    name = asked["tag"] if kind == "tag" else unquote(rev)
    if name in repo.refs:
        return self.answer({"error": "Reference already exists"}, 409)
    repo.refs[name] = repo.sha(rev if kind == "tag" else asked.get("startingPoint") or "main")
    self.answer({})


@route("POST", "/api/models/ID/preupload/REV")
def preupload(self: Handler, repo_id: str, rev: str) -> None:
    repo = self.repo(repo_id, write=True)
    held = repo.commits[repo.sha(rev)]
    self.answer(
        {
            "files": [
                {
                    "path": path,
                    "uploadMode": "lfs" if is_lfs(path) else "regular",
                    "shouldIgnore": False,
                    "oid": (held[path].sha256 if held[path].is_lfs else held[path].oid) if path in held else None,
                }
                for path in (file["path"] for file in json.loads(self.body)["files"])
            ]
        }
    )


@route("POST", r"^ID\.git/info/lfs/objects/batch")
def lfs_batch(self: Handler, repo_id: str) -> None:
    objects = []
    for item in json.loads(self.body)["objects"]:
        actions = {name: {"href": f"{self.server.url}/lfs/{item['oid']}/{name}"} for name in ("upload", "verify")}
        held = item["oid"] in self.server.lfs
        objects.append({**item, **({} if held else {"actions": actions})})
    self.answer({"transfer": "basic", "objects": objects})


@route("PUT|POST|GET", "/lfs/(?P<oid>[0-9a-f]{64})/(?P<what>upload|verify|download)")
def lfs_object(self: Handler, oid: str, what: str) -> None:
    if what == "upload":
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise HubError(400, None, "wrong content")
        self.server.lfs[oid] = self.body
    if what == "download" and self.headers.get("Authorization"):
        raise HubError(400, None, "credentials were sent to another host")
    self.answer(self.server.lfs[oid] if what == "download" else b"{}")


@route("GET", "/api/models/ID/xet-(?P<kind>read|write)-token/REV")
def xet_token(self: Handler, repo_id: str, kind: str, rev: str) -> None:
    self.repo(repo_id)
    token = {"casUrl": f"local://{self.server.xet}", "exp": int(time.time()) + 3600, "accessToken": "xet"}
    headers = {"X-Xet-Cas-Url": token["casUrl"], "X-Xet-Access-Token": "xet", "X-Xet-Token-Expiration": token["exp"]}
    self.answer(token, **{name: str(value) for name, value in headers.items()})


@route("POST", "/api/models/ID/commit/REV")
def commit(self: Handler, repo_id: str, rev: str) -> None:
    repo = self.repo(repo_id, write=True)
    if (hook := self.server.before_commit) is not None:
        self.server.before_commit = None
        hook()
    parent, header = repo.sha(rev), {}
    files = dict(repo.commits[parent])
    for line in self.body.splitlines():
        item = json.loads(line)
        kind, value = item["key"], item["value"]
        if kind == "header":
            header = value
        elif kind == "file":
            files[value["path"]] = entry(value["path"], base64.b64decode(value["content"]))
        elif kind == "lfsFile":
            data = self.server.lfs.get(value["oid"])
            files[value["path"]] = Entry(data, value["oid"], value["size"], True)
        elif kind == "deletedFile":
            del files[value["path"]]
    if header.get("parentCommit") not in (None, parent):
        raise HubError(412, None, "A commit has happened since. Please refresh and try again.")
    is_pr = self.query.get("create_pr") == "1"
    number = 1 + sum(name.startswith("refs/pr/") for name in repo.refs)
    sha = repo.commit(f"refs/pr/{number}" if is_pr else unquote(rev), files)
    url = f"{self.server.url}/{repo_id}"
    pull = {"pullRequestUrl": f"{url}/discussions/{number}"} if is_pr else {}
    self.answer({"success": True, "commitOid": sha, "commitUrl": f"{url}/commit/{sha}", **pull})


@route("GET|HEAD", "^ID/resolve/REV/(?P<path>.+)")
def resolve(self: Handler, repo_id: str, rev: str, path: str) -> None:
    if self.repo(repo_id).gated:
        raise HubError(403 if self.user else 401, "GatedRepo", "Access to this model is restricted")
    sha, files = self.contents(repo_id, rev)
    item = files.get(unquote(path))
    if item is None:
        raise HubError(404, "EntryNotFound", "Entry not found", **{"X-Repo-Commit": sha})
    headers = {"X-Repo-Commit": sha, "ETag": f'"{item.oid}"'}
    if not item.is_lfs:
        return self.answer(item.data, **headers)
    if item.data is not None:
        self.server.lfs[item.sha256] = item.data
    # On another host, as the real one, or the client would follow at once and miss the headers.
    location = f"{self.server.url.replace('127.0.0.1', 'localhost')}/lfs/{item.sha256}/download"
    headers |= {"X-Linked-Etag": f'"{item.sha256}"', "X-Linked-Size": str(item.size), "Location": location}
    if self.server.xet and item.sha256 in self.server.xet_hashes:
        link = f'<{self.server.url}/api/models/{repo_id}/xet-read-token/{sha}>; rel="xet-auth"'
        headers |= {"X-Xet-Hash": self.server.xet_hashes[item.sha256], "Link": link}
    self.answer(b"", 302, **headers)
