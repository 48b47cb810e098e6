# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""The bundled text in two parts, so that nothing is compared on what it was calibrated on."""

from __future__ import annotations

from hf_kvq.bundled import bundled_text


def split_text() -> tuple[str, str]:
    """(to calibrate on, to compare on): four fifths, and the rest."""
    text = bundled_text()
    split = len(text) * 4 // 5
    return text[:split], text[split:]
