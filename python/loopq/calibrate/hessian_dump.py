"""Write a dump of Hessians: exact sums, perhaps with loop metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from loopq.calibrate.collect import CLAIM, alone, begin_dump, finish_dump, write_manifest
from loopq.calibrate.dump import MANIFEST, DumpFile, Manifest, MetricFile, Rows
from loopq.calibrate.hessian_set import HessianSet
from loopq.calibrate.rollouts import Collection
from loopq.calibrate.sums_file import GradientSums, write_accumulator, write_gradient_sums
from loopq.settings.execution import at_most
from loopq.storage.files import write_json


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
        late = begin_dump(self.out, self.key)
        write_json(self.out / CLAIM, {"key": self.key})
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
                for name, (over, metric) in gradients.collect(sums, input_groups, work / "metric").items():
                    file = f"metrics/{len(metrics):03d}.safetensors"
                    digest = write_gradient_sums(out / file, metric)
                    metrics.append(MetricFile(file, digest, (out / file).stat().st_size, name, over, *counts))
            for input_group in input_groups:
                file = f"hessians/{len(files):03d}.safetensors"
                digest = write_accumulator(out / file, sums.accumulators[input_group])
                size_of = (out / file).stat().st_size
                files.append(DumpFile(file, digest, size_of, input_group, sums.per_step))
                rows[input_group] = sums.rows(input_group)
                sums.drop(input_group)
        return write_manifest(sums.job, out, "hessian", "", rows, files, metrics)


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
    with alone(out):
        if dump.begin():
            return finish_dump(out)
        dump.tell()
        return dump.write()
