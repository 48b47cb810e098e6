# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""A whole model on the Triton kernels, in Triton's interpreter: the same text as with attention by its definition.

Also where its steps are recorded and repeated, as in a CUDA graph.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
LAYERS = 4

SCRIPT = """
import functools
import json

import torch
from transformers import CompileConfig
from transformers.utils import logging

import hf_kvq
import hf_kvq_kernels
from hf_kvq import registration
from hf_kvq.bundled import bundled_text, load_model
from hf_kvq.cache import layer, layout
from hf_kvq.ops import byte_orders, fused, naive
from hf_kvq.capture import CapturedSteps
from hf_kvq_kernels import gpu
from recorder import record

logging.set_verbosity_error()
torch.set_num_threads(2)
# Pages as a GPU has them.
layout.byte_orders = lambda device_type, key_dim: byte_orders("cuda", key_dim)
calls = [0, 0]


def by_definition(query, parts, scaling, kernel, softcap, sinks):
    return naive.attend(query, parts, scaling)


def by_triton(query, parts, scaling, kernel, softcap, sinks):
    calls[0] += 1
    assert gpu.why_not(query, None) is None
    return fused.attend(query, parts, scaling, lambda *arguments: gpu.attend(*arguments))


def recorded(function):
    result, replay = record(function)

    def counted():
        calls[1] += 1
        replay()

    return result, counted


def as_operator(query, parts, scaling, kernel, softcap, sinks):
    return fused.attend(query, parts, scaling, hf_kvq_kernels.attend)


def launch(*arguments):
    calls[0] += 1
    return gpu.attend(*hf_kvq_kernels.ops._with_layout(arguments))


# The operator that is recorded is Triton's.
hf_kvq_kernels.ops._LIBRARY.impl("attend", launch, "CPU", allow_override=True)
hf_kvq_kernels.ops._is_watched = lambda query: True
registration._WITH_GRAPHS = ("cpu",)
registration.CapturedSteps = functools.partial(CapturedSteps, capture=recorded)

model, tokenizer = load_model("bundled", dtype=torch.float32)
ids = tokenizer(bundled_text()[:4000], return_tensors="pt").input_ids[:, :300]
texts = []


def generate(name, options, attend, tokens=4, **more):
    layer.attend = attend
    request = {"cache_implementation": name, "cache_config": options, **more}
    return model.generate(ids, max_new_tokens=tokens, do_sample=False, **request)[0, 300:].tolist()


requests = ("pmkvq", {"fbit": 4, "initial_bits": 4}), ("mixkvq", {"target_bits": 3.0})
texts = [[generate(*request, attend) for attend in (by_definition, by_triton)] for request in requests]
# Recording is slow.
del model.model.layers[LAYERS:]
model.config.num_hidden_layers = LAYERS
for request in requests:
    captured = generate(*request, as_operator, 5, compile_config=CompileConfig())
    texts.append([generate(*request, by_definition, 5), captured])
print(json.dumps({"texts": texts, "calls": calls}))
"""


@pytest.mark.slow
def test_a_real_model_says_the_same():
    paths = (str(ROOT), str(ROOT / "kernels" / "torch-ext"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", ""))
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, "-c", f"{LAYERS = }\n{SCRIPT}"], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    # The first token comes from the prompt, which attends to itself exactly. Of four steps two are ordinary, one is
    # recorded as well, and two are repetitions.
    assert found["calls"] == [2 * (3 * 30 + 5 * LAYERS), 2 * 2]
    assert [len(plain) for plain, _ in found["texts"]] == [4, 4, 5, 5]
    assert all(triton == plain for plain, triton in found["texts"])
