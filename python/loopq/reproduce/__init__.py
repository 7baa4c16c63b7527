"""Recipes that make the tables: each runs on any looped system, the zoo by default."""

from __future__ import annotations
