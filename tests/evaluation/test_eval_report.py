# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
import importlib.util
import json
import math
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from hf_kvq.evaluation.plots import bits_chart, chart, fidelity_chart
from hf_kvq.evaluation.report import beaten, bits_by_metric, flat_rows, markdown, overview, to_csv


ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"


def estimate(mean: float, low: float | None = None, high: float | None = None) -> dict:
    return {"mean": mean, "low": low, "high": high, "n": 4}


def report(**kl: tuple[str, float, float]) -> dict:
    """Of methods by label: cache, true bits, KL."""
    methods = {"exact": ("exact", 16.0, 0.0), **kl}
    return {
        "methods": [{"label": k, "cache": cache, "options": {}} for k, (cache, *_) in kl.items()],
        "tasks": {
            "text": {
                "bits": {label: [bits, 2 * bits] for label, (_, bits, _) in methods.items()},
                "bits_by_position": {label: [[128, 16.0], [256, bits]] for label, (_, bits, _) in methods.items()},
                "results": {
                    label: {"kl": estimate(x, 0.9 * x, 1.1 * x), "top1": estimate(1.0), "perplexity": estimate(10.0)}
                    for label, (_, _, x) in methods.items()
                },
            }
        },
    }


def test_overview_goes_from_the_most_bits_down():
    lines = overview(report(a=("pmkvq", 3.0, 0.5), b=("kivi", 4.0, 0.25))).splitlines()
    assert lines[0].startswith("| cache | true bits, end | true bits, mean | KL, text |")
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| exact", "| b", "| a"]
    assert "| 4.00 | 8.00 | 0.25 [0.225, 0.275] |" in lines[3]


@pytest.mark.parametrize(
    ("theirs", "is_beaten"),
    [((3.0, 0.1), True), ((4.0, 0.1), True), ((4.1, 0.1), False), ((3.0, 0.5), False), ((3.0, 0.45), True)],
)
def test_losses_at_equal_bytes_are_named(theirs, is_beaten):
    lines = beaten(report(ours=("pmkvq", 4.0, 0.5), theirs=("kivi", *theirs)))
    mark = ", close" if theirs[1] == 0.45 else ""
    expected = f"text: ours (4.00 true bits, KL 0.5) by theirs ({theirs[0]:.2f}, {theirs[1]:g}{mark})"
    assert lines == ([expected] if is_beaten else [])


def test_losses_are_looked_for_in_every_metric():
    made = report(ours=("pmkvq", 4.0, 0.1), theirs=("kivi", 3.0, 0.5))
    results = {"exact": {"nll": estimate(0.0)}, "ours": {"nll": estimate(2.0)}, "theirs": {"nll": estimate(1.0)}}
    made["tasks"]["phone"] = {"bits": {"exact": [16, 16], "ours": [9, 9], "theirs": [5, 5]}, "results": results}
    assert beaten(made) == ["phone: ours (9.00 true bits, NLL 2) by theirs (5.00, 1, close)"]
    assert bits_by_metric(made).splitlines()[0] == "| cache | text | phone |"
    assert "| ours | 4.00 | 9.00 |" in bits_by_metric(made)


def test_bytes_over_time_are_another_measure():
    made = report(ours=("pmkvq", 4.0, 0.5), theirs=("kivi", 4.1, 0.1))
    made["tasks"]["text"]["bits"]["theirs"][1] = 7.9
    assert beaten(made) == []
    assert beaten(made, over_time=True) == ["text: ours (8.00 true bits, KL 0.5) by theirs (7.90, 0.1)"]


def test_the_exact_cache_and_ours_beat_nobody():
    assert beaten(report(one=("pmkvq", 20.0, 0.5), other=("mixkvq", 4.0, 0.1))) == []


def test_rows_for_csv():
    rows = flat_rows(report(a=("kivi", 4.0, 0.25)))
    text = to_csv(rows)
    assert text.splitlines()[0] == "metric,method,value,mean,low,high,n"
    assert "text,a,kl,0.25,0.225,0.275,4" in text
    assert len(text.splitlines()) == 1 + 2 * 3


def test_markdown():
    assert markdown(["a", "b"], [1, 2]) == "| a | b |\n|---|---|\n| 1 | 2 |"


def test_a_chart_draws_its_points_to_scale():
    root = ElementTree.fromstring(chart({"x<y": [(0, 1.0), (10, 100.0), (5, 10.0)]}, "t", "x", "y", log_y=True))
    points = [(float(c.get("cx")), float(c.get("cy"))) for c in root.iter(f"{SVG}circle")]
    (left, low), (right, high), (middle, half) = points
    assert left < middle < right and middle == pytest.approx((left + right) / 2)
    assert low > half > high and half == pytest.approx((low + high) / 2, abs=0.1)
    texts = [t.text for t in root.iter(f"{SVG}text")]
    assert "x<y" in texts
    # 10 is where its tick is.
    tick = next(t for t in root.iter(f"{SVG}text") if t.text == "10" and t.get("text-anchor") == "end")
    assert float(tick.get("y")) - 4 == pytest.approx(half, abs=0.1)


def test_charts_leave_out_what_a_logarithm_cannot_show():
    root = ElementTree.fromstring(chart({"a": [(1, 0.0), (2, 0.5)], "empty": [(1, 0.0)]}, "t", "x", "y", log_y=True))
    assert len(list(root.iter(f"{SVG}circle"))) == 1


def test_charts_of_a_report():
    made = report(a=("kivi", 4.0, 0.25), b=("kivi", 3.0, 0.5), c=("pmkvq", 3.5, 0.3))
    names = [t.text for t in ElementTree.fromstring(fidelity_chart(made)).iter(f"{SVG}text")]
    # Ours first; one line per cache.
    assert names.index("pmkvq") < names.index("kivi") and "exact" not in names
    assert math.isclose(bits_chart(made).count("<circle"), 6)


# ---- docs/results.md


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        spec = importlib.util.spec_from_file_location("results", ROOT / "scripts" / "results.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT / "scripts"))
    return module


def test_the_committed_results_are_what_the_script_makes(script):
    files = script.build(ROOT / "docs" / "results")
    assert files == script.build(ROOT / "docs" / "results")
    for name, text in files.items():
        path = ROOT / "docs" / name if name.endswith(".md") else ROOT / "docs" / "results" / name
        assert path.read_bytes() == text.encode(), f"{name} is not up to date; run: python scripts/results.py"


def test_pictures_are_there(script):
    text = script.build(ROOT / "docs" / "results")["results.md"]
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", text)
    assert pictures
    for picture in pictures:
        assert (ROOT / "docs" / picture).exists()


def test_empty_places_are_marked(script, tmp_path):
    text = script.build(tmp_path)["results.md"]
    assert text.count(script.EMPTY) == 2 + len(script.WANTED) + len(script.TABLES)


def test_scores_of_the_harness(script, tmp_path):
    found = {"aime24": {"alias": "aime24", "exact_match,none": 0.5, "exact_match_stderr,none": 0.125, "n,none": 30}}
    (tmp_path / "harness_mine.json").write_text(json.dumps({"results": found}))
    assert "| mine | aime24 | exact_match,none | 0.5000 | 0.1250 |" in script.build(tmp_path)["results.md"]
