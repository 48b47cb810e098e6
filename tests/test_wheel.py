# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""What is in a wheel, and what it is tagged as: with compiled kernels for one platform, without them for any."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.tags import sys_tags
from packaging.utils import parse_wheel_filename
from packaging.version import Version

from hf_kvq_kernels.cpu import build as cpu_build


pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources. Wheels are built in it one after the other, as users do."""
    # Asked for by metadata: setuptools, once imported, wants to be the first to import distutils.
    for package, needed in (("pip", "22"), ("setuptools", "77")):
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            version = "0"
        if Version(version) < Version(needed):
            pytest.skip(f"building wheels takes {package}>={needed} in this environment")
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    ignored = shutil.ignore_patterns("__pycache__", ".*_cache", "lib")
    for name in ("hf_kvq", "kernels/torch-ext"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    return folder


def _run(command: list[str], cwd: Path, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


def _build_wheel(checkout: Path, folder: Path, **environment: str) -> SimpleNamespace:
    command = ["-m", "pip", "wheel", "-v", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(folder), "."]
    output = _run(command, checkout, **environment)
    (path,) = folder.glob("*.whl")
    return SimpleNamespace(path=path, output=output, names=set(zipfile.ZipFile(path).namelist()))


@pytest.fixture(scope="module")
def compiled(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    if cpu_build.find_compiler() is None:
        pytest.skip("there is no C compiler")
    _leave(checkout, "of_other_sources.so")
    return _build_wheel(checkout, tmp_path_factory.mktemp("compiled"))


def _leave(checkout: Path, library: str) -> None:
    """What an earlier build may have left in the folder, and no wheel may take along."""
    path = checkout / "build/lib/hf_kvq_kernels/cpu/lib" / library
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"of other sources")


def _sources() -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for folder, package in ((ROOT, "hf_kvq"), (ROOT / "kernels/torch-ext", "hf_kvq_kernels"))
        for path in (folder / package).rglob("*")
        if path.suffix in (".py", ".c", ".h", ".typed", ".json", ".jinja") and "__pycache__" not in path.parts
    }


def _check_contents(wheel: SimpleNamespace, libraries: set[str]) -> None:
    packaged = {name for name in wheel.names if not name.split("/")[0].endswith(".dist-info")}
    assert packaged == _sources() | libraries
    assert {"hf_kvq_kernels/cpu/attend.c", "hf_kvq_kernels/cpu/simd.h", "hf_kvq_kernels/py.typed"} <= packaged


def _tags(wheel: SimpleNamespace) -> list[tuple[str, str, str]]:
    return [(tag.interpreter, tag.abi, tag.platform) for tag in parse_wheel_filename(wheel.path.name)[3]]


def test_with_a_compiler(compiled: SimpleNamespace, tmp_path: Path):
    _check_contents(compiled, {f"hf_kvq_kernels/cpu/lib/{name}.so" for name, *_ in cpu_build.variants()})
    ((interpreter, abi, platform),) = _tags(compiled)
    assert (interpreter, abi) == ("py3", "none") and platform != "any"
    assert parse_wheel_filename(compiled.path.name)[3] & set(sys_tags())

    zipfile.ZipFile(compiled.path).extractall(tmp_path / "installed")
    program = """if True:
        import sys, torch, hf_kvq_kernels as kernels
        from hf_kvq_kernels.cpu import build
        assert kernels.__file__.startswith(sys.argv[1]), kernels.__file__
        assert str(build.installed_library()).startswith(sys.argv[1]), build.installed_library()
        x = torch.ones(1, 1, 3, 16)
        out, lse = kernels.attend(x[:, :, :1], [x], [x], [None], None, None, None, [], None, 1.0)
        assert out.eq(1).all() and torch.allclose(lse, 16 + torch.tensor(3.0).log())
    """
    # From elsewhere than the checkout, and with nothing to compile with.
    folder = str(tmp_path / "installed")
    _run(["-c", program, folder], tmp_path, PYTHONPATH=folder, PATH="", CC="", HF_KVQ_CACHE=str(tmp_path / "cache"))
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "compiler, reason", [("nowhere/cc", "no C compiler was found"), ("false", "could not compile")]
)
def test_without_a_compiler(checkout: Path, tmp_path: Path, compiler: str, reason: str):
    _leave(checkout, "baseline.so")
    path = tmp_path / "path"
    path.mkdir()
    if (broken := shutil.which(compiler)) is not None:
        (path / compiler).symlink_to(broken)
    wheel = _build_wheel(checkout, tmp_path / "wheel", CC=compiler, PATH=str(path))
    assert wheel.output.count("the CPU kernels are not compiled now but on first use") == 1
    assert reason in wheel.output
    _check_contents(wheel, set())
    assert _tags(wheel) == [("py3", "none", "any")]


def test_source_distribution(checkout: Path, tmp_path: Path):
    """It has all that a wheel is made of."""
    _run(["-c", f"import setuptools.build_meta as b; b.build_sdist({str(tmp_path)!r})"], checkout)
    (archive,) = tmp_path.glob("*.tar.gz")
    shutil.unpack_archive(archive, tmp_path / "unpacked", filter="data")
    (folder,) = (tmp_path / "unpacked").iterdir()
    wheel = _build_wheel(folder, tmp_path / "wheel", CC="nowhere/cc", PATH="")
    _check_contents(wheel, set())


def test_editable_install(checkout: Path, tmp_path: Path):
    """It is the sources themselves; nothing is compiled, least of all into them."""
    program = f"import setuptools.build_meta as b; b.build_editable({str(tmp_path)!r})"
    assert "the CPU kernels" not in _run(["-c", program], checkout, CC="nowhere/cc", PATH="")
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not list((checkout / "kernels").rglob("*.so"))
