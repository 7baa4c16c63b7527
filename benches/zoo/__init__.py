"""Small trained models of published classes: how they are built, trained, measured and stored."""

from __future__ import annotations

from pathlib import Path

WEIGHTS = Path(__file__).resolve().parent / "weights"


def folders() -> list[str]:
    """Return the folders of the trained models; `benches.zoo.register` lets loopq open them."""
    return sorted(str(path.parent) for path in WEIGHTS.glob("*/config.json"))
