"""From solved layers to a checkpoint, in memory and on disk."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopq.calibrate.dump import Dump
from loopq.calibrate.select import treat
from loopq.formats.checkpoint import Checkpoint
from loopq.quantizers.task import Task
from loopq.run.config import QuantConfig
from loopq.run.dumped import metrics_of, refuse_rollouts, settings_of
from loopq.run.outside import round_outside
from loopq.run.plan import plan
from loopq.run.solver import Solver
from loopq.settings.execution import Execution
from loopq.storage.files import check_new, file_order, is_own
from loopq.storage.journal import Journal, fingerprint
from loopq.storage.weights import ModelWeights

if TYPE_CHECKING:
    from loopq.run.engine import Layers, Run


def work_folder(out: str | Path) -> Path:
    """Where a run for that output folder saves its progress."""
    return Path(out).with_name(f".{Path(out).name}.work")


def killed_late(out: Path, *, one_file: bool = False) -> bool:
    """Whether a run was killed after it wrote an output and before it removed its work; any other output is refused.

    Parameters
    ----------
    out : Path
        Output folder.
    one_file : bool
        Whether the output is a file.

    Raises
    ------
    CheckpointError
        As of `check_new`.
    """
    there = out.is_file() if one_file else out.is_dir() and any(out.iterdir())
    late = is_own(work_folder(out)) and there and not out.is_symlink()
    if not late:
        check_new(out)
    return late


def checkpoint_of(run: Run, layers: Layers, facts: Mapping[str, Any]) -> Checkpoint:
    """Put a run's layers and the rest of the model, in its own memory, together."""
    settings = {
        **facts,
        "quantization": run.config.to_json(),
        "system": run.job.system.name,
        "n_steps": run.job.selection.n_steps,
        "seed": run.execution.seed,
        "calibration": run.job.tokens.describe(),
    }
    return _assemble(layers | round_outside(run), run.weights, settings, dict(run.job.side_files))


def apart(checkpoint: Checkpoint) -> Checkpoint:
    """The same with memory of its own: it outlives the model that it was made of, and what is done to that."""
    dense = {n: dataclasses.replace(t, data=t.data.copy()) for n, t in checkpoint.dense.items()}
    return dataclasses.replace(checkpoint, dense=dense)


@dataclass(frozen=True)
class DumpRun:
    """A quantization from a dump; see `loopq.solve`.

    Parameters
    ----------
    dump : Dump
        The dump.
    tasks : list of Task
        Layers to quantize.
    solver : Solver
        What solves them.
    settings : dict
        What is recorded of the run.
    """

    dump: Dump
    tasks: list[Task]
    solver: Solver
    settings: dict[str, Any]

    @classmethod
    def open(cls, folder: Path, config: QuantConfig, execution: Execution) -> DumpRun:
        """Open a dump and plan what is done with it."""
        refuse_rollouts(config, "a dump", "use `quantize`")
        dump = Dump(folder, threads=execution.threads)
        manifest = dump.manifest
        # What a dump was told to leave out it did not observe; include cannot bring it back.
        config = settings_of(dump, config)
        tasks = plan(treat(manifest.parameters, (), config.exclude), manifest.input_groups, config)
        metrics = metrics_of(dump, tasks)
        key = fingerprint(config.to_json(), manifest.model, manifest.rows, manifest.files, manifest.metrics)
        journal = Journal(execution.folder("layers"), key)
        solver = Solver(dump.weights(), dump, execution, config.rank_threshold, metrics, journal)
        settings = {
            "quantization": config.to_json(),
            "system": manifest.system,
            "n_steps": manifest.n_steps,
            "seed": manifest.seed,
            "calibration": manifest.calibration,
        }
        return cls(dump, tasks, solver, settings)

    def checkpoint(self) -> Checkpoint:
        """Solve what is not solved yet, and put all layers and the rest of the model together."""
        layers = self.solver.run(self.tasks)
        return _assemble(layers, self.solver.weights, self.settings, self.dump.side_files())


def _assemble(
    layers: Layers, weights: ModelWeights, settings: Mapping[str, Any], side_files: Mapping[str, bytes]
) -> Checkpoint:
    # In the order of a file: a format writes the same bytes from memory and from a folder.
    dense = {name: weights.tensors[name] for name in file_order(weights.tensors) if name not in layers}
    dtypes = {name: weights.raw(name).dtype for name in layers}
    return Checkpoint(
        layers, dense, dict(weights.ties), {**settings, "weight_dtypes": dtypes}, dict(side_files)
    )
