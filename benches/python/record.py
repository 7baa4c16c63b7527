"""Fields of every benchmark's record about its machine."""

from __future__ import annotations

import datetime
import json
import os
import platform
from pathlib import Path
from typing import Any

import numpy as np

from loopq import _native


def factored(h: np.ndarray, precision: Any, threads: int) -> _native.DampedFactor:
    """Factor a Hessian with a hundredth of its mean diagonal as damping."""
    mu = np.full(len(h), 0.01 * float(np.diag(h).mean()))
    return _native.DampedFactor(h, mu, precision=precision, threads=threads)


def about(**more: Any) -> dict[str, Any]:
    """Give date, machine, instruction set, load, version, and further fields."""
    pairs = [x.partition(":") for x in Path("/proc/cpuinfo").read_text().splitlines()]
    cpu = {key.strip(): value.strip() for key, _, value in pairs}
    return {
        "date": datetime.date.today().isoformat(), "machine": platform.machine(), "cpu": cpu.get("model name", "?"),
        # A virtual machine may hide the name; family and model tell the generation.
        "cpu_family": cpu.get("cpu family", "?"), "cpu_model": cpu.get("model", "?"),
        "cores": len(os.sched_getaffinity(0)), "isa": _native.cpu_features()[-1], "loopq": _native.__version__,
        "load_average": round(os.getloadavg()[0], 1), **more,
    }  # fmt: skip


def write(path: Path | None, results: Any, **more: Any) -> None:
    """Write a record, whole or not at all."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(
        json.dumps({"about": about(**more), "results": results}, indent=1) + "\n", encoding="utf-8"
    )
    partial.replace(path)
