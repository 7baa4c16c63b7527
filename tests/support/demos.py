"""The demo at a small size."""

from __future__ import annotations

from typing import Any

SMALL: dict[str, Any] = {
    "grids": ((3, 32),), "seeds": (0, 1), "n_calibration": 8, "n_evaluation": 8, "seq_len": 64,
}  # fmt: skip
