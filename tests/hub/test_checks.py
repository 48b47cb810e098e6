# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""The factors of the keys that a plan may hold."""

import pytest
import torch
from loopback import hub_fixture, make_plan  # noqa: F401

from hf_kvq import KVQPlan, MixKVQConfig, PlanError, PMKVQConfig


ME = "hf_user_me"
SCALE = torch.linspace(0.25, 3.0, 96).view(3, 2, 16)
LAMBDA = PMKVQConfig(fbit=4, transform="lambda", key_codec="token")


def in_file(config) -> dict:
    """What a file says about these options."""
    values = {key: value for key, value in config.to_dict().items() if key != "kernel"}
    return {"method": {PMKVQConfig: "pmkvq", MixKVQConfig: "mixkvq"}[type(config)], "config": values}


@pytest.mark.parametrize(
    ("config", "scale", "message"),
    [
        (LAMBDA, None, "transform='lambda' needs the tensor 'key_scale'"),
        (PMKVQConfig(), SCALE, "'key_scale' is of use only with transform='lambda'"),
        (MixKVQConfig(), SCALE, "'key_scale' is of use only with transform='lambda'"),
        (LAMBDA, SCALE.double(), r"torch.float32 \[3, 2, 16\] .* got torch.float64 \[3, 2, 16\]"),
        (LAMBDA, SCALE[:2], r"torch.float32 \[3, 2, 16\] .* got torch.float32 \[2, 2, 16\]"),
        (LAMBDA, SCALE[:, :1], r"got torch.float32 \[3, 1, 16\]"),
        (LAMBDA, SCALE[..., :8], r"got torch.float32 \[3, 2, 8\]"),
        (LAMBDA, SCALE.flatten(1), r"got torch.float32 \[3, 32\]"),
        (LAMBDA, SCALE - 0.25, "must hold positive factors; the least is 0$"),
        (LAMBDA, -SCALE, "must hold positive factors; the least is -3$"),
        (LAMBDA, SCALE / 0, "numbers that are not finite"),
        (LAMBDA, SCALE * float("nan"), "numbers that are not finite"),
    ],
)
def test_factors_that_do_not_fit_make_no_plan(config, scale, message):
    tensors = {} if scale is None else {"key_scale": scale}
    with pytest.raises(PlanError, match=message):
        make_plan(config=config, tensors=tensors)
    # Nor do they once they are in a file.
    good = make_plan(config=LAMBDA, tensors={"key_scale": SCALE})
    with pytest.raises(PlanError, match=message):
        KVQPlan.from_dict({**good.to_dict(), **in_file(config)}, tensors)


def test_factors_survive(tmp_path, hub):
    plan = make_plan(config=LAMBDA, tensors={"key_scale": SCALE})
    plan.save_pretrained(tmp_path)
    plan.push_to_hub("me/tiny-kvq", token=ME)
    for loaded in (KVQPlan.from_pretrained(tmp_path), KVQPlan.from_pretrained("me/tiny-kvq")):
        assert loaded == plan and torch.equal(loaded.tensors["key_scale"], SCALE)


def test_factors_where_the_config_does_not_say_the_shape():
    values = make_plan(config=LAMBDA, tensors={"key_scale": SCALE}).to_dict()
    values["base_model"] |= {"kv_heads": None, "head_dim": None}
    for shape, fits in (((3, 7, 24), True), ((2, 7, 24), False), ((3, 0, 24), False), ((3, 7), False)):
        tensors = {"key_scale": torch.ones(shape)}
        if fits:
            assert KVQPlan.from_dict(values, tensors).tensors.keys() == tensors.keys()
        else:
            with pytest.raises(PlanError, match=r"must be torch.float32 \[3, any, any\]"):
                KVQPlan.from_dict(values, tensors)
