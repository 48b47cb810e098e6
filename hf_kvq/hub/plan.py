# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""The calibration artifact: options of a cache, the model they were made for, and what they were made from."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import CommitInfo
from packaging.version import InvalidVersion, Version
from transformers import PretrainedConfig, PreTrainedModel

from ..config import KIVIConfig, MixKVQConfig, Options, PMKVQConfig
from ..version import __version__
from . import remote, schema
from .checks import check_config, check_tensors
from .errors import PlanError
from .facts import BaseModel
from .files import replace_file
from .schema import PLAN_FILE
from .tensors import TENSORS_FILE, declaration, from_bytes, to_bytes


#: Options by method; a method is called as its cache is in `generate`.
METHODS: dict[str, type[Options]] = {"pmkvq": PMKVQConfig, "mixkvq": MixKVQConfig, "kivi": KIVIConfig}


@dataclass(frozen=True, eq=False, repr=False)
class KVQPlan:
    """Options of a quantized cache, made for one model, to save and share.

    Args:
        method: "pmkvq", "mixkvq" or "kivi".
        config: the method's options. Which kernel to use is not part of a plan.
        base_model: the model that it was made for.
        calibration: what it was made from; numbers, text, and lists of them.
        fidelity: what it was measured to cost, in the same form.
        tensors: what is too big for JSON: `key_scale` for `transform="lambda"`, float32 [quantized layers, KV heads,
            head_dim].
        hf_kvq_version: the version that made it.

    Raises:
        PlanError: something cannot be stored, or the options do not go with the model.

    Example:

    ```python
    >>> plan = KVQPlan.of(model, calibrate_fbits(model, 32768, "2.25bits"), calibration={"seq_len": 2048})
    >>> plan.save_pretrained("my-model/kvq")
    >>> model.generate(**inputs, cache_implementation="pmkvq", cache_config={"plan": plan})
    ```
    """

    method: str
    config: Options
    base_model: BaseModel
    calibration: dict[str, Any] = field(default_factory=dict)
    fidelity: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    hf_kvq_version: str = __version__

    def __post_init__(self):
        if METHODS.get(self.method) is not type(self.config):
            raise PlanError(f"{type(self.config).__name__} holds no options of method {self.method!r}")
        if getattr(self.config, "kernel", "auto") != "auto":
            object.__setattr__(self, "config", dataclasses.replace(self.config, kernel="auto"))
        for name in ("calibration", "fidelity", "tensors"):
            object.__setattr__(self, name, copy.copy(getattr(self, name)))
        schema.check(schema.load(self.files()[PLAN_FILE]))
        check_config(self.config, self.base_model)
        check_tensors(self.config, self.base_model, self.tensors)

    @classmethod
    def of(
        cls,
        model: PreTrainedModel | PretrainedConfig,
        config: Options,
        calibration: dict[str, Any] | None = None,
        fidelity: dict[str, Any] | None = None,
        tensors: dict[str, torch.Tensor] | None = None,
        base_model: str | None = None,
    ) -> KVQPlan:
        """A plan for a model.

        Args:
            model: the model, or its config.
            config: options of the cache; their class says which method it is.
            calibration, fidelity, tensors: see the class.
            base_model: id of the model on the Hub, where it was loaded from somewhere else.

        Raises:
            PlanError: see the class.
            ValueError: the model has nothing to quantize.
        """
        method = next((name for name, options in METHODS.items() if type(config) is options), None)
        if method is None:
            raise PlanError(f"config must be one of {', '.join(x.__name__ for x in METHODS.values())}; got {config!r}")
        base = BaseModel.of(getattr(model, "config", model))
        if base_model is not None and base_model != base.id:
            base = dataclasses.replace(base, id=base_model, revision=None)
        return cls(method, config, base, calibration or {}, fidelity or {}, tensors or {})

    # --- as a dict and as files --------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """What `kvq_config.json` holds, but for the tensors."""
        return {
            "format_version": schema.FORMAT_VERSION,
            "method": self.method,
            "hf_kvq_version": self.hf_kvq_version,
            "config": {key: value for key, value in self.config.to_dict().items() if key != "kernel"},
            "base_model": self.base_model.to_dict(),
            "calibration": copy.deepcopy(self.calibration),
            "fidelity": copy.deepcopy(self.fidelity),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None) -> KVQPlan:
        """The inverse of `to_dict`.

        Raises:
            PlanError: the values break the format, or the options do not go with the model.
        """
        schema.check(values)
        try:
            config = METHODS[values["method"]].from_dict(values["config"])
        except (TypeError, ValueError) as error:
            raise PlanError(f"config: {error}{_hint(values['hf_kvq_version'])}") from error
        return cls(
            method=values["method"],
            config=config,
            base_model=BaseModel.from_dict(values["base_model"]),
            calibration=values.get("calibration", {}),
            fidelity=values.get("fidelity", {}),
            tensors=tensors or {},
            hf_kvq_version=values["hf_kvq_version"],
        )

    def files(self) -> dict[str, bytes]:
        """The files that make up the plan, by name; the same plan gives the same bytes."""
        values, files = self.to_dict(), {}
        if self.tensors:
            files[TENSORS_FILE] = to_bytes(self.tensors)
            values["tensors"] = declaration(self.tensors, files[TENSORS_FILE])
        # Last, as it vouches for the other.
        return {**files, PLAN_FILE: schema.dump(values)}

    # --- folders and the Hub -----------------------------------------------------------------------------------------

    def save_pretrained(self, save_directory: str | os.PathLike) -> None:
        """Write the plan into a folder, which is made if it is not there. Each file is replaced whole.

        Raises:
            OSError: the folder cannot be written.
        """
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        files = self.files()
        for name, data in files.items():
            replace_file(folder / name, data)
        if TENSORS_FILE not in files:
            (folder / TENSORS_FILE).unlink(missing_ok=True)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike,
        subfolder: str = "",
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | os.PathLike | None = None,
        force_download: bool = False,
        local_files_only: bool = False,
    ) -> KVQPlan:
        """Load a plan from a folder or a repository of the Hub.

        Args:
            pretrained_model_name_or_path: the folder, or the repository's id.
            subfolder: where in it, such as "kvq/pmkvq-2.25bit".
            revision: branch, tag, commit or "refs/pr/N"; all files are taken from the commit that it names now.
            token, cache_dir, force_download, local_files_only: as in `huggingface_hub.hf_hub_download`.

        Raises:
            PlanError: the files are damaged, too new, or make no possible plan.
            PlanUnavailableError: there is no such folder, repository, revision or file, or no way to it.
        """
        source = remote.open_source(
            pretrained_model_name_or_path,
            subfolder,
            revision,
            token=token,
            cache_dir=cache_dir,
            force_download=force_download,
            local_files_only=local_files_only,
        )
        name, tensors = PLAN_FILE, {}
        try:
            values = schema.load(source.read(name, schema.MAX_CONFIG_BYTES))
            if declared := values.get("tensors"):
                name = TENSORS_FILE
                tensors = from_bytes(source.read(name, declared["size"]), declared)
                name = PLAN_FILE
            return cls.from_dict(values, tensors)
        except PlanError as error:
            raise PlanError(f"{source.describe(name)} cannot be used: {error}") from error

    def push_to_hub(
        self,
        repo_id: str,
        path_in_repo: str | None = None,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        commit_message: str | None = None,
    ) -> CommitInfo:
        """Upload the plan to the Hub, in one commit. A README that is not ours gets tags, and nothing else.

        Args:
            repo_id: the repository; it is made if it is not there, unless `create_pr`.
            path_in_repo: folder in it, such as "kvq/pmkvq-2.25bit" next to a model's weights. Without it the
                repository is the plan's own, and gets a model card.
            private: of a new repository.
            token: as in `huggingface_hub`.
            revision: branch, made if it is not there, or "refs/pr/N".
            create_pr: open a pull request instead of committing.
            commit_message: the default names the method and the model.

        Raises:
            PlanUnavailableError: no permission, no network, or the repository changed meanwhile.
            ValueError: `path_in_repo` leads out of the repository.
        """
        return remote.push(
            self,
            repo_id,
            path_in_repo,
            private=private,
            token=token,
            revision=revision,
            create_pr=create_pr,
            commit_message=commit_message or f"hf_kvq: {self.method} plan for {self.base_model.id or 'this model'}",
        )

    # --- use ---------------------------------------------------------------------------------------------------------

    def check_fits(self, model_config: PretrainedConfig) -> None:
        """Refuse a model of another shape.

        Raises:
            PlanError: it names both models and what they differ in.
        """
        other = BaseModel.of(model_config)
        if differences := self.base_model.differences(other):
            raise PlanError(
                f"this {self.method} plan was made for {self.base_model}, and the model is {other}; they differ in "
                f"{'; '.join(differences)}. cache_config={{'plan': None}} does without a plan"
            )

    def layer_widths(self) -> tuple[tuple[int, int], ...] | None:
        """Final widths of keys and values of each quantized layer; None for a method that has none."""
        if not isinstance(self.config, PMKVQConfig):
            return None
        return self.config.layer_widths(self.base_model.layers, self.base_model.quantized_layers)

    def __eq__(self, other: object) -> bool:
        return self.files() == other.files() if isinstance(other, KVQPlan) else NotImplemented

    __hash__ = None

    def __repr__(self) -> str:
        facts = [f"{self.method} for {self.base_model}"]
        if widths := self.layer_widths():
            counts = sorted(Counter(widths).items(), reverse=True)
            facts.append(", ".join(f"{n} x {k if k == v else f'{k}/{v}'} bits" for (k, v), n in counts))
        defaults = METHODS[self.method]().to_dict()
        chosen = {k: v for k, v in self.config.to_dict().items() if v != defaults[k] and "fbit" not in k}
        facts += [f"{key}={value}" for key, value in chosen.items() if not isinstance(value, list)]
        return f"KVQPlan({'; '.join(facts)})"


def _hint(version: str) -> str:
    """What to do if a newer version wrote the plan."""
    try:
        if Version(version) <= Version(__version__):
            return ""
    except InvalidVersion:
        return ""
    return f" (it was written by hf_kvq {version}, and this is {__version__}: pip install -U hf-kvq)"
