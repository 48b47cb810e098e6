# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Fixtures: a plan, and a Hub that the real client in this process talks to."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants
from server import Hub
from transformers import LlamaConfig
from transformers.utils import hub as transformers_hub

from hf_kvq import KVQPlan, PMKVQConfig


FBITS = (8, 4, 2)


def make_plan(**changes) -> KVQPlan:
    """A plan for the tiny Llama of the other tests."""
    config = LlamaConfig(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=128
    )
    options = PMKVQConfig(fbit=FBITS, window=8, group_size=16)
    given = {"calibration": {"dataset": "me/essays", "n": 16}, "fidelity": {"kl": 0.012}, "base_model": "me/tiny"}
    return KVQPlan.of(config, **{"config": options, **given, **changes})


@pytest.fixture(name="plan")
def plan_fixture() -> KVQPlan:
    return make_plan()


@pytest.fixture(name="hub")
def hub_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub on loopback, that the real client in this process talks to, with an empty cache and no token."""
    with Hub() as hub:
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        for name, value in {
            "ENDPOINT": hub.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": template,
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_TOKEN_PATH": str(tmp_path / "token"),
            "HF_XET_CACHE": str(tmp_path / "xet"),
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_DISABLE_TELEMETRY": True,
        }.items():
            monkeypatch.setattr(constants, name, value)
        # What transformers and the client made for themselves when they were imported.
        monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", hub.url)
        monkeypatch.setattr(transformers_hub, "_hf_api", None)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        huggingface_hub.close_session()
        yield hub
        huggingface_hub.close_session()


@pytest.fixture(name="closed_port")
def closed_port_fixture() -> int:
    """A port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
