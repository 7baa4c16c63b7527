"""Analogues of the paper's tables, measured on any looped system, by default the embedded one."""

from __future__ import annotations
