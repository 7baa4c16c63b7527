"""Ways to compute the logits after a growing text, and the trial that shows whether a model can use one.

`opened` tries them in the order of `BACKENDS` and takes the first that gives the logits of a rollout.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from loopq.errors import LoopqError, require
from loopq.runtime.graph import RECORDERS, Graph
from loopq.systems.base import Batch, LoopedSystem
from loopq.systems.capabilities import Exits, Programmed, ServedByCache, extended
from loopq.systems.stepwise import single_steps

if TYPE_CHECKING:
    from torch import Tensor

    from loopq.runtime.runner import Runner  # lazy: loopq imports without torch

#: Largest difference from the logits of a rollout, relative to them (root mean square). In 16 bits, sums over
#: other shapes round otherwise, and a loop multiplies that.
_TOLERANCE = {"float32": 1e-3, "float64": 1e-6, "bfloat16": 5e-2, "float16": 1e-2}


class Declined(Exception):
    """A backend does not compute a model's logits. The message is the reason."""


@dataclass(frozen=True)
class Job:
    """What a backend is asked for.

    Parameters
    ----------
    system : LoopedSystem
        The model's adapter.
    n_steps : int
        Depth.
    texts : tuple of Batch
        A prompt, and the same with one token more, and so on: the trial.
    n_tokens : int
        Tokens that are expected after a prompt.
    exit : float, optional
        Threshold of the model's early-exit rule.
    kv : {8, 4}, optional
        Bits of keys and values.
    """

    system: LoopedSystem
    n_steps: int
    texts: tuple[Batch, ...]
    n_tokens: int
    exit: float | None = None
    kv: Literal[4, 8] | None = None


class NextLogits(ABC):
    """Logits of the next token of one text that grows.

    Attributes
    ----------
    name : str
        Its key in the reasons of `opened`.
    depth : int
        Number of steps of the last call.

    Raises
    ------
    Declined
        By the constructor: this backend does not run the model, or its trial failed.
    """

    name: ClassVar[str]

    def __init__(self, job: Job) -> None:
        self._job, self.depth = job, job.n_steps

    @abstractmethod
    def extend(self, batch: Batch, n_seen: int) -> Tensor:
        """Logits (vocabulary) after the last token of a batch of one text.

        Its first `n_seen` tokens are the text of the last call; 0 begins another text.
        """

    def _try(self, what: str, served: bool = False) -> None:
        """Compare the trial's texts with a rollout; `served` allows other logits."""
        torch, job, n_seen = require("torch"), self._job, 0
        every = []
        with torch.no_grad():
            for batch in job.texts:
                every.append(self.extend(batch, n_seen))
                n_seen = batch.input_ids.shape[1]
            whole = job.system.rollout(job.texts[-1], job.n_steps)[0, -len(job.texts) :]
        if not (close(torch.stack(every), whole) or served):
            raise Declined(f"{what} gives other logits")


class CoreRunner(NextLogits):
    """The core runs the model as one program with its own cache."""

    name = "runner"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        _refuse_exit(job)
        from loopq.runtime.linear import QuantLinear  # lazy: loopq imports without torch
        from loopq.runtime.runner import Runner  # lazy: loopq imports without torch

        system = job.system
        coded = any(isinstance(m, QuantLinear) for m in system.model.modules())
        if system.device.type != "cpu" or not coded:
            raise Declined("the runner takes models with codes, on the processor")
        # A program describes a model by the names of its modules, so it is tried like a cache.
        try:
            program = system.program(job.n_steps) if isinstance(system, Programmed) else None
            if program is None:
                raise Declined(f"the runner does not know the blocks of {type(system.model).__name__}")
            self._runner: Runner = Runner(program)
            self._try("the runner")
            if job.kv is not None:
                self._runner = Runner(program, job.kv)
        except LoopqError as cause:
            raise Declined(str(cause)) from cause

    def extend(self, batch: Batch, n_seen: int) -> Tensor:
        if n_seen == 0:
            self._runner.restart()
        states = self._runner.program.start
        return self._runner.extend(
            batch.input_ids[0, n_seen:], None if states is None else states(batch, n_seen)[0]
        )


class RecordedStep(NextLogits):
    """A recorded step is replayed. A recording repeats choices that depend on the tokens, so it is tried."""

    name = "graph"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        _refuse_exit(job)
        device = job.system.device.type
        if device not in RECORDERS:
            raise Declined(f"loopq records steps on a GPU, not on {device}")
        self._graph = Graph(job.system, job.n_steps, job.n_tokens)
        with _others_code("a recorded step"):
            self._try("a recorded step")

    def extend(self, batch: Batch, n_seen: int) -> Tensor:
        return self._graph.extend(batch, n_seen)


class ModelCache(NextLogits):
    """The cache of loopq or of the model. Published ones differ between versions, and some give other logits."""

    name = "cache"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        _refuse_exit(job)
        self._cache: Any = None
        served = isinstance(job.system, ServedByCache) and job.system.served_by_cache
        with _others_code("the cache"):
            self._try("the cache", served)

    def extend(self, batch: Batch, n_seen: int) -> Tensor:
        if n_seen == 0:
            self._cache = None
        every, self._cache = extended(self._job.system, batch, self._job.n_steps, n_seen, self._cache)
        return every[0, -1]


class EarlyExit(NextLogits):
    """All tokens run to the step that the model's own rule chooses for the last one."""

    name = "exit"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        if job.exit is None:
            raise Declined("the loop runs to its last step")
        self._threshold = job.exit

    def extend(self, batch: Batch, n_seen: int) -> Tensor:
        job = self._job
        system, rule = (
            single_steps(job.system),
            job.system.exit_rule() if isinstance(job.system, Exits) else None,
        )
        embedding = system.embed(batch)
        state = system.initial_state(batch, embedding)
        for t in range(job.n_steps):
            state = system.step(state, embedding, t, job.n_steps)
            logits = system.predict(state, embedding)[0, -1]
            if rule is not None and rule(state[0, -1], logits, self._threshold):
                break
        self.depth = t + 1
        return logits


class Rollout(NextLogits):
    """All tokens run anew. It never declines."""

    name = "rollout"

    def extend(self, batch: Batch, n_seen: int) -> Tensor:
        return self._job.system.rollout(batch, self._job.n_steps)[0, -1]


#: In the order in which they are tried, before `Rollout`.
BACKENDS: tuple[type[NextLogits], ...] = (CoreRunner, RecordedStep, ModelCache, EarlyExit)


def opened(job: Job) -> tuple[NextLogits, dict[str, str]]:
    """Return the first backend that runs a job, and by name the reasons of those before it."""
    declined: dict[str, str] = {}
    for kind in BACKENDS:
        try:
            return kind(job), declined
        except Declined as reason:
            declined[kind.name] = str(reason)
    return Rollout(job), declined


def close(logits: Tensor, expected: Tensor) -> bool:
    """Whether logits differ from those of a rollout by rounding alone."""
    tolerance = _TOLERANCE[str(expected.dtype).removeprefix("torch.")]
    return bool((logits - expected).float().norm() <= tolerance * expected.float().norm())


def _refuse_exit(job: Job) -> None:
    if job.exit is not None:
        raise Declined("left early")


@contextlib.contextmanager
def _others_code(what: str) -> Iterator[None]:
    """Run code of a model's author or of torch. Any error has the same meaning: this cannot be used here."""
    try:
        yield
    except Declined:
        raise
    except LoopqError as cause:
        raise Declined(str(cause)) from cause
    except Exception as cause:
        raise Declined(f"{what} cannot be used ({type(cause).__name__}: {cause})") from cause
