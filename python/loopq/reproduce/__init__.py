"""Recipes that make the tables: each runs on any looped system, the embedded model by default."""

from __future__ import annotations
