# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Runs the tests of model families and of ways to generate, and writes what passed into `docs/compatibility.md`.

python scripts/compatibility.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path


ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import pytest  # noqa: E402
import transformers  # noqa: E402

from families import FAMILIES, QUANTIZED, TITLES, Family  # noqa: E402
from tables import markdown  # noqa: E402


PAGE = ROOT / "docs" / "compatibility.md"
CAPTURE = "test_captured_steps_are_ordinary_steps"
CHECKS = ("test_lossless_equals_the_ordinary_cache", "test_quantized_equals_the_simulation")
SIGNS = {"passed": "✓", "skipped": "–", "failed": "✗"}

# (check, {name of a parameter: its value}) -> "passed", "skipped" or "failed"
Outcome = Callable[[str, dict[str, str]], str]

HEAD = """# Compatibility

`scripts/compatibility.py` writes this page from the results of `tests/test_families.py` and `tests/test_modes.py`.
Each ✓ stands for two tests with a tiny random model, on a padded batch where the way to generate takes one:

* with nothing quantized, tokens and logits are those of the ordinary cache (10⁻⁴ in float32);
* with all pages packed (at 2 bits, `mixkvq` at its three tiers), every byte that the cache holds is that of a
  simulation which shares no code with it, and attention sees just what these bytes stand for.

transformers {version}.
"""

FAMILIES_HEAD = """
## Model families

Layers with full attention are quantized, all others keep transformers' own kind of layer. Attention reads packed codes
directly where it goes through transformers' attention functions (`sdpa`, FlashAttention, and `eager` for models with
capped scores or sinks); models that compute attention by themselves, or from something else than what they cache, are
given dequantized keys and values at each step: as right, but slower. Where queries stay hidden, `mixkvq` ranks key
channels by quantization difficulty alone, and says so once. Attention weights come out where they are asked for.
Decode steps of models marked so can be captured as CUDA graphs (`compile_config`): a recorder that repeats a step's
operations on the same memory comes to the tokens and logits of ordinary steps. Others run as ever.
"""

MODES_HEAD = """
## Ways to generate

– is what the ordinary cache cannot do either: rows of layers with a state can be reordered, but not repeated. Models
with recurrent layers refuse assisted decoding and prompt lookup as they do with the ordinary cache, and group beam
search, constrained beam search, contrastive search and DoLa are repositories for `custom_generate` now, which get the
cache that was asked for.
"""

DRAFTS = """
## What drafts leave behind

Assisted decoding and prompt lookup feed tokens that may be taken back. Nothing that is stored is ever quantized
anew: what was exact stays exact, what was packed stays as packed. So

* with nothing quantized, the output is that of greedy decoding;
* in `pmkvq`, drafts of up to `window` tokens leave no trace in pages or widths: a page may just be packed earlier, by
  as many tokens as there were drafts;
* in `mixkvq` and `kivi`, a page is packed when it is full, drafts included; a part of it that is taken back is hidden,
  and the queries of drafts stay counted.
"""


class Results:
    """Collects outcomes while pytest runs."""

    def __init__(self):
        self.outcomes: dict[tuple, str] = {}

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = (yield).get_result()
        key = self._key(item.originalname, getattr(item, "callspec", None) and item.callspec.params or {})
        if report.when == "call" or not report.passed:
            self.outcomes[key] = report.outcome

    def __call__(self, check: str, parameters: dict[str, str]) -> str:
        return self.outcomes.get(self._key(check, parameters), "failed")

    @staticmethod
    def _key(check: str, parameters: dict[str, str]) -> tuple:
        return check, tuple(sorted(parameters.items()))


def render(outcome: Outcome, version: str) -> str:
    """The page, given how the tests came out."""
    from test_families import CACHES
    from test_modes import MODES, RUNS

    def sign(parameters: dict[str, str]) -> str:
        results = {outcome(check, parameters) for check in CHECKS}
        return SIGNS[next(result for result in ("failed", "skipped", "passed") if result in results)]

    families = (
        [
            TITLES[name],
            _layers(family),
            _attention(family),
            *(sign({"family": name, "cache": cache}) for cache in CACHES),
            SIGNS[outcome(CAPTURE, {"family": name})] if family.is_captured else "",
            family.note,
        ]
        for name, family in FAMILIES.items()
    )
    runs = [tuple(getattr(run, "values", run)) for run in RUNS]
    modes = (
        [mode, *(sign({"mode": mode, "model": model, "cache": cache}) for model, cache in runs)] for mode in MODES
    )
    return "".join(
        [
            HEAD.format(version=version),
            FAMILIES_HEAD,
            "\n",
            markdown(
                ["family", "layers of the tiny model", "attention reads", *CACHES, "CUDA graphs", "note"], *families
            ),
            "\n",
            MODES_HEAD,
            "\n",
            markdown(["", *(f"{TITLES[model]}, {cache}" for model, cache in runs)], *modes),
            "\n",
            DRAFTS,
        ]
    )


def _layers(family: Family) -> str:
    kinds = list(dict.fromkeys(family.layers))
    return ", ".join(f"{family.layers.count(kind)} {kind}" for kind in kinds)


def _attention(family: Family) -> str:
    if QUANTIZED not in family.layers:
        return ""
    if family.reads_packed:
        return "packed codes"
    return "dequantized" if family.shows_queries else "dequantized; queries are hidden"


def main() -> int:
    results = Results()
    files = [str(ROOT / "tests" / name) for name in ("test_families.py", "test_modes.py")]
    status = pytest.main(["-q", "-k", " or ".join((*CHECKS, CAPTURE)), *files], plugins=[results])
    PAGE.write_text(render(results, transformers.__version__), encoding="utf-8")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
