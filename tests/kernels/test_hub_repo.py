# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""The Hub kernel repository: what the build script makes of kernels/, and that the `kernels` package loads it."""

from __future__ import annotations

import ast
import base64
import hashlib
import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub.errors import LocalTokenNotFoundError

import hf_kvq_kernels


ROOT = Path(__file__).resolve().parents[2]
BACKENDS = ["cpu", "cuda", "rocm"]
REPO_ID = "hf-kvq/hf-kvq-kernels"


def load_module(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = load_module("build_kernels", ROOT / "scripts" / "build_kernels.py")


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `build/` in it. Only one is loaded per process: the operators have the same names in all."""
    folder = tmp_path_factory.mktemp("repository")
    script.build(target=folder / "build")
    return folder


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A copy of kernels/ to do things to."""
    shutil.copytree(ROOT / "kernels", tmp_path / "kernels", ignore=shutil.ignore_patterns("build", ".*_cache"))
    return tmp_path / "kernels"


@pytest.fixture
def rust() -> ModuleType:
    # A folder named kernels on the path is a package too, but without a parser.
    return pytest.importorskip("kernels._rust")


def test_tree(repository: Path):
    variants = sorted((repository / "build").iterdir())
    assert [variant.name for variant in variants] == [f"torch-{backend}" for backend in BACKENDS]
    package = {
        path.relative_to(ROOT / "kernels/torch-ext/hf_kvq_kernels").as_posix()
        for suffix in ("py", "c", "h")
        for path in (ROOT / "kernels/torch-ext/hf_kvq_kernels").rglob(f"*.{suffix}")
    }
    assert {"__init__.py", "_ops.py", "cpu/attend.c", "cpu/simd.h", "cpu/build.py", "gpu/attend.py"} <= package
    for variant in variants:
        assert set(contents(variant)) == package | {"hf_kvq_kernels/__init__.py", "metadata.json"}


def test_metadata(repository: Path):
    ids = set()
    for backend in BACKENDS:
        variant = repository / "build" / f"torch-{backend}"
        metadata = json.loads((variant / "metadata.json").read_text())
        ids.add(metadata["id"])
        assert re.fullmatch(rf"_hf_kvq_kernels_{backend}_[0-9a-f]{{7}}", metadata["id"])
        assert f'NAMESPACE = "{metadata["id"]}"\n' in (variant / "_ops.py").read_text()
        assert metadata["digest"].pop("files") == {
            place: base64.b64encode(hashlib.sha256(content).digest()).decode()
            for place, content in contents(variant).items()
            if place != "metadata.json"
        }
        assert metadata == {
            "name": "hf-kvq-kernels",
            "id": metadata["id"],
            "version": 1,
            "license": "Apache-2.0",
            "python-depends": [],
            "backend": {"type": backend},
            "digest": {"algorithm": "sha256"},
        }
    assert len(ids) == len(BACKENDS)


def test_the_parser_of_the_kernels_package_accepts_it(repository: Path, rust: ModuleType):
    assert script.validate(ROOT / "kernels", repository / "build")
    metadata = rust.Metadata.read_from_file(repository / "build/torch-cpu/metadata.json")
    assert (str(metadata.name), metadata.version, metadata.license) == ("hf-kvq-kernels", 1, "Apache-2.0")
    assert metadata.name.python_name == "hf_kvq_kernels"


def test_unknown_field_of_the_recipe(sources: Path, tmp_path: Path, rust: ModuleType):
    recipe = sources / "build.toml"
    recipe.write_text(recipe.read_text() + 'colour = "red"\n')
    with pytest.raises(ValueError, match="colour"):
        script.build(sources, tmp_path / "build")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kernels"]


def _change_id(metadata: dict[str, Any]) -> None:
    del metadata["id"]


def _change_backend(metadata: dict[str, Any]) -> None:
    metadata["backend"]["type"] = "xpu"


def _change_digest(metadata: dict[str, Any]) -> None:
    metadata["digest"]["files"]["ops.py"] = metadata["digest"]["files"]["pages.py"]


@pytest.mark.parametrize(
    "change, message", [(_change_id, "id"), (_change_backend, "torch-cpu is for xpu"), (_change_digest, "ops.py")]
)
def test_wrong_metadata(repository: Path, tmp_path: Path, rust: ModuleType, change: Any, message: str):
    shutil.copytree(repository / "build", tmp_path / "build")
    path = tmp_path / "build/torch-cpu/metadata.json"
    metadata = json.loads(path.read_text())
    change(metadata)
    path.write_text(json.dumps(metadata))
    with pytest.raises(ValueError, match=message):
        script.validate(ROOT / "kernels", tmp_path / "build")


def test_missing_variant(repository: Path, tmp_path: Path, rust: ModuleType):
    shutil.copytree(repository / "build/torch-cpu", tmp_path / "build/torch-cpu")
    with pytest.raises(ValueError, match="missing variants.*cuda.*rocm"):
        script.validate(ROOT / "kernels", tmp_path / "build")


def test_same_sources_same_bytes(repository: Path, sources: Path, tmp_path: Path):
    package = sources / "torch-ext/hf_kvq_kernels"
    # None of these is a source.
    for place in ("cpu/lib/baseline.so", "__pycache__/ops.py", ".hidden/ops.py", "notes.txt"):
        (package / place).parent.mkdir(exist_ok=True)
        (package / place).write_text("x")
    made = script.build(sources, tmp_path / "again")
    assert contents(made) == contents(repository / "build")


def test_other_sources_other_ids(repository: Path, sources: Path, tmp_path: Path):
    with (sources / "torch-ext/hf_kvq_kernels/cpu/attend.c").open("a") as file:
        file.write("\n")
    made = script.build(sources, tmp_path / "build")
    for backend in BACKENDS:
        before, now = (
            json.loads((folder / f"torch-{backend}" / "metadata.json").read_text())["id"]
            for folder in (repository / "build", made)
        )
        assert before != now


def test_a_build_replaces_the_one_before(sources: Path):
    names = {path.name for path in sources.iterdir()}
    made = script.build(sources)
    assert made == sources / "build"
    (made / "torch-cpu/stale.py").write_text("")
    script.build(sources)
    assert not (made / "torch-cpu/stale.py").exists()
    assert {path.name for path in sources.iterdir()} == names | {"build"}


def test_a_failed_build_leaves_the_one_before(sources: Path):
    before = contents(script.build(sources))
    names = {path.name for path in sources.iterdir()}
    (sources / "torch-ext/hf_kvq_kernels/_ops.py").write_text("")
    with pytest.raises(ValueError, match="NAMESPACE"):
        script.build(sources)
    assert contents(sources / "build") == before
    assert {path.name for path in sources.iterdir()} == names


def test_a_build_that_cannot_be_put_in_place(sources: Path, monkeypatch: pytest.MonkeyPatch):
    before = contents(script.build(sources))
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path.name == "made":
            raise PermissionError("no")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(PermissionError):
        script.build(sources)
    assert contents(sources / "build") == before


def test_imports():
    """A kernel on the Hub may import the standard library, torch, triton and itself, the latter relatively."""
    package = ROOT / "kernels/torch-ext/hf_kvq_kernels"
    allowed = {*sys.stdlib_module_names, "torch", "triton"}
    for path in package.rglob("*.py"):
        depth = len(path.relative_to(package).parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert {alias.name.split(".")[0] for alias in node.names} <= allowed, path
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                assert node.module.split(".")[0] in allowed, path
            elif isinstance(node, ast.ImportFrom):
                assert node.level <= depth, f"{path} imports from outside the package"


def test_operators_have_no_fixed_namespace():
    for path in (ROOT / "kernels/torch-ext/hf_kvq_kernels").rglob("*.py"):
        assert not re.search(r"hf_kvq::|torch\.ops\.[a-z]", path.read_text()), path


@pytest.fixture
def loaded(repository: Path, rust: ModuleType) -> ModuleType:
    from kernels import get_local_kernel

    return get_local_kernel(repository, backend="cpu")


def _small_problem() -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(0)
    layout = hf_kvq_kernels.PageLayout(
        heads=2, tokens=32, key_dim=16, value_dim=16, key_bits=4, value_bits=4, key_per_channel=1, key_group=32,
        value_group=16, dtype=hf_kvq_kernels.DTYPES.index(torch.bfloat16),
    )  # fmt: skip
    blocks = []
    for groups in (layout.key_groups(), layout.value_groups()):
        codes = torch.randint(256, (1, 3, 2 * 32 * 16 // 2), dtype=torch.uint8, generator=generator)
        low = torch.randn(1, 3, 2 * groups, generator=generator)
        blocks += [codes, *(x.to(torch.bfloat16).view(torch.uint8) for x in (low, low + 1))]
    pages = torch.cat(blocks, dim=-1)
    assert pages.shape[2] == layout.key_bytes() + layout.value_bytes()
    query, keys, values = (torch.randn(1, n, 5, 16, generator=generator) for n in (4, 2, 2))
    return query[:, :, :1], [keys], [values], [None], pages, None, None, [], layout, 0.25


def test_get_local_kernel(loaded: ModuleType, repository: Path):
    assert Path(loaded.__file__) == repository / "build/torch-cpu/__init__.py"
    assert set(loaded.__all__) == set(hf_kvq_kernels.__all__)
    assert loaded.attend is not hf_kvq_kernels.attend
    problem = _small_problem()
    reason = hf_kvq_kernels.why_not(problem[0], problem[8])
    assert loaded.why_not(problem[0], problem[8]) == reason
    if reason:
        pytest.skip(reason)
    # Each on its own, and still so after the other has run.
    for _ in range(2):
        for got, expected in zip(loaded.attend(*problem), hf_kvq_kernels.attend(*problem)):
            assert got.isfinite().all() and got.abs().max() > 0
            torch.testing.assert_close(got, expected)


def test_operators_of_both_copies_coexist(loaded: ModuleType):
    namespaces = {sys.modules[f"{copy.__name__}._ops"].NAMESPACE for copy in (loaded, hf_kvq_kernels)}
    assert namespaces == {"hf_kvq", loaded.__name__}
    ops = [getattr(torch.ops, namespace).attend.default for namespace in sorted(namespaces)]
    assert ops[0] is not ops[1]


def test_compat_package(loaded: ModuleType, repository: Path):
    """What is loaded already is not loaded again; what is not yet is."""
    compat = load_module("compat_cpu", repository / "build/torch-cpu/hf_kvq_kernels/__init__.py")
    assert compat.attend is loaded.attend
    cold = load_module("compat_rocm", repository / "build/torch-rocm/hf_kvq_kernels/__init__.py")
    assert set(cold.__all__) == set(loaded.__all__) and cold.attend is not loaded.attend


def test_the_example_on_the_card(
    repository: Path, rust: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    reason = hf_kvq_kernels.why_not(torch.zeros(1, 1, 1, 64), None)
    if reason:
        pytest.skip(reason)
    card = (ROOT / "kernels/CARD.md").read_text()
    example, local = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
    monkeypatch.setenv("LOCAL_KERNELS", f"{REPO_ID}={repository}")
    exec(compile(example, "CARD.md", "exec"), {})
    assert float(capsys.readouterr().out.split()[-1]) < 5e-3
    monkeypatch.setattr("kernels.get_local_kernel", lambda path: SimpleNamespace(path=path))
    exec(compile(local, "CARD.md", "exec"), names := {})
    assert names["kvq"].path == Path("kernels")


class FakeApi:
    """Writes down what is asked of it."""

    def __init__(self, logged_in: bool = True):
        self.logged_in = logged_in
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*repo_id: str, **arguments: Any) -> SimpleNamespace:
            if not self.logged_in:
                raise LocalTokenNotFoundError("no token")
            self.calls.append((name, {**dict(zip(["repo_id"], repo_id)), **arguments}))
            return SimpleNamespace(commit_url=f"commit of {name}", pr_url=f"pr of {name}")

        return call


def _push(api: FakeApi, built: Path, create_pr: bool = False) -> list[str]:
    recipe = script.Recipe.read(ROOT / "kernels/build.toml")
    return script.push(built, ROOT / "kernels/CARD.md", recipe, "me/kernels", api, create_pr)


def test_push(repository: Path):
    api = FakeApi()
    assert _push(api, repository / "build") == ["commit of upload_file", "commit of upload_folder"]
    # The card is on main before the branch is made from that.
    assert [name for name, _ in api.calls] == [
        "whoami", "create_repo", "upload_file", "create_branch", "upload_folder"
    ]  # fmt: skip
    calls = dict(api.calls)
    assert all((call["repo_id"], call["repo_type"]) == ("me/kernels", "kernel") for _, call in api.calls[1:])
    assert calls["create_repo"]["exist_ok"] and calls["create_branch"]["exist_ok"]
    assert calls["create_branch"]["branch"] == calls["upload_folder"]["revision"] == "v1"
    assert calls["upload_file"]["path_in_repo"] == "README.md" and "revision" not in calls["upload_file"]
    assert calls["upload_folder"]["path_in_repo"] == "build" and calls["upload_folder"]["delete_patterns"] == "*"
    assert calls["upload_folder"]["folder_path"] == repository / "build"
    assert not calls["upload_file"]["create_pr"] and not calls["upload_folder"]["create_pr"]


def test_push_as_pull_requests(repository: Path):
    """Whoever opens one may not create a repository or a branch."""
    api = FakeApi()
    assert _push(api, repository / "build", create_pr=True) == ["pr of upload_file", "pr of upload_folder"]
    assert [name for name, _ in api.calls] == ["whoami", "upload_file", "upload_folder"]
    assert all(call["create_pr"] for _, call in api.calls[1:])


def test_push_takes_a_login(repository: Path):
    with pytest.raises(RuntimeError, match="hf auth login"):
        _push(FakeApi(logged_in=False), repository / "build")


def test_pull_request_of_what():
    with pytest.raises(SystemExit):
        script.main(["--create-pr"])
