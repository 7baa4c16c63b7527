"""Rollouts of a calibration set: the rows that each shared layer reads, batch by batch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from loopq.calibrate.data import TokenSet
from loopq.calibrate.hooks import InputKey, Observer, input_key
from loopq.calibrate.inputs import OUTPUT, changed_inputs, model_inputs
from loopq.calibrate.select import Selection
from loopq.errors import CalibrationError
from loopq.layers.shared import SharedParameter
from loopq.settings.execution import Execution
from loopq.storage.journal import digest_of, fingerprint
from loopq.storage.model_files import model_tensors
from loopq.systems.base import LoopedSystem
from loopq.terminal.progress import Progress

if TYPE_CHECKING:
    from torch import Tensor


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

    @cached_property
    def inputs(self) -> dict[str, str]:
        """Digest of each input by its name."""
        return model_inputs(self.system, self.side_files) | {
            "the weights": digest_of(self._weights),
            "the calibration": digest_of(self.tokens.describe()),
            "the seed": str(self.execution.seed),
            "the number of steps": str(self.selection.n_steps),
            OUTPUT: self.selection.output,
        }

    def fingerprint(self, *more: Any) -> str:
        """Identity of the work: weights, tokens, settings, and all else that describes the model."""
        return fingerprint(
            self.inputs,
            self._weights,
            str(next(self.system.model.parameters()).dtype),
            self.tokens.describe(),
            self.execution.batch_size,
            self.selection.parameters,
            *more,
        )

    def key(self, *more: Any) -> str:
        """Return `fingerprint` for the work folder. If an interrupted run left other inputs there, name them."""
        work = self.execution.work
        changed = changed_inputs(work, self.inputs) if work else []
        if changed:
            names = ", ".join(changed)
            self.execution.progress.note(f"{names} changed since the interruption; starts again")
        return self.fingerprint(*more)

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
        places = {p.name: place for p in selection.observed if (place := p.expert)}
        names = {place: name for name, place in places.items()}
        #: The first parameter with the same input in each expert. Several experts may have one input group.
        self._first = {
            name: names.get((*at[:2], places.get(self._input_groups[name], at)[2]), name)
            for name, at in places.items()
        }
        self._sink = sink
        # The first parameter's tensor is kept alive, so no other tensor can get its address.
        self._last: dict[str, tuple[int, InputKey, Tensor]] = {}

    def __call__(self, parameter: SharedParameter, step: int, rows: Tensor) -> None:
        input_group = self._input_groups[parameter.name]
        first = self._first.get(parameter.name, input_group)
        if first == parameter.name:
            self._last[first] = (step, input_key(rows), rows)
            self._sink(input_group, step, rows)
        elif self._last.get(first, ())[:2] != (step, input_key(rows)):
            raise CalibrationError(
                f"layer {parameter.name}, step {step}: reads another input than {first}, which it shared in "
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
        if observer.differing:
            least, most = observer.differing
            progress.note(
                f"the loop ends by itself: {least} to {most} calls of a layer in a rollout. Sums run over all calls. "
                "Figures by step make no sense here: the last step holds all further calls"
            )
    progress.stop()
