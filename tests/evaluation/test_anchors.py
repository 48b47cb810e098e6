# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""What has to hold on a real model, whatever the numbers are."""

import pytest

from hf_kvq.bundled import bundled_text
from hf_kvq.evaluation import teacher_forced
from hf_kvq.evaluation.methods import Method, exact_cache
from hf_kvq.evaluation.tasks import text_items


pytestmark = pytest.mark.slow

TOKENS = 512
FIXED = {bits: Method("pmkvq", {"fbit": bits, "initial_bits": bits, "window": 64}) for bits in (8, 4, 2)}
PROGRESSIVE = Method("pmkvq", {"fbit": 2, "window": 64, "max_length": 2 * TOKENS})
QUERY = Method("mixkvq", {"target_bits": 2.25})
ERROR_ONLY = Method("mixkvq", {"target_bits": 2.25, "importance": "none"})


@pytest.fixture(scope="module")
def found(real_model):
    model, tokenizer = real_model
    items = text_items(bundled_text(), tokenizer, TOKENS)
    methods = [*FIXED.values(), PROGRESSIVE, QUERY, ERROR_ONLY]
    caches = {method.label: method.build(model, TOKENS) for method in methods}
    return teacher_forced(model, items.ids, {**caches, "exact": exact_cache(model)}, chunk=64)


def kl(found, method: Method) -> float:
    return found[method.label].kl.mean().item()


def test_the_exact_cache_has_no_divergence(found):
    assert found["exact"].kl.abs().max() == 0 and found["exact"].agreed.all()


def test_more_bits_never_diverge_more(found):
    assert 0 < kl(found, FIXED[8]) < kl(found, FIXED[4]) < kl(found, FIXED[2])


def test_queries_tell_which_channels_matter(found):
    """At the same bits, ranking by queries too beats ranking by the error alone."""
    assert found[QUERY.label].usage.last_bits == pytest.approx(found[ERROR_ONLY.label].usage.last_bits, rel=0.02)
    assert kl(found, QUERY) < kl(found, ERROR_ONLY)


def test_a_short_output_profits_from_its_budget(found):
    """Progressive beats fixed at the same final bits while the budget lasts."""
    assert kl(found, PROGRESSIVE) < 0.1 * kl(found, FIXED[2])
