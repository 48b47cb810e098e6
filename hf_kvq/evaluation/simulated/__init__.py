# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Methods that are no way for our caches to store data, simulated so that they can be compared; not for `generate`."""

from __future__ import annotations

from .base import SimulatedCache
from .kvquant import KVQuantCache
from .mikv import MiKVCache
from .quest import QuestCache
from .shrink import ShrinkCache


#: By the name that `hf-kvq eval` knows them under.
SIMULATED: dict[str, type[SimulatedCache]] = {
    "shrink": ShrinkCache,
    "kvquant": KVQuantCache,
    "quest": QuestCache,
    "mikv": MiKVCache,
}
