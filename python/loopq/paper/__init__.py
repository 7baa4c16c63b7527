"""Versions of the paper's tables for any looped system, by default the embedded one."""

from __future__ import annotations
