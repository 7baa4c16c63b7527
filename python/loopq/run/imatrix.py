"""Importance of input columns: the diagonal of the error cost in the loop. See docs/formats/gguf.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from loopq.calibrate.dump import Dump
from loopq.errors import DumpError
from loopq.formats.imatrix import Entry
from loopq.run.dump_source import loop_metric
from loopq.run.plan import steps_of


class ObservedDump:
    """Data of a calibration dump for `loopq.formats.imatrix`.

    Parameters
    ----------
    folder : path
        Calibration dump (`loopq collect`). It may include the loop metric.

    Raises
    ------
    DumpError
        No layer was observed.
    """

    def __init__(self, folder: str | Path) -> None:
        self._dump = Dump(Path(folder))
        manifest = self._dump.manifest
        self._layers = [p for p in manifest.parameters if p.name in manifest.input_groups]
        if not self._layers:
            raise DumpError(f"{folder}: no layer was observed")

    @property
    def side_files(self) -> Mapping[str, bytes]:
        """Config files of the model."""
        return self._dump.side_files()

    @property
    def calibration(self) -> Mapping[str, Any]:
        """Source and number of the prompts."""
        return self._dump.manifest.calibration

    def entries(self, steps: str) -> Iterator[Entry]:
        """Yield the importance of every layer over some steps.

        Parameters
        ----------
        steps : str
            As in `loopq.settings.steps.parse_steps`.

        Raises
        ------
        DumpError
            A loop metric is not over these steps.

        Notes
        -----
        The sum of column j is ``sum over steps t and rows r of X_t[r, j]^2 = diag(H)[j]``. A weight that every step
        uses is therefore rounded by the inputs of all steps. If the dump holds a layer's loop metric, ``diag(S)``
        replaces ``diag(H)``, with `S` of `LoopMetric.combined` scaled to the same sum.
        """
        manifest = self._dump.manifest
        measured = {m.parameter for m in manifest.metrics}
        for parameter in self._layers:
            chosen = list(steps_of(parameter, steps, manifest.n_steps))
            hessians = self._dump.accumulator(manifest.input_groups[parameter.name], chosen)
            summed = chosen if hessians.per_step else None
            sums = hessians.diagonal(summed)
            if parameter.name in measured:
                metric = loop_metric(self._dump.sums, parameter.name, chosen)
                ends = np.diagonal(metric.combined(np.asarray(hessians.matrix(summed), dtype=np.float64)))
                # Inputs that are always zero have no weight in either.
                sums = ends * (sums.sum() / (ends.sum() or 1.0))
            n_rows = sum(hessians.n_rows(t) for t in chosen)
            yield Entry(parameter.name, sums, n_rows, parameter.name in measured)
