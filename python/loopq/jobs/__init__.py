"""Whole runs: one quantization, and runs that are made of several."""

from __future__ import annotations
