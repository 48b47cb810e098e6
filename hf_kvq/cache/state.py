# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""What a layer holds as plain values and tensors, for files and for other devices.

The codes are in the same order whatever device they come from: each kind of device has an order of its own, which its
layers bring them into. Only what tokens need is taken, no reserved room.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ..codecs import WIDTHS, BlockCodec
from .checks import DTYPES, expect, require
from .layer import KVQLayer, count_tokens
from .layout import LayerLayout
from .rows import RowState, runs
from .stock import restore_stock, stock_state
from .tiered import TieredLayer
from .tiered_body import RECORDS, Records


# Values of a layer, as JSON has them, and its tensors by name.
State = tuple[dict[str, Any], dict[str, torch.Tensor]]

_EXACT = ("sink_keys", "sink_values", "recent_keys", "recent_values")


def layer_state(layer: Any) -> State:
    """The state of a layer, ours or a stock one. Its tensors share no memory with the layer's.

    Raises:
        ValueError: a stock layer of this kind holds something that is neither a tensor nor a plain value.
    """
    return _quantized_state(layer) if isinstance(layer, KVQLayer) else stock_state(layer)


def restore_layer(layer: Any, state: State, device: torch.device, batch: int, columns: int) -> None:
    """Give an empty layer of the same kind and options a state, on `device`. Its padding must be known already.

    Raises:
        ValueError: this can be no state of such a layer with `batch` rows and `columns` columns.
    """
    device = torch.empty(0, device=device).device  # "cuda" is some "cuda:0"
    # What lives on must not belong to inference_mode.
    with torch.inference_mode(False), torch.no_grad():
        (_restore_quantized if isinstance(layer, KVQLayer) else restore_stock)(layer, *state, device, batch, columns)


def move_layer(layer: Any, device: torch.device) -> None:
    """Bring what a layer holds to another device."""
    state, columns = layer_state(layer), layer.get_seq_length() if hasattr(layer, "get_seq_length") else 0
    keys = state[1].get("sink_keys", state[1].get("keys"))
    layer.reset()
    restore_layer(layer, state, device, 0 if keys is None else keys.shape[0], columns)


def _quantized_state(layer: KVQLayer) -> State:
    layer.settle()
    if not layer.is_initialized:
        return {}, {}
    facts = {"states": [_row_facts(state) for state in layer.states]}
    held = ([state.sink for state in layer.states], [state.recent for state in layer.states])
    exact = [_filled(x, counts) for pair, counts in zip((layer.sink, layer.recent), held) for x in pair]
    tensors = dict(zip(_EXACT, exact))
    blocks = [
        _in_order(layer.body.pages(rows, bits)[:, :pages], bits, layer.layout, to_plain=True).flatten()
        for rows, bits, pages in _page_runs(layer.states)
    ]
    tensors["pages"] = torch.cat(blocks)
    if isinstance(layer, TieredLayer):
        facts["query_count"] = list(layer.query_count)
        tensors["query_sum"] = layer.query_sum.clone()
        records = [_used(r, state.pages) for r, state in zip(layer.body.records, layer.states)]
        tensors |= {name: torch.cat([record[name] for record in records]) for name in records[0]}
    return facts, tensors


def _restore_quantized(
    layer: KVQLayer,
    facts: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    device: torch.device,
    batch: int,
    columns: int,
) -> None:
    if not tensors:
        require(columns == 0, "a layer is empty")
        return
    _check_exact(tensors, batch)
    like = [tensors[name][:, :, :0].to(device) for name in _EXACT[:2]]
    layer.lazy_initialization(*like)
    states = [_row_state(values, layer) for values in facts["states"]]
    require(len(states) == batch, f"a layer has {len(states)} rows instead of {batch}")
    for row, state in enumerate(states):
        tokens = count_tokens(layer.padding, row, 0, columns)
        held = state.tokens(layer.page_tokens)
        require(held == tokens, f"row {row} of a layer holds {held} tokens instead of {tokens}")
        require(state.sink == min(tokens, layer.sink_tokens), f"row {row} of a layer holds {state.sink} sink tokens")
    layer._make_room(max(state.tokens(layer.page_tokens) for state in states))
    size = {bits: layer.layout.page_bytes(bits) for bits in {state.bits for state in states}}
    total = sum(state.pages * size[state.bits] for state in states)
    expect(tensors["pages"], torch.uint8, (total,), "pages")
    for pair, count in ((layer.sink, "sink"), (layer.recent, "recent")):
        most = max(getattr(state, count) for state in states)
        require(most <= pair[0].shape[2], f"a row of a layer holds {most} {count} tokens")
        for store, name in zip(pair, ("keys", "values")):
            exact = tensors[f"{count}_{name}"]
            require(exact.shape[2] == most, f"{count}_{name} has {exact.shape[2]} tokens instead of {most}")
            store[:, :, :most] = exact.to(device)
    layer.body.resize(max(state.pages * size[state.bits] for state in states))
    start = 0
    for rows, bits, pages in _page_runs(states):
        stop = start + (rows.stop - rows.start) * pages * size[bits]
        blocks = tensors["pages"][start:stop].view(rows.stop - rows.start, pages, size[bits]).to(device)
        layer.body.pages(rows, bits)[:, :pages] = _in_order(blocks, bits, layer.layout, to_plain=False)
        start = stop
    if isinstance(layer, TieredLayer):
        _restore_tiers(layer, facts, tensors, device, states)
    layer.states, layer.columns = states, columns


def _restore_tiers(
    layer: TieredLayer,
    facts: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    device: torch.device,
    states: list[RowState],
) -> None:
    codec, count = layer.body.codec, facts["query_count"]
    plain = isinstance(count, list) and len(count) == len(states) and all(type(n) is int and n >= 0 for n in count)
    require(plain, "query_count must be one number per row")
    expect(tensors["query_sum"], torch.int64, tuple(layer.query_sum.shape), "query_sum")
    require(bool((tensors["query_sum"] >= 0).all()), "query_sum has negative numbers")
    layer.query_count, layer.query_sum = count, tensors["query_sum"].to(device)

    pages = [state.pages for state in states]
    counts = tensors["counts"]
    expect(counts, torch.int16, (sum(pages), codec.heads, 2), "counts")
    require(bool((counts >= 0).all()) and bool((counts.long().sum(-1) <= codec.dim).all()), "counts are impossible")
    for name, kind in (("low", 0), ("exact", 1)):
        n = int(counts[..., kind].long().sum())
        width, dtype = (codec.low_bytes, torch.uint8) if name == "low" else (codec.tokens, codec.dtype)
        expect(tensors[name], dtype, (n, width), name)
        expect(tensors[f"{name}_channel"], torch.uint8, (n,), f"{name}_channel")
        _check_channels(tensors[f"{name}_channel"], counts[..., kind].flatten(), codec.dim)
    totals = [each.long().sum((0, 1)).tolist() for each in counts.split(pages)]
    parts = {
        name: tensors[name].split([total[name.startswith("exact")] for total in totals])
        for name in RECORDS
    }  # fmt: skip
    parts["counts"] = counts.split(pages)
    layer.body.records = [
        Records({name: part[row].to(device).clone() for name, part in parts.items()}, _before(parts["counts"][row]))
        for row in range(len(states))
    ]


def _check_channels(channels: torch.Tensor, counts: torch.Tensor, dim: int) -> None:
    """Channels of each page and head have to ascend: kernels index with them."""
    place = torch.arange(len(counts)).repeat_interleave(counts.long()) * 256 + channels.long()
    require(bool((channels < dim).all()) and bool((place.diff() > 0).all()), "channel lists are impossible")


def _page_runs(states: list[RowState]) -> list[tuple[slice, int, int]]:
    """Rows that have equally many pages of one width, with that width and number."""
    together = runs(len(states), lambda row: (states[row].bits, states[row].pages))
    return [(rows, states[rows.start].bits, states[rows.start].pages) for rows in together]


def _in_order(blocks: torch.Tensor, bits: int, layout: LayerLayout, to_plain: bool) -> torch.Tensor:
    """Pages, uint8 [rows, pages, bytes], with their codes in plain order instead of the layout's, or the reverse."""
    key_bits, value_bits = layout.widths(bits)
    split = layout.keys.nbytes(key_bits)
    halves = (layout.keys, key_bits, blocks[..., :split]), (layout.values, value_bits, blocks[..., split:])
    return torch.cat([_recoded(codec, width, half, to_plain) for codec, width, half in halves], dim=-1)


def _recoded(codec: BlockCodec, bits: int, blocks: torch.Tensor, to_plain: bool) -> torch.Tensor:
    if bits == 16 or codec.byte_order is None or not blocks.numel():
        return blocks
    source, target = codec, dataclasses.replace(codec, byte_order=None)
    if not to_plain:
        source, target = target, source
    return target.join(*source.fields(blocks, bits))


def _filled(x: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """The first `counts[row]` tokens of each row of [batch, heads, tokens, dim]; zeros behind them."""
    out = x.new_zeros(x.shape[0], x.shape[1], max(counts), x.shape[3])
    for row, count in enumerate(counts):
        out[row, :, :count] = x[row, :, :count]
    return out


def _used(records: Records, pages: int) -> dict[str, torch.Tensor]:
    """A row's records of its first `pages` pages."""
    low, exact = records.before[pages]
    used = {"counts": pages, "low": low, "low_channel": low, "exact": exact, "exact_channel": exact}
    return {name: records.buffers[name][:n] for name, n in used.items()}


def _before(counts: torch.Tensor) -> list[tuple[int, int]]:
    ends = counts.long().sum(1).cumsum(0).tolist()
    return [(0, 0), *(tuple(end) for end in ends)]


def _row_facts(state: RowState) -> dict[str, Any]:
    return {**dataclasses.asdict(state), "short": [list(item) for item in state.short.items()]}


def _row_state(values: dict[str, Any], layer: KVQLayer) -> RowState:
    state = RowState(**{**values, "short": dict(values["short"])})
    numbers = [state.bits, state.sink, state.pages, state.recent, *state.short, *state.short.values()]
    require(all(type(n) is int and 0 <= n < 2**48 for n in numbers), "a row's state must consist of counts")
    least = getattr(layer, "fbit", layer.initial_bits)
    require(
        state.bits in WIDTHS and least <= state.bits <= layer.initial_bits, f"a row cannot have {state.bits} bits here"
    )
    for page, held in state.short.items():
        require(page < state.pages and 0 < held < layer.page_tokens, f"page {page} cannot hold {held} tokens")
    return state


def _check_exact(tensors: dict[str, torch.Tensor], batch: int) -> None:
    """Sink and recent tokens must be of one kind."""
    exact = [tensors[name] for name in _EXACT]
    require(all(x.ndim == 4 and x.dtype in DTYPES.values() for x in exact), "sinks must be [batch, heads, n, dim]")
    keys, values = exact[:2]
    for x, like in zip(exact[2:], (keys, values)):
        require(x.shape[3] == like.shape[3], "sink and recent tokens differ in size")
    same = {(x.shape[0], x.shape[1], x.dtype) for x in exact}
    require(len(same) == 1 and keys.shape[0] == batch, f"exact tokens are not of {batch} rows of one kind")
    require(0 not in (keys.shape[1], keys.shape[3], values.shape[3]), "there are no heads or channels")
