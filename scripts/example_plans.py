# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Make the example plans in docs/plans from what scripts/calibrate_fbits.py and compare_methods.py measured.

python scripts/example_plans.py
"""

from __future__ import annotations

from pathlib import Path

from tables import read_csv
from transformers import AutoConfig

from hf_kvq import KVQPlan, MixKVQConfig, PMKVQConfig
from hf_kvq.bundled import bundled_model_path
from hf_kvq.hub.cards import render


ROOT = Path(__file__).parent.parent
RESULTS, PLANS = ROOT / "docs" / "results", ROOT / "docs" / "plans"
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def pmkvq() -> KVQPlan:
    row = next(
        row
        for row in read_csv(RESULTS / "calibration_2048.csv")
        if (row["schedule"], row["bytes of"], row["widths"]) == ("progressive", "15 of 30 at 4", "calibrated")
    )
    config = PMKVQConfig(fbit=tuple(map(int, row["fbit"].split())), max_length=2048)
    calibration = {"dataset": "bundled English essays", "n_samples": 8, "seq_len": 2048, "seed": 0}
    return plan_of(config, calibration, row, 2048)


def mixkvq() -> KVQPlan:
    row = next(row for row in read_csv(RESULTS / "fidelity_8192.csv") if row["cache"] == "mixkvq, target 2.5")
    return plan_of(MixKVQConfig(target_bits=2.5), {}, row, 8192)


def plan_of(config: PMKVQConfig | MixKVQConfig, calibration: dict, row: dict[str, str], tokens: int) -> KVQPlan:
    fidelity = {"tokens": tokens, "text": "English essays"}
    for key, column in (("true_bits", "true bits"), ("perplexity", "perplexity"), ("kl", "KL"), ("top1", "top-1")):
        fidelity[key] = float(row[column])
    model_config = AutoConfig.from_pretrained(bundled_model_path())
    return KVQPlan.of(model_config, config, calibration, fidelity, base_model=MODEL)


def main() -> None:
    for name, plan in (("smollm2-135m-instruct-pmkvq", pmkvq()), ("smollm2-135m-instruct-mixkvq", mixkvq())):
        plan.save_pretrained(PLANS / name)
        (PLANS / name / "README.md").write_text(render(plan, f"hf-kvq/{name}"), encoding="utf-8")


if __name__ == "__main__":
    main()
