# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""What a user can choose: frozen, validated, JSON-serializable."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

from .codecs import WIDTHS


T = TypeVar("T", bound="Options")

KeyCodec = Literal["token", "channel"]
KeyShrink = Literal["centered", "equivalent"]
TransformName = Literal["none", "hadamard", "hadamard_kv", "lambda"]
ValueTransform = Literal["none", "hadamard"]
Overflow = Literal["grow", "error"]
Kernel = Literal["auto", "triton", "cpu", "torch"]

Importance = Literal["query", "none"]
ImportanceWindow = Literal["all", "page"]
Tau = float | tuple

#: Floor of the first and last `boundary_layers` layers.
BOUNDARY_FBIT = 8

#: Average key bits of an uncalibrated MixKVQ run.
DEFAULT_TARGET_BITS = 2.5


class Options:
    """Dict round trip and lenient construction, for the frozen dataclasses below."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; `from_dict` is the inverse."""
        return {field.name: _as_lists(getattr(self, field.name)) for field in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls: type[T], values: dict[str, Any]) -> T:
        """Build from a dict, which is left as it is.

        Raises:
            ValueError: a key is unknown; the message names the nearest known one.
        """
        known = [f.name for f in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known options: {', '.join(known)}"
                raise ValueError(f"unknown option {key!r} for {cls.__name__}; {hint}")
        return cls(**values)

    @classmethod
    def of(cls: type[T], value: T | dict[str, Any] | None) -> T:
        """Accept what `cache_config=` accepts: an object of this class, a dict or nothing."""
        if value is None:
            return cls()
        if isinstance(value, cls):
            return value
        if isinstance(value, dict):
            return cls.from_dict(value)
        raise TypeError(f"expected a {cls.__name__} or a dict of its options, got {type(value).__name__}")


@dataclass(frozen=True)
class PMKVQConfig(Options):
    """Options of the progressive cache (PM-KVQ, arXiv 2505.18610).

    Args:
        fbit: final width of every layer, or one per quantized layer, from the first on: 16 (never quantized), 8, 4 or
            2. The budget is what `max_length` tokens take at this width.
        value_fbit: final width of the values where it is another one than the keys', in the same form. Both narrow
            together until one of them is there.
        max_length: tokens per request the budget is made for. `generate` knows it; without `generate` the default is
            the model's `max_position_embeddings`.
        budget_bytes: bytes per request for all layers together, instead of `fbit * max_length`.
        initial_bits: width that the cache starts at; 16 means the model's own dtype, lossless.
        sink_tokens: first tokens of each request, exact for ever.
        window: most recent tokens of each request, exact. At least this many; tokens leave it in small blocks.
        group_size: elements that share one (min, max): channels of a token, or tokens of a channel.
        key_codec: "channel" (groups along the tokens of a key channel, best at equal bytes) or "token" (as in the
            paper). Values are always quantized per token.
        key_shrink: how keys go from 4 to 2 bits. "centered": to the quarter of its group's range that a code lies in,
            whose center it then stands for. "equivalent": as in the paper, and as all else is shifted, to four levels
            from the group's minimum to its maximum; costs several times the KL.
        transform: "none"; "hadamard" to rotate the values of each head before quantization; "hadamard_kv" to rotate
            keys as well, which ruins models whose keys have a bias; or "lambda" to smooth the keys by the factors of a
            plan, for key_codec="token" only: groups along a channel do not see its scale.
        key_clip, value_clip: share of a group's range, around its middle, that is kept; what lies outside is moved to
            its edge. Less than 1 costs at 4 and 8 bits, also on the way to 2, and for centered keys; at 2 bits it can
            pay where levels reach from end to end and values are rotated.
        boundary_layers: keep so many first and last layers of the model at 8 bits or more, whatever `fbit` says, a
            list of it included.
        on_overflow: past the budget at `fbit`, "grow" (allocate more, warn once) or "error".
        kernel: "auto", or the implementation that has to be used.

    Raises:
        ValueError, TypeError: an option has an impossible value; the message says what was expected.
    """

    fbit: int | tuple[int, ...] = 4
    value_fbit: int | tuple[int, ...] | None = None
    max_length: int | None = None
    budget_bytes: int | None = None
    initial_bits: int = 16
    sink_tokens: int = 1
    window: int = 128
    group_size: int = 128
    key_codec: KeyCodec = "channel"
    key_shrink: KeyShrink = "centered"
    transform: TransformName = "none"
    key_clip: float = 1.0
    value_clip: float = 1.0
    boundary_layers: int = 0
    on_overflow: Overflow = "grow"
    kernel: Kernel = "auto"

    def __post_init__(self):
        object.__setattr__(self, "fbit", _widths("fbit", self.fbit))
        if self.value_fbit is not None:
            object.__setattr__(self, "value_fbit", _widths("value_fbit", self.value_fbit))
        _check_choice("initial_bits", self.initial_bits, WIDTHS)
        _check_int("max_length", self.max_length, 1, optional=True)
        _check_int("budget_bytes", self.budget_bytes, 1, optional=True)
        _check_int("sink_tokens", self.sink_tokens, 0)
        _check_int("window", self.window, 0)
        _check_int("group_size", self.group_size, 1)
        _check_int("boundary_layers", self.boundary_layers, 0)
        _check_choice("key_codec", self.key_codec, get_args(KeyCodec))
        _check_choice("key_shrink", self.key_shrink, get_args(KeyShrink))
        _check_choice("transform", self.transform, get_args(TransformName))
        for name in ("key_clip", "value_clip"):
            _check_share(name, getattr(self, name))
        _check_choice("on_overflow", self.on_overflow, get_args(Overflow))
        _check_choice("kernel", self.kernel, get_args(Kernel))
        if self.transform == "lambda" and self.key_codec != "token":
            raise ValueError(
                "transform='lambda' changes nothing with key_codec='channel', where a group lies within one channel; "
                "use it with key_codec='token', or say transform='none'"
            )
        if self.key_codec == "channel" and self.group_size % 16:
            raise ValueError(
                f"group_size must be a multiple of 16 with key_codec='channel', as it is the number of tokens that "
                f"leave the window together; got {self.group_size}"
            )

    def layer_fbits(self, num_layers: int, quantized: Sequence[int] | None = None) -> tuple[int, ...]:
        """Final width of the keys of each quantized layer, and of its values unless `value_fbit` says otherwise.

        See `layer_widths`.
        """
        return tuple(keys for keys, _ in self.layer_widths(num_layers, quantized))

    def layer_widths(self, num_layers: int, quantized: Sequence[int] | None = None) -> tuple[tuple[int, int], ...]:
        """Final widths of keys and values of each quantized layer of a model of `num_layers` layers.

        Args:
            num_layers: all layers of the model.
            quantized: indices of those that are quantized; None if all are.

        Raises:
            ValueError: `fbit` or `value_fbit` is a list of another length.
        """
        quantized = range(num_layers) if quantized is None else quantized
        is_edge = [is_boundary(i, num_layers, self.boundary_layers) for i in quantized]

        def of_layers(name: str) -> list[int]:
            given = getattr(self, name)
            fbits = given if isinstance(given, tuple) else (given,) * len(quantized)
            if len(fbits) != len(quantized):
                which = "" if len(quantized) == num_layers else f" that are quantized, of {num_layers}"
                raise ValueError(
                    f"{name} lists {len(fbits)} layers, but the model has {len(quantized)}{which}; give one width per "
                    "quantized layer"
                )
            return [max(b, BOUNDARY_FBIT) if edge else b for b, edge in zip(fbits, is_edge)]

        keys = of_layers("fbit")
        return tuple(zip(keys, keys if self.value_fbit is None else of_layers("value_fbit")))


@dataclass(frozen=True)
class MixKVQConfig(Options):
    """Options of the query-aware cache (MixKVQ, arXiv 2512.19206).

    Args:
        residual: tokens of a page; up to so many newest tokens are exact, and a full page is quantized at once.
        group_size: tokens of a key channel, or channels of a value token, that share one (min, max).
        sink_tokens: first tokens of each request, exact for ever.
        value_bits: width of the values: 2, 4 or 8.
        tau_bf16, tau_uint4: thresholds on a key channel's salience (mean |query| x quantization step) above which it
            is kept at BF16, or else at UINT4: a number, one per layer, or one per layer and KV head. They do not
            transfer between models.
        target_bits: instead of thresholds, average bits of a key element that each head may spend on its channels,
            2 to 16, (min, max) not counted. The default is 2.5, unless thresholds are given.
        importance: "query", or "none" to rank channels by quantization difficulty alone.
        importance_window: "all" queries up to a page's end count for it, or only those since the "page" before.
        transform: "none", or "hadamard" to rotate the values of each head before quantization.
        key_clip, value_clip: as in `PMKVQConfig`; of the keys, UINT2 channels are clipped.
        boundary_layers: keep so many first and last layers of the model at 8 bits, without tiers.
        kernel: "auto", or the implementation that has to be used.

    Raises:
        ValueError, TypeError: an option has an impossible value; the message says what was expected.
    """

    residual: int = 128
    group_size: int = 32
    sink_tokens: int = 32
    value_bits: int = 2
    tau_bf16: Tau | None = None
    tau_uint4: Tau | None = None
    target_bits: float | None = None
    importance: Importance = "query"
    importance_window: ImportanceWindow = "all"
    transform: ValueTransform = "none"
    key_clip: float = 1.0
    value_clip: float = 1.0
    boundary_layers: int = 0
    kernel: Kernel = "auto"

    def __post_init__(self):
        _check_page(self.residual, self.group_size)
        _check_int("sink_tokens", self.sink_tokens, 0)
        _check_choice("value_bits", self.value_bits, (2, 4, 8))
        _check_choice("importance", self.importance, get_args(Importance))
        _check_choice("importance_window", self.importance_window, get_args(ImportanceWindow))
        _check_choice("transform", self.transform, get_args(ValueTransform))
        for name in ("key_clip", "value_clip"):
            _check_share(name, getattr(self, name))
        _check_int("boundary_layers", self.boundary_layers, 0)
        _check_choice("kernel", self.kernel, get_args(Kernel))
        for name in ("tau_bf16", "tau_uint4"):
            object.__setattr__(self, name, _tau(name, getattr(self, name)))
        if (self.tau_bf16 is None) != (self.tau_uint4 is None):
            raise ValueError("give both thresholds, tau_bf16 and tau_uint4, or neither")
        if self.target_bits is None:
            return
        if isinstance(self.target_bits, bool) or not isinstance(self.target_bits, (int, float)):
            raise TypeError(f"target_bits must be a number; got {self.target_bits!r}")
        if not 2 <= self.target_bits <= 16:
            raise ValueError(f"target_bits must be between 2 and 16; got {self.target_bits}")
        if self.tau_bf16 is not None:
            raise ValueError("give either target_bits or the thresholds tau_bf16 and tau_uint4, not both")

    @property
    def key_bits(self) -> float:
        """Average bits of a key element where no thresholds are given."""
        return DEFAULT_TARGET_BITS if self.target_bits is None else self.target_bits

    def layer_tau(self, layer: int, num_layers: int) -> tuple | None:
        """(tau_bf16, tau_uint4) of one layer, each a number or one per KV head; None to go by `key_bits`.

        Raises:
            ValueError: thresholds are given for another number of layers.
        """
        if self.tau_bf16 is None:
            return None
        pair = []
        for name in ("tau_bf16", "tau_uint4"):
            tau = getattr(self, name)
            if isinstance(tau, tuple) and len(tau) != num_layers:
                raise ValueError(f"{name} lists {len(tau)} layers, but the model has {num_layers}")
            pair.append(tau[layer] if isinstance(tau, tuple) else tau)
        return tuple(pair)


@dataclass(frozen=True)
class KIVIConfig(Options):
    """Options of KIVI (arXiv 2402.02750): keys per channel and values per token at one width, no tiers, no schedule.

    Args:
        bits: width of keys and values: 2, 4 or 8.
        residual, group_size, sink_tokens, kernel: as in `MixKVQConfig`; KIVI itself has no sinks.
        boundary_layers: keep so many first and last layers of the model at 8 bits.
    """

    bits: int = 2
    residual: int = 128
    group_size: int = 32
    sink_tokens: int = 0
    boundary_layers: int = 0
    kernel: Kernel = "auto"

    def __post_init__(self):
        _check_choice("bits", self.bits, (2, 4, 8))
        _check_page(self.residual, self.group_size)
        _check_int("sink_tokens", self.sink_tokens, 0)
        _check_int("boundary_layers", self.boundary_layers, 0)
        _check_choice("kernel", self.kernel, get_args(Kernel))


def is_boundary(layer: int, num_layers: int, boundary_layers: int) -> bool:
    """Whether a layer is among the first or last `boundary_layers` of `num_layers`."""
    return min(layer, num_layers - 1 - layer) < boundary_layers


def _check_page(residual: int, group_size: int) -> None:
    _check_int("residual", residual, 1)
    _check_int("group_size", group_size, 1)
    if residual % 16:
        raise ValueError(f"residual must be a multiple of 16; got {residual}")


def _as_lists(value: Any) -> Any:
    return [_as_lists(item) for item in value] if isinstance(value, tuple) else value


def _tau(name: str, value: Any, depth: int = 0) -> Tau | None:
    """A threshold, or nested lists of them, which become tuples; -inf and inf are fine, NaN is not."""
    if isinstance(value, (list, tuple)) and value and depth < 2:
        return tuple(_tau(name, item, depth + 1) for item in value)
    if value is None and depth == 0:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        raise TypeError(f"{name} must be a number, one per layer, or one per layer and KV head; got {value!r}")
    return float(value)


def _widths(name: str, value: Any) -> int | tuple[int, ...]:
    """A width, or a list of them, which becomes a tuple."""
    if value in ([], ()):
        raise ValueError(f"{name} is an empty list; give one width for all layers, or one per layer")
    value = tuple(value) if isinstance(value, list) else value
    for bits in value if isinstance(value, tuple) else (value,):
        _check_choice(name, bits, WIDTHS)
    return value


def _check_share(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number; got {value!r}")
    if not 0 < value <= 1:
        raise ValueError(f"{name} must be above 0 and at most 1; got {value!r}")


def _check_choice(name: str, value: Any, allowed: tuple) -> None:
    # `True in (1, 2)` holds in Python, and a float width is surely a mistake.
    if value not in allowed or type(value) is not type(allowed[0]):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {value!r}")


def _check_int(name: str, value: Any, least: int, optional: bool = False) -> None:
    if value is None and optional:
        return
    if type(value) is not int:
        raise TypeError(f"{name} must be an integer; got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}; got {value}")
