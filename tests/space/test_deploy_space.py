# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Deploying the Space, against the Hub stand-in and with the real client."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from huggingface_hub import HfApi


ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/hub"))

from loopback import closed_port_fixture, hub_fixture  # noqa: E402, F401


spec = importlib.util.spec_from_file_location("deploy_space", ROOT / "scripts/deploy_space.py")
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)

ID = "me/demo"
FILES = {"README.md": b"---\nsdk: gradio\n---\n", "app.py": b"1\n", "requirements.txt": b"x\n", "hf_kvq/a.py": b"2\n"}


@pytest.fixture
def api(hub) -> HfApi:
    return HfApi(endpoint=hub.url, token="hf_user_me")


def test_what_is_uploaded():
    files = script.space_files()
    assert {"README.md", "app.py", "requirements.txt", "hf_kvq/__init__.py", "hf_kvq/hub/schema.py"} <= set(files)
    assert {"hf_kvq/py.typed", "hf_kvq_kernels/cpu/attend.c", "hf_kvq_kernels/gpu/attend.py"} <= set(files)
    assert {place for place in files if place.endswith(".jinja")} and "calculator.py" in files
    assert not [place for place in files if "__pycache__" in place or place.endswith((".so", ".pyc"))]
    front = yaml.safe_load(files["README.md"].decode().split("---")[1])
    assert front["sdk"] == "gradio" and front["app_file"] in files
    assert not [place for place in script.space_files(from_index=True) if place.startswith("hf_kvq")]


def test_requirements_are_those_of_the_package(tmp_path: Path):
    pyproject = tmp_path / "pyproject.toml"
    pyproject.write_text(
        '[project]\nname = "hf-kvq"\ndependencies = ["torch>=2", "packaging"]\n'
        '[project.optional-dependencies]\nbundled = ["gguf>=1"]\nother = ["never"]\n'
    )
    wanted = "# what it takes\nhf-kvq[bundled]\nspaces>=0.30\npackaging\n"
    expected = "# what it takes\ntorch>=2\npackaging\ngguf>=1\nspaces>=0.30\n"
    assert script.requirements(wanted, pyproject) == expected
    assert "hf-kvq[bundled]" in script.space_files(from_index=True)["requirements.txt"].decode()
    own = script.space_files()["requirements.txt"].decode().splitlines()
    assert "hf-kvq[bundled]" not in own and any(line.startswith("transformers") for line in own)


@pytest.mark.slow
def test_the_package_is_found_next_to_the_app(tmp_path: Path):
    for place, content in script.space_files().items():
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_bytes(content)
    code = "import hf_kvq, hf_kvq_kernels; print(hf_kvq.__file__, hf_kvq_kernels.__file__, sep='\\n')"
    # From the folder, as a Space runs its app.
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert [Path(line).parents[1] for line in done.stdout.split()] == [tmp_path] * 2


def test_what_must_not_be_uploaded_is_not(tmp_path: Path):
    for place in (
        "README.md",
        "app.py",
        "requirements.txt",
        "__pycache__/app.py",
        ".cache/x.py",
        "a/.env.txt",
        "lib.so",
    ):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text("hello\n")
    assert set(script.space_files(True, tmp_path)) == {"README.md", "app.py", "requirements.txt"}
    (tmp_path / "app.py").unlink()
    with pytest.raises(ValueError, match="has no app.py"):
        script.space_files(True, tmp_path)


def test_create_then_nothing_then_update(hub, api):
    hub_commits = lambda: len(hub.repos[ID].commits)  # noqa: E731
    address = script.deploy(api, ID, FILES, model="org/model")
    assert address == f"{hub.url}/spaces/{ID}" and hub.repos[ID].kind == "space" and not hub.repos[ID].private
    assert hub.files(ID) == {".gitattributes": hub.files(ID)[".gitattributes"], **FILES}
    assert hub.repos[ID].variables == {"HF_KVQ_SPACE_MODEL": "org/model"} and hub_commits() == 2
    script.deploy(api, ID, FILES)
    assert hub_commits() == 2 and hub.repos[ID].variables == {"HF_KVQ_SPACE_MODEL": "org/model"}
    # A file of the user's own stays, and a module that is no more goes.
    hub.add(ID, {"notes.md": b"mine", "hf_kvq/old/b.py": b"3"})
    changed = {**FILES, "app.py": b"4\n"}
    script.deploy(api, ID, changed)
    assert hub_commits() == 4
    assert {key: hub.files(ID)[key] for key in hub.files(ID) if key != ".gitattributes"} == {
        **changed,
        "notes.md": b"mine",
    }


def test_private(hub, api):
    script.deploy(api, ID, FILES, private=True)
    assert hub.repos[ID].private
    script.deploy(api, ID, FILES, private=True)
    hub.repos[ID].private = False
    before = len(hub.repos[ID].commits)
    with pytest.raises(RuntimeError, match="there already and public"):
        script.deploy(api, ID, {**FILES, "app.py": b"5\n"}, private=True)
    assert len(hub.repos[ID].commits) == before


def test_pull_request(hub, api):
    hub.add(ID, {"README.md": b"theirs"}, kind="space")
    stranger = HfApi(endpoint=hub.url, token="hf_user_stranger")
    assert script.deploy(stranger, ID, FILES, create_pr=True) == f"{hub.url}/{ID}/discussions/1"
    assert hub.files(ID) == {"README.md": b"theirs"}
    assert hub.files(ID, "refs/pr/1") == FILES
    with pytest.raises(RuntimeError, match="no Space me/none"):
        script.deploy(stranger, "me/none", FILES, create_pr=True)


def test_hardware(hub, api):
    with pytest.raises(RuntimeError, match="answered 402.*Payment Required"):
        script.deploy(api, ID, FILES, hardware="t4-small")
    pro = HfApi(endpoint=hub.url, token="hf_user_pro")
    script.deploy(pro, "pro/demo", FILES, hardware="zero-a10g")
    assert hub.repos["pro/demo"].hardware == "zero-a10g"


@pytest.mark.parametrize(
    ("token", "repo_id", "message"),
    [
        ("wrong", ID, "answered 401"),
        (None, ID, "not logged in"),
        ("hf_user_other", ID, "answered 403.*check what your token may do"),
        ("hf_user_me", "me/a/b", "no id of a Space"),
        ("hf_user_me", "me/..", "no id of a Space|answered 4"),
    ],
)
def test_errors_leave_nothing_behind(hub, token, repo_id, message):
    with pytest.raises(RuntimeError, match=message):
        script.deploy(HfApi(endpoint=hub.url, token=token), repo_id, FILES)
    assert not hub.repos


def test_a_model_of_that_name_is_left_alone(hub, api):
    hub.add(ID, {"config.json": b"{}"})
    with pytest.raises(RuntimeError):
        script.deploy(api, ID, FILES)
    assert hub.files(ID) == {"config.json": b"{}"}


def test_no_network(closed_port):
    with pytest.raises(RuntimeError, match="cannot be reached"):
        script.deploy(HfApi(endpoint=f"http://127.0.0.1:{closed_port}", token="hf_user_me"), ID, FILES)


def test_command(hub, capsys, monkeypatch):
    script.main([ID, "--dry-run"])
    assert "hf_kvq/__init__.py" in capsys.readouterr().out and not hub.requests
    with pytest.raises(SystemExit):
        script.main([ID, "--create-pr", "--model", "org/model"])
    monkeypatch.setenv("HF_TOKEN", "hf_user_me")
    monkeypatch.setattr(script, "HfApi", lambda: HfApi(endpoint=hub.url, token="wrong"))
    with pytest.raises(SystemExit, match="error: the Hub answered 401"):
        script.main([ID])
    assert not hub.repos
