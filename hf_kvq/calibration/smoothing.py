# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Smoothing of keys: the factors λ by which channels are divided before they are quantized (PM-KVQ, arXiv 2505.18610).

λ = max|K|^α, the maximum over text at stretched positions, and α, layer by layer, whatever hurts attention least.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.utils import logging

from ..cache.base import stock_layers
from ..cache.layout import LayerLayout, LayerShape
from ..codecs import BlockCodec
from ..config import PMKVQConfig
from .positions import feed, probed, require_rotary, rotary_pairs
from .replay import Candidates, attention_errors
from .samples import over_samples
from .sensitivity import Pair, quantization_error


logger = logging.get_logger(__name__)

#: Exponents that are tried; 0 means no smoothing.
ALPHAS = tuple(i / 20 for i in range(21))

# λ of a channel, relative to the other channels of its head, and the other way round.
_LARGEST = 1e4


@dataclass(frozen=True, eq=False)
class Smoothing:
    """λ of every layer, and what it is worth.

    Args:
        layers: indices of the quantized layers in the model.
        alphas: the chosen exponent of each of them; 0 where smoothing does not help, or its keys stay at 16 bits.
        key_scale: λ, float32 [layers, KV heads, head_dim]; 1 where the exponent is 0.
        grid: the exponents that were tried, 0 first.
        errors: float64 [layers, len(grid)], the squared error of the layer's attention output relative to the output's
            own square; 0 where the keys stay at 16 bits.
    """

    layers: tuple[int, ...]
    alphas: tuple[float, ...]
    key_scale: torch.Tensor
    grid: tuple[float, ...]
    errors: torch.Tensor

    @property
    def plain_error(self) -> torch.Tensor:
        """Without smoothing, float64 [layers]."""
        return self.errors[:, 0]

    @property
    def error(self) -> torch.Tensor:
        """With it, float64 [layers]."""
        return self.errors.min(dim=1).values

    @property
    def helps(self) -> bool:
        """Whether any layer is smoothed at all."""
        return any(self.alphas)


def smooth(
    model: PreTrainedModel,
    samples: torch.Tensor | Sequence[torch.Tensor],
    config: PMKVQConfig | dict[str, Any] | None = None,
    stretch: int = 4,
    search_samples: int = 4,
    queries: int = 128,
    desc: str | None = "smoothing",
) -> Smoothing:
    """Factors for `transform="lambda"`: maxima of the keys, shared by rotary pairs, to the power that works best.

    The exponent of a layer is chosen by the error of its attention output with K and V quantized to the layer's final
    width by the cache's own codec, on the exact model's K, V and queries. As in the cache, the sinks, the window and
    an incomplete page before the queries stay exact, and so do the queries' own tokens. Positions are not stretched
    here, as attention over stretched text is not what the model does later. The model is left as it was.

    Args:
        model: a causal language model, on one device or several.
        samples: token ids, [samples, tokens], or a sequence of [tokens].
        config: the cache's options: final widths, codec and exact regions. `key_codec` must be "token", which is the
            default here.
        stretch: distance of positions for the maxima; 4 lets samples of 2,048 tokens show what 8,192 do.
        search_samples: so many of the samples, the first ones, are searched on.
        queries: last tokens of these, whose attention is compared.
        desc: label of the progress bars; None for no bars.

    Raises:
        ValueError: `config` has no use for λ, a sample is too short, or positions cannot be stretched.
    """
    config = PMKVQConfig(key_codec="token") if config is None else PMKVQConfig.of(config)
    if config.key_codec != "token" or config.transform not in ("none", "lambda"):
        raise ValueError(
            "factors of keys are of use with key_codec='token' and transform='lambda' only; got "
            f"key_codec={config.key_codec!r}, transform={config.transform!r}"
        )
    stock, layers = stock_layers(model.config.get_text_config(decoder=True))
    widths = dict(zip(layers, config.layer_widths(len(stock), layers)))
    maxima = key_maxima(model, samples, stretch, desc and f"{desc}: maxima")
    with probed(model):
        maxima = pair_maxima(maxima, rotary_pairs(model))
        scales = dict(zip(layers, torch.stack([channel_scale(maxima, alpha) for alpha in ALPHAS], dim=1)))
        candidates = _candidates(config, widths, scales, queries)

        def measure(ids: torch.Tensor) -> torch.Tensor:
            found = attention_errors(model, ids, queries, candidates)
            return torch.tensor([found[i] or [(0.0, 1.0)] * len(ALPHAS) for i in layers], dtype=torch.float64)

        found = over_samples(measure, samples[:search_samples], desc=desc and f"{desc}: exponents")
    errors, sizes = found.sum(0).unbind(-1)
    errors = errors / sizes
    best = errors.argmin(dim=1)
    result = Smoothing(
        tuple(layers),
        tuple(ALPHAS[j] for j in best),
        torch.stack([scales[i][j] for i, j in zip(layers, best)]),
        ALPHAS,
        errors,
    )
    if not result.helps:
        logger.warning("smoothing the keys helps in no layer of this model, so all factors are 1; do without it")
    return result


def key_maxima(
    model: PreTrainedModel,
    samples: torch.Tensor | Sequence[torch.Tensor],
    stretch: int = 4,
    desc: str | None = "key maxima",
) -> torch.Tensor:
    """Largest |K| of every channel after RoPE, as the cache sees it; one sample is in memory at a time.

    Slow rotary channels take thousands of tokens to turn, so short samples do not show how large they get. Positions
    `stretch` apart make a sample cover `stretch` times as many ("positional interpolation").

    Args:
        model: a causal language model.
        samples: token ids, [samples, tokens], or a sequence of [tokens].
        stretch: distance of positions; 1 is the ordinary one.
        desc: label of the progress bar; None for no bar.

    Returns:
        float32 [quantized layers, KV heads, head_dim].

    Raises:
        ValueError: there are no samples, positions cannot be stretched, or keys are not finite.
    """
    if type(stretch) is not int or stretch < 1:
        raise ValueError(f"stretch must be a whole number, 1 or more; got {stretch!r}")
    if not len(samples):
        raise ValueError("there are no samples to look for the largest keys in")
    if model.config.is_encoder_decoder:
        raise ValueError(f"{type(model).__name__} is an encoder-decoder model; only decoders can be calibrated")
    config = model.config.get_text_config(decoder=True)

    def measure(ids: torch.Tensor) -> torch.Tensor:
        cache = DynamicCache(config=config)
        feed(model, ids, cache, stretch)
        return torch.stack(
            [cache.layers[i].keys.abs().amax(dim=(0, 2)).float().cpu() for i in stock_layers(config)[1]]
        )

    with probed(model):
        if stretch != 1:
            require_rotary(model, rotary_pairs(model))
        maxima = over_samples(measure, samples, desc=desc).amax(0).float()
    if not maxima.isfinite().all():
        raise ValueError("some keys are not finite; was the model run in a dtype that overflows?")
    return maxima


def pair_maxima(maxima: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """The larger maximum of each two channels that rotate together, for both of them; so λ commutes with the rotation.

    Args:
        maxima: [layers, heads, dim].
        pairs: partners of the channels, int64 [layers, dim], see `rotary_pairs`.

    Returns:
        [layers, heads, dim]
    """
    return maxima.maximum(maxima.gather(-1, pairs[:, None].expand_as(maxima)))


def channel_scale(maxima: torch.Tensor, alpha: float) -> torch.Tensor:
    """λ = max|K|^α, relative to the geometric mean over the head's channels.

    Only ratios within a head matter, as every group has a range of its own; so λ stays near 1 in any dtype.

    Args:
        maxima: float32 [..., heads, dim], at least 0.
        alpha: 0 (no smoothing) to 1 (all channels equally large).

    Returns:
        float32 like `maxima`, within 1e-4 and 1e4; 1 for channels that are always 0.
    """
    used = maxima > 0
    logs = torch.where(used, maxima, 1.0).double().log()
    logs = logs - logs.sum(dim=-1, keepdim=True) / used.sum(dim=-1, keepdim=True).clamp(min=1)
    scale = (alpha * logs).exp().clamp(1 / _LARGEST, _LARGEST).float()
    return torch.where(used, scale, 1.0)


def _candidates(
    config: PMKVQConfig, widths: dict[int, tuple[int, int]], scales: dict[int, torch.Tensor], queries: int
) -> Candidates:
    """What a layer's cache would hand out with each of its λ: the `candidates` of `attention_errors`."""
    config = dataclasses.replace(config, transform="none")

    def quantized(layer: int, keys: torch.Tensor, values: torch.Tensor) -> Iterator[Pair]:
        key_bits, value_bits = widths.get(layer, (16, 16))
        if key_bits == 16:
            return
        shape = LayerShape(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype)
        layout = LayerLayout.of(config, shape, keys.device.type)
        sink, pages, _ = layout.split(keys.shape[2] - queries)
        if not pages:
            least = layout.sink_tokens + layout.window + layout.page_tokens + queries
            raise ValueError(
                f"a sample of {keys.shape[2]} tokens fills no page of the cache before its last {queries}; with this "
                f"sink, window and page it takes {least}"
            )
        body = slice(sink, sink + pages * layout.page_tokens)
        values = _replaced(values, body, layout.values, value_bits)
        for scale in scales[layer].to(keys.device):
            codec = LayerLayout.of(config, shape, keys.device.type, scale).keys
            yield _replaced(keys, body, codec, key_bits), values

    return quantized


def _replaced(x: torch.Tensor, body: slice, codec: BlockCodec, bits: int) -> torch.Tensor:
    """`x` with its tokens in `body` quantized."""
    out = x.clone()
    out[:, :, body] = (x[:, :, body].float() - quantization_error(codec, x[:, :, body], bits)).to(x.dtype)
    return out
