# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""A model split by `tp_plan="auto"`: every process caches its KV heads, by the same schedule as one process would.

And one whose weights are sharded (FSDP): every process caches whole requests, as if it were alone.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

import hf_kvq
from conftest import CONFIGS, generate, left_padded, tiny_model
from hf_kvq import KVQCache, KVQPlan, PMKVQConfig
from hf_kvq.cache import layout
from hf_kvq.cache.sharding import HeadShard
from simulation import TOKEN_PAGE


PM = {"window": 8, "group_size": 16, "kernel": "torch"}
MIX = {"residual": 16, "group_size": 8, "sink_tokens": 4, "kernel": "torch"}
CASES = {
    "fbits": ("pmkvq", {**PM, "fbit": [8, 4, 2], "max_length": 100}),
    "budget": ("pmkvq", {**PM, "fbit": 2, "budget_bytes": 100_001}),
    "lambda": ("pmkvq", {"plan": "plan"}),
    "target": ("mixkvq", {**MIX, "target_bits": 5}),
    "tau": ("mixkvq", {**MIX, "tau_bf16": [[9.0, 1.0]] * 3, "tau_uint4": [[0.5, 0.1]] * 3}),
    "kivi": ("kivi", {**MIX, "bits": 4}),
}


def results(model, folder: Path, name: str) -> dict[str, torch.Tensor]:
    """What a padded batch comes to: logits, keys and values, and numbers of the cache."""
    method, options = CASES[name]
    if "plan" in options:
        options = {"plan": str(folder / options["plan"]), "kernel": "torch"}
    prompt = left_padded(2, 60, [0, 21])
    out = generate(model, 20, **prompt, cache_implementation=method, cache_config=options)
    cache, logits = out.cache, out.logits
    numbers = [*cache.layer_bits(), getattr(cache.layers[0], "max_length", 0), cache.nbytes()]
    tensors = {"logits": logits, "sequences": out.sequences, "numbers": torch.tensor(numbers)}
    for i in range(3):
        tensors |= {f"{kind}.{i}": x.contiguous() for kind, x in zip(("keys", "values"), cache.dequantize(i))}
    return tensors


def work(folder: Path) -> None:
    """One of the processes."""
    layout.PAGE_TOKENS = TOKEN_PAGE
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64, tp_plan="auto").eval()
    rank, said = torch.distributed.get_rank(), {}
    with torch.no_grad():
        for name in CASES:
            safetensors.torch.save_file(results(model, folder, name), folder / f"{name}.{rank}")
        sharded = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64).eval()
        mesh = init_device_mesh("cpu", (2,))
        for module in (*sharded.model.layers, sharded):
            fully_shard(module, mesh=mesh)
        safetensors.torch.save_file(results(sharded, folder, "fbits"), folder / f"fsdp.{rank}")
        cache = hf_kvq.PMKVQCache(model.config, {**PM, "max_length": 100})
        prompt = left_padded(1, 40, [0])["input_ids"]
        model(prompt, past_key_values=cache, use_cache=True)
        cache.save(folder / f"cache.{rank}")
        torch.distributed.barrier()
        loaded = KVQCache.load(folder / f"cache.{rank}", model)
        said["alike"] = all(torch.equal(*pair) for pair in zip(cache.dequantize(1), loaded.dequantize(1)))
        try:
            KVQCache.load(folder / f"cache.{1 - rank}", model)
        except ValueError as error:
            said["refusal"] = str(error)
    (folder / f"said.{rank}").write_text(json.dumps(said))
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_are_one(tmp_path):
    # In float64, as a sum in another order may bring a number to the next code.
    model = tiny_model(dtype=torch.float64)
    model.save_pretrained(tmp_path / "model")
    scale = torch.rand(3, 2, 8, generator=torch.Generator().manual_seed(1)) * 4 + 0.5
    config = PMKVQConfig(fbit=4, key_codec="token", transform="lambda", max_length=100, **PM)
    plan = KVQPlan.of(model, config, tensors={"key_scale": torch.cat([scale, scale], dim=-1)})
    plan.save_pretrained(tmp_path / "plan")
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__, str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[:6000]
    for name in CASES:
        one = results(model, tmp_path, name)
        for rank in (0, 1):
            mine = safetensors.torch.load_file(tmp_path / f"{name}.{rank}")
            assert torch.equal(mine["sequences"], one["sequences"]), name
            torch.testing.assert_close(mine["logits"], one["logits"], atol=1e-4, rtol=0)
            assert torch.equal(mine["numbers"][:-1], one["numbers"][:-1]), name
            if name in ("fbits", "budget", "lambda", "kivi"):
                assert 2 * mine["numbers"][-1] == one["numbers"][-1], name
            for key in [key for key in one if key.startswith(("keys", "values"))]:
                torch.testing.assert_close(mine[key], one[key][:, rank : rank + 1], atol=1e-4, rtol=0)
    for rank in (0, 1):
        said = json.loads((tmp_path / f"said.{rank}").read_text())
        sharded, one = safetensors.torch.load_file(tmp_path / f"fsdp.{rank}"), results(model, tmp_path, "fbits")
        for key, x in sharded.items():
            torch.testing.assert_close(x, one[key], atol=1e-4, rtol=0)
        refusal = f"holds part {1 - rank} of 2 of the KV heads, and this process has part {rank} of 2"
        assert said["alike"] and refusal in said["refusal"]
    with pytest.raises(ValueError, match="part 1 of 2 of the KV heads, and this process has part 0 of 1"):
        KVQCache.load(tmp_path / "cache.1", model)


@pytest.fixture
def third_of_four(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 6)


def split_config(arch: str = "llama", **distributed):
    config = CONFIGS[arch]()
    config.distributed_config = SimpleNamespace(tp_size=4, **distributed)
    return config


def test_the_share_of_a_process(third_of_four):
    shard = HeadShard.of(split_config())
    assert (shard.rank, shard.size) == (2, 4)
    assert shard.pick(tuple("abcdefgh")) == ("e", "f")
    assert torch.equal(shard.pick(torch.arange(4)), torch.tensor([2]))
    with pytest.raises(ValueError, match="6 KV heads cannot be shared out to 4 processes"):
        shard.pick(tuple("abcdef"))


def test_models_that_are_not_split_have_all_heads(third_of_four):
    # Data parallelism; latent attention, which every process caches whole; a plan that leaves attention alone.
    for config in (CONFIGS["llama"](), split_config("deepseek_v3"), split_config(tp_plan={"model.layers.*.mlp": "x"})):
        assert HeadShard.of(config) == HeadShard(0, 1)
    assert HeadShard.of(split_config(tp_plan={"model.layers.*.k_proj": "colwise"})).size == 4


def test_without_processes_there_is_one_share():
    assert HeadShard.of(split_config()) == HeadShard(0, 1)


if __name__ == "__main__":
    work(Path(sys.argv[1]))
