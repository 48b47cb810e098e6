# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
import importlib.util
import re
from pathlib import Path

from families import FAMILIES, TITLES
from test_modes import IMPOSSIBLE


ROOT = Path(__file__).resolve().parent.parent


def test_the_page_says_what_these_tests_check(monkeypatch):
    """If this fails, run `python scripts/compatibility.py`."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    specification = importlib.util.spec_from_file_location("compatibility", ROOT / "scripts" / "compatibility.py")
    script = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(script)

    def expected(check, parameters):
        return "skipped" if (parameters.get("model"), parameters.get("mode")) in IMPOSSIBLE else "passed"

    page = script.PAGE.read_text(encoding="utf-8")
    version = re.search(r"^transformers (\S+)\.$", page, re.M)[1]
    assert page == script.render(expected, version)
    assert TITLES.keys() == FAMILIES.keys()


def test_every_fault_names_tests_that_exist():
    page = (ROOT / "docs" / "bug-cases.md").read_text(encoding="utf-8")
    files = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")}
    named = re.findall(r"`(\w+)::(\w+)`", page)
    assert len(named) > 200
    assert [f"{file}::{test}" for file, test in named if f"def {test}(" not in files.get(file, "")] == []
