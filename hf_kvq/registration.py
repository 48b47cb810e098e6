# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Everything that touches transformers' internals: makes `cache_implementation="pmkvq"` known, and takes it back."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    Cache,
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
    masking_utils,
)
from transformers.generation import configuration_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface
from transformers.utils import extract_commit_hash, output_capturing

from .cache import KIVICache, KVHandle, KVQCache, MixKVQCache, PMKVQCache
from .capture import CapturedSteps, is_capturing
from .hub import discovery
from .presets import PRESETS, resolve


#: Cache implementations by the name that `generate` knows them under.
CACHES: dict[str, type[KVQCache]] = {"pmkvq": PMKVQCache, "mixkvq": MixKVQCache, "kivi": KIVICache}
#: All names that `generate` knows: of caches, and of presets of their options.
NAMES = (*CACHES, *PRESETS)

_OLDEST, _TOO_NEW = "5.17", "6"

# What attention functions may be given beside queries, keys and values that changes the result.
_SPECIAL = ("position_bias", "softcap", "s_aux", "sliding_window", "cu_seq_lens_q", "cu_seq_lens_k", "head_mask")
# Attention functions that we can stand in for, and which special arguments we may be given then: those that we do, and
# those that the function does not look at. Any other function, or argument, gets dequantized keys and values.
_FLASH = frozenset({"softcap", "s_aux"})
_ATTENDED = {
    "sdpa": frozenset({"sliding_window"}),
    "flash_attention_2": _FLASH,
    "flash_attention_3": _FLASH,
    "flash_attention_4": _FLASH,
}
# A model's own `eager` function. Models with capped scores or sinks have nothing faster to ask for on most machines,
# so we stand in for it there; elsewhere it is what people choose to look inside, and stays itself.
_EAGER = frozenset({"softcap", "s_aux", "sliding_window"})

# Devices on which steps can be captured.
_WITH_GRAPHS = ("cuda",)

_undo: list[Callable[[], None]] = []


def register() -> None:
    """Make the caches available by name in `generate`, and let attention read packed codes. Idempotent.

    Raises:
        ImportError: this transformers version is not supported.
    """
    if _undo:
        return
    if not Version(_OLDEST) <= Version(Version(transformers.__version__).base_version) < Version(_TOO_NEW):
        raise ImportError(
            f"hf_kvq works with transformers >= {_OLDEST}, < {_TOO_NEW}, but {transformers.__version__} is installed; "
            f"run: pip install 'transformers>={_OLDEST},<{_TOO_NEW}'"
        )
    names = configuration_utils.ALL_CACHE_IMPLEMENTATIONS
    _replace(configuration_utils, "ALL_CACHE_IMPLEMENTATIONS", (*names, *NAMES))
    _replace(
        GenerationMixin,
        "_prepare_cache_for_generation",
        _with_our_caches(GenerationMixin._prepare_cache_for_generation),
    )
    _replace(
        GenerationMixin,
        "_valid_auto_compile_criteria",
        _with_captured_caches(GenerationMixin._valid_auto_compile_criteria),
    )
    _replace(PreTrainedModel, "get_compiled_call", _with_captured_steps(PreTrainedModel.get_compiled_call))
    _replace(
        PreTrainedModel, "_load_pretrained_model", staticmethod(_with_commit(PreTrainedModel._load_pretrained_model))
    )
    _replace(masking_utils, "_preprocess_mask_arguments", _with_padding(masking_utils._preprocess_mask_arguments))
    _replace(masking_utils, "is_tracing", _with_our_captures(masking_utils.is_tracing))
    _replace(AttentionInterface, "get_interface", _with_late_functions(AttentionInterface.get_interface))
    for name, function in list(ALL_ATTENTION_FUNCTIONS._global_mapping.items()):
        _replace_item(ALL_ATTENTION_FUNCTIONS._global_mapping, name, _with_handles(function, _ATTENDED.get(name)))


def unregister() -> None:
    """Put transformers back as it was before `register`. Caches that exist already go on working, unfused."""
    while _undo:
        _undo.pop()()


def cache_argument(model: torch.nn.Module) -> str:
    """The keyword under which `model.forward` takes a cache; it was renamed within transformers 5."""
    # Adapters (PEFT) wrap a model, and pass on what they do not know.
    model = getattr(model, "get_base_model", lambda: model)()
    names = inspect.signature(model.forward).parameters
    return next((name for name in ("cache", "past_key_values", "cache_params") if name in names), "past_key_values")


def default_attention(config: PretrainedConfig) -> str | None:
    """The attention implementation that a model of this config gets; None if transformers has no such model."""
    kinds = (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM)
    found = [kind._model_mapping[type(config)] for kind in kinds if type(config) in kind._model_mapping]
    if not found:
        return None
    given = getattr(config, "_attn_implementation", None)
    return given or ("sdpa" if found[0]._supports_sdpa else "eager")


def _replace(owner: Any, name: str, value: Any) -> None:
    original = inspect.getattr_static(owner, name)
    setattr(owner, name, value)
    _undo.append(lambda: setattr(owner, name, original))


def _replace_item(mapping: dict, name: str, value: Any) -> None:
    original = mapping[name]
    mapping[name] = value

    def restore() -> None:
        # Somebody may have registered another function since.
        if mapping.get(name) is value:
            mapping[name] = original

    _undo.append(restore)


def _with_our_caches(original: Callable) -> Callable:
    """`GenerationMixin._prepare_cache_for_generation` that also knows our names."""

    @functools.wraps(original)
    def prepare_cache(self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length):
        arguments = (generation_config, model_kwargs, generation_mode, batch_size, max_cache_length)
        name, options = _requested(generation_config)
        if name is not None and generation_config.is_assistant:
            # A draft model keeps an ordinary cache of its own from round to round, whatever its defaults are.
            generation_config.cache_implementation = name = None
        if name is None or any(isinstance(value, Cache) for value in model_kwargs.values()):
            return original(self, *arguments)
        options = discovery.options_for(self, name, options)
        # The original decides whether there is a cache and under which keyword; then ours takes its place.
        implementation, generation_config.cache_implementation = generation_config.cache_implementation, None
        try:
            original(self, *arguments)
        finally:
            generation_config.cache_implementation = implementation
        for key, value in model_kwargs.items():
            if isinstance(value, EncoderDecoderCache):
                value.self_attention_cache = CACHES[name](self.config, options, max_length=max_cache_length)
                return
            if isinstance(value, DynamicCache):
                model_kwargs[key] = CACHES[name](self.config, options, max_length=max_cache_length)
                return
        if generation_config.use_cache is not False:
            raise ValueError(
                f"{type(self).__name__} makes its own cache, so cache_implementation={name!r} cannot be used with it; "
                "leave cache_implementation out"
            )

    return prepare_cache


def _with_captured_caches(original: Callable) -> Callable:
    """`GenerationMixin._valid_auto_compile_criteria` by which a step over one of our caches may be captured, if asked.

    It is asked for by a `compile_config`, and done where there are CUDA graphs.
    """

    @functools.wraps(original)
    def may_compile(self, model_kwargs, generation_config):
        is_ours = any(isinstance(value, KVQCache) for value in model_kwargs.values())
        is_wanted = generation_config.compile_config is not None and not generation_config.disable_compile
        # Beams are reordered, which moves the cache at every step.
        is_possible = self.device.type in _WITH_GRAPHS and (generation_config.num_beams or 1) == 1
        is_possible &= len(set(getattr(self, "hf_device_map", {"": self.device}).values())) == 1
        is_possible &= getattr(getattr(self, "hf_quantizer", None), "is_compileable", True)
        if is_ours and is_wanted and is_possible:
            return True
        return original(self, model_kwargs, generation_config)

    return may_compile


def _with_captured_steps(original: Callable) -> Callable:
    """`PreTrainedModel.get_compiled_call` whose result captures steps over our caches, and compiles all others."""

    @functools.wraps(original)
    def get_compiled_call(self, compile_config):
        captured = CapturedSteps(self, cache_argument(self))

        def call(*args, **kwargs):
            if any(isinstance(value, KVQCache) for value in kwargs.values()):
                return captured(*args, **kwargs)
            return original(self, compile_config)(*args, **kwargs)

        return call

    return get_compiled_call


def _with_our_captures(original: Callable) -> Callable:
    """`masking_utils.is_tracing` that does not count captured steps: there, too, one query needs no mask."""

    @functools.wraps(original)
    def is_tracing(*args, **kwargs):
        return original(*args, **kwargs) and not is_capturing()

    return is_tracing


def _with_commit(original: Callable) -> Callable:
    """`PreTrainedModel._load_pretrained_model` that notes which commit of its repository the weights came from.

    Older versions of transformers did so themselves. Without it nobody could tell what belongs to the model.
    """

    @functools.wraps(original)
    def load(model, state_dict, checkpoint_files, *args, **kwargs):
        if checkpoint_files and getattr(model.config, "_commit_hash", None) is None:
            model.config._commit_hash = extract_commit_hash(checkpoint_files[0], None)
        return original(model, state_dict, checkpoint_files, *args, **kwargs)

    return load


def _requested(generation_config: GenerationConfig) -> tuple[str | None, Any]:
    """Which of our caches is asked for, by name, by a preset's or as a backend of "quantized", and its options."""
    name, options = generation_config.cache_implementation, generation_config.cache_config
    if name == "quantized" and isinstance(options, dict):
        name, options = options.get("backend"), {key: value for key, value in options.items() if key != "backend"}
    return resolve(name, options) if name in NAMES else (None, None)


def _with_padding(original: Callable) -> Callable:
    """`masking_utils._preprocess_mask_arguments` that tells our caches which columns are padding."""
    signature = inspect.signature(original)
    cache_name = next(name for name in ("cache", "past_key_values") if name in signature.parameters)

    @functools.wraps(original)
    def preprocess(*args, **kwargs):
        given = signature.bind(*args, **kwargs).arguments
        cache, mask = given.get(cache_name), given.get("attention_mask")
        if isinstance(cache, EncoderDecoderCache):
            cache = cache.self_attention_cache
        if isinstance(cache, KVQCache) and isinstance(mask, torch.Tensor) and mask.ndim == 2:
            cache.observe_padding(mask, given["inputs_embeds"].shape[1])
        return original(*args, **kwargs)

    return preprocess


def _with_late_functions(original: Callable) -> Callable:
    """`AttentionInterface.get_interface` for functions that were registered after us, or by a model for itself."""
    wrapped: dict[Callable, Callable] = {}

    @functools.wraps(original)
    def get_interface(self, attn_implementation, default):
        function = original(self, attn_implementation, default)
        if hasattr(function, "reads_handles"):
            return function
        if function not in wrapped:
            wrapped[function] = _with_handles(function, None, is_eager=function is default)
        return wrapped[function]

    return get_interface


def _with_handles(original: Callable, attended: frozenset[str] | None, is_eager: bool = False) -> Callable:
    """An attention function that lets a cache layer attend over its packed codes, if it is handed such a layer.

    `attended` has the special arguments under which we may stand in for it; None if never.
    """

    @functools.wraps(original)
    def attention(module, query, key, value, attention_mask, *args, **kwargs):
        handles = [x for x in (key, value) if isinstance(x, KVHandle)]
        if not handles:
            return original(module, query, key, value, attention_mask, *args, **kwargs)
        return attend(handles, module, query, key, value, attention_mask, *args, **kwargs)

    # Like `KVQCache.update`, nothing that a compiler could make a graph of.
    @torch.compiler.disable
    def attend(handles, module, query, key, value, attention_mask, *args, **kwargs):
        layer = handles[0].layer
        try:
            if handles[0].is_current:
                layer.observe_query(query)
            # A model that works on keys or values itself hands on other tensors, or these ones changed in place.
            touched = len(handles) < 2 or any(x.dense is not None for x in handles)
            touched = touched or value.layer is not layer or (key.is_value, value.is_value) != (False, True)
            if layer.prompt is not None and not touched:
                # Sums over masked scores, as eager attention forms them, must not meet what padding may hold.
                prompt = (key.dequantize(), value.dequantize()) if is_eager else layer.prompt
                key, value = (x.to(query.dtype) for x in prompt)
                return original(module, query, key, value, attention_mask, *args, **kwargs)
            allowed = _eager_allowed(module, kwargs) if is_eager else attended
            if touched or args or allowed is None or not _supported(kwargs, allowed):
                key, value = (x.dequantize() if isinstance(x, KVHandle) else x for x in (key, value))
                return original(module, query, key, value, attention_mask, *args, **kwargs)
            key.check_current()
            # A 2D mask only marks padding, which is not in the cache.
            mask = attention_mask if attention_mask is not None and attention_mask.ndim == 4 else None
            scaling, is_causal = kwargs.get("scaling"), kwargs.get("is_causal")
            if is_causal is None:
                is_causal = not is_eager and getattr(module, "is_causal", True)
            out = layer.attend(
                query,
                mask,
                query.shape[-1] ** -0.5 if scaling is None else scaling,
                is_causal,
                softcap=kwargs.get("softcap"),
                sinks=kwargs.get("s_aux"),
            )
            return out.transpose(1, 2).contiguous(), None
        finally:
            layer.settle_attended()

    attention.reads_handles = True
    return attention


def _eager_allowed(module: torch.nn.Module, kwargs: dict[str, Any]) -> frozenset[str] | None:
    """`attended` of a model's own function, which may also be asked for its weights."""
    collected = output_capturing._active_collector.get() or {}
    if kwargs.get("output_attentions") or any("attentions" in name for name in collected):
        return None
    sinks = kwargs.get("s_aux")
    # Without these we have no need; with sinks that it is not told of, no way.
    has_reason = kwargs.get("softcap") is not None or sinks is not None
    return _EAGER if has_reason and getattr(module, "sinks", None) is sinks else None


def _supported(kwargs: dict[str, Any], allowed: frozenset[str]) -> bool:
    return not kwargs.get("dropout") and all(kwargs.get(name) is None for name in _SPECIAL if name not in allowed)
