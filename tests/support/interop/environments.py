"""Find the Python that has a library, and run jobs there."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import loopq

ROOT = Path(__file__).parents[3]
PACKAGES = {
    "ct": "compressed_tensors",
    "fracast": "fracast",
    "gptq": "gptqmodel",
    "llama": "xllamacpp",
    "vllm": "vllm",
}
TARGETS = {"fracast": "ci-tools", "llama": "ci-tools", "vllm": "interop-vllm"}


def interpreter(kind):
    """Python with the library: LOOPQ_CT_PYTHON and its like, `.cache/venv-*`, or this one."""
    named = os.environ.get(f"LOOPQ_{kind.upper()}_PYTHON")
    if named:
        return named
    folder = ROOT / ".cache" / f"venv-{kind}"
    failed = folder.with_name(f"{folder.name}.unavailable")
    if failed.is_file():
        pytest.skip(
            f"NOT RUN: {PACKAGES[kind]} could not be installed, so nothing here shows that it loads our files: "
            f"{' '.join(failed.read_text('utf-8').split())}"
        )
    if (folder / "stamp").is_file():
        return str(folder / "bin" / "python")
    if importlib.util.find_spec(PACKAGES[kind]) is not None:
        return sys.executable
    pytest.skip(
        f"NOT RUN: {PACKAGES[kind]} is not installed, so nothing here shows that it loads our files; "
        f"run `make {TARGETS.get(kind, 'interop')}`"
    )


def run(kind, jobs, folder):
    """Run jobs in one process; return each job's result by its `out`."""
    python = interpreter(kind)
    path = folder / f"jobs-{kind}.json"
    path.write_text(json.dumps(jobs), "utf-8")
    env = os.environ | {
        "PYTHONPATH": str(Path(loopq.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
        "HF_HOME": str(folder / "hf-home"),
        "HF_MODULES_CACHE": str(folder / "hf-modules"),
    }
    program = Path(__file__).with_name("library.py")
    done = subprocess.run(
        [python, str(program), str(path)],
        cwd=folder,
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {j["out"]: json.loads(Path(j["out"] + ".json").read_text("utf-8")) for j in jobs}
