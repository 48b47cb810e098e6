# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Create or update a Space on the Hub from scripts/space.

    python scripts/deploy_space.py me/hf-kvq --dry-run
    python scripts/deploy_space.py me/hf-kvq --private --model Qwen/Qwen3-4B --hardware zero-a10g

The package goes along as source, next to the app, and `requirements.txt` names what it depends on; with --from-index
it is installed from the package index instead. (A wheel in the repository would not do: a Space installs its
requirements before its files are there.) Everything is one commit, and none if nothing has changed. What else is in
the Space stays.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, RepositoryNotFoundError
from packaging.requirements import Requirement


try:
    import tomllib
except ModuleNotFoundError:
    import tomli as tomllib


ROOT = Path(__file__).resolve().parents[1]
#: Folders of the Space that are ours alone, and where their content comes from.
PACKAGES = {"hf_kvq": ROOT / "hf_kvq", "hf_kvq_kernels": ROOT / "kernels/torch-ext/hf_kvq_kernels"}
MODEL_VARIABLE = "HF_KVQ_SPACE_MODEL"
# The client's own network errors have this base; which library it comes from depends on the client's version.
_NETWORK_ERRORS = tuple(base for base in HfHubHTTPError.__bases__ if base is not OSError)
_SUFFIXES = {".py", ".md", ".txt", ".css", ".json", ".jinja", ".typed", ".c", ".h", ".svg", ".png"}


def read_folder(folder: Path) -> dict[str, bytes]:
    """What there is to upload in a folder, by its place; hidden files, caches and compiled libraries are not."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and path.suffix in _SUFFIXES
        and not any(part.startswith((".", "__pycache__")) for part in path.relative_to(folder).parts)
    }


def requirements(wanted: str, pyproject: Path = ROOT / "pyproject.toml") -> str:
    """`requirements.txt` with our package replaced by what it depends on, extras included."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    lines = []
    for line in wanted.splitlines():
        try:
            given = Requirement(line)
        except ValueError:
            lines.append(line)
            continue
        if given.name != project["name"]:
            lines.append(line)
            continue
        extras = project["optional-dependencies"]
        lines += [*project["dependencies"], *(need for extra in sorted(given.extras) for need in extras[extra])]
    return "\n".join(dict.fromkeys(lines)) + "\n"


def space_files(from_index: bool = False, space: Path = ROOT / "scripts/space") -> dict[str, bytes]:
    """All files of the Space, by their place.

    Raises:
        ValueError: something that a Space needs is missing.
    """
    files = read_folder(space)
    if missing := [name for name in ("README.md", "app.py", "requirements.txt") if name not in files]:
        raise ValueError(f"{space} has no {missing[0]}, which a Space needs")
    if not from_index:
        files["requirements.txt"] = requirements(files["requirements.txt"].decode()).encode()
        for name, folder in PACKAGES.items():
            files |= {f"{name}/{place}": content for place, content in read_folder(folder).items()}
    return files


def deploy(
    api: HfApi,
    repo_id: str,
    files: dict[str, bytes],
    private: bool = False,
    model: str | None = None,
    hardware: str | None = None,
    create_pr: bool = False,
) -> str:
    """Make the Space what `files` say, in one commit.

    Args:
        api: the Hub.
        repo_id: the Space.
        files: its files; others that it has stay, but for those in the folders of `PACKAGES`.
        private: of a new Space; one that is there must be private already.
        model: id of the model that it shows.
        hardware: what it runs on, as the Hub calls it.
        create_pr: open a pull request; the Space must be there, and its settings stay.

    Returns:
        Address of the Space, or of the pull request.

    Raises:
        RuntimeError: the Hub does not let us; the message says what to do.
    """
    with tempfile.TemporaryDirectory() as folder:
        for place, content in files.items():
            path = Path(folder, place)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        try:
            api.whoami()
            if create_pr:
                address = f"{api.endpoint}/spaces/{repo_id}"
            else:
                address = str(
                    api.create_repo(repo_id, repo_type="space", space_sdk="gradio", private=private, exist_ok=True)
                )
                if private and not api.space_info(repo_id).private:
                    raise RuntimeError(f"the Space {repo_id} is there already and public; make it private first")
            commit = api.upload_folder(
                repo_id=repo_id,
                repo_type="space",
                folder_path=folder,
                # Modules that are no more, or that the index has now, must not be found instead.
                delete_patterns=[f"{name}/*" for name in PACKAGES],
                commit_message="hf_kvq: side by side",
                create_pr=create_pr,
            )
            if create_pr:
                return commit.pr_url or address
            if model:
                api.add_space_variable(repo_id, MODEL_VARIABLE, model)
            if hardware:
                api.request_space_hardware(repo_id, hardware)
            return address
        except LocalTokenNotFoundError:
            raise RuntimeError("you are not logged in to the Hub: run `hf auth login`, or set HF_TOKEN") from None
        except RepositoryNotFoundError:
            raise RuntimeError(f"there is no Space {repo_id}, or your token may not see it") from None
        except HFValidationError:
            raise RuntimeError(f"{repo_id!r} is no id of a Space; write user/name") from None
        except HfHubHTTPError as error:
            status = getattr(error.response, "status_code", None)
            advice = "; check what your token may do" if status in (401, 403) else ""
            raise RuntimeError(f"the Hub answered {status}: {' '.join(str(error).split())[:300]}{advice}") from None
        except (OSError, *_NETWORK_ERRORS) as error:
            raise RuntimeError(f"the Hub cannot be reached ({error}); check the network and HF_ENDPOINT") from None


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("repo_id", help="the Space, such as me/hf-kvq")
    parser.add_argument("--from-index", action="store_true", help="install the package from the index")
    parser.add_argument("--private", action="store_true", help="a new Space is private")
    parser.add_argument("--model", metavar="ID", help="the model that it shows, a Hub id")
    parser.add_argument("--hardware", help="what it runs on, such as zero-a10g or t4-small")
    parser.add_argument("--create-pr", action="store_true", help="open a pull request; the Space must be there")
    parser.add_argument("--dry-run", action="store_true", help="list the files and upload nothing")
    options = parser.parse_args(arguments)
    if options.create_pr and (options.model or options.hardware or options.private):
        parser.error("--create-pr changes files only; leave --model, --hardware and --private out")
    try:
        files = space_files(options.from_index)
        if options.dry_run:
            print(*(f"{len(content):>9,}  {place}" for place, content in files.items()), sep="\n")
            return
        print(
            deploy(
                HfApi(), options.repo_id, files, options.private, options.model, options.hardware, options.create_pr
            )
        )
    except (OSError, RuntimeError, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
