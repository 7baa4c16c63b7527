"""Runs over the tiny model, and what they leave on disk."""

from __future__ import annotations

import hashlib
import shutil

from loopq.calibrate.collect import Collection
from loopq.calibrate.select import select
from loopq.execution import Execution
from loopq.run.engine import Run

#: The paper's method; a group size that divides no width of the tiny model.
SETTINGS = {"preset": "paper", "bits": 3, "group_size": 20}


def digest(folder):
    """Names and SHA-256 of all files of a folder."""
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


def job_of(loaded, tokens, **execution):
    """All that a collection from a loaded model needs."""
    selection = select(loaded.system, tokens)
    return Collection(loaded.system, tokens, selection, Execution(**execution), loaded.side_files)


def run_of(loaded, tokens, config=None, **execution):
    """A run of one thread."""
    return Run.prepare(loaded.system, tokens, config, execution=Execution(**({"threads": 1} | execution)))


def tensors_of(layers):
    """Dequantized weights of layers by name, in the model's orientation."""
    return {name: layer.in_model_orientation() for name, layer in layers.items()}


def damaged(folder, change, copy):
    """A copy of a folder with a change applied to it."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy)
    change(copy)
    return copy
