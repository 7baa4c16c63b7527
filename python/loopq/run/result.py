"""From solved layers to a checkpoint, in memory and on disk."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

from loopq.errors import CheckpointError
from loopq.formats.checkpoint import Checkpoint
from loopq.formats.convert import verify, write_as
from loopq.formats.native import NATIVE
from loopq.run.plan import Plan
from loopq.run.source import Layers, Source
from loopq.settings.execution import Execution
from loopq.storage.files import file_order
from loopq.storage.folders import own_folder, remove_leftovers, remove_own
from loopq.storage.lock import held, work_folder

Write: TypeAlias = Callable[[Checkpoint], object]


def assemble(plan: Plan, source: Source, layers: Layers) -> Checkpoint:
    """Combine solved layers and the rest of the model."""
    weights = source.weights
    # The order of a file makes a format write the same bytes from memory and from a folder.
    dense = {name: weights.tensors[name] for name in file_order(weights.tensors) if name not in layers}
    settings = {**plan.facts, "quantization": plan.config.to_json(), **source.facts()}
    return Checkpoint(layers, dense, dict(weights.ties), settings, dict(source.side_files))


def apart(checkpoint: Checkpoint) -> Checkpoint:
    """Return a copy with its own memory. It outlives its model and changes to it."""
    dense = {n: dataclasses.replace(t, data=t.data.copy()) for n, t in checkpoint.dense.items()}
    return dataclasses.replace(checkpoint, dense=dense)


@contextlib.contextmanager
def output(
    path: str | Path | None, execution: Execution, write: Write | None = None, *, shared: bool = False
) -> Iterator[tuple[Execution, Write]]:
    """Hold an output and its work folder for one run, and provide the function that writes the output.

    A successful run removes the work folder. A run that was killed between the two has nothing left to write. Its
    result is compared with the existing output. If processes share the output, only the one that writes it holds it,
    and only while it writes.
    """
    if path is None:
        yield execution, lambda checkpoint: None
        return
    out = Path(path)
    if shared:

        def finish_alone(checkpoint: Checkpoint) -> None:
            with output(out, execution, write) as (_, finish):
                finish(checkpoint)

        yield dataclasses.replace(execution, work=work_folder(out)), finish_alone
        return
    with held(out) as late:

        def finish(checkpoint: Checkpoint) -> None:
            if late:
                remove_leftovers(out.parent, out.name)
                try:
                    verify(out, checkpoint)
                except CheckpointError as cause:
                    raise CheckpointError(
                        f"{out}: a killed run finished it, and it holds something else than this command writes "
                        f"({cause}); choose a new folder"
                    ) from cause
                execution.progress.note(f"{out} was written before the interruption; compared")
            elif write is None:
                write_as(out, checkpoint, NATIVE.name)
            else:
                write(checkpoint)

        work = own_folder(work_folder(out))
        try:
            yield dataclasses.replace(execution, work=work), finish
        except BaseException:
            remove_own(work, if_empty=True)
            raise
        remove_own(work)
