# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Peak memory of a whole process on the real model, with an ordinary cache and with ours."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


# What getrusage says of a new process includes its parent's peak, so Linux's own books are read.
pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

RUN = """
import re, sys, torch, hf_kvq
from pathlib import Path
from hf_kvq.bundled import load_model
torch.set_num_threads(2)
model, _ = load_model("bundled", dtype=torch.bfloat16)
ids = torch.randint(1000, 2000, (1, 6000), generator=torch.Generator().manual_seed(0))
options = {} if sys.argv[1] == "dynamic" else {"cache_implementation": sys.argv[1]}
model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, **options)
print(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""


def peak_mib(implementation: str) -> float:
    # Freed blocks go back to the system at once, so that the peak shows what is alive, not malloc's habits.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "262144"}
    command = [sys.executable, "-c", RUN, implementation]
    out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=900, env=env).stdout
    return int(out.split()[-1]) / 1024


@pytest.fixture(scope="module")
def ordinary_mib() -> float:
    return peak_mib("dynamic")


@pytest.mark.parametrize("implementation", ["pmkvq", "mixkvq"])
def test_peak_memory_of_a_long_run_is_below_the_ordinary_caches(implementation, ordinary_mib):
    # The ordinary cache holds 6,000 tokens x 22.5 KiB = 132 MiB, ours about a third of it.
    assert peak_mib(implementation) < ordinary_mib - 60
