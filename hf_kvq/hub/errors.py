# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""What can go wrong with a plan."""


class PlanError(ValueError):
    """A plan cannot be used: it is damaged, too new, impossible, or made for another model."""


class PlanUnavailableError(OSError):
    """A plan cannot be fetched or stored: no such folder, repository, revision or file, no permission, no network."""
