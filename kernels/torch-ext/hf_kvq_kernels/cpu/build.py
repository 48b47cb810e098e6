# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Compile the C kernels with the system's compiler, for one kind of processor or for all of this architecture."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path


_FOLDER = Path(__file__).parent
_SOURCES = ("attend.c", "quantize.c")
_HEADERS = ("numbers.h", "simd.h")

# Results must be what the source says, but nobody reads errno or floating point flags.
_FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math")

_AVX512 = ("f", "bw", "dq", "vl", "vnni")

#: Kinds of processors by architecture, best first: name, flags of `/proc/cpuinfo` it must have, compiler options.
VARIANTS: dict[str, list[tuple[str, tuple[str, ...], tuple[str, ...]]]] = {
    "x86_64": [
        (
            "avx512",
            tuple("avx512_vnni" if x == "vnni" else f"avx512{x}" for x in _AVX512),
            (*(f"-mavx512{x}" for x in _AVX512), "-mavx2", "-mfma", "-mf16c", "-mprefer-vector-width=512"),
        ),
        ("avx2", ("avx2", "fma", "f16c"), ("-mavx2", "-mfma", "-mf16c")),
        ("baseline", (), ()),
    ],
    "aarch64": [("dotprod", ("asimddp",), ("-march=armv8.2-a+dotprod",)), ("baseline", (), ())],
}


def variants() -> list[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """The kinds of processors that this architecture has."""
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
    return VARIANTS.get(machine, [("baseline", (), ())])


def variant() -> str:
    """The best kind that this processor is one of."""
    flags = _processor_flags()
    return next(name for name, needed, _ in variants() if flags.issuperset(needed))


def find_compiler() -> str | None:
    """The C compiler, as a command line: `$CC`, or the first of cc, gcc and clang there is."""
    own = os.environ.get("CC", "")
    if own.strip() and shutil.which(shlex.split(own)[0]):
        return own
    return next((shlex.quote(path) for path in map(shutil.which, ("cc", "gcc", "clang")) if path), None)


def compile_library(compiler: str, name: str, target: Path) -> None:
    """Compile for the processors of variant `name`. `target` appears whole or not at all.

    Raises:
        RuntimeError: the compiler fails; the message has its last line.
    """
    options = next(options for kind, _, options in variants() if kind == name)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        command = [
            compiler,
            *_FLAGS,
            *options,
            "-o",
            str(made),
            *(str(_FOLDER / source) for source in _SOURCES),
            "-lm",
        ]
        # Threads need OpenMP; where a compiler lacks it, one thread does the work.
        for openmp in ("-fopenmp", "-fopenmp-simd"):
            result = subprocess.run([*command, openmp], capture_output=True, text=True, errors="replace")
            if result.returncode == 0:
                os.replace(made, target)
                return
    reason = (result.stderr.strip().splitlines() or ["no message"])[-1]
    raise RuntimeError(f"{compiler} could not compile the CPU kernels: {reason}")


def installed_library() -> Path | None:
    """The library for this processor that came with the package, if it did."""
    path = _FOLDER / "lib" / f"{variant()}.so"
    return path if path.exists() else None


def cached_library() -> Path:
    """The library for this processor, compiled now unless it is in the cache folder.

    The folder is `$HF_KVQ_CACHE`, or `hf_kvq` in the user's cache folder.

    Raises:
        RuntimeError: there is no compiler, or it fails.
        OSError: the cache folder cannot be written.
    """
    name = variant()
    target = _cache_folder() / f"{name}-{_fingerprint(name)}.so"
    if target.exists():
        return target
    compiler = find_compiler()
    if compiler is None:
        raise RuntimeError("no C compiler was found (set CC, or install gcc or clang)")
    with _only_one(target.with_suffix(".lock")):
        if not target.exists():
            compile_library(compiler, name, target)
    return target


def _cache_folder() -> Path:
    own = os.environ.get("HF_KVQ_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_kvq"


def _fingerprint(name: str) -> str:
    """Changes with whatever the library is made of."""
    parts = [(_FOLDER / source).read_bytes() for source in (*_SOURCES, *_HEADERS)]
    parts.append(repr((name, _FLAGS, variants(), platform.machine(), platform.system())).encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _processor_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return {
        flag
        for line in lines
        if line.lower().startswith(("flags", "features"))
        for flag in line.split(":", 1)[1].split()
    }


@contextlib.contextmanager
def _only_one(lock: Path) -> Iterator[None]:
    """Others who want the same wait; where files cannot be locked they do the same work twice, to the same end."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield
