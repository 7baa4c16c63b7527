"""One model with one draw of calibration prompts: what all methods of this folder start from and are measured by."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import benches.next.methods  # noqa: F401  registers the codes
from benches.next.corrections import Corrections
from benches.quality.subjects import other_text, prepare
from loopq.calibrate.collect import HessianSet
from loopq.calibrate.data import TokenSet
from loopq.evaluate.compare import _output, _score
from loopq.execution import Execution
from loopq.gradients.unroll import unroll
from loopq.quantizers.task import Task
from loopq.reproduce.models import PreparedModel, Sizes
from loopq.run import choose
from loopq.run.config import PRESETS, QuantConfig
from loopq.run.engine import Layers, Run
from loopq.systems.base import LoopedSystem
from loopq.systems.replace import replaced

Weights = Mapping[str, NDArray[np.float32]]


@dataclass
class Subject:
    """A model, its prompts, its Hessians and loop metrics, collected once for all methods and grids.

    Parameters
    ----------
    name : str
        Of the zoo.
    sizes : Sizes
        Prompts of each set.
    draw : int
        Stretch of the calibration text.
    data : Path
        Data folder, for text of another kind.
    share : float
        Share of the calibration tokens that are replaced by others, drawn from the whole vocabulary.
    """

    name: str
    sizes: Sizes
    draw: int
    data: Path | None
    share: float = 0.0
    model: PreparedModel = field(init=False)
    other: TokenSet | None = field(init=False)
    run: Run = field(init=False)
    sums: HessianSet = field(init=False)
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model = prepare(self.name, self.sizes, self.data, self.draw)
        if self.share:
            known = np.arange(self.model.loaded.config["vocab_size"])
            tokens = self.model.calibration.with_random_tokens(self.share, known)
            self.model = dataclasses.replace(self.model, calibration=tokens)
        self.other = other_text(self.model, self.data, self.sizes.n_evaluation)
        best = QuantConfig.of(rank_threshold=None, **PRESETS["best"])
        self.run = Run.prepare(self.system, self.model.calibration, best, execution=Execution(threads=1))
        with self.timed("metric"):
            self.sums = self.run.all_steps()
            self.run.collect_metrics(self.sums, self.run.tasks)

    @property
    def system(self) -> LoopedSystem:
        """The model's adapter."""
        return self.model.loaded.system

    @property
    def initial_states(self) -> tuple[int, ...]:
        """Seeds of the initial states that the evaluation starts from."""
        return (0, 1) if self.system.state_is_random else (0,)

    @contextlib.contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Take the CPU seconds of the block."""
        began = time.process_time()
        yield
        self.seconds[what] = time.process_time() - began

    def hessian(self, task: Task) -> NDArray[np.float64]:
        """H of a layer's input over all steps, of the full-precision rollout."""
        return np.asarray(self.sums.accumulator(str(task.input_group), task.steps).matrix(list(task.steps)))

    def solve(self, what: str, bits: int, group: int, **settings: Any) -> Layers:
        """Layers of preset best with some settings changed, with one path of codes unless told otherwise."""
        one_path = {} if "method" in settings else {"beam": 1}
        settings = {**PRESETS["best"], **one_path, **settings}
        config = QuantConfig.of(**settings, bits=bits, group_size=group)
        with self.timed(what):
            return choose.solve(self.run.with_config(config))[1]

    def measure(self, weights: Weights, corrections: Corrections | None) -> dict[str, Any]:
        """KL to full precision, mean and by prompt, and top-1 agreement, on text of another author and another kind."""
        found = self._measured(weights, corrections, self.model.evaluation)
        if self.other is not None:
            found |= {f"{k}_other": v for k, v in self._measured(weights, corrections, self.other).items()}
        return found

    def _measured(
        self, weights: Weights, corrections: Corrections | None, tokens: TokenSet
    ) -> dict[str, Any]:
        scores = np.zeros((2, len(self.initial_states), len(tokens.sequences)))
        depth = self.system.n_steps
        with torch.no_grad():
            for row, seed in enumerate(self.initial_states):
                for batch in tokens.batches(8, seed):
                    reference = _output(self.system, batch, depth)
                    with replaced(self.system, weights):
                        out = self._corrected(batch, depth, corrections)
                    found = _score(self.system, reference, out, batch, tokens.scored_from)[:2]
                    scores[:, row, list(batch.prompts)] = found
        per_prompt = scores[0].mean(axis=0)
        return {
            "kl": float(per_prompt.mean()),
            "kl_by_prompt": [float(f"{v:.6g}") for v in per_prompt],
            "agreement": float(scores[1].mean()),
        }

    def _corrected(self, batch: Any, depth: int, corrections: Corrections | None) -> torch.Tensor:
        if corrections is None:
            return _output(self.system, batch, depth)
        with corrections.applied(self.system):
            return unroll(self.system, batch, depth).double().log_softmax(-1)


def weights_of(layers: Layers) -> dict[str, NDArray[np.float32]]:
    """Dequantized weights as the model stores them."""
    return {name: layer.in_model_orientation() for name, layer in layers.items()}


def bytes_of(layers: Layers) -> int:
    """Bytes of codes and scales."""
    return sum(layer.n_bytes for layer in layers.values())
