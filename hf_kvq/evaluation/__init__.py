# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""Measuring what a cache does to a model's answers."""

from .fidelity import Fidelity, compare_fidelity, measure_fidelity
from .forced import Forced, Usage, teacher_forced


__all__ = ["Fidelity", "Forced", "Usage", "compare_fidelity", "measure_fidelity", "teacher_forced"]
