"""Collecting loop metrics with NumPy's small products on one thread and on all of them, in turns in one process.

    python benches/python/bench_metric.py [--model huginn_small] [--prompts 16] [--pairs 3] [--record FILE]

Start it with OMP_NUM_THREADS set to the number of threads. Both ways must agree up to rounding before times count.
"""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from bench_core import pairs

from loopq import zoo
from loopq.calibrate.data import windows
from loopq.gradients.collect_metrics import collect_metrics
from loopq.gradients.threads import OneThread
from loopq.models.load import load_model
from loopq.quantizers.loop_metric import LoopMetric
from loopq.run.config import QuantConfig
from loopq.run.engine import Run
from loopq.settings.execution import Execution
from loopq.storage.journal import Journal
from record import write


def main() -> None:
    """Measure and print the ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="huginn_small")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--record", type=Path)
    args = parser.parse_args()
    loaded = load_model(args.model)
    text = windows(zoo.calibration_text().decode(), loaded.encode, 128, args.prompts, "calibration text")
    execution = Execution()
    config = QuantConfig.of(metric="loop", metric_prompts=args.prompts)
    run = Run.prepare(loaded.system, text, config, execution=execution)
    sums, n_steps = run.all_steps(), run.job.selection.n_steps

    def one() -> dict[str, LoopMetric]:
        return collect_metrics(sums, loaded.system, text, run.tasks, n_steps, execution, Journal(None))

    def every() -> dict[str, LoopMetric]:
        with mock.patch.object(OneThread, "where_small", return_value=contextlib.nullcontext()):
            return one()

    first, second = one(), every()
    for name, metric in first.items():
        for a, b in zip((*metric.left, metric.right), (*second[name].left, second[name].right), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9 * float(np.abs(a).max()))
    found = pairs(one, every, args.pairs)
    threads = torch.get_num_threads()
    print(
        f"{args.model}, {args.prompts} prompts, {threads} threads: one thread for small products "
        f"{found['loopq_s']:.2f} s, all threads {found['other_s']:.2f} s, ratio {found['speedup']:.2f}"
    )
    write(args.record, found, model=args.model, n_prompts=args.prompts, threads=threads)


if __name__ == "__main__":
    main()
