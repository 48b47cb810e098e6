# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""A whole model on the Triton kernels, in Triton's interpreter: the same text as with attention by its definition."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]

SCRIPT = """
import json

import torch
from transformers.utils import logging

import hf_kvq
from hf_kvq.bundled import bundled_text, load_model
from hf_kvq.cache import layer, layout
from hf_kvq.ops import byte_orders, fused, naive
from hf_kvq_kernels import gpu

logging.set_verbosity_error()
torch.set_num_threads(2)
# Pages as a GPU has them.
layout.byte_orders = lambda device_type, key_dim: byte_orders("cuda", key_dim)
calls = [0]


def by_definition(query, parts, scaling, kernel, softcap, sinks):
    return naive.attend(query, parts, scaling)


def by_triton(query, parts, scaling, kernel, softcap, sinks):
    calls[0] += 1
    assert gpu.why_not(query, None) is None
    return fused.attend(query, parts, scaling, lambda *arguments: gpu.attend(*arguments))


model, tokenizer = load_model("bundled", dtype=torch.float32)
ids = tokenizer(bundled_text()[:4000], return_tensors="pt").input_ids[:, :300]
texts = []
for name, options in (("pmkvq", {"fbit": 4, "initial_bits": 4}), ("mixkvq", {"target_bits": 3.0})):
    for attend in (by_definition, by_triton):
        layer.attend = attend
        out = model.generate(
            ids, max_new_tokens=4, do_sample=False, cache_implementation=name, cache_config=options
        )
        texts.append(out[0, 300:].tolist())
print(json.dumps({"texts": texts, "calls": calls[0], "layers": model.config.num_hidden_layers}))
"""


@pytest.mark.slow
def test_a_real_model_says_the_same():
    paths = (str(ROOT), str(ROOT / "kernels" / "torch-ext"), os.environ.get("PYTHONPATH", ""))
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    # The first token comes from the prompt, which attends to itself exactly.
    assert found["calls"] == 2 * 3 * found["layers"]
    plain, triton, mixed_plain, mixed_triton = found["texts"]
    assert triton == plain and mixed_triton == mixed_plain and len(plain) == 4
