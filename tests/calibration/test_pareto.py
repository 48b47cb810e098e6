# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
import csv
import sys

import pytest

from hf_kvq import MixKVQConfig
from hf_kvq.calibration.pareto import ThresholdTrial, knee, pareto_front, plot_trials, write_trials


def trial(bits: float, kl: float) -> ThresholdTrial:
    return ThresholdTrial(1.5, 0.5, kl, int(1000 * bits), bits, 2.5)


SMALL, MIDDLE, LARGE = trial(3, 0.9), trial(4, 0.3), trial(6, 0.1)
WORSE, EQUAL, LARGER, DIVERGENT = trial(5, 0.4), trial(4, 0.3), trial(4.5, 0.3), trial(3, 1.0)
TRIALS = (LARGE, WORSE, MIDDLE, DIVERGENT, EQUAL, LARGER, SMALL)


def test_the_front_has_what_no_other_trial_beats():
    front = pareto_front(TRIALS)
    assert front == (SMALL, MIDDLE, LARGE) and front[1] is MIDDLE
    for other in TRIALS:
        beaten = any(
            t.true_bits <= other.true_bits and t.kl <= other.kl and (t.true_bits, t.kl) != (other.true_bits, other.kl)
            for t in TRIALS
        )
        assert beaten != any(other == t for t in front)
    assert pareto_front(()) == ()


@pytest.mark.parametrize(("bits", "best"), [(3, SMALL), (3.9, SMALL), (4, MIDDLE), (5.9, MIDDLE), (100, LARGE)])
def test_the_best_within_a_size(bits, best):
    assert knee(TRIALS, bits) == knee(TRIALS, nbytes=int(1000 * bits)) == knee(pareto_front(TRIALS), bits) == best


def test_nothing_within_a_size():
    with pytest.raises(ValueError, match="no trial is within 2.5 true bits; the smallest one takes 3"):
        knee(TRIALS, 2.5)
    with pytest.raises(ValueError, match="no trial is within 2,500 bytes; the smallest one takes 3,000"):
        knee(TRIALS, nbytes=2500)
    for sizes in ({}, {"target_bits": 3, "nbytes": 3}):
        with pytest.raises(TypeError, match="either target_bits or nbytes"):
            knee(TRIALS, **sizes)


def test_thresholds_become_options():
    assert SMALL.config() == MixKVQConfig(tau_bf16=1.5, tau_uint4=0.5)
    others = MixKVQConfig(value_bits=4)
    assert SMALL.config(others) == MixKVQConfig(value_bits=4, tau_bf16=1.5, tau_uint4=0.5)


def test_trials_as_a_table(tmp_path):
    path = tmp_path / "new" / "front.csv"
    write_trials(TRIALS, path)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["kl"]) for row in rows] == [t.kl for t in TRIALS]
    assert [t for t, row in zip(TRIALS, rows) if row["on_front"] == "1"] == [LARGE, MIDDLE, EQUAL, SMALL]
    assert list(tmp_path.iterdir()) == [path.parent] and list(path.parent.iterdir()) == [path]


def test_trials_as_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    plot_trials(TRIALS, tmp_path / "front.png", "a title")
    assert (tmp_path / "front.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        plot_trials(TRIALS, tmp_path / "front.png")
