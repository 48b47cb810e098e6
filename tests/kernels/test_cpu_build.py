# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""How the CPU kernels are compiled, kept and found, and what happens where they cannot be."""

from __future__ import annotations

import functools
import itertools
import os
import platform
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from oracle import check
from test_cpu import DTYPES, WIDTHS, Case, Maker, parts_of, random_case
from transformers import LlamaConfig
from transformers.utils import logging

import hf_kvq.ops
import hf_kvq_kernels
from hf_kvq import KIVICache, MixKVQCache, PMKVQCache
from hf_kvq_kernels import cpu
from hf_kvq_kernels.cpu import build


pytestmark = pytest.mark.skipif(os.name != "posix", reason="compilers are stood in for by shell scripts")

COMPILER = build.find_compiler()
RUNNABLE = [name for name, needed, _ in build.variants() if build._processor_flags().issuperset(needed)]
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no compiler")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty cache folder, and no library installed or loaded; afterwards all is as it was."""
    monkeypatch.setenv("HF_KVQ_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cpu, "installed_library", lambda: None)
    cpu._library.cache_clear()
    yield tmp_path / "cache"
    cpu._library.cache_clear()


def script(path: Path, text: str) -> str:
    """An executable shell script; `$out` is the file that a compiler is to make."""
    find = 'for word in "$@"; do [ "$last" = -o ] && out="$word"; last="$word"; done\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{find}{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def files(folder: Path) -> list[str]:
    """What there is but for locks."""
    return sorted(str(x.relative_to(folder)) for x in folder.rglob("*") if x.suffix != ".lock")


def reason() -> str:
    why = hf_kvq_kernels.why_not(torch.empty(1, 1, 1, 16), None)
    assert why is not None and why.startswith("the CPU kernels could not be built: ")
    assert "\n" not in why and len(why) < 500
    return why


# --- every kind of processor -----------------------------------------------------------------------------------------


@functools.cache
def library(name: str, folder: Path) -> Path:
    build.compile_library(COMPILER, name, folder / f"{name}.so")
    return folder / f"{name}.so"


@pytest.fixture(scope="session")
def libraries(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("libraries")


@pytest.fixture(params=RUNNABLE)
def variant(request, libraries, monkeypatch):
    """One kind of library in the place of the one that is best."""
    if request.param != build.variant():
        path = library(request.param, libraries)
        monkeypatch.setattr(cpu, "installed_library", lambda: path)
    cpu._library.cache_clear()
    yield request.param
    cpu._library.cache_clear()


@needs_compiler
def test_every_variant_gives_right_results(variant):
    shapes = itertools.cycle([((64, 64), 1), ((80, 96), 3), ((20, 7), 5)])
    cases = [
        Case(bits, dims=dims, per_channel=per_channel, group=group, dtype=dtype, exact=((33, dtype, "plain"),))
        for bits, (dims, group), (per_channel, dtype) in zip(
            WIDTHS * 3, shapes, itertools.cycle(itertools.product((True, False), DTYPES))
        )
    ]
    cases += [Case((2, 2), tiers=(6, 4), rows=2, queries=q, mask="bool", held=(32, 32, 9)) for q in (1, 2, 4)]
    cases += map(random_case, range(1000, 1040))
    for case in cases:
        try:
            check(hf_kvq_kernels.attend, Maker(case).arguments())
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from None


@needs_compiler
def test_all_processors_of_this_kind_have_a_variant():
    assert RUNNABLE[-1] == "baseline" and build.variant() == RUNNABLE[0]
    assert all(kinds[-1] == ("baseline", (), ()) for kinds in build.VARIANTS.values())


def test_choice_of_variant(monkeypatch):
    x86 = {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "sse2"}
    machines = [
        ("x86_64", x86, "avx512"),
        ("AMD64", x86, "avx512"),
        ("x86_64", x86 - {"avx512_vnni"}, "avx2"),
        ("x86_64", x86 - {"avx512bw", "fma"}, "baseline"),
        ("x86_64", set(), "baseline"),
        ("aarch64", {"asimd", "asimddp"}, "dotprod"),
        ("arm64", {"asimd"}, "baseline"),
        ("riscv64", {"avx2"}, "baseline"),
    ]
    for machine, flags, wanted in machines:
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        monkeypatch.setattr(build, "_processor_flags", lambda flags=flags: flags)
        assert build.variant() == wanted


def test_flags_of_the_processor(monkeypatch):
    x86 = "processor\t: 0\nflags\t\t: fpu avx2 fma\nbugs\t\t: none\n\n"
    arm = "processor\t: 0\nFeatures\t: fp asimd asimddp\n"
    for text, wanted in ((x86 * 2, {"fpu", "avx2", "fma"}), (arm, {"fp", "asimd", "asimddp"}), ("", set())):
        monkeypatch.setattr(Path, "read_text", lambda self, *a, text=text, **k: text)
        assert build._processor_flags() == wanted

    def missing(self, *args, **kwargs):
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    assert build._processor_flags() == set()


# --- where the library is kept ---------------------------------------------------------------------------------------


@pytest.fixture
def build_once() -> Path:
    """The library that other tests use."""
    return build.cached_library()


@needs_compiler
def test_built_once_and_kept(build_once, place, tmp_path, monkeypatch):
    """In the folder that the environment names; the next process does not compile again."""
    made, log = build_once, tmp_path / "log"
    monkeypatch.setenv("CC", script(tmp_path / "bin" / "compiler", f'echo run >> "{log}"\ncp "{made}" "$out"'))
    assert hf_kvq_kernels.why_not(torch.empty(1, 1, 1, 16), None) is None
    name = f"{build.variant()}-{build._fingerprint(build.variant())}.so"
    assert files(place) == [name] and build.cached_library() == place / name
    cpu._library.cache_clear()
    check(hf_kvq_kernels.attend, Maker(Case()).arguments())
    assert log.read_text() == "run\n"


def test_cache_folders(monkeypatch, tmp_path):
    monkeypatch.delenv("HF_KVQ_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert build._cache_folder() == tmp_path / ".cache" / "hf_kvq"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert build._cache_folder() == tmp_path / "xdg" / "hf_kvq"
    monkeypatch.setenv("HF_KVQ_CACHE", str(tmp_path / "own"))
    assert build._cache_folder() == tmp_path / "own"


def test_another_source_has_another_name(monkeypatch, tmp_path):
    names = {build._fingerprint("baseline"), build._fingerprint("avx2")}
    copied = tmp_path / "cpu"
    shutil.copytree(build._FOLDER, copied, ignore=shutil.ignore_patterns("lib", "__pycache__"))
    monkeypatch.setattr(build, "_FOLDER", copied)
    assert build._fingerprint("baseline") in names
    for source in (*build._SOURCES, *build._HEADERS):
        with (copied / source).open("a") as file:
            file.write("\n")
        names.add(build._fingerprint("baseline"))
    monkeypatch.setattr(build, "_FLAGS", (*build._FLAGS, "-g"))
    names.add(build._fingerprint("baseline"))
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    names.add(build._fingerprint("baseline"))
    assert len(names) == 4 + len(build._SOURCES) + len(build._HEADERS) and all(len(name) == 16 for name in names)


def test_sources_are_all_that_is_compiled():
    """Nothing but these files, so that nothing else can change what a name stands for."""
    folder = build._FOLDER
    own = {x.name for x in folder.iterdir() if x.suffix in (".c", ".h")}
    assert own == {*build._SOURCES, *build._HEADERS}
    included = {line for x in own for line in (folder / x).read_text().splitlines() if line.startswith('#include "')}
    assert included == {f'#include "{x}"' for x in build._HEADERS}


def test_where_an_installed_library_is(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "_FOLDER", tmp_path)
    assert build.installed_library() is None
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "another.so").write_bytes(b"any")
    assert build.installed_library() is None
    (tmp_path / "lib" / f"{build.variant()}.so").write_bytes(b"any")
    assert build.installed_library() == tmp_path / "lib" / f"{build.variant()}.so"


@needs_compiler
def test_an_installed_library_is_preferred(build_once, place, monkeypatch, tmp_path):
    """It needs no compiler; one that cannot be loaded here is as good as none."""
    monkeypatch.setattr(cpu, "installed_library", lambda: build_once)
    compiler = script(tmp_path / "compiler", f'cp "{build_once}" "$out"')
    monkeypatch.setenv("CC", compiler)
    assert hf_kvq_kernels.why_not(torch.empty(1, 1, 1, 16), None) is None and not place.exists()
    (tmp_path / "rubbish.so").write_bytes(b"any")
    monkeypatch.setattr(cpu, "installed_library", lambda: tmp_path / "rubbish.so")
    cpu._library.cache_clear()
    assert hf_kvq_kernels.why_not(torch.empty(1, 1, 1, 16), None) is None and len(files(place)) == 1
    check(hf_kvq_kernels.attend, Maker(Case()).arguments())


# --- what can go wrong -----------------------------------------------------------------------------------------------


def test_which_compiler(monkeypatch, tmp_path):
    for name in ("cc", "gcc", "clang", "mine"):
        script(tmp_path / name / name, "exit 0")
    monkeypatch.delenv("CC", raising=False)
    found = []
    for folders in (("clang",), ("clang", "gcc"), ("clang", "gcc", "cc")):
        monkeypatch.setenv("PATH", os.pathsep.join(str(tmp_path / name) for name in folders))
        found.append(Path(build.find_compiler()).name)
    assert found == ["clang", "gcc", "cc"]
    monkeypatch.setenv("CC", str(tmp_path / "mine" / "mine"))
    assert build.find_compiler() == str(tmp_path / "mine" / "mine")
    monkeypatch.setenv("CC", "does-not-exist")
    assert Path(build.find_compiler()).name == "cc"


@pytest.fixture
def no_compiler(place, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.delenv("CC", raising=False)
    return place


@pytest.fixture
def warnings(monkeypatch) -> list[str]:
    messages: list[str] = []
    logger = logging.get_logger("hf_kvq.ops")
    logger.warning_once.__func__.cache_clear()
    monkeypatch.setattr(logger, "warning", lambda message, *a, **k: messages.append(str(message)))
    return messages


def test_without_a_compiler(no_compiler, warnings):
    """Kernel "auto" says once that it is slower, and why; kernel "cpu" is an error when the cache is made."""
    assert "no C compiler was found" in reason() and "gcc" in reason()
    query, parts, _ = parts_of(Case(exact=((9, DTYPES[0], "plain"),)))
    for _ in range(3):
        got = hf_kvq.ops.attend(query, parts, 0.2, "auto")
    assert torch.equal(got, hf_kvq.ops.attend(query, parts, 0.2, "torch"))
    assert len(warnings) == 1 and "slower" in warnings[0] and "no C compiler was found" in warnings[0]
    with pytest.raises(RuntimeError, match="kernel='cpu' cannot run: .*no C compiler.*'auto'"):
        hf_kvq.ops.attend(query, parts, 0.2, "cpu")
    for cache in (PMKVQCache, MixKVQCache, KIVICache):
        with pytest.raises(RuntimeError, match="kernel='cpu' cannot run: .*no C compiler.*'auto'"):
            cache(LlamaConfig(num_hidden_layers=1), {"kernel": "cpu"})
        cache(LlamaConfig(num_hidden_layers=1), {"kernel": "auto"})
    assert not no_compiler.exists()


def test_with_kernels_there_is_no_warning(warnings):
    if hf_kvq_kernels.why_not(torch.empty(1, 1, 1, 16), None) is not None:
        pytest.skip("the CPU kernels cannot be built here")
    query, parts, _ = parts_of(Case())
    got = hf_kvq.ops.attend(query, parts, 0.2, "auto")
    assert torch.equal(got, hf_kvq.ops.attend(query, parts, 0.2, "cpu")) and not warnings


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("exit 1", "no message"),
        ('echo "first\nlast words" >&2; exit 3', "last words"),
        ('head -c 1000 /dev/zero > "$out"; echo disk full >&2; exit 1', "disk full"),
        ('head -c 1000 /dev/zero > "$out"; printf "\\377\\n" >&2; kill -9 $$', "\ufffd"),
    ],
    ids=["silent", "talkative", "half a file", "killed"],
)
def test_a_compiler_that_fails(text, message, place, monkeypatch, tmp_path):
    """Its last words are told, nothing half-written stays, and one that works is not prevented later."""
    monkeypatch.setenv("CC", script(tmp_path / "compiler", text))
    assert message in reason() and "compiler could not compile" in reason()
    assert files(place) == []
    query, parts, _ = parts_of(Case())
    with pytest.raises(RuntimeError, match="could not compile"):
        hf_kvq.ops.attend(query, parts, 0.2, "cpu")
    hf_kvq.ops.attend(query, parts, 0.2, "auto")


def test_a_compiler_without_openmp(place, monkeypatch, tmp_path):
    """It is asked again for a library of one thread."""
    log = tmp_path / "log"
    text = f'echo "$@" >> "{log}"\ncase "$*" in *-fopenmp-simd*) echo made > "$out";; *) exit 1;; esac'
    target = place / "x.so"
    build.compile_library(script(tmp_path / "compiler", text), "baseline", target)
    assert target.read_text() == "made\n" and files(place) == ["x.so"]
    asked = [[word for word in line.split() if word.startswith("-fopenmp")] for line in log.read_text().splitlines()]
    assert asked == [["-fopenmp"], ["-fopenmp-simd"]]


def test_a_library_that_cannot_be_loaded(place, monkeypatch, tmp_path):
    monkeypatch.setenv("CC", script(tmp_path / "compiler", 'echo rubbish > "$out"'))
    assert ".so" in reason()


@pytest.mark.parametrize("folder", ["a file", "below a file", "read only"])
def test_a_cache_folder_that_cannot_be_written(folder, place, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "closed").mkdir(mode=0o500)
    path = {"a file": tmp_path / "file", "below a file": tmp_path / "file" / "x", "read only": tmp_path / "closed"}[
        folder
    ]
    if folder == "read only" and os.access(path, os.W_OK):
        pytest.skip("this user may write everywhere")
    monkeypatch.setenv("HF_KVQ_CACHE", str(path))
    monkeypatch.setenv("CC", script(tmp_path / "compiler", 'echo any > "$out"'))
    assert str(path) in reason()
    with pytest.raises(RuntimeError, match="could not be built"):
        hf_kvq.ops.require_kernel("cpu")
    assert (tmp_path / "file").read_text() == ""


# --- at the same time ------------------------------------------------------------------------------------------------

# The module by itself, without torch.
BUILD = f"""
import importlib.util, sys, time, ctypes
spec = importlib.util.spec_from_file_location("build", {str(Path(build.__file__))!r})
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)
print(build.cached_library().read_text())
"""


@pytest.mark.parametrize("locks", [True, False])
def test_processes_that_build_at_once(locks, tmp_path):
    """All get a whole library; those that can lock files compile it once."""
    log, cache = tmp_path / "log", tmp_path / "cache"
    text = f'echo run >> "{log}"; printf begin > "$out"; sleep 0.5; printf -- -end >> "$out"'
    environment = {**os.environ, "CC": script(tmp_path / "compiler", text), "HF_KVQ_CACHE": str(cache)}
    code = BUILD if locks else "import sys; sys.modules['fcntl'] = None\n" + BUILD
    processes = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    outputs = [process.communicate(timeout=60)[0].strip() for process in processes]
    assert outputs == ["begin-end"] * 3
    assert all(process.returncode == 0 for process in processes)
    assert len(files(cache)) == 1 and (cache / files(cache)[0]).read_text() == "begin-end"
    assert log.read_text().count("run") == 1 if locks else 1 <= log.read_text().count("run") <= 3


def test_a_build_that_is_killed_leaves_nothing_in_the_way(tmp_path):
    """The lock of a dead process does not last, and what it had written is not taken for a library."""
    cache, started = tmp_path / "cache", tmp_path / "started"
    slow = script(tmp_path / "slow", f'printf begin > "$out"; echo > "{started}"; exec sleep 30')
    good = script(tmp_path / "good", 'printf whole > "$out"')
    environment = {**os.environ, "CC": slow, "HF_KVQ_CACHE": str(cache)}
    process = subprocess.Popen([sys.executable, "-c", BUILD], env=environment, start_new_session=True)
    deadline = time.monotonic() + 30
    while not started.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, 9)
    process.wait(timeout=30)
    environment["CC"] = good
    got = subprocess.run([sys.executable, "-c", BUILD], env=environment, capture_output=True, text=True, timeout=30)
    assert got.stdout.strip() == "whole", got.stderr
