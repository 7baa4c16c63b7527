"""The gradient tier: scales and codes tuned on the end loss through the unrolled loop. Never a default."""

from __future__ import annotations
