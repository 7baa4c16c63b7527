"""The demo at a small size."""

from __future__ import annotations

from typing import Any

from loopq.calibrate.prompts import CalibrationTake, Take

SMALL: dict[str, Any] = {
    "grids": ((3, 32),), "seeds": (0, 1), "calibration": CalibrationTake(8, 64), "evaluation": Take(8, 64),
}  # fmt: skip
#: For pages: every row with any numbers.
FEWEST = SMALL | {"seeds": (0,), "calibration": CalibrationTake(2, 32), "evaluation": Take(2, 32)}
