# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Build the Hub kernel repository from kernels/, and upload it if asked to.

    python scripts/build_kernels.py
    python scripts/build_kernels.py --push hf-kvq/hf-kvq-kernels --create-pr

The kernels are Python, Triton and C that is compiled where it runs, so building is copying: the folders `torch-cuda`,
`torch-rocm` and `torch-cpu` in kernels/build each hold the package, under a name and an operator namespace of their
own, and `metadata.json`. The same sources give the same bytes. If the `kernels` package is installed, its own parser
checks everything.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import LocalTokenNotFoundError


try:
    import tomllib
except ModuleNotFoundError:
    import tomli as tomllib


KERNELS = Path(__file__).resolve().parents[1] / "kernels"

COMPAT = '''\
# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""The kernels one folder up, for whoever has the folder of this variant on the path and imports them by name."""

import importlib.util
import sys
from pathlib import Path


_ID = "{id}"

if _ID not in sys.modules:
    _spec = importlib.util.spec_from_file_location(_ID, Path(__file__).parents[1] / "__init__.py")
    sys.modules[_ID] = importlib.util.module_from_spec(_spec)
    try:
        _spec.loader.exec_module(sys.modules[_ID])
    except BaseException:
        del sys.modules[_ID]
        raise

__all__ = sys.modules[_ID].__all__
globals().update({{name: getattr(sys.modules[_ID], name) for name in __all__}})
'''


@dataclass(frozen=True)
class Recipe:
    """What `build.toml` says."""

    name: str
    version: int
    license: str
    backends: tuple[str, ...]
    repo_id: str
    extensions: tuple[str, ...]

    @property
    def package(self) -> str:
        """The name of the Python package."""
        return self.name.replace("-", "_")

    @property
    def branch(self) -> str:
        """The branch of the repository on the Hub."""
        return f"v{self.version}"

    @classmethod
    def read(cls, path: Path) -> Recipe:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        general = content["general"]
        return cls(
            name=general["name"],
            version=general["version"],
            license=general["license"],
            backends=tuple(general["backends"]),
            repo_id=general["hub"]["repo-id"],
            extensions=tuple(content["torch-noarch"]["pyext"]),
        )


def read_sources(folder: Path, extensions: tuple[str, ...]) -> dict[str, bytes]:
    """The package's files by their place in it; hidden ones, caches and compiled libraries are not part of it."""
    files = {}
    for path in folder.rglob("*"):
        place = path.relative_to(folder)
        hidden = any(part.startswith((".", "__pycache__")) for part in place.parts)
        if path.is_file() and not hidden and path.suffix[1:] in extensions:
            files[place.as_posix()] = path.read_bytes()
    return dict(sorted(files.items()))


def variant_files(recipe: Recipe, sources: dict[str, bytes], backend: str) -> dict[str, bytes]:
    """All files of one variant.

    Raises:
        ValueError: `_ops.py` does not set NAMESPACE in one line of its own.
    """
    about = {
        "name": recipe.name,
        "version": recipe.version,
        "license": recipe.license,
        "python-depends": [],
        "backend": {"type": backend},
    }
    variant_id = f"_{recipe.package}_{backend}_{_fingerprint(about, sources)}"
    ops, places = re.subn(
        r"^NAMESPACE = .*$", f'NAMESPACE = "{variant_id}"', sources.get("_ops.py", b"").decode(), flags=re.MULTILINE
    )
    if places != 1:
        raise ValueError(f"_ops.py must have one line 'NAMESPACE = ...', it has {places}")
    files = {
        **sources,
        "_ops.py": ops.encode(),
        f"{recipe.package}/__init__.py": COMPAT.format(id=variant_id).encode(),
    }
    hashes = {place: base64.b64encode(hashlib.sha256(files[place]).digest()).decode() for place in sorted(files)}
    metadata = {**about, "id": variant_id, "digest": {"algorithm": "sha256", "files": hashes}}
    return {**files, "metadata.json": (json.dumps(metadata, indent=2) + "\n").encode()}


def _fingerprint(about: dict[str, Any], sources: dict[str, bytes]) -> str:
    hashes = {place: hashlib.sha256(content).hexdigest() for place, content in sorted(sources.items())}
    return hashlib.sha256(json.dumps([about, hashes]).encode()).hexdigest()[:7]


def build(kernels: Path = KERNELS, target: Path | None = None) -> Path:
    """Build all variants into `target`, by default the folder `build` in `kernels`, which they replace.

    If anything fails, `target` stays as it was.

    Raises:
        ValueError: the sources, or what would be built, are not a valid kernel.
    """
    target = target or kernels / "build"
    recipe = Recipe.read(kernels / "build.toml")
    sources = read_sources(kernels / "torch-ext" / recipe.package, recipe.extensions)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Hidden, so that nobody takes it for a part of the repository if the process is killed.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as folder:
        made, before = Path(folder) / "made", Path(folder) / "before"
        for backend in recipe.backends:
            for place, content in variant_files(recipe, sources, backend).items():
                path = made / f"torch-{backend}" / place
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
        validate(kernels, made)
        if target.exists():
            target.rename(before)
        try:
            made.rename(target)
        except OSError:
            if before.exists():
                before.rename(target)
            raise
    return target


def validate(kernels: Path, built: Path) -> bool:
    """Let the `kernels` package read `build.toml` and the variants in `built`; False if it is not installed.

    Raises:
        ValueError: it refuses them, or they are not what `build.toml` announces.
    """
    try:
        from kernels import _rust
    except ImportError:
        return False
    announced = {str(backend).lower() for backend in _rust.Build.open(kernels).general.backends}
    ids = set()
    for variant in sorted(built.iterdir()):
        metadata = _rust.Metadata.read_from_file(variant / "metadata.json")
        backend = str(metadata.backend.backend_type).lower()
        if variant.name != f"torch-{backend}" or backend not in announced:
            raise ValueError(f"{variant.name} is for {backend}, but build.toml announces {sorted(announced)}")
        announced.remove(backend)
        ids.add(metadata.id)
        try:
            metadata.digest.validate(_rust.Digest.hash_variant(metadata.digest.algorithm, variant))
        except _rust.DigestValidationError as error:
            raise ValueError(f"{variant.name}: {'; '.join(map(str, error.violations))}") from error
    if announced or len(ids) != len(list(built.iterdir())):
        raise ValueError(f"missing variants: {sorted(announced)}; ids: {sorted(ids)}")
    return True


def push(built: Path, card: Path, recipe: Recipe, repo_id: str, api: HfApi, create_pr: bool = False) -> list[str]:
    """Upload the card to the repository's main branch, and the variants to the branch of their version.

    Args:
        create_pr: open pull requests; the repository and the branch must be there.

    Returns:
        Addresses of what was made.

    Raises:
        RuntimeError: nobody is logged in.
    """
    try:
        api.whoami()
    except LocalTokenNotFoundError:
        raise RuntimeError("you are not logged in to the Hub: run `hf auth login`, or set HF_TOKEN") from None
    if not create_pr:
        api.create_repo(repo_id, repo_type="kernel", exist_ok=True)
    commits = [
        api.upload_file(
            repo_id=repo_id,
            repo_type="kernel",
            path_or_fileobj=card,
            path_in_repo="README.md",
            commit_message="Kernel card",
            create_pr=create_pr,
        )
    ]
    if not create_pr:
        api.create_branch(repo_id, repo_type="kernel", branch=recipe.branch, exist_ok=True)
    commits.append(
        api.upload_folder(
            repo_id=repo_id,
            repo_type="kernel",
            folder_path=built,
            path_in_repo="build",
            revision=recipe.branch,
            # What is not part of this build goes, so the branch holds it and nothing else.
            delete_patterns="*",
            ignore_patterns=["*.pyc"],
            commit_message=f"Build of {recipe.name} {recipe.version}",
            create_pr=create_pr,
        )
    )
    return [commit.pr_url if create_pr else commit.commit_url for commit in commits]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--push", metavar="REPO_ID", help="upload to this repository on the Hub")
    parser.add_argument("--create-pr", action="store_true", help="with --push: as pull requests")
    options = parser.parse_args(arguments)
    if options.create_pr and not options.push:
        parser.error("--create-pr needs --push REPO_ID")
    try:
        built = build()
        checked = validate(KERNELS, built)
        for variant in sorted(built.iterdir()):
            print(
                f"{variant.relative_to(KERNELS.parent)}  {json.loads((variant / 'metadata.json').read_text())['id']}"
            )
        if not checked:
            print("not validated: that takes the kernels package, pip install 'hf-kvq[kernels]'")
        if options.push:
            if not checked:
                raise RuntimeError("what has not been validated is not uploaded")
            recipe = Recipe.read(KERNELS / "build.toml")
            addresses = push(built, KERNELS / "CARD.md", recipe, options.push, HfApi(), options.create_pr)
            print(*addresses, sep="\n")
    except (OSError, RuntimeError, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
