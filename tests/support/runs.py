"""Runs over the tiny model, and what they leave on disk."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import subprocess
import sys

from loopq.calibrate.collect import Collection
from loopq.calibrate.select import select
from loopq.run.engine import Run
from loopq.settings.execution import Execution

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


def in_ranks(command, world):
    """Run a command line in several processes as torchrun does; return exit code and output of each."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(world):
        own = {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "loopq", *command.split()],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, **{key: str(value) for key, value in own.items()}},
            )
        )
    said = [process.communicate(timeout=300)[0] for process in started]
    return [(process.returncode, text) for process, text in zip(started, said, strict=True)]
