"""A dump of the tiny model with gradients."""

from __future__ import annotations

from loopq.calibrate.hessian_dump import collect_hessians
from loopq.run.plan import loop_metrics
from tests.support.runs import job_of


def collected(loaded, tokens, out, steps=None, **execution):
    """A dump with the loop metric of three prompts and two draws."""
    job = job_of(loaded, tokens, batch_size=3, threads=1, **execution)
    collect_hessians(job, out, steps=steps, gradients=loop_metrics(job, 3, 2, steps))
    return out
