"""Run the rollouts of a calibration set and keep the inputs of the shared layers, as Hessians or as rows."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import loopq._native as native
from loopq.calibrate.data import TokenSet
from loopq.calibrate.device import Sums
from loopq.calibrate.dump import (
    MANIFEST,
    DumpFile,
    GradientSums,
    Manifest,
    MetricFile,
    Rows,
    rows_to_raw,
    write_accumulator,
    write_gradient_sums,
)
from loopq.calibrate.hooks import InputKey, Observer, input_key
from loopq.calibrate.parts import Parts, Pass
from loopq.calibrate.select import Selection
from loopq.errors import CalibrationError, ConfigError, DumpError
from loopq.layers.shared import SharedParameter
from loopq.models.depths import Depths
from loopq.settings.execution import POLL, Execution, at_most
from loopq.storage.files import (
    check_named,
    check_new,
    free_bytes,
    read_json,
    remove_leftovers,
    write_json,
    write_tensors,
)
from loopq.storage.journal import Journal, Snapshots, fingerprint
from loopq.storage.lock import locked
from loopq.storage.model_files import model_tensors, write_files
from loopq.storage.schema import Count, Sha256, checked
from loopq.systems.base import LoopedSystem
from loopq.terminal.progress import Progress, Silent
from loopq.terminal.table import size

if TYPE_CHECKING:
    from torch import Tensor

_CLAIM = "collecting.json"
ROW_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True)
class Collection:
    """A model, its prompts and settings: everything that determines the collected rows.

    Parameters
    ----------
    system : LoopedSystem
        The model's adapter. It runs the rollouts.
    tokens : TokenSet
        Calibration prompts.
    selection : Selection
        Parameters, input groups and depth. They come from `select`.
    execution : Execution
        Seed of the initial states, batch size, threads, memory limit and progress.
    side_files : mapping of str to bytes
        Config and tokenizer files of the model.
    """

    system: LoopedSystem
    tokens: TokenSet
    selection: Selection
    execution: Execution = field(default_factory=Execution)
    side_files: Mapping[str, bytes] = field(default_factory=dict)

    @cached_property
    def _weights(self) -> dict[str, str]:
        """SHA-256 of each tensor of the full-precision model. It is cached: gigabytes take seconds."""
        tensors, _ = model_tensors(self.system.model)
        return {name: hashlib.sha256(t.data.data).hexdigest() for name, t in tensors.items()}

    def fingerprint(self, *more: Any) -> str:
        """Identity of the work: weights, tokens and settings."""
        return fingerprint(
            self._weights,
            str(next(self.system.model.parameters()).dtype),
            self.tokens.describe(),
            self.execution.seed,
            self.execution.batch_size,
            self.selection.n_steps,
            self.selection.parameters,
            *more,
        )

    @property
    def n_batches(self) -> int:
        """Batches of one run over the calibration set."""
        return len(self.batch_tokens)

    @property
    def batch_tokens(self) -> list[int]:
        """Tokens of each batch."""
        plan = self.tokens.plan(self.execution.batch_size)
        return [sum(self.tokens.sequences[prompt].size for prompt in batch) for batch in plan]


class _GroupFilter:
    """Forward the rows of input groups and check that the other parameters read the same tensor."""

    def __init__(self, selection: Selection, sink: Callable[[str, int, Tensor], None]) -> None:
        self._input_groups = selection.input_groups
        self._sink = sink
        # The first parameter's tensor is kept alive, so no other tensor can get its address.
        self._last: dict[str, tuple[int, InputKey, Tensor]] = {}

    def __call__(self, parameter: SharedParameter, step: int, rows: Tensor) -> None:
        input_group = self._input_groups[parameter.name]
        if input_group == parameter.name:
            self._last[input_group] = (step, input_key(rows), rows)
            self._sink(input_group, step, rows)
        elif self._last.get(input_group, ())[:2] != (step, input_key(rows)):
            raise CalibrationError(
                f"layer {parameter.name}, step {step}: reads another input than {input_group}, which it shared in "
                "the probe rollout; the model branches on its input: exclude this layer, or keep prompts of "
                "one kind together"
            )


def run_rollouts(
    job: Collection,
    sink: Callable[[str, int, Tensor], None],
    *,
    only: Sequence[str] | None = None,
    wanted: Callable[[int], bool] = lambda number: True,
    first: int = 0,
    label: str = "collect",
    progress: Progress | None = None,
) -> Generator[int, None, None]:
    """Run batches and pass the rows of each input group to a sink. Yield the number of each finished batch.

    Parameters
    ----------
    job : Collection
        The model and its prompts. The seed belongs to it.
    sink : callable
        Called with input group, step and rows, Tensor (n_rows, in_features), in the order of the calls.
    only : sequence of str, optional
        Input groups to observe. All are observed when absent.
    wanted : callable
        Takes the number of a batch before it runs. Return false to skip the batch.
    first : int
        Batch to begin with. Earlier batches come last.
    label : str
        Name of the stage.
    progress : Progress, optional
        Receives every prompt; the job's own when absent.
    """
    progress = progress or job.execution.progress
    chosen = set(job.selection.input_groups.values() if only is None else only)
    parameters = [p for p in job.selection.observed if job.selection.input_groups[p.name] in chosen]
    batches = list(job.tokens.batches(job.execution.batch_size, job.execution.seed))
    progress.start(label, sum(len(b.prompts) for b in batches), "prompts")
    with Observer(job.system, parameters, _GroupFilter(job.selection, sink), ends=True) as observer:
        for number in (*range(first, len(batches)), *range(first)):
            batch = batches[number]
            if wanted(number):
                with observer.rollout(batch):
                    job.system.rollout(batch, job.selection.n_steps)
                yield number
            progress.advance(len(batch.prompts))
    progress.stop()


class HessianSet:
    """Hessian accumulators of every input group, in memory.

    Parameters
    ----------
    job : Collection
        Model and prompts.
    steps : mapping of str to list of int
        Summed steps of each input group.
    per_step : bool
        Keep each step's Hessian separate. This multiplies the memory by the number of steps.
    """

    def __init__(
        self, job: Collection, steps: Mapping[str, Sequence[int]], *, per_step: bool = False
    ) -> None:
        self.job = job
        self.per_step = per_step
        self.steps = {input_group: sorted(s) for input_group, s in steps.items()}
        self._dims = {p.name: p.in_features for p in job.selection.distinct_inputs}
        self.accumulators: dict[str, native.HessianAccumulator] = {}

    def n_bytes(self, input_group: str) -> int:
        """Memory of one accumulator: 16 bytes per entry of the upper triangle, and per step kept."""
        dim = self._dims[input_group]
        return 8 * dim * (dim + 1) * (len(self.steps[input_group]) if self.per_step else 1)

    def rows(self, input_group: str) -> dict[int, int]:
        """Rows added at each step."""
        acc = self.accumulators[input_group]
        return {step: acc.n_rows(step) for step in self.steps[input_group]}

    def accumulator(
        self, input_group: str, steps: Sequence[int], *, per_step: bool = False
    ) -> native.HessianAccumulator:
        """Return the accumulator of an input group. It must hold exactly these steps, or each step separately.

        `per_step` is for sources that sum on demand. It has no effect here.
        """
        acc = self.accumulators[input_group]
        if not self.per_step and list(steps) != self.steps[input_group]:
            raise ConfigError(
                f"layer {input_group}: summed over steps {self.steps[input_group]}, not {list(steps)}"
            )
        return acc

    def passes(self, need: Callable[[Sequence[str]], int] | None = None) -> list[list[str]]:
        """Divide the input groups into few passes within the memory limit: the largest first, each where it fits.

        `need` returns the bytes of a pass over some input groups; their accumulators' bytes when absent.

        Raises
        ------
        ConfigError
            One input group alone exceeds the limit.
        """
        need = need or (lambda input_groups: sum(map(self.n_bytes, input_groups)))
        limit = self.job.execution.memory
        runs: list[list[str]] = []
        for input_group in sorted(self.steps, key=lambda g: need([g]), reverse=True):
            if limit is not None and need([input_group]) > limit:
                raise ConfigError(
                    f"layer {input_group}: alone it takes {need([input_group]) / 2**20:.2f} MiB, above the limit of "
                    f"{limit / 2**20:.2f} MiB: raise --memory"
                )
            fits = (run for run in runs if limit is None or need([*run, input_group]) <= limit)
            found = next(fits, None)
            if found is None:
                runs.append(found := [])
            found.append(input_group)
        return [[g for g in self.steps if g in run] for run in runs]

    def run_pass(
        self, input_groups: Sequence[str], *, work: Path | None = None, label: str = "collect"
    ) -> None:
        """Collect the Hessians of some input groups in one run over the calibration set.

        Parameters
        ----------
        input_groups : sequence of str
            Input groups of this pass.
        work : Path, optional
            Folder for periodic snapshots of the sums. A pass resumes from snapshots of the same work.
        label : str
            Name of the stage.
        """
        parts = Parts(self._pass(input_groups), work)
        if parts.covered():
            done = f"{len(parts.covered())} of {self.job.n_batches} batches"
            self.job.execution.progress.note(f"resumed: {done} are there")
        if len(parts.covered()) < self.job.n_batches:
            self._run(parts, input_groups, label, self.job.execution.progress)
        self.accumulators.update(parts.finish())

    def share_pass(
        self, input_groups: Sequence[str], work: Path, share: tuple[int, int], ended: Callable[[], bool]
    ) -> None:
        """Run the unclaimed batches of a pass, until all its batches are saved in `work`.

        Parameters
        ----------
        input_groups, work
            As in `run_pass`, which adds up the saved parts afterwards.
        share : (int, int)
            Index of this process, from 0, and number of processes. Each process begins at another batch.
        ended : callable
            Whether other processes have finished the whole work and removed `work`.
        """
        first = self.job.n_batches * share[0] // share[1]
        with Journal(work, "").claims() as claims:
            parts = Parts(self._pass(input_groups), work, claims, ended)
            progress = self.job.execution.progress
            while len(parts.covered()) < self.job.n_batches and not ended():
                self._run(parts, input_groups, "collect", progress, first)
                time.sleep(POLL)
                # From now on the process only waits for others, or takes over when one is gone.
                progress = Silent()

    def _pass(self, input_groups: Sequence[str]) -> Pass:
        return Pass(
            {g: self.steps[g] for g in input_groups},
            self.per_step,
            self.job.batch_tokens,
            self.job.system.device,
            self._empty,
            lambda: self.job.fingerprint("ranges", list(input_groups), self.steps, self.per_step),
        )

    def _run(
        self, parts: Parts, input_groups: Sequence[str], label: str, progress: Progress, first: int = 0
    ) -> None:
        """Run the wanted batches of a pass and save them periodically."""
        snapshots = Snapshots()
        for _ in run_rollouts(
            self.job,
            parts.add,
            only=input_groups,
            wanted=parts.begin,
            first=first,
            label=label,
            progress=progress,
        ):
            if snapshots.due():
                with snapshots.saving():
                    parts.save()
        # Other processes wait for shared parts, so these are always saved. Less than a minute of work is recomputed.
        if parts.shared or snapshots.due():
            parts.save()

    def _empty(self, input_group: str) -> Sums:
        """Return new sums of an input group."""
        return Sums(
            self._dims[input_group],
            self.steps[input_group],
            per_step=self.per_step,
            threads=self.job.execution.threads,
        )

    def drop(self, input_group: str) -> None:
        """Free one accumulator."""
        self.accumulators.pop(input_group, None)


@dataclass(frozen=True)
class _ShardJournal:
    sha256: Sha256
    n_bytes: Count
    batches: tuple[Count, Count]
    rows: Rows


@dataclass(frozen=True)
class _Claim:
    key: str


def collect_rows(
    job: Collection,
    out: Path,
    *,
    rows_dtype: str | None = None,
    shard_batches: int = 8,
) -> Manifest:
    """Write an activation dump. An interrupted dump is resumed.

    Parameters
    ----------
    job : Collection
        Model and prompts.
    out : Path
        Folder of the dump. It must be new or hold the same unfinished dump.
    rows_dtype : {"float32", "float16", "bfloat16"}, optional
        Storage type of the rows. The default is the type of the activations, which needs no rounding.
    shard_batches : int
        Batches of one shard. A kill loses at most one shard.

    Raises
    ------
    DumpError
        `out` holds a finished dump or part of another dump, or another run is writing it.
    """
    kind = rows_dtype or str(next(job.system.model.parameters()).dtype).removeprefix("torch.")
    if kind not in ROW_TYPES:
        raise ConfigError(f"rows_dtype must be one of {', '.join(ROW_TYPES)}; got {kind!r}")
    if shard_batches < 1:
        raise ConfigError(f"shard_batches must be at least 1; got {shard_batches}")
    with _alone(out):
        return _write_rows(job, out, kind, shard_batches)


@contextlib.contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Lock a folder for a single collection. Ranks that divide one collection use claims instead."""
    check_named(out, DumpError)
    with locked(out):
        yield
    # After the lock: a kill before it leaves the claim, which tells the same command that the dump is its own.
    release(out)


def _write_rows(job: Collection, out: Path, kind: str, shard_batches: int) -> Manifest:
    key = job.fingerprint(kind, shard_batches)
    if _begin(out, key):
        return _finish(out)
    written = sum(path.stat().st_size for path in (out / "shards").glob("*.safetensors"))
    need, free = _rows_bytes(job, kind), free_bytes(out)
    if need - written > free:
        raise DumpError(
            f"{out}: the rows take {size(need)}, {size(written)} of them are there, the disk has {size(free)}; free "
            "some space, take fewer prompts, or keep Hessians instead (--hessian)"
        )
    write_json(out / _CLAIM, {"key": key})
    # A shard is held as it comes, and once more as it is written.
    shard = (need + _rows_bytes(job, "float32")) * min(1, shard_batches / job.n_batches)
    rows = f"about {need / 2**20:.1f} MiB of rows for {job.tokens.n_tokens} tokens"
    job.execution.progress.note(f"{rows}; {at_most(int(shard))}")
    done = _finished_shards(out)
    buffer: dict[str, list[Tensor]] = {}

    def sink(input_group: str, step: int, rows: Tensor) -> None:
        buffer.setdefault(f"{input_group}/{step}", []).append(rows.detach().clone())

    for number in run_rollouts(job, sink, wanted=lambda number: number >= done * shard_batches):
        if (number + 1) % shard_batches == 0 or number + 1 == job.n_batches:
            index = number // shard_batches
            _write_shard(out, index, (index * shard_batches, number + 1), buffer, ROW_TYPES[kind])
            buffer.clear()
    return _finish_rows(job, out, ROW_TYPES[kind])


def _rows_bytes(job: Collection, kind: str) -> int:
    shares = job.selection.shares
    width = sum(
        p.in_features * p.invocations * shares.get(p.name, 1.0) for p in job.selection.distinct_inputs
    )
    return int(job.tokens.n_tokens * width) * (4 if kind == "float32" else 2)


def _begin(out: Path, key: str) -> bool:
    """Whether the folder holds this finished dump, killed during its final clean-up.

    Any other collection in the folder is an error.
    """
    check_named(out, DumpError)
    claim = out / _CLAIM
    if claim.is_file():
        if checked(_Claim, read_json(claim, DumpError), claim, DumpError).key != key:
            raise DumpError(
                f"{out}: holds the beginnings of another collection; choose a new folder or remove it"
            )
        for folder in (out, out / "shards", out / "hessians", out / "metrics", out / "model"):
            remove_leftovers(folder)
    elif (out / MANIFEST).exists():
        raise DumpError(f"{out}: holds a finished dump; choose a new folder")
    else:
        # A kill may have interrupted the write of the claim itself.
        remove_leftovers(out)
        check_new(out, DumpError)
    return (out / MANIFEST).exists()


def _finish(out: Path) -> Manifest:
    """Remove the files that only an unfinished collection needs, except the claim."""
    shutil.rmtree(out / "work", ignore_errors=True)
    return Manifest.read(out)


def release(out: Path) -> None:
    """Remove the claim of a complete dump, which is the last step of a collection."""
    (out / _CLAIM).unlink(missing_ok=True)


def collected(out: Path) -> bool:
    """Whether a dump exists and its clean-up is complete."""
    return (out / MANIFEST).exists() and not (out / _CLAIM).exists()


def _finished_shards(out: Path) -> int:
    count = 0
    while (out / "shards" / f"{count:05d}.json").is_file():
        count += 1
    return count


def _write_shard(
    out: Path, index: int, batches: tuple[int, int], buffer: Mapping[str, list[Tensor]], dtype: str
) -> None:
    import torch  # lazy: loopq imports without torch

    tensors = {name: rows_to_raw(torch.cat(parts), dtype) for name, parts in buffer.items()}
    path = out / "shards" / f"{index:05d}.safetensors"
    digest = write_tensors(path, tensors)
    rows: dict[str, dict[str, int]] = {}
    for name, tensor in tensors.items():
        input_group, _, step = name.rpartition("/")
        rows.setdefault(input_group, {})[step] = tensor.shape[0]
    journal = {"sha256": digest, "n_bytes": path.stat().st_size, "batches": list(batches), "rows": rows}
    write_json(path.with_suffix(".json"), journal)


def _finish_rows(job: Collection, out: Path, dtype: str) -> Manifest:
    # A shard has no rows for a step that sent none to an expert.
    rows: Rows = {
        p.name: dict.fromkeys(range(p.invocations) if p.routed_in else (), 0)
        for p in job.selection.distinct_inputs
    }
    files = []
    for path in sorted((out / "shards").glob("*.json")):
        journal = checked(_ShardJournal, read_json(path, DumpError), path, DumpError)
        files.append(DumpFile(f"shards/{path.stem}.safetensors", journal.sha256, journal.n_bytes))
        for input_group, steps in journal.rows.items():
            if input_group not in rows:
                raise DumpError(f"{path}: rows of {input_group!r}, which is not collected here")
            for step, n in steps.items():
                rows[input_group][step] = rows[input_group].get(step, 0) + n
    return _write_manifest(job, out, "rows", dtype, rows, files)


def _write_manifest(
    job: Collection,
    out: Path,
    kind: Literal["rows", "hessian"],
    dtype: str,
    rows: Rows,
    files: Sequence[DumpFile],
    metrics: Sequence[MetricFile] = (),
) -> Manifest:
    tensors, ties = model_tensors(job.system.model)
    manifest = Manifest(
        kind=kind,
        system=job.system.name,
        n_steps=job.selection.n_steps,
        seed=job.execution.seed,
        calibration=job.tokens.describe(),
        rows_dtype=cast(Any, dtype),
        parameters=job.selection.parameters,
        input_groups=job.selection.input_groups,
        rows=rows,
        files=tuple(files),
        model=tuple(write_files(out / "model", tensors, job.side_files)),
        ties=ties,
        loopq_version=native.__version__,
        metrics=tuple(metrics),
        depths=job.system.depths if isinstance(job.system, Depths) else (),
    )
    manifest.write(out)
    return _finish(out)


class Gradients(Protocol):
    """Collector of loop metrics for a Hessian dump. Calibration itself runs no backward pass."""

    @property
    def n_prompts(self) -> int:
        """Number of prompts for gradients."""

    @property
    def n_draws(self) -> int:
        """Label draws for each prompt."""

    def collect(
        self, sums: HessianSet, input_groups: Sequence[str], work: Path
    ) -> Mapping[str, tuple[tuple[int, ...], GradientSums]]:
        """Return steps and sums of each parameter that reads these inputs. Resume from the folder `work`."""


@dataclass(frozen=True)
class HessianDump:
    """A Hessian dump during writing: exact sums, which can be merged with those of other prompts.

    Parameters
    ----------
    sums : HessianSet
        The sums. They also hold the job.
    passes : list of list of str
        Input groups of each run over the calibration set.
    out : Path
        Folder of the dump. Unfinished work lies in its subfolder "work".
    gradients : Gradients or None
        Collector of loop metrics.
    key : str
        Identity of the work.
    """

    sums: HessianSet
    passes: list[list[str]]
    out: Path
    gradients: Gradients | None
    key: str

    @classmethod
    def of(
        cls,
        job: Collection,
        out: Path,
        *,
        steps: Sequence[int] | None = None,
        per_step: bool = False,
        gradients: Gradients | None = None,
    ) -> HessianDump:
        """Plan a dump. The parameters are those of `collect_hessians`."""
        wanted = {
            p.name: [t for t in (steps if steps is not None else range(p.invocations)) if t < p.invocations]
            for p in job.selection.distinct_inputs
        }
        sums = HessianSet(job, wanted, per_step=per_step)
        counts = (gradients.n_prompts, gradients.n_draws) if gradients else ()
        return cls(sums, sums.passes(), out, gradients, job.fingerprint(wanted, per_step, *counts))

    def work(self, number: int) -> Path:
        """Return the folder for the saved sums of a pass."""
        return self.out / "work" / str(number)

    @property
    def is_there(self) -> bool:
        """Whether the dump is complete."""
        return (self.out / MANIFEST).exists()

    def begin(self) -> bool:
        """Claim the folder. Return whether it holds this finished dump, killed during its clean-up."""
        late = _begin(self.out, self.key)
        write_json(self.out / _CLAIM, {"key": self.key})
        return late

    def tell(self) -> None:
        """Report the memory and the passes of the collection."""
        needs = [list(map(self.sums.n_bytes, groups)) for groups in self.passes]
        held = max(map(sum, needs), default=0)
        # A sum takes twice its memory in addition while it is saved.
        most = max((sum(each) + 2 * max(each, default=0) for each in needs), default=0)
        self.sums.job.execution.progress.note(
            f"{at_most(most)}, {held / 2**20:.1f} of them for Hessians; passes over the text: {len(self.passes)}"
        )

    def finish(self) -> Manifest:
        """Clean up after a complete dump."""
        return _finish(self.out)

    def write(self) -> Manifest:
        """Collect the missing sums, pass by pass, and write the dump."""
        sums, gradients, out = self.sums, self.gradients, self.out
        files: list[DumpFile] = []
        metrics: list[MetricFile] = []
        rows: Rows = {}
        for number, input_groups in enumerate(self.passes):
            work = self.work(number)
            sums.run_pass(input_groups, work=work)
            if gradients:
                counts = (gradients.n_prompts, gradients.n_draws)
                for name, (over, found) in gradients.collect(sums, input_groups, work / "metric").items():
                    file = f"metrics/{len(metrics):03d}.safetensors"
                    digest = write_gradient_sums(out / file, found)
                    metrics.append(MetricFile(file, digest, (out / file).stat().st_size, name, over, *counts))
            for input_group in input_groups:
                file = f"hessians/{len(files):03d}.safetensors"
                digest = write_accumulator(out / file, sums.accumulators[input_group])
                size_of = (out / file).stat().st_size
                files.append(DumpFile(file, digest, size_of, input_group, sums.per_step))
                rows[input_group] = sums.rows(input_group)
                sums.drop(input_group)
        return _write_manifest(sums.job, out, "hessian", "", rows, files, metrics)


def collect_hessians(
    job: Collection,
    out: Path,
    *,
    steps: Sequence[int] | None = None,
    per_step: bool = False,
    gradients: Gradients | None = None,
) -> Manifest:
    """Write a Hessian dump. An interrupted dump is resumed.

    Parameters
    ----------
    job : Collection
        Model and prompts.
    out : Path
        Folder of the dump. It must be new or hold the same unfinished dump.
    steps : sequence of int, optional
        Steps to keep. All invocations of each parameter are kept when absent.
    per_step : bool
        Keep each step separate, so that any choice of steps is possible later.
    gradients : Gradients, optional
        Collector of loop metrics. A dump with loop metrics cannot be merged, because gradients are weighted by the
        Hessian of all prompts.
    """
    dump = HessianDump.of(job, out, steps=steps, per_step=per_step, gradients=gradients)
    with _alone(out):
        if dump.begin():
            return dump.finish()
        dump.tell()
        return dump.write()
