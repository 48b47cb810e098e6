# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Compile the Triton kernels for GPUs that are not here, and read what came out.

`measure` works in a process of its own, so that a Triton that was imported as an interpreter does not matter.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


CUDA = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100")
AMD = "gfx942"
#: Shape of all variants: as Llama 3 8B, one query.
HEADS, GROUP, DIM = 8, 4, 128
# Runs of a tiered page's inner loop over UINT4 channels, 16 channels each, beyond the first one.
_MORE_LOW_RUNS = 1

VARIANTS: dict[str, dict[str, Any]] = {
    "k4v4 g128": {"bits": (4, 4)},
    "k2v2 g128": {"bits": (2, 2)},
    "k8v8 g128": {"bits": (8, 8)},
    "tiered k2v2 g32": {"bits": (2, 2), "groups": (32, 32), "tiered": True},
    "k2v2 g32": {"bits": (2, 2), "groups": (32, 32)},
    "k4v4 g128 token": {"bits": (4, 4), "per_channel": 0},
    "k4v2 g128": {"bits": (4, 2)},
    "k16v16": {"bits": (16, 16)},
    "k4v4 g128 mask": {"bits": (4, 4), "mask": 1, "short": True},
    "k4v4 g128 two queries": {"bits": (4, 4), "queries": 2},
    "k4v4 g128 softcap": {"bits": (4, 4), "softcap": True},
    "k4v4 g256 dim 256": {"bits": (4, 4), "groups": (128, 256), "dim": 256},
    "exact": {},
    "reduce": {},
    "spilling": {},
}


def measure(jobs: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """For each (variant, target): registers, spills, lane-instructions per token of a KV head, seconds."""
    return _in_process([__file__, json.dumps(jobs)])


def _in_process(arguments: list[str]) -> Any:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *(p for p in sys.path if p)])
    run = subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(run.stderr[-4000:])
    return json.loads(run.stdout.splitlines()[-1])


def spills_of(sass: str) -> int:
    """Instructions that read or write memory where registers did not suffice."""
    return len(re.findall(r"\b(?:LDL|STL)\b", sass))


def main_loop(sass: str, more_inner_runs: int = 0) -> int:
    """Instructions of the longest loop; its longest inner loop may count several times."""
    code = [(int(a, 16), rest) for a, rest in re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]*);", sass)]
    loops = []
    for address, instruction in code:
        target = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", instruction)
        if target and int(target[1], 16) < address:
            first = int(target[1], 16)
            loops.append((sum(first <= a <= address for a, _ in code), first, address))
    if not loops:
        return 0
    size, first, last = max(loops)
    inner = [n for n, a, b in loops if first < a and b < last]
    return size + more_inner_runs * max(inner, default=0)


def compile_variant(name: str, target: str) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, types, constants, warps, tokens = _source(name, target)
    types = {**types, **dict.fromkeys(constants, "constexpr")}
    # What a cache allocates is aligned; the launcher tells Triton so whenever it is true.
    attributes = {(kernel.arg_names.index(arg),): [["tt.divisibility", 16]] for arg in types if _aligned(arg, types)}
    gpu = GPUTarget("hip", target, 64) if target == AMD else GPUTarget("cuda", int(target[3:]), 32)
    start = time.time()
    source = ASTSource(kernel, types, constants, attributes)
    compiled = triton.compile(source, target=gpu, options={"num_warps": warps, "num_stages": 2})
    result: dict[str, Any] = {"variant": name, "target": target, "seconds": round(time.time() - start, 1)}
    if target == AMD:
        text = compiled.asm["amdgcn"]
        result["registers"] = int(re.search(r"\.vgpr_count:\s*(\d+)", text)[1])
        result["spills"] = int(re.search(r"\.vgpr_spill_count:\s*(\d+)", text)[1])
        return result
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        cubin, ptx = Path(folder, "kernel.cubin"), Path(folder, "kernel.ptx")
        cubin.write_bytes(compiled.asm["cubin"])
        ptx.write_text(compiled.asm["ptx"])
        sass = _output(tools / "cuobjdump", "--dump-sass", cubin)
        usage = _output(tools / "cuobjdump", "--dump-resource-usage", cubin)
        # The PTX names its own target, which may be a variant such as sm_90a.
        arch = re.search(r"\.target\s+(\w+)", compiled.asm["ptx"])[1]
        ptxas = tools / ("ptxas-blackwell" if int(target[3:]) >= 90 else "ptxas")
        command = (ptxas, "-v", "-lineinfo", f"--gpu-name={arch}", ptx, "-o", Path(folder, "again.cubin"))
        try:
            # As newer versions of Triton do; older assemblers do not know the option.
            report = _output(*command, "--regAllocOptLevel=2")
        except subprocess.CalledProcessError:
            report = _output(*command)
    spilled = [int(n) for n in re.findall(r"(\d+) bytes spill", report)]
    result["registers"] = int(re.search(r"REG:(\d+)", usage)[1])
    result["stack"] = int(re.search(r"STACK:(\d+)", usage)[1])
    result["spills"] = spills_of(sass)
    result["ptxas_spill_bytes"] = sum(spilled)
    if tokens:
        loop = main_loop(sass, _MORE_LOW_RUNS if "tiered" in name else 0)
        result["lane_instructions_per_token"] = loop * 32 * warps / tokens
    return result


def launch(names: list[str], target: str = "sm_90") -> list[list[str]]:
    """The kernels that `attend` compiles for each of the named cases, with the launcher's own arguments."""
    code = "import json, offline, sys; print(json.dumps(offline.launch_here(json.loads(sys.argv[1]), sys.argv[2])))"
    return _in_process(["-c", code, json.dumps(names), target])


def launch_here(names: list[str], target: str) -> list[list[str]]:
    """As `launch`, and the process is no good for anything else."""
    import torch
    import triton
    from gpu_cases import CASES, build
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    class Driver:
        """Says what GPU there is, and has none."""

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", int(target[3:]), 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int | None = None) -> int:
            return 0

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

    compiled: list[str] = []
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, **options: Any) -> Any:
        compiled.append(self.fn.__name__)
        return run(self, *args, **{**options, "warmup": True})

    triton.runtime.driver.set_active(Driver())
    JITFunction.run = compile_only
    attend = importlib.import_module("hf_kvq_kernels.gpu.attend")
    results = []
    for name in names:
        compiled.clear()
        attend.attend(**build(CASES[name])[0])
        results.append(list(compiled))
    return results


def _source(name: str, target: str) -> tuple[Any, dict[str, str], dict[str, Any], int, int]:
    """Kernel, argument types, constants, warps, and tokens of one turn of the main loop."""
    import torch
    import triton.language as tl

    from hf_kvq_kernels.gpu import exact, pages
    from hf_kvq_kernels.pages import DTYPES, PageLayout

    attend = importlib.import_module("hf_kvq_kernels.gpu.attend")
    bf16, options = torch.bfloat16, VARIANTS[name]
    if name == "spilling":
        return spilling_kernel(), {"x": "*fp32"}, {}, 1, 0
    common = {"HEADS": HEADS, "GROUP": GROUP, "QUERIES": 8, "SOFTCAP": options.get("softcap", False), "MASK": 0}
    if name == "reduce":
        constants = {"VALUE_DIM": DIM, "VALUE_TILE": DIM, "SLOTS": 16}
        types = dict.fromkeys(("partial", "partial_lse", "out", "lse"), "*fp32") | {"slots": "i32", "count": "i32"}
        return exact.reduce_kernel, types, constants, 4, 16
    if name == "exact":
        constants = {**common, "KEY_DIM": DIM, "VALUE_DIM": DIM, "KEY_TILE": DIM, "VALUE_TILE": DIM}
        constants |= {"TOKENS": attend.EXACT_TOKENS, "EXACT": tl.bfloat16}
        constants = _specialized(constants)
        return exact.exact_kernel, _types(exact.exact_kernel, constants), constants, 4, attend.EXACT_TOKENS
    dim = options.get("dim", DIM)
    layout = PageLayout(
        HEADS, 128, dim, dim, *options["bits"], options.get("per_channel", 1), *options.get("groups", (128, 128)),
        DTYPES.index(bf16),
    )  # fmt: skip
    constants = common | attend.page_constants(layout, bf16, options.get("tiered", False))
    constants |= {"MASK": options.get("mask", 0), "SHORT": options.get("short", False), "ASM": target != AMD}
    constants["QUERIES"] = 8 * options.get("queries", 1)
    warps, constants = attend.page_warps(constants), _specialized(constants)
    return pages.pages_kernel, _types(pages.pages_kernel, constants), constants, warps, 128


def _specialized(constants: dict[str, Any]) -> dict[str, Any]:
    """With what Triton turns into constants by itself: what the launcher passes as None."""
    absent = {name: None for name in ("mask",) if not constants["MASK"]}
    if "SHORT" in constants and not constants["SHORT"]:
        absent["starts"] = None
    if "TIERED" in constants and not constants["TIERED"]:
        absent |= dict.fromkeys(("counts", "low", "low_channel", "exact", "exact_channel"))
    return {**constants, **absent}


def _types(kernel: Any, constants: dict[str, Any]) -> dict[str, str]:
    special = {
        "words": "*i16", "low": "*i16", "low_channel": "*u8", "exact_channel": "*u8", "mask": "*i8",
        "starts": "*i32", "counts": "*i32", "out": "*fp32", "lse": "*fp32", "scaling": "fp32", "softcap": "fp32",
    } | dict.fromkeys(("query", "ranges", "exact", "keys", "values"), "*bf16")  # fmt: skip
    return {name: special.get(name, "i32") for name in kernel.arg_names if name not in constants}


def _aligned(name: str, types: dict[str, str]) -> bool:
    if types[name].startswith("*"):
        return "channel" not in name and name != "mask"
    return re.match(r"(query|pages|keys|values)_", name) is not None and types[name] == "i32"


def spilling_kernel() -> Any:
    """Holds four times as many numbers as a thread has registers."""
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(x):
        at = x + tl.arange(0, 32768)
        numbers = tl.load(at)
        tl.store(at, numbers - tl.sum(numbers, 0))

    return kernel


def _output(*command: Any) -> str:
    run = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True)
    return run.stdout + run.stderr


if __name__ == "__main__":
    print(json.dumps([compile_variant(*job) for job in json.loads(sys.argv[1])]))
