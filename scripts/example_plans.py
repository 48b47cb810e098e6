# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Make the example plans in docs/plans from what scripts/calibrate_fbits.py and compare_methods.py measured.

python scripts/example_plans.py
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig

from hf_kvq import KVQPlan, MixKVQConfig, PMKVQConfig
from hf_kvq.bundled import bundled_model_path, load_model
from hf_kvq.hub.cards import page
from tables import read_csv
from texts import split_text


ROOT = Path(__file__).parent.parent
RESULTS, PLANS = ROOT / "docs" / "results", ROOT / "docs" / "plans"
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
TEXT = "English essays"


def pmkvq() -> KVQPlan:
    row = next(
        row
        for row in read_csv(RESULTS / "calibration_2048.csv")
        if (row["schedule"], row["bytes of"], row["widths"])
        == ("progressive", "15 of 30 at 4", "calibrated, measured")
    )
    config = PMKVQConfig(fbit=tuple(map(int, row["fbit"].split())), max_length=2048)
    calibration = {"dataset": f"{TEXT}, other parts of them", "n_samples": 1, "seq_len": 2048, "seed": 0}
    calibration["measure"] = "kl"
    return plan_of(config, calibration, row, exact_perplexity(texts=2, length=2048), tokens=2 * 2048)


def mixkvq() -> KVQPlan:
    rows = {row["cache"]: row for row in read_csv(RESULTS / "fidelity_8192.csv")}
    exact = float(rows["exact"]["perplexity"])
    return plan_of(MixKVQConfig(target_bits=2.5), {}, rows["mixkvq, target 2.5"], exact, tokens=8192)


def plan_of(
    config: PMKVQConfig | MixKVQConfig, calibration: dict, row: dict[str, str], exact_perplexity: float, tokens: int
) -> KVQPlan:
    fidelity = {"dataset": TEXT, "tokens": tokens, "exact_perplexity": exact_perplexity}
    for key, column in (("true_bits", "true bits"), ("perplexity", "perplexity"), ("kl", "KL"), ("top1", "top-1")):
        fidelity[key] = float(row[column])
    model_config = AutoConfig.from_pretrained(bundled_model_path())
    return KVQPlan.of(model_config, config, calibration, fidelity, base_model=MODEL)


@torch.no_grad()
def exact_perplexity(texts: int, length: int) -> float:
    """Of the texts that calibrate_fbits.py compares on, which does not write it down."""
    model, tokenizer = load_model("bundled", dtype=torch.float32)
    ids = tokenizer(split_text()[1], return_tensors="pt").input_ids[0, : texts * length]
    losses = [model(input_ids=part[None], labels=part[None], use_cache=False).loss for part in ids.split(length)]
    return round(torch.stack(losses).mean().exp().item(), 2)


def main() -> None:
    for name, plan in (("smollm2-135m-instruct-pmkvq", pmkvq()), ("smollm2-135m-instruct-mixkvq", mixkvq())):
        plan.save_pretrained(PLANS / name)
        for file, data in page(plan, f"hf-kvq/{name}").items():
            (PLANS / name / file).write_bytes(data)


if __name__ == "__main__":
    main()
