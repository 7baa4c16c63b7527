"""Gradients of the end loss through the unrolled loop: the loop metric, and scores of candidates."""

from __future__ import annotations
