"""Interface of an engine, and the process in which it reads a file."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from loopq.errors import require

#: Largest difference that rounding explains, as a part of the largest logit, by the type that an engine computes in.
#: "int8": products with activations rounded to 8 bits.
TOLERANCE: Mapping[str, float] = {"float32": 1e-4, "float16": 0.02, "bfloat16": 0.1, "int8": 0.15}

#: File of a question with what the engine wrote to its standard error.
STDERR = "stderr"


@dataclass(frozen=True)
class Reading:
    """The answer of an engine.

    Parameters
    ----------
    engine : str
        Name of the package and its version.
    difference : float or None
        Largest difference between its logits and the expected ones. None if it gave none.
    allowed : float
        Largest difference that rounding explains.
    problem : str
        Why there are no logits. It is empty if there are.
    skipped : bool
        Whether the engine was not asked.
    """

    engine: str
    difference: float | None = None
    allowed: float = 0.0
    problem: str = ""
    skipped: bool = False

    @property
    def same(self) -> bool:
        """Whether the engine runs the same model."""
        return self.difference is not None and self.difference <= self.allowed

    def line(self) -> str:
        """Return the report as a line to print."""
        if self.difference is not None:
            return f"{self.engine} read it: largest difference {self.difference:.2g} (allowed {self.allowed:.2g})"
        return f"{self.engine} {'was not asked' if self.skipped else 'cannot read it'}: {self.problem}"


@dataclass(frozen=True)
class Way:
    """A way to write a model for an engine.

    Parameters
    ----------
    format : str
        Name of the format.
    runs : str
        How to run the file, with OUT for its place.
    options : mapping
        Options of the format.
    settings : mapping
        Settings of the run, unless they are given.
    bits : int, optional
        Bits of the codes that it is for. All if absent.
    """

    format: str
    runs: str
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    bits: int | None = None


def begun(states: NDArray[np.float32] | None) -> dict[str, Any]:
    """Return the argument by which published classes take first states, with a reason to take no cache."""
    torch = require("torch")
    return {} if states is None else {"input_states": torch.from_numpy(states), "use_cache": False}


class Engine(ABC):
    """A program that runs a file.

    A module of `loopq.formats.engines` registers an instance in `ENGINES`.

    Attributes
    ----------
    name : str
        Name in the registry and on the command line.
    needs : mapping of str to tuple of str
        Packages, by format. The first has the version. An engine that is not asked in its own process has none.
    ways : tuple of Way
        Ways to write a model for it, best first. The first that it takes is written (`loopq.run.destination`).
    """

    name: ClassVar[str]
    ways: ClassVar[tuple[Way, ...]]
    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def missing(self, format_name: str) -> list[str]:
        """Return the packages that are not installed here."""
        return [p for p in self.needs[format_name] if importlib.util.find_spec(p) is None]

    def is_asked(self, format_name: str) -> bool:
        """Whether it can be asked about files of a format here."""
        return format_name in self.needs and not self.missing(format_name)

    def version(self, format_name: str) -> str:
        """Return package and version."""
        package = self.needs[format_name][0]
        # vLLM's build for processors has another name.
        name = importlib.metadata.packages_distributions().get(package, [package])[0]
        return f"{name} {importlib.metadata.version(name)}"

    def unasked(self, path: Path) -> str:
        """Return why it cannot be asked about a file, which says nothing about the file. It is empty if it can."""
        return ""

    def cause(self, said: str) -> str:
        """Return the cause of a failure from the standard error of its process. It is empty if its exception has it."""
        return ""

    @abstractmethod
    def logits(
        self, path: Path, ids: NDArray[np.int64], trust_remote_code: bool, states: NDArray[np.float32] | None
    ) -> tuple[NDArray[Any], Sequence[int], str]:
        """Load a file and run it, in a process of its own.

        Parameters
        ----------
        path : Path
            File or folder.
        ids : array of int64, shape (n_prompts, seq_len)
            Token ids.
        trust_remote_code : bool
            Allow code of the folder to run.
        states : array of float32, shape (n_prompts, seq_len, width), optional
            First states of a model that draws them. It starts from these.

        Returns
        -------
        array, shape (n_prompts, n_positions, vocabulary)
            Logits, or logits up to a constant for each position.
        sequence of int
            The positions.
        str
            Type that it computes in: a key of `TOLERANCE`.
        """


@dataclass(frozen=True)
class Question:
    """A written file, token ids of shape (n_prompts, seq_len), and the logits that loopq expects of it.

    `slack` is the largest difference that weights in float16 make in loopq itself. In a mixture of experts it is large:
    rounding sends a token to another expert. `states` as of `Engine.logits`.
    """

    path: Path
    format: str
    ids: NDArray[np.int64]
    expected: NDArray[np.float32]
    trust_remote_code: bool = False
    slack: float = 0.0
    states: NDArray[np.float32] | None = None

    def put(self, work: Path, engine: str) -> None:
        """Write the question into a folder."""
        work.mkdir()
        arrays: dict[str, Any] = {} if self.states is None else {"states": self.states}
        np.savez(work / "question.npz", ids=self.ids, expected=self.expected, **arrays)
        job = {
            "engine": engine, "path": str(self.path.absolute()), "format": self.format,
            "trust": self.trust_remote_code, "slack": self.slack,
        }  # fmt: skip
        (work / "job.json").write_text(json.dumps(job), "utf-8")


def ask(
    engine: str,
    questions: Sequence[Question],
    python: str = sys.executable,
    program: Sequence[str] = ("-m", "loopq.formats.engines"),
) -> list[Reading]:
    """Let an engine of an interpreter read files in a process of its own, and compare its logits.

    `program` are the interpreter's arguments before the folders of the questions.
    """
    with tempfile.TemporaryDirectory(prefix="loopq-engine-") as place:
        folders = [Path(place) / str(i) for i in range(len(questions))]
        for folder, question in zip(folders, questions, strict=True):
            question.put(folder, engine)
        # The process has this loopq, and leaves no code of a model in the user's cache.
        paths = [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "HF_HUB_OFFLINE": "1",
            "HF_MODULES_CACHE": f"{place}/modules",
        }
        command = [python, *program, *map(str, folders)]
        done = subprocess.run(command, cwd=place, env=env, capture_output=True, text=True, check=False)
        return [_answer(folder, engine, done) for folder in folders]


def _answer(work: Path, engine: str, done: subprocess.CompletedProcess[str]) -> Reading:
    """Return an engine's answer, or how its process ended without one."""
    answer, kept = work / "answer.json", work / STDERR
    if answer.is_file():
        return Reading(**json.loads(answer.read_text("utf-8")))
    said = (kept.read_text("utf-8", "replace") if kept.is_file() else "") or done.stderr
    last = " ".join(said.strip().splitlines()[-1:])
    return Reading(engine, problem=f"its process ended with {done.returncode}: {last[:300]}")


def compared(
    engine: str, logits: NDArray[Any], expected: NDArray[Any], kind: str, slack: float = 0.0
) -> Reading:
    """Compare logits up to a constant for each position, which no probability shows; `slack` as of `Question`."""
    if logits.shape != expected.shape:
        problem = f"its logits have the shape {list(logits.shape)}, and {list(expected.shape)} are expected"
        return Reading(engine, problem=problem)
    logits, expected = (x - x.mean(-1, keepdims=True) for x in (logits.astype(np.float64), expected))
    difference = float(np.abs(logits - expected).max())
    if not np.isfinite(difference):
        return Reading(engine, problem="its logits are not finite")
    allowed = TOLERANCE[kind] * float(np.abs(expected).max())
    return Reading(engine, difference, allowed if kind == "float32" else max(allowed, 3 * slack))
