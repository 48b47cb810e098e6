# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
import pytest
import torch

from conftest import feed, kv, paired
from hf_kvq.cache import KVHandle
from simulation import Rules


RULES = Rules(2, 16, 24, torch.float32, fbit=2, max_length=100)


@pytest.fixture
def filled():
    """A cache with packed tokens, and the handles of its last update."""
    cache, layer, _ = paired(RULES)
    feed(cache, kv(RULES, 70, 2))
    return cache, layer, *cache.update(*kv(RULES, 3, 2, seed=1), 0)


def test_looks_like_the_full_tensor(filled):
    _, layer, keys, values = filled
    assert layer.bits() < 16
    for handle, dim in ((keys, 16), (values, 24)):
        assert isinstance(handle, KVHandle) and isinstance(handle, torch.Tensor)
        assert handle.shape == (2, 2, 73, dim) and handle.dtype == torch.float32 and handle.device.type == "cpu"
        assert handle.ndim == 4 and handle.size(2) == 73 and not handle.requires_grad
        assert "shape=(2, 2, 73" in repr(handle)
    assert "keys" in repr(keys) and "values" in repr(values)


OPERATIONS = {
    "matmul": lambda x: torch.ones(2, 2, 5, x.shape[2]) @ x,
    "transpose": lambda x: x.transpose(2, 3),
    "index": lambda x: x[:, :, -5:, ::2],
    "index_select": lambda x: x.index_select(2, torch.tensor([0, 40, 72])),
    "cat": lambda x: torch.cat([x, x], dim=2),
    "list of stack": lambda x: torch.stack([x[0], x[1]]),
    "arithmetic": lambda x: 2 * x + 1,
    "cast": lambda x: x.to(torch.bfloat16),
    "expand": lambda x: x[:, :, None].expand(2, 2, 3, *x.shape[2:]).reshape(2, 6, *x.shape[2:]),
    "contiguous": lambda x: x.contiguous() + 0,
    "clone": lambda x: x.clone(),
    "detach": lambda x: x.detach(),
    "einsum": lambda x: torch.einsum("bhsd->bhd", x),
    "softmax": lambda x: x.softmax(-1),
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("grad", [True, False])
def test_any_operation_gets_the_dequantized_tensor(filled, name, grad):
    cache, _, *handles = filled
    for handle, full in zip(handles, cache.dequantize(0)):
        with torch.set_grad_enabled(grad):
            result = OPERATIONS[name](handle)
        assert type(result) is torch.Tensor
        assert torch.equal(result, OPERATIONS[name](full))


def test_both_at_once_and_as_keyword(filled):
    cache, _, keys, values = filled
    query = torch.randn(2, 2, 1, 16)
    attention = torch.nn.functional.scaled_dot_product_attention
    wanted = attention(query, *cache.dequantize(0))
    assert torch.equal(attention(query, keys, values), wanted)
    assert torch.equal(attention(query=query, key=keys, value=values), wanted)
    out = torch.empty(2, 2, 73, 16)
    assert torch.equal(torch.add(keys, other=keys, out=out), 2 * cache.dequantize(0)[0])


IN_PLACE = {
    "multiply": lambda x: x.mul_(2),
    "fill": lambda x: x.masked_fill_(torch.ones(1, dtype=torch.bool), 0),
    "assign": lambda x: x.__setitem__((0, 0), 7.0),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_operations_in_place_are_refused_or_done(filled, name):
    # Never lost in silence: either the caller is told, or what it holds has changed.
    cache, _, keys, _ = filled
    wanted = cache.dequantize(0)[0].clone()
    IN_PLACE[name](wanted)
    try:
        IN_PLACE[name](keys)
    except (RuntimeError, TypeError, NotImplementedError):
        return
    assert torch.equal(keys + 0, wanted)


def test_dequantize_by_name(filled):
    cache, _, keys, values = filled
    for handle, full in zip((keys, values), cache.dequantize(0)):
        assert type(handle.dequantize()) is torch.Tensor
        assert torch.equal(handle.dequantize(), full)


CHANGES = {
    "update": lambda cache: cache.update(*kv(RULES, 1, 2), 0),
    "crop": lambda cache: cache.crop(-1),
    "reset": lambda cache: cache.reset(),
    "crop and update": lambda cache: (cache.crop(-5), cache.update(*kv(RULES, 5, 2), 0)),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([0])),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_stale_handle_is_refused(filled, change):
    cache, _, keys, values = filled
    CHANGES[change](cache)
    for handle in (keys, values):
        with pytest.raises(RuntimeError, match="before the next `update`"):
            handle + 1


def test_storing_does_not_make_it_stale(filled):
    cache, layer, keys, values = filled
    before = keys + 0, values + 0
    layer.settle()
    # Stored, all of these tokens are still in the window.
    assert torch.equal(keys + 0, before[0]) and torch.equal(values + 0, before[1])
