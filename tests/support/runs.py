"""Runs over the tiny model, and what they leave on disk."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
import socket
import subprocess
import sys

from loopq.calibrate.rollouts import Collection
from loopq.calibrate.select import select
from loopq.run.config import QuantConfig
from loopq.run.model_source import ModelSource
from loopq.run.plan import Plan
from loopq.run.solving import solve, solve_from
from loopq.settings.execution import Execution

#: Few and short prompts, for the command line.
TINY = ("--n-prompts", "6", "--seq-len", "24", "--batch-size", "2")
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


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A plan and the model that it is for, with what tests ask of both."""

    plan: Plan
    source: ModelSource

    def __iter__(self):
        """Unpack as the arguments of functions that take both."""
        return iter((self.plan, self.source))

    @property
    def job(self):
        return self.source.job

    @property
    def config(self):
        return self.plan.config

    @property
    def tasks(self):
        return self.plan.tasks

    @property
    def execution(self):
        return self.source.execution

    def with_config(self, config):
        """The same model under another plan."""
        return Prepared(self.source.plan(config), self.source)

    def estimate(self):
        return self.source.estimate(self.plan)

    def sums(self, **how):
        return self.source.sums(self.plan, **how)

    def all_steps(self):
        return self.source.all_steps(self.plan)

    def solve(self, inputs=None):
        """All layers, collected as the plan or other inputs ask."""
        return solve(inputs or self.plan.config.inputs, self.plan, self.source)

    def solver(self, hessians, journal=None):
        return self.source.solver(self.plan, hessians, self.source.metrics, journal)

    def solve_from(self, hessians, config=None):
        """All layers from Hessians that are there, under the plan or another."""
        plan = self.plan if config is None else self.source.plan(config)
        return solve_from(plan, self.source, hessians)


def run_of(loaded, tokens, config=None, **execution):
    """A plan of one thread."""
    how = Execution(**({"threads": 1} | execution))
    source = ModelSource.of(loaded.system, tokens, config, execution=how)
    return Prepared(source.plan(config or QuantConfig()), source)


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
        variables = {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "loopq", *command.split()],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, **{key: str(value) for key, value in variables.items()}},
            )
        )
    said = [process.communicate(timeout=300)[0] for process in started]
    return [(process.returncode, text) for process, text in zip(started, said, strict=True)]
