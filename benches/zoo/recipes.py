"""How each member of the zoo is built and trained."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from loopq.zoo.chains import CHAIN_LENGTH


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
    data: str = "novels"

    def as_json(self) -> str:
        """Return the recipe as JSON, for the card and to recognise a checkpoint."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)


_SMALL = {"n_embd": 128, "n_heads": 2, "intermediate_size": 384, "block_size": 128}
_FOUR = {**_SMALL, "n_heads": 4}
_SHORT: dict[str, Any] = {"steps": 1200, "warmup": 50, "batch": 8}
_HUGINN = Recipe("huginn", "ZooHuginn", {**_SMALL, "n_steps": 8}, depth=(6, 10), steps=3000)
_OURO = Recipe("ouro", "ZooOuro", {**_SMALL, "n_layers": 2, "n_steps": 4}, depth=(4, 4), steps=1300)

# These lie inside the package; the others stay in the repository.
SHIPPED = {"huginn_small"}

RECIPES: dict[str, Recipe] = {
    "huginn_small": _HUGINN,
    "huginn_small_seed1": dataclasses.replace(_HUGINN, seed=1, **_SHORT),
    "huginn_small_seed2": dataclasses.replace(_HUGINN, seed=2, **_SHORT),
    "ouro_small": _OURO,
    "ouro_small_seed1": dataclasses.replace(_OURO, seed=1, **_SHORT),
    "ouro_small_seed2": dataclasses.replace(_OURO, seed=2, **_SHORT),
    "ouro_large": Recipe("ouro", "ZooOuro", {**_SMALL, "n_layers": 4, "n_steps": 4}, depth=(4, 4), **_SHORT),
    "rllama_small": Recipe(
        "rllama", "ZooRLlama", {**_FOUR, "n_steps": 8}, depth=(6, 10), **{**_SHORT, "steps": 500}
    ),
    "parcae_small": Recipe("parcae", "ZooParcae", {**_SMALL, "n_steps": 8}, depth=(6, 10), **_SHORT),
    "loopformer_small": Recipe(
        "loopformer",
        "ZooLoopFormer",
        {**_SMALL, "intermediate_size": 320, "n_steps": 8},
        depth=(6, 8),
        **_SHORT,
    ),
    "ponder_small": Recipe(
        "ponder", "ZooPonder", {**_SMALL, "intermediate_size": 512, "n_steps": 4}, depth=(4, 4), **_SHORT
    ),
    "nanbeige_small": Recipe(
        "nanbeige", "ZooNanbeige", {**_FOUR, "n_layers": 3, "n_steps": 2}, depth=(2, 2), **_SHORT
    ),
    "coconut_small": Recipe(
        "coconut",
        "ZooCoconut",
        {**_FOUR, "intermediate_size": 512, "block_size": 64, "n_layers": 2, "n_steps": 5},
        depth=(1, 6),
        steps=1200,
        batch=48,
        seq_len=CHAIN_LENGTH,
        data="chains",
    ),
    "mamba_small": Recipe(
        "mamba",
        "ZooMamba",
        {**_SMALL, "intermediate_size": 256, "n_steps": 1},
        depth=(1, 1),
        margin=None,
        **_SHORT,
    ),
    "control_small": Recipe(
        "control",
        "ZooControl",
        {**_SMALL, "intermediate_size": 424, "n_steps": 1},
        depth=(1, 1),
        steps=1500,
        margin=None,
    ),
}
