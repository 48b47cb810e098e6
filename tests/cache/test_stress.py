# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Random programs of everything that can be done to a cache, step by step against the simulation."""

import copy
import pickle

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from transformers import LlamaConfig

import conftest
import simulation
import simulation_mixkvq as tiered
from conftest import kv, storage_bytes
from hf_kvq import KIVICache, MixKVQCache


FP32, BF16, INF = torch.float32, torch.bfloat16, float("inf")


class Program(RuleBasedStateMachine):
    """A cache of one layer, and its simulation, to which the same things happen."""

    module = simulation

    def drawn(self, draw) -> object:
        raise NotImplementedError

    def make_cache(self):
        raise NotImplementedError

    @initialize(data=st.data())
    def start(self, data):
        self.layer_rules, self.seed = self.drawn(data.draw), 0
        self.cache, self.simulation = self.make_cache(), None

    # --- what happens ------------------------------------------------------------------------------------------------

    @rule(
        tokens=st.integers(1, 40),
        batch=st.integers(1, 3),
        padding=st.sampled_from(["none", "none", "left", "anywhere"]),
        shows_queries=st.booleans(),
    )
    def append(self, tokens, batch, padding, shows_queries):
        if self.simulation is None:
            self.simulation = self.module.Simulation(self.layer_rules, batch)
        batch, self.seed = len(self.simulation.rows), self.seed + 1
        data = kv(self.layer_rules, tokens, batch, self.seed)
        if self.module is tiered and shows_queries:
            data.append(tiered.queries(self.layer_rules, tokens, batch, self.seed))
        valid = None
        if padding != "none":
            random = torch.rand(batch, tokens, generator=torch.Generator().manual_seed(self.seed))
            new = random < 0.7 if padding == "anywhere" else random.cumsum(1) > 3
            new[-1] = True
            valid = torch.cat([torch.tensor(self.simulation.valid, dtype=torch.bool).view(batch, -1), new], dim=1)
        feed = tiered.feed if self.module is tiered else conftest.feed
        feed(self.cache, data, None, [self.simulation], valid)

    @precondition(lambda self: self.simulation)
    @rule(tokens=st.one_of(st.integers(0, 12), st.integers(0, 90)))
    def crop(self, tokens):
        self.cache.crop(-tokens)
        self.simulation.crop(tokens)

    @precondition(lambda self: self.simulation)
    @rule(data=st.data())
    def reorder(self, data):
        rows = len(self.simulation.rows)
        order = data.draw(st.lists(st.integers(0, rows - 1), min_size=rows, max_size=rows))
        self.cache.reorder_cache(torch.tensor(order))
        self.simulation.select(order)

    @precondition(lambda self: self.simulation and len(self.simulation.rows) <= 3)
    @rule()
    def repeat(self):
        self.cache.batch_repeat_interleave(2)
        self.simulation.select([row for row in range(len(self.simulation.rows)) for _ in range(2)])

    @precondition(lambda self: self.simulation and len(self.simulation.rows) > 1)
    @rule(data=st.data(), as_mask=st.booleans())
    def select(self, data, as_mask):
        rows = len(self.simulation.rows)
        kept = sorted(data.draw(st.sets(st.integers(0, rows - 1), min_size=1, max_size=3)))
        mask = torch.tensor([row in kept for row in range(rows)])
        self.cache.batch_select_indices(mask if as_mask else torch.tensor(kept))
        self.simulation.select(kept)

    @rule(how=st.sampled_from([copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]))
    def duplicate(self, how):
        # What happens to the other one from here on is nobody's business.
        other, self.cache = self.cache, how(self.cache)
        other.reset()

    @precondition(lambda self: self.simulation)
    @rule()
    def reset(self):
        self.cache.reset()
        self.simulation = None

    @rule()
    def look(self):
        assert repr(self.cache) and len(self.cache.summary()) == len(self.cache.layer_bits()) == 1
        assert self.cache.exact_nbytes() >= 0 and self.cache.true_bits() != 0

    # --- what always holds -------------------------------------------------------------------------------------------

    @invariant()
    def equals_the_simulation(self):
        assert self.cache.nbytes() == storage_bytes(self.cache)
        if self.simulation is None:
            assert self.cache.get_seq_length() == self.cache.nbytes() == 0 and self.cache.padding.rows == []
        else:
            self.module.assert_equal(self.cache.layers[0], self.simulation)


class ProgressiveProgram(Program):
    def drawn(self, draw):
        return simulation.Rules(
            2,
            16,
            8,
            draw(st.sampled_from([BF16, FP32])),
            fbit=draw(st.sampled_from([2, 4, 8, 16])),
            max_length=draw(st.sampled_from([40, 90, 200])),
            sink=draw(st.sampled_from([0, 1, 5])),
            window=draw(st.sampled_from([0, 7, 20])),
            channel=draw(st.booleans()),
            initial_bits=draw(st.sampled_from([16, 16, 4])),
        )

    def make_cache(self):
        return conftest.cache_of(self.layer_rules)


class TieredProgram(Program):
    module = tiered

    def drawn(self, draw):
        return tiered.Rules(
            2,
            draw(st.sampled_from([1, 3])),
            16,
            8,
            draw(st.sampled_from([BF16, FP32])),
            residual=draw(st.sampled_from([16, 32])),
            group=draw(st.sampled_from([10, 16])),
            sink=draw(st.sampled_from([0, 5])),
            value_bits=draw(st.sampled_from([2, 4])),
            tau=draw(st.sampled_from([None, None, (20.0, 5.0), ((INF, 1.0), (0.0, 1.0))])),
            target_bits=draw(st.sampled_from([2.5, 4])),
            importance_window=draw(st.sampled_from(["all", "page"])),
        )

    def make_cache(self):
        return MixKVQCache(LlamaConfig(num_hidden_layers=1), self.layer_rules.options())


class FixedProgram(Program):
    module = tiered

    def drawn(self, draw):
        return tiered.Rules(
            draw(st.sampled_from([1, 3])),
            1,
            16,
            24,
            draw(st.sampled_from([BF16, FP32])),
            residual=draw(st.sampled_from([16, 48])),
            group=draw(st.sampled_from([10, 32])),
            sink=draw(st.sampled_from([0, 5])),
            key_bits=draw(st.sampled_from([2, 4, 8])),
        )

    def make_cache(self):
        return KIVICache(LlamaConfig(num_hidden_layers=1), self.layer_rules.options())


PROGRAMS = {"pmkvq": ProgressiveProgram, "mixkvq": TieredProgram, "kivi": FixedProgram}


def run(program: type[Program], examples: int, steps: int) -> None:
    run_state_machine_as_test(
        program,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            database=None,
            # Programs are short enough to read as they are.
            phases=[Phase.generate],
        ),
    )


@pytest.mark.parametrize("name", PROGRAMS)
def test_random_programs(name):
    run(PROGRAMS[name], examples=10, steps=25)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_long_random_programs(name):
    run(PROGRAMS[name], examples=12, steps=60)
