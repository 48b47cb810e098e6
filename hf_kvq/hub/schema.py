# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""kvq_config.json as text: canonical to write, strict to read. `plan.schema.json` says what may be in it."""

from __future__ import annotations

import difflib
import functools
import json
import math
import re
from pathlib import Path
from typing import Any, NoReturn

from .errors import PlanError


PLAN_FILE = "kvq_config.json"
FORMAT_VERSION = 1
MAX_CONFIG_BYTES = 2**20

# Integers beyond this lose digits in other JSON readers.
_MAX_INTEGER = 2**53
_LINE = 110
_TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
_NAMES = {"object": "an object", "array": "a list", "string": "text", "boolean": "true or false", "null": "null"}
_NAMES |= {"integer": "an integer", "number": "a number"}


def dump(values: dict[str, Any]) -> bytes:
    """The one way to write these values: sorted keys, two spaces, short lists on one line, a newline at the end.

    Raises:
        PlanError: a value is no JSON, is not finite, or the file would be too big.
    """
    try:
        data = (_text(values, "") + "\n").encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise PlanError(f"not plain, finite JSON: {error}") from error
    if len(data) > MAX_CONFIG_BYTES:
        raise PlanError(f"it takes {len(data):,} bytes, and at most {MAX_CONFIG_BYTES:,} are allowed")
    return data


def load(data: bytes) -> dict[str, Any]:
    """Values of a file that follows the schema.

    Raises:
        PlanError: it does not, or it is too big, no JSON, ambiguous, or of a newer format.
    """
    if len(data) > MAX_CONFIG_BYTES:
        raise PlanError(f"it has {len(data):,} bytes, and at most {MAX_CONFIG_BYTES:,} are allowed")
    try:
        text = data.decode("utf-8")
        values = json.loads(
            text, object_pairs_hook=_unique, parse_float=_finite, parse_int=_integer, parse_constant=_no_constant
        )
    except PlanError:
        raise
    except (ValueError, RecursionError) as error:
        raise PlanError(f"it is not valid JSON: {error}") from error
    check(values)
    return values


def check(values: Any) -> None:
    """Compare with the schema.

    Raises:
        PlanError: the first thing that is wrong, by its path.
    """
    version = values.get("format_version") if isinstance(values, dict) else None
    if type(version) is int and version > FORMAT_VERSION:
        writer = values.get("hf_kvq_version")
        raise PlanError(
            f"it has format version {version}, written by hf_kvq {writer}; this hf_kvq reads up to version "
            f"{FORMAT_VERSION}. Run: pip install -U hf-kvq"
        )
    _check(values, schema(), "")


@functools.cache
def schema() -> dict[str, Any]:
    """The JSON schema of kvq_config.json."""
    return json.loads(Path(__file__).with_name("plan.schema.json").read_text(encoding="utf-8"))


def _check(value: Any, rule: dict[str, Any], path: str) -> None:
    """The part of JSON Schema that `plan.schema.json` is written in."""
    if "$ref" in rule:
        rule = schema()["$defs"][rule["$ref"].rpartition("/")[2]]
    allowed = rule.get("type", [])
    allowed = [allowed] if isinstance(allowed, str) else allowed
    if allowed and not any(_is(value, name) for name in allowed):
        _refuse(path, f"must be {' or '.join(_NAMES[name] for name in allowed)}", value)
    if "enum" in rule and value not in rule["enum"]:
        _refuse(path, f"must be {' or '.join(json.dumps(choice) for choice in rule['enum'])}", value)
    if isinstance(value, str):
        if len(value) > rule.get("maxLength", MAX_CONFIG_BYTES):
            _refuse(path, f"must have at most {rule['maxLength']} characters", value)
        # JSON Schema's `$` is the very end; Python's also matches before a last newline.
        if "pattern" in rule and not re.fullmatch(rule["pattern"], value):
            _refuse(path, f"must look like {rule['pattern']}", value)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        if not math.isfinite(value) or isinstance(value, int) and abs(value) > _MAX_INTEGER:
            _refuse(path, "must be a finite number, and an integer within 2^53", value)
        if not rule.get("minimum", -math.inf) <= value <= rule.get("maximum", math.inf):
            _refuse(path, f"must be between {rule.get('minimum')} and {rule.get('maximum')}", value)
    elif isinstance(value, list):
        if not rule.get("minItems", 0) <= len(value) <= rule.get("maxItems", MAX_CONFIG_BYTES):
            _refuse(path, f"must have {rule.get('minItems', 0)} to {rule.get('maxItems')} items", value)
        for i, item in enumerate(value):
            _check(item, rule.get("items", {}), f"{path}[{i}]")
    elif isinstance(value, dict):
        _check_object(value, rule, path)


def _check_object(value: dict[str, Any], rule: dict[str, Any], path: str) -> None:
    known, others = rule.get("properties", {}), rule.get("additionalProperties", True)
    for name in rule.get("required", []):
        if name not in value:
            raise PlanError(f"{_join(path, name)} is missing")
    for name, item in value.items():
        if not isinstance(name, str):
            _refuse(path, "must have text as keys", name)
        item_rule = known.get(name, others)
        if item_rule is False:
            if name in known:
                raise PlanError(f"{_join(path, name)} does not belong in a plan: it is up to whoever uses the plan")
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}"
            raise PlanError(f"unknown key {_short(name)} in {path or 'the file'}; {hint}")
        if item_rule is not True:
            _check(item, item_rule, _join(path, name))


def _is(value: Any, name: str) -> bool:
    if name in ("integer", "number"):
        return isinstance(value, int if name == "integer" else (int, float)) and not isinstance(value, bool)
    return isinstance(value, _TYPES[name])


def _refuse(path: str, wanted: str, value: Any) -> NoReturn:
    raise PlanError(f"{path or 'the file'} {wanted}; got {_short(value)}")


def _short(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)} items"
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _join(path: str, name: str) -> str:
    name = name if len(name) <= 40 else f"{name[:37]}..."
    name = name if name.isidentifier() else ascii(name)
    return f"{path}.{name}" if path else name


def _text(value: Any, indent: str) -> str:
    inner = indent + "  "
    if isinstance(value, dict) and value:
        lines = [f"{inner}{json.dumps(key)}: {_text(value[key], inner)}" for key in sorted(value)]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    text = json.dumps(value, sort_keys=True, allow_nan=False)
    if isinstance(value, list) and (len(text) > _LINE or any(isinstance(item, (list, dict)) for item in value)):
        return "[\n" + ",\n".join(f"{inner}{_text(item, inner)}" for item in value) + f"\n{indent}]"
    return text


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise PlanError(f"the key {_short(twice)} occurs twice")
    return values


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise PlanError(f"the number {text[:40]} is out of range")
    return value


def _integer(text: str) -> int:
    if len(text) > 20:
        raise PlanError(f"the integer {text[:40]} is out of range")
    return int(text)


def _no_constant(text: str) -> NoReturn:
    raise PlanError(f"{text} is not allowed; numbers have to be finite")
