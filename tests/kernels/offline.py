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
    "k4v4 g128 held": {"bits": (4, 4), "held": True},
    "tiered k2v2 g32 held": {"bits": (2, 2), "groups": (32, 32), "tiered": True, "held": True},
    "exact": {},
    "exact held": {"held": True},
    "reduce": {},
    "spilling": {},
}
#: Kernels that pack and narrow, which have no loop: for 128 tokens of bfloat16 in groups of 128.
PACKING: dict[str, dict[str, Any]] = {
    **{f"quantize {axis} {bits}": {"axis": axis, "bits": bits} for axis in ("channel", "token") for bits in (8, 4, 2)},
    "quantize token 4 g32": {"axis": "token", "bits": 4, "group": 32},
    "quantize token 2 dim 256": {"axis": "token", "bits": 2, "group": 256, "dim": 256},
    "tiers g32": {"group": 32},
    **{f"shrink {old} to {new}": {"from": old, "bits": new} for old, new in ((8, 4), (8, 2), (4, 2))},
    "ranges": {},
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
    # But where the kernel wants to know nothing of it.
    places = {arg: kernel.arg_names.index(arg) for arg in types}
    attributes = {
        (place,): [["tt.divisibility", 16]]
        for arg, place in places.items()
        if _aligned(arg, types) and not kernel.params[place].do_not_specialize_on_alignment
    }
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
    return _call("launch_here", names, target)


def launch_here(names: list[str], target: str) -> list[list[str]]:
    """As `launch`, and the process is no good for anything else."""
    from gpu_cases import CASES, build

    compiled, results = compile_only(target), []
    attend = importlib.import_module("hf_kvq_kernels.gpu.attend")
    for name in names:
        compiled.clear()
        attend.attend(**build(CASES[name])[0])
        results.append([kernel for kernel, _ in compiled])
    return results


def quantize(shapes: list[tuple[int, int, int]], target: str = "sm_90") -> list[str]:
    """The kernels that are compiled for blocks of (tokens, dim, group), with the launchers' own arguments."""
    return _call("quantize_here", shapes, target)


def quantize_here(shapes: list[tuple[int, int, int]], target: str) -> list[str]:
    """As `quantize`, and the process is no good for anything else."""
    import torch

    from hf_kvq_kernels.gpu import pack

    compiled = compile_only(target)
    for tokens, dim, group in shapes:
        x, out = torch.zeros(1, 2, 2, tokens, dim), torch.zeros(1, 2, 1 << 18, dtype=torch.uint8)
        for per_channel, bits in ((True, 2), (False, 4)):
            if pack.why_not_packing(x, 3, tokens, tokens if per_channel else dim, group) is None:
                pack.quantize_(x.to(torch.bfloat16), out, bits, per_channel, group, 3, True)
        if pack.why_not_packing(x, 3, tokens, tokens, group) is None:
            pack.quantize_tiers_(x[0], torch.arange(4 * dim).view(2, 2, dim) % 3, out[0], group, 3)
    return [kernel for kernel, _ in compiled]


def shrink(bits: int, target_bits: int, target: str = "sm_90") -> list[tuple[str, int]]:
    """Each launch of one narrowing of pages of odd sizes: the kernel, and which of its compiled forms."""
    return [tuple(launched) for launched in _call("shrink_here", bits, target_bits, target)]


def shrink_here(bits: int, target_bits: int, target: str) -> list[tuple[str, int]]:
    """As `shrink`, and the process is no good for anything else."""
    import torch

    from hf_kvq_kernels.gpu import pack
    from hf_kvq_kernels.pages import PageLayout

    compiled = compile_only(target)
    pack._WORK_BYTES = 0
    # A narrower page is a multiple of 4 bytes, and not of 8.
    layout = PageLayout(1, 16, 12, 13, bits, bits, 1, 16, 13, 1)
    size = layout.key_bytes() + layout.value_bytes()
    pack.shrink_(torch.zeros(2, 40 * size, dtype=torch.uint8), 40, layout, target_bits, 3, 3, False)
    return compiled


def _call(function: str, *arguments: Any) -> Any:
    """What a function of this file returns in a process of its own."""
    code = f"import json, offline, sys; print(json.dumps(offline.{function}(*json.loads(sys.argv[1]))))"
    return _in_process(["-c", code, json.dumps(arguments)])


def compile_only(target: str) -> list[tuple[str, int]]:
    """From now on kernels are compiled for `target` and never run. Gives a list that notes which, as it grows."""
    import torch
    import triton
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

    compiled: list[tuple[str, int]] = []
    run = JITFunction.run

    def warm_up(self: JITFunction, *args: Any, **options: Any) -> Any:
        kernel = run(self, *args, **{**options, "warmup": True})
        compiled.append((self.fn.__name__, id(kernel)))
        return kernel

    triton.runtime.driver.set_active(Driver())
    JITFunction.run = warm_up
    return compiled


def _source(name: str, target: str) -> tuple[Any, dict[str, str], dict[str, Any], int, int]:
    """Kernel, argument types, constants, warps, and tokens of one turn of the main loop."""
    import torch
    import triton.language as tl

    from hf_kvq_kernels.gpu import exact, pages
    from hf_kvq_kernels.pages import DTYPES, PageLayout

    attend = importlib.import_module("hf_kvq_kernels.gpu.attend")
    if name in PACKING:
        return _packing_source(name)
    bf16, options = torch.bfloat16, VARIANTS[name]
    if name == "spilling":
        return spilling_kernel(), {"x": "*fp32"}, {}, 1, 0
    common = {"HEADS": HEADS, "GROUP": GROUP, "QUERIES": 8, "SOFTCAP": options.get("softcap", False), "MASK": 0}
    if name == "reduce":
        constants = {"VALUE_DIM": DIM, "VALUE_TILE": DIM, "SLOTS": 16}
        types = dict.fromkeys(("partial", "partial_lse", "out", "lse"), "*fp32") | {"slots": "i32", "count": "i32"}
        return exact.reduce_kernel, types, constants, 4, 16
    if name.startswith("exact"):
        constants = {
            **common,
            "HELD": options.get("held", False),
            "KEY_DIM": DIM,
            "VALUE_DIM": DIM,
            "KEY_TILE": DIM,
            "VALUE_TILE": DIM,
        }
        constants |= {"TOKENS": attend.EXACT_TOKENS, "EXACT": tl.bfloat16}
        constants = _specialized(constants)
        return exact.exact_kernel, _types(exact.exact_kernel, constants), constants, 4, attend.EXACT_TOKENS
    dim = options.get("dim", DIM)
    layout = PageLayout(
        HEADS, 128, dim, dim, *options["bits"], options.get("per_channel", 1), *options.get("groups", (128, 128)),
        DTYPES.index(bf16),
    )  # fmt: skip
    constants = common | attend.page_constants(layout, bf16, options.get("tiered", False))
    constants |= {
        "MASK": options.get("mask", 0),
        "SHORT": options.get("short", False),
        "HELD": options.get("held", False),
        "ASM": target != AMD,
    }
    constants["QUERIES"] = 8 * options.get("queries", 1)
    warps, constants = attend.page_warps(constants), _specialized(constants)
    return pages.pages_kernel, _types(pages.pages_kernel, constants), constants, warps, 128


def _packing_source(name: str) -> tuple[Any, dict[str, str], dict[str, Any], int, int]:
    import torch

    from hf_kvq_kernels.gpu import codes, pack

    options = {"bits": 2, "dim": DIM, "group": 128, "axis": "channel", **PACKING[name]}
    bits, per_channel = options["bits"], options["axis"] == "channel"
    tile, words, group = pack._tiling(128, options["dim"], bits, per_channel, options["group"])
    shape = {"HEADS": HEADS, "TOKENS": 128, "TILE": tile}
    centered, item = {"CENTERED": bits == 2}, {"ITEM": torch.bfloat16.itemsize}
    ranges = {"GROUP": group, "SATURATE": True}
    kernel, constants = {
        "quantize": (
            codes.quantize_kernel,
            {**shape, **item, **centered, **ranges, "ROWS": words, "BITS": bits, "PER_CHANNEL": per_channel},
        ),
        "tiers": (codes.tiers_kernel, {**shape, **item, **ranges}),
        "shrink": (codes.shrink_kernel, {**shape, **centered, "FROM": options.get("from"), "TO": bits}),
        "ranges": (codes.ranges_kernel, {**item, **centered, "TILE": pack._RANGES}),
    }[name.split()[0]]
    if kernel is codes.shrink_kernel:
        constants["TILE"], constants["ROWS"], _ = pack._tiling(128, options["dim"], bits, False, 1)
    special = {"places": "*i32"} | dict.fromkeys(("words", "low_words"), "*i16")
    special |= dict.fromkeys(("tiers", "low_channel", "exact_channel"), "*u8")
    special |= dict.fromkeys(("x", "ranges", "exact"), "*bf16") | {"x_channel": "constexpr"}
    special |= dict.fromkeys(("old", "new"), "*bf16" if kernel is codes.ranges_kernel else "*i16")
    if "x_channel" in kernel.arg_names:
        # What Triton makes of a stride of 1.
        constants["x_channel"] = 1
    types = {arg: special.get(arg, "i32") for arg in kernel.arg_names if arg not in constants}
    return kernel, types, constants, 4, 0


def _specialized(constants: dict[str, Any]) -> dict[str, Any]:
    """With what Triton turns into constants by itself: what the launcher passes as None."""
    absent = {name: None for name in ("mask",) if not constants["MASK"]}
    if not constants["HELD"]:
        absent |= {"row_pages" if "SHORT" in constants else "row_tokens": None}
    if "SHORT" in constants and not constants["SHORT"]:
        absent["starts"] = None
    if "TIERED" in constants and not constants["TIERED"]:
        absent |= dict.fromkeys(("counts", "low", "low_channel", "exact", "exact_channel"))
    return {**constants, **absent}


def _types(kernel: Any, constants: dict[str, Any]) -> dict[str, str]:
    special = {
        "words": "*i16", "low": "*i16", "low_channel": "*u8", "exact_channel": "*u8", "mask": "*i8",
        "starts": "*i32", "counts": "*i32", "row_pages": "*i64", "row_tokens": "*i64",
        "out": "*fp32", "lse": "*fp32", "scaling": "fp32", "softcap": "fp32",
    } | dict.fromkeys(("query", "ranges", "exact", "keys", "values"), "*bf16")  # fmt: skip
    return {name: special.get(name, "i32") for name in kernel.arg_names if name not in constants}


def _aligned(name: str, types: dict[str, str]) -> bool:
    if types[name].startswith("*"):
        return "channel" not in name and name != "mask"
    return re.match(r"(query|pages|keys|values|x)_|dim$", name) is not None and types[name] == "i32"


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
