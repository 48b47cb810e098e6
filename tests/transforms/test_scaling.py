# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
import pytest
import torch

from hf_kvq.codecs import BlockCodec
from hf_kvq.ops import ExactPart, PackedPart, attend, byte_orders
from hf_kvq.transforms import ChannelScale


def factors(heads: int, dim: int) -> torch.Tensor:
    return torch.rand(heads, dim, generator=torch.Generator().manual_seed(1)) * 8 + 0.1


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_divides_each_channel_of_each_head_and_comes_back():
    scale, x = factors(3, 10), random(2, 5, 3, 7, 10)
    smoothed = ChannelScale(scale).forward(x)
    for head in range(3):
        for channel in range(10):
            wanted = x[:, :, head, :, channel] / scale[head, channel]
            torch.testing.assert_close(smoothed[:, :, head, :, channel], wanted)
    torch.testing.assert_close(ChannelScale(scale).inverse(smoothed), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scores_stay_as_they_were(dtype):
    # Query heads 0-3 share the first KV head, 4-7 the second.
    scale, query, keys = ChannelScale(factors(2, 16)), random(1, 8, 5, 16).to(dtype), random(1, 2, 9, 16, seed=1)
    adapted = scale.dual(query)
    assert adapted.dtype == torch.float32
    got = adapted @ scale.forward(keys).repeat_interleave(4, dim=1).mT
    torch.testing.assert_close(got, query.float() @ keys.repeat_interleave(4, dim=1).mT, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernel", ["torch", "cpu"])
@pytest.mark.parametrize("bits", [16, 8, 4, 2])
@pytest.mark.parametrize("exact", [0, 9])
def test_attention_sees_the_keys_in_their_own_size(kernel, bits, exact):
    orders, g = byte_orders("cpu", 32), torch.Generator().manual_seed(2)
    scale = ChannelScale(factors(2, 32))
    keys = BlockCodec(2, 32, 32, torch.float32, "token", 32, scale, orders[0])
    values = BlockCodec(2, 32, 24, torch.float32, "token", 24, None, orders[1])
    data = [torch.randn(1, 3, 2, 32, dim, generator=g) for dim in (32, 24)]
    pages = [codec.encode(x, bits) for codec, x in zip((keys, values), data)]
    k, v = (codec.restore(codec.decode(page, bits), bits) for codec, page in zip((keys, values), pages))
    if bits < 16:
        # Half a step of the smoothed group, in the channel's own size.
        smoothed = scale.forward(data[0])
        steps = (smoothed.amax(-1) - smoothed.amin(-1)) / (2**bits - 1)
        bound = (steps[..., None] * scale.scale).transpose(1, 2).flatten(2, 3)
        errors = (k - data[0].transpose(1, 2).flatten(2, 3)).abs()
        assert bool((errors <= 0.51 * bound).all()) and errors.max() > 0
    parts = [PackedPart(torch.cat(pages, dim=-1), keys, values, (bits, bits))]
    if exact:
        parts.append(ExactPart(*(torch.randn(1, 2, exact, dim, generator=g) for dim in (32, 24))))
        k, v = torch.cat([k, parts[1].keys], dim=2), torch.cat([v, parts[1].values], dim=2)
    query = torch.randn(1, 6, 4, 32, generator=g)
    scores = query.double() @ k.double().repeat_interleave(3, dim=1).mT * 0.2
    wanted = scores.softmax(-1) @ v.double().repeat_interleave(3, dim=1)
    got = attend(query, parts, 0.2, kernel)
    torch.testing.assert_close(got, wanted.float(), rtol=1e-3, atol=1e-3)


def test_an_outlier_channel_no_longer_widens_the_others():
    x = random(1, 1, 1, 32, 64)
    x[..., 5] *= 50
    plain, smoothed = (
        BlockCodec(1, 32, 64, torch.float32, "token", 64, transform, None)
        for transform in (None, ChannelScale(x.abs().amax((0, 1, 3))))
    )
    errors = [
        (codec.restore(codec.decode(codec.encode(x, 4), 4), 4) - x[0])[..., torch.arange(64) != 5].square().mean()
        for codec in (plain, smoothed)
    ]
    assert errors[1] < errors[0] / 50
