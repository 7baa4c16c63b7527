"""Analogues of the paper's tables, measured on the models of the zoo or on any looped system."""

from __future__ import annotations
