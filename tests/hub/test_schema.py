# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
import functools
import hashlib
import json
import random
import struct
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loopback import make_plan

from hf_kvq import KVQPlan, PlanError
from hf_kvq.hub import schema, tensors


FILE = "kvq_config.json"
FUZZ = settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))


@functools.cache
def good() -> tuple[bytes, bytes, dict]:
    """The two files of a plan with tensors, and the values of the first."""
    plan = make_plan(tensors={"a": torch.arange(12.0).view(3, 4), "b": torch.ones(5, dtype=torch.bfloat16)})
    files = plan.files()
    return files[FILE], files["kvq.safetensors"], json.loads(files[FILE])


def changed(path: str, value: object) -> dict:
    """Good values with one of them replaced; `...` removes it."""
    values = json.loads(good()[0])
    *parents, name = path.split(".")
    place = functools.reduce(lambda x, key: x[key], parents, values)
    place.pop(name) if value is ... else place.update({name: value})
    return values


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("method", ..., "method is missing"),
        ("method", "pmkvk", 'method must be "kivi" or "mixkvq" or "pmkvq"; got \'pmkvk\''),
        ("method", ["pmkvq"], "method must be text"),
        ("metod", "pmkvq", "unknown key 'metod' in the file; did you mean 'method'?"),
        ("base_model.layer", 3, "unknown key 'layer' in base_model; did you mean 'layers'?"),
        ("base_model.layers", "3", "base_model.layers must be an integer; got '3'"),
        ("base_model.layers", True, "base_model.layers must be an integer; got True"),
        ("base_model.layers", 10**9, "base_model.layers must be between 1 and 10000"),
        ("base_model.layers", 10**30, "out of range"),
        ("base_model.id", "../../etc/passwd", "base_model.id must look like"),
        ("base_model.id", "me/x\n", "base_model.id must look like"),
        ("base_model.quantized_layers", [], "must have 1 to 10000 items"),
        ("base_model.quantized_layers", [0, 2, 1], "ascending indices below 3"),
        ("base_model.quantized_layers", [0, 1, 3], "ascending indices below 3"),
        ("base_model.quantized_layers", [0, 1, "2"], r"base_model.quantized_layers\[2\] must be an integer"),
        ("config.fbits", [8, 4, 2], "unknown option 'fbits' for PMKVQConfig; did you mean 'fbit'"),
        ("config.fbit", [8, 4, 3], "fbit must be one of 16, 8, 4, 2; got 3"),
        ("config.fbit", [8, 4], "fbit lists 2 layers"),
        ("config.window", {"a": 1}, "config.window must be"),
        ("config.window", 1.5, "window must be an integer"),
        ("config.kernel", "triton", "config.kernel does not belong in a plan"),
        ("config.plan", "me/other", "config.plan does not belong in a plan"),
        ("calibration", [1], "calibration must be an object"),
        ("calibration.deep", [[1]], r"calibration.deep\[0\] must be"),
        ("format_version", 0, "format_version must be 1"),
        ("format_version", "1", "format_version must be an integer"),
        ("format_version", 2, "format version 2, written by hf_kvq .*pip install -U hf-kvq"),
        ("hf_kvq_version", "", "hf_kvq_version must look like"),
        ("tensors.file", "../kvq.safetensors", 'tensors.file must be "kvq.safetensors"'),
        ("tensors.size", 2**31, "tensors.size must be between"),
        ("tensors.sha256", "0" * 63, "tensors.sha256 must look like"),
        ("tensors.entries.a", {"dtype": "F32"}, "tensors.entries.a.shape is missing"),
        ("tensors.entries.a", {"dtype": "C64", "shape": []}, "tensors.entries.a.dtype must be"),
    ],
)
def test_errors_name_the_place(path, value, message):
    with pytest.raises(PlanError, match=message):
        KVQPlan.from_dict(schema.load(json.dumps(changed(path, value)).encode()))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not valid JSON"),
        (b"\x80\x04K\x01.", "not valid JSON"),
        (b"\xef\xbb\xbf{}", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[]", "the file must be an object"),
        (b"null", "the file must be an object"),
        (b'{"a": 1, "a": 2}', "the key 'a' occurs twice"),
        (b'{"a": NaN}', "NaN is not allowed"),
        (b'{"a": -Infinity}', "-Infinity is not allowed"),
        (b'{"a": 1e999}', "out of range"),
        (b'{"a": ' + b"9" * 5000 + b"}", "out of range"),
        (b" " * (2**20 + 1), "at most 1,048,576"),
        (b'{"base_model": {', "not valid JSON"),
    ],
)
def test_files_that_are_no_plans(data, message):
    with pytest.raises(PlanError, match=message):
        schema.load(data)


def test_a_newer_writer_is_told_apart_from_a_mistake():
    values = changed("config.brand_new", 1)
    values["hf_kvq_version"] = "99.0"
    with pytest.raises(PlanError, match="unknown option 'brand_new'.*written by hf_kvq 99.0.*pip install -U hf-kvq"):
        KVQPlan.from_dict(values)


# --- mutated files ---------------------------------------------------------------------------------------------------


def load(config: bytes, weights: bytes) -> KVQPlan | None:
    """The plan of these files, or None if they are refused in a clear way."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, FILE).write_bytes(config)
        Path(folder, "kvq.safetensors").write_bytes(weights)
        try:
            return KVQPlan.from_pretrained(folder)
        except PlanError as error:
            assert str(error).startswith(folder) and len(str(error)) < 1500 and "\n" not in str(error)[:200]
            return None


def bytes_changed(data: bytes, seed: int) -> bytes:
    """A few bytes flipped, inserted, removed, repeated or cut off."""
    rng, data = random.Random(seed), bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at, length = rng.randrange(len(data) + 1), rng.randrange(1, 9)
        kind = rng.randrange(6)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at:at] = rng.randbytes(length)
        elif kind == 2:
            del data[at : at + length]
        elif kind == 3:
            del data[at:]
        elif kind == 4:
            data[at:at] = data[max(0, at - length) : at]
        else:
            data[at : at + 1] = rng.choice((b'"', b"{", b"}", b"[", b",", b"-", b"9", b"1e99", b"null", b"\\u0000"))
    return bytes(data)


@FUZZ
@given(seed=st.integers(0, 2**32))
def test_any_change_to_the_config_is_refused_or_makes_a_whole_plan(seed):
    config = bytes_changed(good()[0], seed)
    plan = load(config, good()[1])
    if plan is not None:
        assert sorted(plan.tensors) == ["a", "b"] and plan.files()["kvq.safetensors"] == good()[1]
        assert len(plan.layer_widths() if plan.method == "pmkvq" else (1, 2, 3)) == 3


leaves = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["../x", 2, 4])
)
junk = st.recursive(leaves, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=6), x, max_size=3))


def paths(values: dict, prefix: tuple = ()) -> list[tuple]:
    inner = [p for k, v in values.items() if isinstance(v, dict) for p in paths(v, (*prefix, k))]
    return [(*prefix, key) for key in values] + inner


@FUZZ
@given(data=st.data())
def test_any_value_anywhere_is_refused_or_makes_a_whole_plan(data):
    values = json.loads(good()[0])
    *parents, name = data.draw(st.sampled_from(paths(values)))
    place = functools.reduce(lambda x, key: x[key], parents, values)
    if data.draw(st.booleans()):
        name = data.draw(st.text(max_size=8) | st.just(name))
    place[name] = data.draw(junk)
    config = json.dumps(values).encode()
    plan = load(config, good()[1])
    if plan is not None:
        assert plan == KVQPlan.from_dict(plan.to_dict(), plan.tensors)
        assert schema.load(plan.files()[FILE])["method"] == values["method"]


def redeclared(weights: bytes) -> dict:
    """What an attacker would declare: the changed file's own size and hash."""
    declared = dict(good()[2]["tensors"])
    return {**declared, "size": len(weights), "sha256": hashlib.sha256(weights).hexdigest()}


@FUZZ
@given(seed=st.integers(0, 2**32))
def test_any_change_to_the_tensors_is_refused(seed):
    weights = bytes_changed(good()[1], seed)
    assert load(good()[0], weights) is None or weights == good()[1]
    # Even if the hash had been changed too: the reader gives what is declared, finite, or an error.
    try:
        found = tensors.from_bytes(weights, redeclared(weights))
    except PlanError:
        return
    assert {name: tuple(x.shape) for name, x in found.items()} == {"a": (3, 4), "b": (5,)}
    assert all(bool(x.isfinite().all()) for x in found.values())


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"", "header is not there"),
        (b"\xff" * 8, "header is not there"),
        (struct.pack("<Q", 2**60), "header is not there"),
        (struct.pack("<Q", 2) + b"[]", "header cannot be read"),
        (struct.pack("<Q", 4) + b'{"a"', "header cannot be read"),
        (struct.pack("<Q", 8) + b'{"a": 1}', "header cannot be read"),
        (struct.pack("<Q", 2) + b"{}", "does not list the tensors"),
        (struct.pack("<Q", 50_000) + b"[" * 50_000, "header cannot be read"),
    ],
)
def test_files_that_are_no_tensors(header, message):
    with pytest.raises(PlanError, match=message):
        tensors.from_bytes(header, redeclared(header))


def test_tensors_that_overlap_or_point_outside_are_refused():
    weights = good()[1]
    length = int.from_bytes(weights[:8], "little")
    header = json.loads(weights[8 : 8 + length])
    for offsets in ([0, 47], [8, 56], [10**12, 10**12 + 48], [48, 0], [-48, 0], ["0", "48"]):
        header["a"]["data_offsets"] = offsets
        text = json.dumps(header).encode()
        damaged = struct.pack("<Q", len(text)) + text + weights[8 + length :]
        with pytest.raises(PlanError, match="no valid safetensors file"):
            tensors.from_bytes(damaged, redeclared(damaged))


def test_the_published_schema_agrees_with_the_checks():
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(schema.schema())
    jsonschema.Draft202012Validator.check_schema(schema.schema())
    rng, verdicts = random.Random(0), [0, 0]
    values_to_try = [
        None,
        True,
        -1,
        0,
        3,
        2.5,
        10**9,
        "x",
        "../x",
        "",
        "1.0",
        "0" * 64,
        [],
        [0],
        ["a"],
        [[1]],
        {},
        {"a": 1},
    ]
    for _ in range(1500):
        values = json.loads(good()[0])
        *parents, name = rng.choice(paths(values))
        place = functools.reduce(lambda x, key: x[key], parents, values)
        place[rng.choice((name, name, name, "odd"))] = rng.choice(values_to_try)
        try:
            schema.check(values)
            ours = True
        except PlanError:
            ours = False
        assert ours == validator.is_valid(values), values
        verdicts[ours] += 1
    assert min(verdicts) > 100
