# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Tiny models of each family, and what a cache of ours is to do with it. `docs/compatibility.md` is made of this."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import transformers as hf
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM, PreTrainedConfig


VOCAB = 128
PAD = 0
#: Token that stands for a part of an image.
IMAGE = VOCAB - 1

_COMMON = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "initializer_range": 0.05,
    "pad_token_id": PAD,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
_GQA = {**_COMMON, "num_key_value_heads": 2, "head_dim": 16}
_GQA_BARE = {key: value for key, value in _GQA.items() if key != "head_dim"}
_MIDDLE = ["sliding_attention", "full_attention", "sliding_attention"]
_MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 3,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MAMBA = {"mamba_d_state": 8, "use_mamba_kernels": False}
_BART = {
    f"{side}_{what}": n
    for side in ("encoder", "decoder")
    for what, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 32))
}
_SEQ2SEQ = {"vocab_size": VOCAB, "pad_token_id": PAD, "eos_token_id": None, "decoder_start_token_id": 1}

QUANTIZED, SLIDING, STATE, BOTH = "quantized", "sliding window", "state", "attention with state"


@dataclass(frozen=True)
class Family:
    """A tiny model.

    Args:
        config: makes its config.
        layers: what the cache has to hold for each of its layers.
        note: what is special about it, and what is wanted.
        reads_packed: whether attention reads packed codes, or is given dequantized keys and values.
        shows_queries: whether the cache sees the queries.
        goes_by_host: whether a decode step depends on numbers that the host has, for other reasons than these.
        attention: attention implementation, unless a test wants another one.
        auto: class that makes the model.
    """

    config: Callable[[], PreTrainedConfig]
    layers: tuple[str, ...] = (QUANTIZED,) * 3
    note: str = ""
    reads_packed: bool = True
    shows_queries: bool = True
    goes_by_host: bool = False
    attention: str = "sdpa"
    auto: Any = AutoModelForCausalLM

    @property
    def is_captured(self) -> bool:
        """Whether decode steps can be CUDA graphs."""
        return set(self.layers) == {QUANTIZED} and self.reads_packed and not self.goes_by_host


# Models that compute attention by themselves, or from something else than what they cache.
_BY_ITSELF = {"reads_packed": False, "shows_queries": False}


FAMILIES = {
    "llama": Family(lambda: hf.LlamaConfig(**_GQA), note="grouped queries"),
    "qwen2": Family(
        lambda: hf.Qwen2Config(**_GQA), note="bias on keys: a few huge channels, each with a range of its own"
    ),
    "qwen3": Family(lambda: hf.Qwen3Config(**_GQA), note="keys are cached after their norm"),
    "qwen3_moe": Family(lambda: hf.Qwen3MoeConfig(**_GQA, **_MOE), note="experts"),
    "mistral": Family(lambda: hf.MistralConfig(**_GQA, sliding_window=None), note="without a window"),
    "sliding": Family(
        lambda: hf.MistralConfig(**_GQA, sliding_window=8),
        (SLIDING,) * 3,
        "nothing to quantize, which is said once; does what the ordinary cache does",
        False,
    ),
    "phi3": Family(lambda: hf.Phi3Config(**_GQA_BARE), note="queries, keys and values from one projection"),
    "gemma2": Family(
        lambda: hf.Gemma2Config(
            **_GQA, sliding_window=8, layer_types=_MIDDLE, query_pre_attn_scalar=16, attn_logit_softcapping=5.0
        ),
        (SLIDING, QUANTIZED, SLIDING),
        "capped scores",
        attention="eager",
    ),
    "mixed": Family(
        lambda: hf.Gemma3TextConfig(**_GQA, sliding_window=8, layer_types=_MIDDLE, query_pre_attn_scalar=16),
        (SLIDING, QUANTIZED, SLIDING),
        "norms on queries and keys",
    ),
    "gemma3n": Family(
        lambda: hf.Gemma3nTextConfig(
            **{**_GQA, "num_hidden_layers": 4},
            num_kv_shared_layers=2,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention"] * 2,
            vocab_size_per_layer_input=VOCAB,
            hidden_size_per_layer_input=16,
            laurel_rank=8,
            activation_sparsity_pattern=None,
        ),
        (SLIDING, QUANTIZED),
        "the last layers attend to keys and values of earlier ones, which are stored once",
    ),
    "gpt_oss": Family(
        lambda: hf.GptOssConfig(
            **_GQA, sliding_window=8, layer_types=_MIDDLE, num_local_experts=2, num_experts_per_tok=1
        ),
        (SLIDING, QUANTIZED, SLIDING),
        "attention sinks",
        attention="eager",
    ),
    "gpt_neox": Family(lambda: hf.GPTNeoXConfig(**_COMMON, rotary_pct=0.5), note="RoPE on half of the channels"),
    "gpt2": Family(
        lambda: hf.GPT2Config(
            **{k: v for k, v in _COMMON.items() if k not in ("intermediate_size", "max_position_embeddings")}
        ),
        goes_by_host=True,
        note="learned positions",
    ),
    "falcon": Family(lambda: hf.FalconConfig(**_COMMON, alibi=True, multi_query=False), note="ALiBi", **_BY_ITSELF),
    "falcon_mqa": Family(
        lambda: hf.FalconConfig(**_COMMON, alibi=False, multi_query=True), note="one KV head", **_BY_ITSELF
    ),
    "bloom": Family(
        lambda: hf.BloomConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            n_layer=3,
            n_head=4,
            pad_token_id=PAD,
            bos_token_id=None,
            eos_token_id=None,
        ),
        note="ALiBi",
        attention="eager",
        **_BY_ITSELF,
    ),
    "diffllama": Family(
        lambda: hf.DiffLlamaConfig(**_GQA_BARE), note="rearranges values before it attends", reads_packed=False
    ),
    "olmo": Family(lambda: hf.OlmoConfig(**_GQA_BARE)),
    "olmo2": Family(lambda: hf.Olmo2Config(**_GQA_BARE), note="norms on queries and keys"),
    "stablelm": Family(lambda: hf.StableLmConfig(**_GQA_BARE), note="RoPE on a quarter of the channels"),
    "cohere": Family(lambda: hf.CohereConfig(**_GQA_BARE), note="RoPE on pairs side by side"),
    "deepseek_v2": Family(
        lambda: hf.DeepseekV2Config(**_COMMON, **_MLA),
        note="as DeepSeek-V3",
        **_BY_ITSELF,
    ),
    "deepseek_v3": Family(
        lambda: hf.DeepseekV3Config(**_COMMON, **_MLA),
        note="MLA: latents are cached as keys and rotary parts as values, and quantized as such; the model expands "
        "them before it attends",
        **_BY_ITSELF,
    ),
    "qwen3_next": Family(
        lambda: hf.Qwen3NextConfig(
            **_GQA,
            **_MOE,
            shared_expert_intermediate_size=32,
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
        ),
        (STATE, QUANTIZED, STATE),
        "linear attention",
    ),
    "lfm2": Family(
        lambda: hf.Lfm2Config(**_GQA_BARE, block_ff_dim=64, layer_types=["conv", "full_attention", "conv"]),
        (STATE, QUANTIZED, STATE),
        "convolutions",
    ),
    "jamba": Family(
        lambda: hf.JambaConfig(
            **_GQA_BARE, **_MAMBA, attn_layer_period=3, attn_layer_offset=1, num_experts=2, mamba_dt_rank=8
        ),
        (STATE, QUANTIZED, STATE),
        "Mamba layers",
    ),
    "bamba": Family(
        lambda: hf.BambaConfig(
            **_GQA_BARE, attn_layer_indices=[1], mamba_n_heads=4, mamba_d_head=32, mamba_n_groups=1, mamba_d_state=8
        ),
        (STATE, QUANTIZED, STATE),
        "Mamba-2 layers",
    ),
    "falcon_h1": Family(
        lambda: hf.FalconH1Config(**_GQA, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8),
        (BOTH,) * 3,
        "attention and Mamba-2 side by side in each layer, which stays as it is; said once",
        False,
    ),
    "t5": Family(
        lambda: hf.T5Config(**_SEQ2SEQ, d_model=64, d_kv=16, d_ff=64, num_layers=2, num_heads=4),
        (QUANTIZED,) * 2,
        "encoder and decoder: self-attention is quantized, cross-attention is not; a bias per position",
        False,
        auto=AutoModelForSeq2SeqLM,
    ),
    "bart": Family(
        lambda: hf.BartConfig(
            **_SEQ2SEQ, **_BART, d_model=64, max_position_embeddings=128, init_std=0.1, forced_eos_token_id=None
        ),
        (QUANTIZED,) * 2,
        "encoder and decoder: self-attention is quantized, cross-attention is not",
        goes_by_host=True,
        auto=AutoModelForSeq2SeqLM,
    ),
    "qwen2_vl": Family(
        lambda: hf.Qwen2VLConfig(
            text_config={
                **_GQA,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
            },
            vision_config={
                "depth": 1,
                "embed_dim": 32,
                "num_heads": 2,
                "hidden_size": 64,
                "mlp_ratio": 2,
                "patch_size": 4,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
            },
            image_token_id=IMAGE,
            video_token_id=VOCAB - 2,
            vision_start_token_id=VOCAB - 3,
            vision_end_token_id=VOCAB - 4,
        ),
        note="images; positions in three dimensions",
        auto=AutoModelForImageTextToText,
    ),
    "llava": Family(
        lambda: hf.LlavaConfig(
            text_config=hf.LlamaConfig(**_GQA),
            vision_config=hf.CLIPVisionConfig(
                hidden_size=32,
                intermediate_size=32,
                num_hidden_layers=1,
                num_attention_heads=2,
                image_size=8,
                patch_size=4,
            ),
            image_token_index=IMAGE,
            vision_feature_layer=-1,
        ),
        note="images",
        auto=AutoModelForImageTextToText,
    ),
}

#: What the families are called.
TITLES = {
    "llama": "Llama",
    "qwen2": "Qwen2, Qwen2.5",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3-MoE",
    "mistral": "Mistral",
    "sliding": "Mistral with a window",
    "phi3": "Phi-3",
    "gemma2": "Gemma 2",
    "mixed": "Gemma 3",
    "gemma3n": "Gemma 3n",
    "gpt_oss": "gpt-oss",
    "gpt_neox": "GPT-NeoX",
    "gpt2": "GPT-2",
    "falcon": "Falcon with ALiBi",
    "falcon_mqa": "Falcon",
    "bloom": "BLOOM",
    "diffllama": "DiffLlama",
    "olmo": "OLMo",
    "olmo2": "OLMo 2",
    "stablelm": "StableLM",
    "cohere": "Cohere",
    "deepseek_v2": "DeepSeek-V2",
    "deepseek_v3": "DeepSeek-V3",
    "qwen3_next": "Qwen3-Next",
    "lfm2": "LFM2",
    "jamba": "Jamba",
    "bamba": "Bamba",
    "falcon_h1": "Falcon-H1",
    "t5": "T5",
    "bart": "BART",
    "qwen2_vl": "Qwen2-VL",
    "llava": "LLaVA",
}
