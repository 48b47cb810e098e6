# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""What must be right on a GPU, whatever it is: attention, packing, and decode steps that are captured."""

from __future__ import annotations

import functools
import importlib
import itertools
from typing import Any

import torch


# Of the caches and blocks that are packed.
HEADS, DIM = 8, 128


def check(device: str) -> list[str]:
    """Names of everything that comes out wrong."""
    return [*check_attention(device), *check_packing(device), *check_captured_steps(device)]


def check_attention(device: str) -> list[str]:
    """Names of the cases that come out wrong."""
    from gpu_cases import CASES, TOLERANCE, build

    attend = importlib.import_module("hf_kvq_kernels.gpu.attend").attend
    wrong = []
    for name, case in CASES.items():
        arguments, expected, expected_lse = build(case, device)
        # Exact bfloat16 is multiplied as it is on a GPU, with weights of eight bits.
        exact_bf16 = torch.bfloat16 in (case.dtype, case.query_dtype) and (case.exact or 16 in case.bits or case.tiers)
        tolerance = 2e-2 if exact_bf16 else TOLERANCE[arguments["query"].dtype]
        try:
            out, lse = (x.double().cpu() for x in attend(**arguments))
            size = float(expected.abs().max())
            torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance * size)
            torch.testing.assert_close(lse, expected_lse, rtol=tolerance, atol=tolerance)
        except Exception as error:  # one broken case must not hide the others
            print(f"WRONG {name}: {error}")
            wrong.append(name)
    print(f"attention: {len(CASES) - len(wrong)} of {len(CASES)} cases right")
    return wrong


def check_packing(device: str) -> list[str]:
    """Whether what a GPU packs and narrows is what the codecs and the CPU's kernels make of it, byte for byte."""
    from gpu_cases import TOKENS

    from hf_kvq.codecs import BlockCodec
    from hf_kvq.codecs.tiered import TieredKeyCodec
    from hf_kvq.ops import encode_blocks, encode_tiers, selfcheck, shrink_pages

    failure = selfcheck.packing_failure(torch.device(device), ((-2, 2), (-2, 2)))
    if failure is not None:
        print(f"kernels that pack are not used: {failure}")
    results, pages = {"self-check": failure is None}, 40
    x = torch.randn(2, pages, HEADS, TOKENS, DIM, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    # As it comes from a model, tokens before heads.
    on_device = x.transpose(2, 3).contiguous().to(device).transpose(2, 3)
    sides = {}
    for axis, centered in itertools.product(("channel", "token"), (False, True)):
        codec = BlockCodec(HEADS, TOKENS, DIM, x.dtype, axis, 32, byte_order=(-2, 2), centered=centered)
        for bits in (16, 8, 4, 2):
            wanted = sides[axis, centered, bits] = codec.encode(x, bits)
            out = torch.zeros_like(wanted, device=device)
            encode_blocks(codec, on_device, bits, out, "triton")
            results[f"encode_blocks {axis} {bits} {'centered' if centered else ''}"] = torch.equal(out.cpu(), wanted)
    codecs = [
        BlockCodec(HEADS, TOKENS, DIM, x.dtype, axis, 32, byte_order=(-2, 2), centered=axis == "channel")
        for axis in ("channel", "token")
    ]
    for bits, target in ((16, 8), (16, 2), (8, 4), (8, 2), (4, 2)):
        wide, narrow = (
            torch.cat([sides["channel", True, n], sides["token", False, n]], dim=-1).flatten(1) for n in (bits, target)
        )
        arena = wide.to(device)
        shrink_pages(arena, pages, codecs, bits, target, "triton")
        results[f"shrink_pages {bits} to {target}"] = torch.equal(arena[:, : narrow.shape[1]].cpu(), narrow)
    codec = TieredKeyCodec(HEADS, TOKENS, DIM, x.dtype, 32, (-2, 2))
    # The second row has no channel with more bits.
    tiers = torch.arange(2 * HEADS * DIM).view(2, HEADS, DIM) % 3 * torch.tensor([1, 0])[:, None, None]
    wanted = codec.encode(x[:, 0], tiers)
    out = torch.zeros_like(wanted.dense, device=device)
    block = encode_tiers(codec, on_device[:, 0], tiers.to(device), out, "triton")
    results["encode_tiers"] = all(
        torch.equal(getattr(block, name).cpu(), getattr(wanted, name))
        for name in ("dense", "counts", "low", "low_channel", "exact", "exact_channel")
    )
    for options in ({}, {"key_codec": "token"}, {"fbit": 4, "value_fbit": 2}):
        results[f"pmkvq cache {options}"] = same_codes(device, options)
    wrong = [name for name, is_right in results.items() if not is_right]
    print(f"packing: {len(results) - len(wrong)} of {len(results)} cases right", *(f"WRONG {name}" for name in wrong))
    return wrong


def same_codes(device: str, options: dict[str, Any]) -> bool:
    """Whether a progressive cache that narrows three times has the same codes and ranges on a device as on a CPU."""
    from transformers import LlamaConfig

    from hf_kvq import PMKVQCache

    config = LlamaConfig(
        num_hidden_layers=1,
        hidden_size=512,
        num_attention_heads=8,
        num_key_value_heads=HEADS,
        head_dim=64,
        vocab_size=8,
    )
    pieces = (1500, 1, 700, 1, 1900)
    x = torch.randn(2, 2, HEADS, sum(pieces), 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    fields = []
    for where in ("cpu", device):
        cache = PMKVQCache(config, {"fbit": 2, "max_length": sum(pieces), **options})
        for keys, values in zip(*(side.to(where).split(pieces, dim=2) for side in x)):
            cache.update(keys, values, 0)
        layer = cache.layers[0]
        layer.settle()
        state = layer.states[0]
        widths = layer.layout.widths(state.bits)
        held = layer.body.pages(slice(0, 2), state.bits)[:, : state.pages].cpu()
        blocks = held.tensor_split([layer.layout.keys.nbytes(widths[0])], dim=-1)
        codecs = layer.layout.keys, layer.layout.values
        fields.append([x for codec, block, n in zip(codecs, blocks, widths) for x in codec.fields(block, n)])
    return all(torch.equal(a, b) for a, b in zip(*fields))


def check_captured_steps(device: str) -> list[str]:
    """Whether `generate` says the same with captured steps as with ordinary ones, and does capture them."""
    from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM

    from hf_kvq import registration
    from hf_kvq.capture import CapturedSteps, cuda_graph

    torch.manual_seed(0)
    shape = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2}
    config = LlamaConfig(num_hidden_layers=3, vocab_size=512, max_position_embeddings=4096, **shape)
    with torch.device(device):
        model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    for name, weight in model.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            weight.data.mul_(4)
    ids = torch.randint(3, 512, (2, 500), generator=torch.Generator().manual_seed(1)).to(device)
    mask = (torch.arange(500) >= torch.tensor([[0], [140]])).long().to(device)
    replays, wrong = [0], []

    def counted(function: Any) -> Any:
        result, replay = cuda_graph(function)

        def repeat() -> None:
            replays[0] += 1
            replay()

        return result, repeat

    registration.CapturedSteps = functools.partial(CapturedSteps, capture=counted)
    requests = {
        "pmkvq": {"fbit": 2, "max_length": 800},
        "kivi": {"bits": 4},
        "mixkvq": {"target_bits": 4},
    }
    try:
        for name, options in requests.items():
            replays[0], logits = 0, []
            for compile_config in (CompileConfig(), None):
                out = model.generate(
                    ids,
                    attention_mask=mask,
                    cache_implementation=name,
                    cache_config=options,
                    compile_config=compile_config,
                    max_new_tokens=200,
                    do_sample=False,
                    eos_token_id=None,
                    pad_token_id=0,
                    output_logits=True,
                    return_dict_in_generate=True,
                )
                logits.append(torch.stack(out.logits).float().cpu())
            # Up to where two nearly equal tokens come in another order.
            same = (logits[0].argmax(-1) == logits[1].argmax(-1)).all(-1).long().cumprod(0).sum()
            error = float((logits[0] - logits[1])[: max(1, int(same))].abs().max() / logits[1].abs().max())
            print(
                f"captured steps, {name}: {replays[0]} replays, {int(same)} of 200 tokens the same, error {error:.1e}"
            )
            if error > 0.02 or same < 20 or replays[0] < 150:
                wrong.append(f"captured steps, {name}")
                print("WRONG", wrong[-1])
    finally:
        registration.CapturedSteps = CapturedSteps
    return wrong
