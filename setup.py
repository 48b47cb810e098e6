# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Compiles the CPU kernels into the wheel if there is a C compiler; everything else is in pyproject.toml."""

from __future__ import annotations

import importlib.util
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py


CPU = Path("hf_kvq_kernels", "cpu")


def compile_libraries(folder: Path) -> bool:
    """Compile for all kinds of processors of this architecture into `folder`, or leave nothing there and say why."""
    # Libraries of an earlier build may be of other sources.
    shutil.rmtree(folder, ignore_errors=True)
    try:
        build = _load_cpu_build()
        compiler = build.find_compiler()
        if compiler is None:
            raise RuntimeError("no C compiler was found")
        names = [name for name, *_ in build.variants()]
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda name: build.compile_library(compiler, name, folder / f"{name}.so"), names))
    except (RuntimeError, OSError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        print(f"hf_kvq: the CPU kernels are not compiled now but on first use: {error}")
        return False
    return True


def _load_cpu_build() -> ModuleType:
    """`hf_kvq_kernels.cpu.build` without the packages around it, which import torch."""
    path = Path(__file__).parent / "kernels" / "torch-ext" / CPU / "build.py"
    spec = importlib.util.spec_from_file_location("cpu_build", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildPy(build_py):
    """Adds the compiled CPU kernels. An editable install has none: it is the sources themselves."""

    compiled = False

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            self.compiled = compile_libraries(Path(self.build_lib) / CPU / "lib")


class BdistWheel(bdist_wheel):
    """A wheel with compiled kernels is for one platform, and for any Python: they are called through ctypes."""

    def run(self) -> None:
        self.run_command("build")
        self.skip_build = True
        if self.get_finalized_command("build_py").compiled:
            self.root_is_pure = False
            self.distribution.has_ext_modules = lambda: True
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        return (python, abi, platform) if self.root_is_pure else ("py3", "none", platform)


setup(cmdclass={"build_py": BuildPy, "bdist_wheel": BdistWheel})
