"""From solved layers to a checkpoint, in memory and on disk."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from loopq.formats import FORMATS
from loopq.formats.checkpoint import Checkpoint
from loopq.formats.convert import verify, write_as
from loopq.formats.native import NATIVE
from loopq.run.export import export
from loopq.run.plan import Plan
from loopq.run.source import Layers, Source
from loopq.settings.execution import Execution
from loopq.storage.files import check_new, file_order, is_own, own_folder, remove_leftovers, remove_own
from loopq.storage.lock import locked

Write: TypeAlias = Callable[[Checkpoint], object]


def work_folder(out: str | Path) -> Path:
    """Where a run for that output folder saves its progress."""
    return Path(out).with_name(f".{Path(out).name}.work")


def was_killed_late(out: Path, *, one_file: bool = False) -> bool:
    """Whether a run was killed after it wrote an output, a folder or one file, and before it removed its work."""
    return is_own(work_folder(out)) and not out.is_symlink() and is_written(out, one_file=one_file)


def check_out(out: Path, *, one_file: bool = False) -> None:
    """Refuse an output that is neither new nor that of a run that was killed late.

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
    if not was_killed_late(out, one_file=one_file):
        check_new(out)


def assemble(plan: Plan, source: Source, layers: Layers, facts: Mapping[str, Any]) -> Checkpoint:
    """Put solved layers and the rest of the model together."""
    weights = source.weights
    # In the order of a file: a format writes the same bytes from memory and from a folder.
    dense = {name: weights.tensors[name] for name in file_order(weights.tensors) if name not in layers}
    settings = {
        **facts,
        "quantization": plan.config.to_json(),
        **source.facts(),
        "weight_dtypes": {name: weights.raw(name).dtype for name in layers},
    }
    return Checkpoint(layers, dense, dict(weights.ties), settings, dict(source.side_files))


def apart(checkpoint: Checkpoint) -> Checkpoint:
    """The same with memory of its own: it outlives the model that it was made of, and what is done to that."""
    dense = {n: dataclasses.replace(t, data=t.data.copy()) for n, t in checkpoint.dense.items()}
    return dataclasses.replace(checkpoint, dense=dense)


def is_written(out: Path, *, one_file: bool = False) -> bool:
    """Whether a checkpoint is there: a folder or a file gets its name when it is whole."""
    return out.is_file() if one_file else out.is_dir() and any(out.iterdir())


@contextlib.contextmanager
def output(
    path: str | Path | None, execution: Execution, write: str | Write | None = None
) -> Iterator[tuple[Execution, Write]]:
    """Hold an output and its work folder for one run, and give what writes the output: a format or a function.

    The work folder is gone after a good end. A run that was killed between the two has nothing more to write: what it
    comes to is compared with what is there.
    """
    if path is None:
        yield execution, lambda checkpoint: None
        return
    out = Path(path)
    # What a function writes is not known: a file or a folder.
    one_file = out.is_file() if callable(write) else FORMATS.get(write or NATIVE.name).one_file
    check_out(out, one_file=one_file)
    with locked(out):
        # Another run may have written meanwhile.
        check_out(out, one_file=one_file)
        late = was_killed_late(out, one_file=one_file)

        def finish(checkpoint: Checkpoint) -> None:
            if late:
                remove_leftovers(out.parent, out.name)
                verify(out, checkpoint)
                execution.progress.note(f"{out} was written before the interruption; compared")
            elif callable(write):
                write(checkpoint)
            elif write is None or FORMATS.get(write).own:
                write_as(out, checkpoint, NATIVE.name)
            else:
                export(checkpoint, out, write)

        work = own_folder(work_folder(out))
        try:
            yield dataclasses.replace(execution, work=work), finish
        except BaseException:
            remove_own(work, if_empty=True)
            raise
        remove_own(work)
