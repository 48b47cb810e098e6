# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
from hf_kvq.evaluation.anchors import anchors


def report(**kl: tuple[dict, float]) -> dict:
    methods = [{"label": label, "cache": "pmkvq", "options": options} for label, (options, _) in kl.items()]
    values = {"exact": 0.0, **{label: mean for label, (_, mean) in kl.items()}}
    results = {label: {"kl": {"mean": x, "low": 0.9 * x, "high": 1.1 * x}} for label, x in values.items()}
    return {"methods": methods, "tasks": {"text": {"results": results}}}


def lines(found: str, anchor: str) -> list[str]:
    return [line for line in found.splitlines() if line.startswith(f"| {anchor}")]


def test_what_holds_and_what_does_not():
    four, two, mine = {"fbit": 4, "window": 8}, {"fbit": 2, "window": 8}, {"fbit": 2, "initial_bits": 2, "window": 8}
    found = anchors({"a": report(b4=(four, 0.1), b2=(two, 0.2), fixed=(mine, 0.19))})
    assert lines(found, "the exact cache has KL 0") == ["| the exact cache has KL 0 | a | exact | 0 | yes |"]
    assert lines(found, "more bits") == [
        "| more bits, no more KL | a | b4 < b2 | 0.1 [0.09, 0.11], 0.2 [0.18, 0.22] | yes |"
    ]
    (progressive,) = lines(found, "progressive")
    assert "b2 < fixed" in progressive and "no, but the intervals overlap" in progressive
    assert "not in these results" in lines(found, "queries tell")[0]


def test_methods_that_differ_in_more_are_not_compared():
    found = anchors({"a": report(b4=({"fbit": 4, "window": 8}, 0.2), b2=({"fbit": 2, "window": 16}, 0.1))})
    assert "not in these results" in lines(found, "more bits")[0]
    found = anchors({"a": report(b4=({"fbit": 4}, 0.2), b2=({"fbit": 2}, 0.1))})
    assert "no: the intervals are apart" in lines(found, "more bits")[0]
