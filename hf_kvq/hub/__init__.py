# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Plans: saved, shared on the Hub, and found next to a model's weights."""

from .discovery import find
from .errors import PlanError, PlanUnavailableError
from .facts import BaseModel
from .plan import KVQPlan


__all__ = ["BaseModel", "KVQPlan", "PlanError", "PlanUnavailableError", "find"]
