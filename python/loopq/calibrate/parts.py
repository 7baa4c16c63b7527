"""Sums of one run over the calibration set in parts: saved periodically, by one or several processes."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeAlias

import loopq._native as native
from loopq.calibrate.device import Sums
from loopq.calibrate.dump import Rows
from loopq.calibrate.sums_file import accumulator_from, accumulator_parts
from loopq.errors import CalibrationError
from loopq.storage.journal import Journal
from loopq.storage.lock import Claims
from loopq.storage.model_files import raw, to_torch
from loopq.storage.schema import checked

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    #: Rows of blocks that cross the end of a range, by input and step, then by the index of their first row.
    Edges: TypeAlias = dict[tuple[str, int], dict[int, Tensor]]


@dataclass(frozen=True)
class Pass:
    """Settings of the sums of one run over the calibration set.

    Parameters
    ----------
    steps : mapping of str to list of int
        Summed steps of each input in the pass.
    per_step : bool
        Keep each step's Hessian separate. The sum over all steps takes less memory.
    batch_tokens : list of int
        Tokens of each batch.
    device : torch.device
        Device of the model.
    empty : callable
        Returns new sums of an input. They start at zero.
    fingerprint : callable
        Returns the identity of the work. It reads all weights, so it is called only before saving.
    """

    steps: Mapping[str, Sequence[int]]
    per_step: bool
    batch_tokens: Sequence[int]
    device: torch.device
    empty: Callable[[str], Sums]
    fingerprint: Callable[[], str]


@dataclass
class Range:
    """Consecutive batches `first` to `end` - 1, with the rows before them and their own rows, by input and step."""

    first: int
    end: int
    before: Rows
    rows: Rows


@dataclass(frozen=True)
class Saved:
    """Saved parts of a pass. No batch is in two of those that count.

    Parameters
    ----------
    known : mapping of str to sequence of Range
        Ranges of each part in the folder, by its name.
    """

    known: Mapping[str, Sequence[Range]] = field(default_factory=dict)

    def with_parts(self, more: Mapping[str, Sequence[Range]]) -> Saved:
        """Return these parts and others."""
        return Saved({**self.known, **more}) if more else self

    @cached_property
    def parts(self) -> Mapping[str, Sequence[Range]]:
        """The parts that count. The largest are chosen first."""
        chosen: dict[str, Sequence[Range]] = {}
        seen: set[int] = set()
        for name in sorted(self.known, key=lambda n: (-len(_batches(self.known[n])), n)):
            batches = _batches(self.known[name])
            if not seen & batches:
                seen |= batches
                chosen[name] = self.known[name]
        return chosen

    @property
    def ranges(self) -> list[Range]:
        """Ranges of all parts that count."""
        return [r for ranges in self.parts.values() for r in ranges]

    @cached_property
    def batches(self) -> set[int]:
        """Batches of all parts that count."""
        return _batches(self.ranges)


class _Growing:
    """The part in memory: sums of whole blocks, and rows of blocks that cross the end of a range."""

    def __init__(self, of: Pass) -> None:
        self.ranges: list[Range] = []
        self.sums = {input_group: of.empty(input_group) for input_group in of.steps}
        self.edges: Edges = {}
        self._open: dict[tuple[str, int], tuple[int, Tensor]] = {}

    def extend(self, number: int, before: Callable[[], Rows], rows: Callable[[], Rows]) -> None:
        """Begin a batch, in the last range if it follows that, otherwise in a new one."""
        if self.ranges and self.ranges[-1].end == number:
            self.ranges[-1].end += 1
        else:
            self.close()
            self.ranges.append(Range(number, number + 1, before(), rows()))

    def add(self, input_group: str, step: int, rows: Tensor) -> None:
        """Add rows of the last batch."""
        import torch  # lazy: loopq imports without torch

        last = self.ranges[-1]
        first = last.before[input_group][step] + last.rows[input_group][step]
        last.rows[input_group][step] += rows.shape[0]
        if (input_group, step) in self._open:
            first, waiting = self._open.pop((input_group, step))
            rows = torch.cat([waiting, rows])
        head = -first % native.BLOCK_ROWS
        if 0 < head <= rows.shape[0]:
            self.edges.setdefault((input_group, step), {})[first] = rows[:head].clone()
            first, rows, head = first + head, rows[head:], 0
        whole = 0 if head else rows.shape[0] // native.BLOCK_ROWS * native.BLOCK_ROWS
        if whole:
            self.sums[input_group].add(step, rows[:whole])
        if whole < rows.shape[0]:
            self._open[input_group, step] = (first + whole, rows[whole:].clone())

    def close(self) -> None:
        """End a range: rows of incomplete blocks become its edges."""
        for key, (first, rows) in self._open.items():
            self.edges.setdefault(key, {})[first] = rows
        self._open.clear()


class Parts:
    """The accumulators of one pass, saved part by part so that a kill loses little.

    A block of rows ends at every 512th row of its step, counted over all batches. It does not depend on calls or parts.
    A part sums the complete blocks of its batches. Rows of incomplete blocks at either end of a range of batches are
    saved beside the sums. The final total has the bits of an uninterrupted run, for any division into parts and
    processes.

    With claims, a process begins only batches that no other process has claimed. A batch can still be in two parts if
    its owner stalled. Then one of the parts does not count.
    """

    def __init__(
        self,
        of: Pass,
        work: Path | None,
        claims: Claims | None = None,
        ended: Callable[[], bool] = lambda: False,
    ) -> None:
        self._pass = of
        self._input_groups = list(of.steps)
        self._claims, self._ended = claims, ended
        self._journal = Journal(work, of.fingerprint() if work else "")
        #: Tokens before each batch, and their total.
        self._tokens = [0, *itertools.accumulate(of.batch_tokens)]
        self._growing = _Growing(of)
        #: The parts in the folder when `look` read it last.
        self.saved = Saved()
        self.look()

    @property
    def shared(self) -> bool:
        """Whether other processes take part."""
        return self._claims is not None

    def look(self) -> None:
        """Read the parts that other processes saved since the last look. A part never changes, so each is read once."""
        new: dict[str, list[Range]] = {}
        for name in set(self._journal.names("part-")) - set(self.saved.known):
            if (piece := self._journal.find(name)) is not None:
                new[name] = [checked(Range, r, name, CalibrationError) for r in piece.facts["ranges"]]
        self.saved = self.saved.with_parts(new)

    def begin(self, number: int) -> bool:
        """Whether this process must run a batch. If so, its rows come next."""
        if self._claims is not None:
            self.look()
        if number in self.saved.batches or self._ended() or not self._claim(number):
            return False
        self._growing.extend(number, lambda: self._before(number), self._nothing)
        return True

    def _claim(self, number: int) -> bool:
        """Claim a batch if there are other processes. Return False if one of them has it."""
        if self._claims is None:
            return True
        if not self._claims.take(str(number)):
            return False
        # Another process may have saved it since the last look.
        self.look()
        if number in self.saved.batches:
            self._claims.release(str(number))
            return False
        return True

    def _before(self, number: int) -> Rows:
        """Rows before a batch: counted if all those batches are known, otherwise one per token."""
        known = [r for r in (*self._growing.ranges, *self.saved.ranges) if r.first < number]
        counted = _batches(known) == set(range(number))
        return {
            k: {t: sum(r.rows[k][t] for r in known) if counted else self._tokens[number] for t in steps}
            for k, steps in self._nothing().items()
        }

    def add(self, input_group: str, step: int, rows: Tensor) -> None:
        """Add the rows of one invocation."""
        last = self._growing.ranges[-1]
        if step not in last.rows[input_group]:
            return
        tokens = self._tokens[last.end] - self._tokens[last.end - 1]
        if self._claims is not None and rows.shape[0] != tokens:
            raise CalibrationError(
                f"layer {input_group}, step {step}, batch {last.end - 1}: {rows.shape[0]} rows of {tokens} tokens; "
                "several processes can only divide what has one row for each token: collect with one"
            )
        self._growing.add(input_group, step, rows)

    def save(self) -> None:
        """Save the batches since the last part: sums and edges of each input, then the entry that makes them count."""
        part = self._growing
        if self._journal.folder is None or not part.ranges:
            return
        part.close()
        claimed = [str(number) for number in _batches(part.ranges)]
        # Other processes run the batches that they took over meanwhile.
        ours = self._claims is None or all(map(self._claims.holds, claimed))
        if ours:
            name = f"part-{secrets.token_hex(8)}"
            for i, input_group in enumerate(self._input_groups):
                arrays, state = accumulator_parts(part.sums[input_group].finish())
                edges = {
                    f"edge/{step}/{first}": raw(rows)
                    for (k, step), of_step in part.edges.items()
                    if k == input_group
                    for first, rows in of_step.items()
                }
                self._journal.save(f"sums-{name}-{i}", arrays | edges, state=state)
            self._journal.save(name, ranges=[vars(r) for r in part.ranges])
            self.saved = self.saved.with_parts({name: part.ranges})
        self._growing = _Growing(self._pass)
        if self._claims is not None:
            for number in claimed:
                self._claims.release(number, done=ours)

    def finish(self) -> dict[str, native.HessianAccumulator]:
        """Join the edges and add the parts.

        Raises
        ------
        CalibrationError
            The sums differ in rows from the rollouts.
        """
        import torch  # lazy: loopq imports without torch

        part = self._growing
        part.close()
        rows = self._count_rows([*part.ranges, *self.saved.ranges])
        totals: dict[str, native.HessianAccumulator] = {}
        for i, input_group in enumerate(self._input_groups):
            total, edges = self._saved_sums(i, input_group)
            for step in rows[input_group]:
                joined = edges.get(step, {}) | part.edges.get((input_group, step), {})
                if joined:
                    part.sums[input_group].add(step, torch.cat([joined[first] for first in sorted(joined)]))
            acc = totals[input_group] = part.sums[input_group].finish()
            if total is not None:
                acc.merge(total)
            for step, n_rows in rows[input_group].items():
                if acc.n_rows(step) != n_rows:
                    self._refuse(
                        input_group, step, f"{acc.n_rows(step)} rows were summed, the rollouts gave {n_rows}"
                    )
        return totals

    def _saved_sums(
        self, number: int, input_group: str
    ) -> tuple[native.HessianAccumulator | None, dict[int, dict[int, Tensor]]]:
        """Add the sums of one input over all parts. Return them and the edges by step and first row."""
        total = None
        edges: dict[int, dict[int, Tensor]] = {}
        for name in self.saved.parts:
            part = self._journal.find(f"sums-{name}-{number}")
            if part is None:
                raise CalibrationError(
                    f"{self._journal.folder}: {name} was removed or altered; remove the folder and start anew"
                )
            arrays = dict(part.tensors)
            for key in [k for k in arrays if k.startswith("edge/")]:
                _, step, first = key.split("/")
                edges.setdefault(int(step), {})[int(first)] = to_torch(arrays.pop(key)).to(self._pass.device)
            sums = accumulator_from(arrays, part.facts["state"], str(self._journal.folder))
            if total is None:
                total = sums
            else:
                total.merge(sums)
        return total, edges

    def _count_rows(self, ranges: Sequence[Range]) -> Rows:
        """Count the rows of all batches by input and step. Each range must begin where the previous ones end."""
        rows = self._nothing()
        for r in sorted(ranges, key=lambda r: r.first):
            for input_group, steps in rows.items():
                for step, n_rows in steps.items():
                    before = r.before[input_group][step]
                    if before != n_rows:
                        self._refuse(
                            input_group, step, f"{n_rows} rows before batch {r.first}, which counts {before}"
                        )
                    steps[step] += r.rows[input_group][step]
        if _batches(ranges) != set(range(len(self._tokens) - 1)):
            raise CalibrationError(
                f"{self._journal.folder}: batches are missing; give the same command again"
            )
        return rows

    def _nothing(self) -> Rows:
        return {k: dict.fromkeys(self._pass.steps[k], 0) for k in self._input_groups}

    def _refuse(self, input_group: str, step: int, what: str) -> NoReturn:
        raise CalibrationError(
            f"layer {input_group}, step {step}: {what}: the saved sums are of another run; remove "
            f"{self._journal.folder} and start anew"
        )


def _batches(ranges: Sequence[Range]) -> set[int]:
    return {number for r in ranges for number in range(r.first, r.end)}
