"""Small trained models of published classes: how they are built, trained, measured and stored."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).resolve().parent
WEIGHTS = HERE / "weights"
#: Cards of the models without weights in the repository.
CARDS = HERE / "cards"
#: Where `make zoo` and `make zoo-medium` put their weights.
TRAINED_HERE = HERE.parents[1] / ".cache" / "zoo" / "weights"


def folders() -> list[str]:
    """Return the folders of the trained models; `benches.zoo.register` lets loopq open them."""
    places = (WEIGHTS, TRAINED_HERE)
    return sorted(str(path.parent) for place in places for path in place.glob("*/config.json"))
