"""How each small model is built and trained."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from benches.zoo.chains import CHAIN_LENGTH


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Settings of one training run.

    ``depth`` is the inclusive range that each step draws its depth from; the gradient goes through all steps, with
    ``growth`` through the last ones. A model is accepted when one step costs ``margin`` bits per byte more than full
    depth. The learning rate falls over the last ``fall`` of the ``steps``, over all of them when absent. ``data`` is
    "novels" (bytes), "subwords" (the same novels as `benches.zoo.subwords`) or "chains". ``start`` is a shipped model
    whose weights begin the run. With ``growth``, a small change of the last state is trained to grow by this factor.
    """

    model_type: str
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
    fall: int | None = None
    start: str | None = None
    growth: float | None = None

    def as_json(self) -> str:
        """Return the recipe as JSON, for the card and to recognise a checkpoint."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)


_SMALL = {"n_embd": 128, "n_heads": 2, "intermediate_size": 384, "block_size": 128}
_FOUR = {**_SMALL, "n_heads": 4}
_SHORT: dict[str, Any] = {"steps": 1200, "warmup": 50, "batch": 8}
_HUGINN = Recipe("loopq-zoo-huginn", {**_SMALL, "mean_recurrence": 8}, depth=(6, 10), steps=3000)
_OURO = Recipe("loopq-zoo-ouro", {**_SMALL, "n_layers": 2, "total_ut_steps": 4}, depth=(4, 4), steps=1300)

# So wide that a group of 128 is a part of a row; `--finish` ended their training after these steps.
_MEDIUM: dict[str, Any] = {
    **{"fall": 200, "warmup": 60, "batch": 8, "seq_len": 128, "data": "subwords"},
    "matrix_lr": 0.01,
    "vector_lr": 2e-3,
}
_WIDE = {"vocab_size": 4096, "n_embd": 512, "n_heads": 8, "intermediate_size": 1408, "block_size": 256}

# These lie inside the package; the others stay in the repository.
SHIPPED = {"huginn_small"}

RECIPES: dict[str, Recipe] = {
    "huginn_small": _HUGINN,
    "huginn_small_seed1": dataclasses.replace(_HUGINN, seed=1, **_SHORT),
    "huginn_small_seed2": dataclasses.replace(_HUGINN, seed=2, **_SHORT),
    # Its steps hardly contract at the end, as those of Huginn-3.5B.
    "huginn_boundary": dataclasses.replace(
        _HUGINN,
        config={**_SMALL, "mean_recurrence": 16},
        depth=(12, 20),
        steps=1100,
        batch=8,
        warmup=20,
        matrix_lr=4e-3,
        vector_lr=8e-4,
        start="huginn_small",
        growth=0.98,
    ),
    "ouro_small": _OURO,
    "ouro_small_seed1": dataclasses.replace(_OURO, seed=1, **_SHORT),
    "ouro_small_seed2": dataclasses.replace(_OURO, seed=2, **_SHORT),
    "ouro_large": Recipe(
        "loopq-zoo-ouro", {**_SMALL, "n_layers": 4, "total_ut_steps": 4}, depth=(4, 4), **_SHORT
    ),
    "rllama_small": Recipe(
        "loopq-zoo-rllama", {**_FOUR, "mean_recurrence": 8}, depth=(6, 10), **{**_SHORT, "steps": 500}
    ),
    "parcae_small": Recipe("loopq-zoo-parcae", {**_SMALL, "mean_recurrence": 8}, depth=(6, 10), **_SHORT),
    "loopformer_small": Recipe(
        "loopq-zoo-loopformer",
        {**_SMALL, "intermediate_size": 320},
        depth=(6, 8),
        **_SHORT,
    ),
    "ponder_small": Recipe(
        "loopq-zoo-ponder", {**_SMALL, "intermediate_size": 512, "pondering_steps": 3}, depth=(4, 4), **_SHORT
    ),
    "nanbeige_small": Recipe(
        "loopq-zoo-nanbeige", {**_FOUR, "n_layers": 3, "num_loops": 2}, depth=(2, 2), **_SHORT
    ),
    "coconut_small": Recipe(
        "loopq-zoo-coconut",
        {**_FOUR, "intermediate_size": 512, "block_size": 64, "n_layers": 2},
        depth=(1, 6),
        steps=1200,
        batch=48,
        seq_len=CHAIN_LENGTH,
        data="chains",
    ),
    # One step costs 0.155 bits per byte more than six, 0.54 bits per token.
    "huginn_medium": Recipe(
        "loopq-zoo-huginn", {**_WIDE, "mean_recurrence": 6}, depth=(4, 6), margin=0.1, **_MEDIUM, steps=1250
    ),
    "ouro_medium": Recipe(
        "loopq-zoo-ouro", {**_WIDE, "n_layers": 2, "total_ut_steps": 4}, depth=(3, 4), **_MEDIUM, steps=1500
    ),
    "mamba_small": Recipe(
        "loopq-zoo-mamba",
        {**_SMALL, "intermediate_size": 256},
        depth=(1, 1),
        margin=None,
        **_SHORT,
    ),
    "control_small": Recipe(
        "loopq-zoo-control",
        {**_SMALL, "intermediate_size": 424},
        depth=(1, 1),
        steps=1500,
        margin=None,
    ),
}
