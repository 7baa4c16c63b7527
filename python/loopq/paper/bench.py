"""Shared measurements of all tables: one model, its prompts, its Hessians collected once, and compared variants."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from loopq.analysis.diagnosis.config import DiagnoseConfig
from loopq.analysis.diagnosis.context import Context
from loopq.analysis.diagnosis.survey import diagnose
from loopq.calibrate.hessian_set import HessianSet
from loopq.evaluation.compare import Measurement, compare
from loopq.layers.grid import Bits
from loopq.paper.models import OpenedModel, PreparedModel, Sizes
from loopq.quantizers.config import Override
from loopq.run.config import QuantConfig
from loopq.run.model_source import ModelSource
from loopq.run.solving import solve_from
from loopq.run.source import Layers
from loopq.settings.declare import Settings, setting
from loopq.settings.execution import Execution
from loopq.settings.steps import parse_steps
from loopq.storage.journal import Journal, fingerprint
from loopq.storage.model_files import model_tensors
from loopq.storage.schema import Object

# Li, Table 25: the adapter has 10 % damping, the core 1 %.
ADAPTER_DAMPING = 0.1
# Block size of the rotation. Narrower inputs use a divisor of their width.
ROTATION = "hadamard:512"
# Remedies for a planted column or channel: small groups, and little weight on step 0.
CURE_GROUP, CURE_ALPHA = 32, "0.05"


@dataclass(frozen=True)
class BenchSettings(Settings):
    """Settings of the tables.

    Parameters
    ----------
    bits : int
        Width of the codes where a table does not vary it.
    group_size : int
        Group size where a table does not vary it; -1 is per channel.
    n_calibration : int
        Calibration prompts; the paper has 50 of GSM8K.
    n_evaluation : int
        Held-out prompts on which quantized weights are compared; the paper's agreement has 20 to 60.
    n_prompts : int
        Prompts of the experiments that follow the state step by step.
    seq_len : int
        Tokens of a prompt that is cut from a text.
    n_seeds : int
        Sets of calibration prompts of the main table, each with initial states of its own. Of feedback initial states.
    """

    bits: Bits = setting(4, common=True)
    group_size: int = setting(128, common=True)
    n_calibration: int = setting(50, at_least=1, common=True)
    n_evaluation: int = setting(50, at_least=2, common=True)
    n_prompts: int = setting(8, at_least=1, common=True)
    seq_len: int = setting(128, at_least=2, common=True)
    n_seeds: int = setting(3, at_least=1, common=True)


@dataclass
class Bench:
    """One model on the bench. Results that several tables need are computed once.

    Parameters
    ----------
    source : OpenedModel
        Model, and the source of its prompts.
    settings : BenchSettings
        Sizes.
    execution : Execution
        Execution settings.
    n_steps : int, optional
        Depth. The system's default when absent.
    saved : Journal, optional
        Journal that saves parts of the current table.
    prompts : PreparedModel, optional
        Model and prompts. Cut from the source in the settings' sizes when absent.
    """

    source: OpenedModel
    settings: BenchSettings
    execution: Execution
    n_steps: int | None = None
    saved: Journal | None = None
    prompts: PreparedModel | None = None

    def once(self, name: str, make: Callable[[], Object]) -> Object:
        """Part of a table, read if an earlier run of the same command saved it, else computed and saved."""
        piece = self.saved.find(name) if self.saved else None
        if piece is not None:
            return dict(json.loads(piece.facts["found"]))
        result = make()
        if self.saved:
            self.saved.save(name, found=json.dumps(result))
        return result

    @property
    def system(self) -> Any:
        """Adapter of the model."""
        return self.source.loaded.system

    @cached_property
    def model(self) -> PreparedModel:
        """Model and prompts."""
        s = self.settings
        return self.prompts or self.source.prompts(Sizes(s.n_calibration, 1, s.n_evaluation, s.seq_len))

    @cached_property
    def depth(self) -> int:
        """Recurrence steps of a rollout."""
        depth: int = self.system.check_depth(self.n_steps or self.system.n_steps)
        return depth

    @cached_property
    def collected(self) -> ModelSource:
        """Rollouts of the calibration prompts."""
        return ModelSource.of(
            self.system, self.model.calibration, n_steps=self.n_steps, execution=self.execution
        )

    @cached_property
    def sums(self) -> HessianSet:
        """Hessians of every input, with separate steps."""
        return self.collected.all_steps(self.collected.plan(QuantConfig(rank_threshold=None)))

    def context(self, work: Path | None = None, **changes: Any) -> Context:
        """Context of `loopq.analysis.diagnosis.sections`, on held-out prompts. `work` keeps sections."""
        config = DiagnoseConfig(
            bits=self.settings.bits,
            group_size=self.settings.group_size,
            n_prompts=self.settings.n_prompts,
            n_ablation_prompts=self.settings.n_prompts,
        ).changed(**changes)
        return Context(
            self.system,
            self.model.evaluation,
            self.depth,
            config,
            execution=self.execution.changed(work=work),
            train=self.model.calibration,
        )

    @cached_property
    def alone(self) -> Object:
        """Diagnosis with each layer rounded alone. Two tables have it, also where a resumed run makes the second."""
        context = self.context(work=self.saved.folder if self.saved else None)
        return diagnose(context, only=["ablation"], name=self.model.name)

    @cached_property
    def adapters(self) -> tuple[str, ...]:
        """Names of the layers that join state and embedding."""
        return tuple(p.name for p in self.collected.job.selection.observed if p.role == "adapter")

    def cures(self, **grid: int) -> dict[str, QuantConfig]:
        """Remedies for a planted outlier on a grid: groups, rotation of those layers, less weight on step 0."""
        source = self.source
        if not source.planted:
            return {}
        turned = tuple(Override(n, {"rotation": ROTATION}) for n in source.planted_in)
        small = grid | {"group_size": CURE_GROUP}
        cures = {
            f"RTN, groups of {CURE_GROUP}": self.rtn(**small),
            f"GPTQ, groups of {CURE_GROUP}": self.gptq("all", **small),
        }
        # The outlier is in the adapter, which the tables already rotate.
        if source.planted_in != self.adapters:
            cures["RTN, planted layers rotated"] = self.rtn(*turned, **grid)
            cures["GPTQ, planted layers rotated"] = self.gptq("all", *turned, **grid)
        if source.planted == "spike" and self.depth > 1:
            weights = f"alpha={CURE_ALPHA}"
            cures[f"GPTQ, alpha = {CURE_ALPHA}"] = self.gptq("all", step_weights=weights, **grid)
        return cures

    def rtn(self, *overrides: Override, **changes: Any) -> QuantConfig:
        """Settings of rounding to nearest, as in the paper."""
        return self._config(overrides, {"method": "rtn", "scale_search": "max"} | changes)

    def gptq(self, steps: str = "all", *overrides: Override, **changes: Any) -> QuantConfig:
        """Settings of the paper's GPTQ on the Hessians of some steps."""
        damped = tuple(Override(name, {"damping": ADAPTER_DAMPING}) for name in self.adapters)
        paper = {"method": "gptq", "scale_search": "max", "steps": steps}
        return self._config((*damped, *overrides), paper | changes)

    def awq(self, steps: str = "all", **changes: Any) -> QuantConfig:
        """Settings of AWQ on an asymmetric grid."""
        return self._config(
            (), {"method": "awq", "symmetric": False, "scale_search": "max", "steps": steps} | changes
        )

    def _config(self, overrides: tuple[Override, ...], changes: Mapping[str, Any]) -> QuantConfig:
        grid = {"bits": self.settings.bits, "group_size": self.settings.group_size}
        overrides += self._of_shorter_loops(changes.get("steps", "all"))
        return QuantConfig.of(*overrides, rank_threshold=None, **(grid | dict(changes)))

    def _of_shorter_loops(self, steps: str) -> tuple[Override, ...]:
        """Give layers with fewer calls than the loop those of the steps that they have, or their last one."""
        if steps in ("all", "first"):
            return ()
        chosen, found = parse_steps(steps, self.depth), []
        for p in self.collected.job.selection.observed:
            if 1 < p.invocations < self.depth and chosen[-1] >= p.invocations:
                own = [t for t in chosen if t < p.invocations] or [p.invocations - 1]
                found.append(Override(p.name, {"steps": ",".join(map(str, own))}))
        return tuple(found)

    def solve(self, config: QuantConfig) -> Layers:
        """Quantize from the collected Hessians, or collect them as the settings' inputs require."""
        return solve_from(self.collected.plan(config), self.collected, self.sums)

    def measure(self, variants: Mapping[str, QuantConfig | Layers]) -> Object:
        """Quantize with each of several settings and compare with full precision on the held-out prompts.

        Returns
        -------
        dict
            Entries `model`, `n_steps`, `output`, `bytes_per_token` and `variants`. The variants are listed by name,
            "full precision" first. Each has its bytes. It also has KL, agreement, negative log-likelihood and
            correctness of the answer by prompt.
        """
        layers = {n: self.solve(v) if isinstance(v, QuantConfig) else v for n, v in variants.items()}
        measured = compare(
            self.system,
            {n: {k: q.in_model_orientation() for k, q in v.items()} for n, v in layers.items()},
            self.model.evaluation,
            n_steps=self.n_steps,
            seeds=(self.execution.seed,),
            count_bytes=self.source.loaded.count_bytes,
            execution=self.execution,
        )
        sizes = {n: sum(q.n_bytes for q in v.values()) for n, v in layers.items()}
        return self.head() | {
            "bytes_per_token": measured[0].bytes_per_token,
            "cures": [name for name in self.cures() if name in layers],
            "variants": {m.name: _plain(m, sizes.get(m.name)) for m in measured},
        }

    def key(self) -> str:
        """Identity of all inputs of a result."""
        tensors = model_tensors(self.source.loaded.model)[0]
        weights = {n: hashlib.sha256(t.data.data).hexdigest() for n, t in tensors.items()}
        texts = [t.digest() for t in (self.model.calibration, self.model.evaluation)]
        return fingerprint(
            weights, texts, self.settings.to_json(), self.execution.seed, self.depth, str(self.source.data)
        )

    def head(self) -> Object:
        """Common entries of every result."""
        return {"model": self.source.name, "n_steps": self.depth, "output": self.system.output}


def _plain(m: Measurement, n_bytes: int | None) -> Object:
    hidden = m.output == "hidden"

    def values(array: Any) -> list[float]:
        return [float(f"{v:.8g}") for v in np.asarray(array)[0]]

    return {
        "n_bytes": n_bytes,
        "kl": values(m.kl),
        "agreement": values(m.agreement),
        "nll": None if hidden else values(m.nll),
        "answered": None if hidden else values(m.answered),
    }
