"""Helpers for the tests of measurements."""

from __future__ import annotations

import benches.zoo.chains  # noqa: F401  registers the letter task

FEW = ("--n-prompts", "4", "--seq-len", "24")
