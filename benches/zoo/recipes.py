"""How each member of the zoo is built and trained."""

from __future__ import annotations

import dataclasses
import json
from typing import Any


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Settings of one training run.

    ``depth`` is the inclusive range that each step draws its depth from; the gradient always goes through
    all steps. A model is accepted when one step costs ``margin`` bits per byte more than full depth.
    """

    module: str
    model_class: str
    config: dict[str, Any]
    depth: tuple[int, int]
    steps: int
    seed: int = 0
    batch: int = 16
    seq_len: int = 128
    warmup: int = 100
    matrix_lr: float = 0.02
    vector_lr: float = 4e-3
    weight_decay: float = 0.05
    bfloat16: bool = True
    margin: float | None = 0.2

    def as_json(self) -> str:
        """Return the recipe as JSON, for the card and to recognise a checkpoint."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)


_SMALL = {"n_embd": 128, "n_heads": 2, "intermediate_size": 384, "block_size": 128}

RECIPES: dict[str, Recipe] = {
    "huginn_small": Recipe("huginn", "ZooHuginn", {**_SMALL, "n_steps": 8}, depth=(6, 10), steps=3000),
}
