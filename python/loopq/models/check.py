"""Conformance checks that test whether loopq fits a model, run on a user's checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from loopq.errors import ConfigError, LoopqError
from loopq.layers.shared import SharedParameter
from loopq.models.trace import Trace, token_tables, trace
from loopq.storage.names import names_of
from loopq.systems.base import Batch, LoopedSystem
from loopq.systems.capabilities import Describes, FixedLength
from loopq.systems.declare import parameter_of
from loopq.systems.stepwise import steps_of

if TYPE_CHECKING:
    from torch import Tensor

    from loopq.models.load import LoadedModel

PROBE_TOKENS = 16
PROBE_PROMPTS = 3
GROUP_SIZE = 128


@dataclass(frozen=True)
class Verdict:
    """What must hold, whether it does (None where it does not apply), and the measurement or the problem."""

    check: str
    ok: bool | None
    detail: str


@dataclass(frozen=True)
class CheckReport:
    """Outcome of all checks in the order of execution, and facts that are not failures."""

    system: str
    n_steps: int
    verdicts: tuple[Verdict, ...]
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return all(v.ok is not False for v in self.verdicts)

    def lines(self) -> list[str]:
        """Return the report as lines to print."""
        words = {True: "ok", False: "FAILED", None: "-"}
        text = [f"{words[v.ok]:>6}  {v.check}: {v.detail}" for v in self.verdicts]
        return text + [f"  note  {note}" for note in self.notes]


# Errors of remote code that was written for another version of a library.
_OF_THE_MODEL = (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError)


class _Failed(Exception):
    """A check does not hold. The message is the detail of its verdict."""


class _Idle(Exception):
    """A check does not apply. The message gives the reason."""


class _Probe:
    """A model, its adapter and a few random prompts, with the runs that several checks share."""

    def __init__(self, system: LoopedSystem, n_steps: int, seed: int, vocabulary: int) -> None:
        import torch  # lazy: loopq imports without torch

        self.system, self.n_steps = system, n_steps
        length = system.prompt_length if isinstance(system, FixedLength) else PROBE_TOKENS
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, vocabulary, (PROBE_PROMPTS, length), generator=generator)
        self.batch = Batch(ids, tuple(range(PROBE_PROMPTS)), seed)
        self.part = Batch(ids[1:], tuple(range(1, PROBE_PROMPTS)), seed)
        self.output: Tensor | None = None
        self.seen: Trace | None = None
        self.shared: tuple[SharedParameter, ...] = ()

    def declared(self) -> str:
        """All weights in the adapter's list exist, and none is listed twice."""
        self.shared = self.system.shared_parameters(self.n_steps)
        for parameter in self.shared:
            weight = parameter_of(self.system.model, parameter)
            for owner in parameter.owners:
                if self.system.model.get_submodule(owner)._parameters["weight"] is not weight:
                    raise _Failed(f"{parameter.name}: {owner} holds another tensor; the tie is broken")
        kinds: dict[str, int] = {}
        for parameter in self.shared:
            kinds[parameter.treatment] = kinds.get(parameter.treatment, 0) + 1
        total = sum(p.in_features * p.out_features for p in self.shared)
        counts = ", ".join(f"{n} {kind}" for kind, n in kinds.items())
        return f"{counts}; {total:,} numbers in {len(self.shared)} weights"

    def rolls_out(self) -> str:
        """One rollout gives finite numbers of the right shape."""

        def run() -> None:
            self.output = self.system.rollout(self.batch, self.n_steps)

        self.seen = trace(self.system.model, run)
        assert self.output is not None
        if self.output.shape[:2] != self.batch.input_ids.shape:
            raise _Failed(
                f"output of shape {tuple(self.output.shape)} for {tuple(self.batch.input_ids.shape)} ids"
            )
        if not bool(self.output.isfinite().all()):
            raise _Failed("NaN or infinity in the output: run the model in bfloat16 or float32")
        return f"{self.n_steps} steps, {self.system.output} {tuple(self.output.shape)}, {self.output.dtype}"

    def reproducible(self) -> str:
        """The same seed gives the same bits, regardless of the global generator."""
        # Draws from the global generator differ from those of the first rollout.
        again = self.system.rollout(self.batch, self.n_steps)
        if self.output is None or not self.output.equal(again):
            raise _Failed("two rollouts from one seed differ: something in the model draws random numbers")
        return "two rollouts agree in every bit"

    def counted(self) -> str:
        """The number of calls of every declared weight matches its declaration."""
        assert self.seen is not None
        rows, entered = self.seen.rows, self.seen.entered
        for parameter in self.shared:
            routing = parameter.routed_in
            called = rows.get(_traced(parameter), ())
            got = entered.get(routing, 0) if routing else len(called)
            if got != parameter.invocations:
                what = routing or parameter.name
                raise _Failed(f"{what}: called {got} times, declared {parameter.invocations}")
        calls = sorted({p.invocations for p in self.shared})
        experts = sum(bool(p.routed_in) for p in self.shared)
        also = f"; {experts} weights of experts, which get some rows of a call" if experts else ""
        return f"{' and '.join(map(str, calls))} calls of each weight, as declared{also}"

    def complete(self) -> str:
        """No undeclared weight is called repeatedly."""
        assert self.seen is not None
        known = {id(parameter_of(self.system.model, p)) for p in self.shared}
        known |= {id(self.system.model.get_parameter(name)) for name in self.system.left_out()}
        by_name = dict(self.system.model.named_parameters())
        forgotten = [name for name in self.seen.repeated if id(by_name[name]) not in known]
        if forgotten:
            raise _Failed(f"called more than once but not declared: {', '.join(forgotten[:5])}")
        return f"{len(self.system.left_out())} looped parameters are left out on purpose"

    def steps_chain(self) -> str:
        """A chain of single steps equals the rollout."""
        import torch  # lazy: loopq imports without torch

        system = steps_of(self.system)
        if system is None:
            raise _Idle("the system has no single-step function")
        assert self.output is not None
        with torch.no_grad():
            embedding = system.embed(self.batch)
            state = system.initial_state(self.batch, embedding)
            for t in range(system.n_updates(self.n_steps)):
                state = system.step(state, embedding, t, self.n_steps)
            chained = system.predict(state, embedding)
        scale = float(self.output.float().abs().max())
        off = float((chained.float() - self.output.float()).abs().max()) / max(scale, 1e-30)
        allowed = 1e-4 if next(system.model.parameters()).dtype == torch.float32 else 3e-2
        if not off <= allowed:
            raise _Failed(f"chained steps differ from the rollout by {off:.2e} of its largest value")
        return f"largest difference {off:.1e} of the largest value"

    def state_is_paired(self) -> str:
        """A prompt's initial state does not depend on its batch."""
        import torch  # lazy: loopq imports without torch

        system = steps_of(self.system)
        if system is None or not system.state_is_random:
            raise _Idle("the initial state is not random")
        with torch.no_grad():
            whole = system.initial_state(self.batch, system.embed(self.batch))
            part = system.initial_state(self.part, system.embed(self.part))
        if not torch.equal(whole[1:], part):
            raise _Failed("the noise of a prompt depends on the batch it runs in")
        return f"noise of standard deviation {float(whole.float().std()):.4f}, fixed by seed and prompt"

    def depth_matters(self) -> str:
        """Another depth gives another rollout. An impossible depth is rejected."""
        try:
            self.system.rollout(self.batch, 0)
        except ConfigError:
            pass
        else:
            raise _Failed("a rollout of depth 0 is not refused")
        if self.n_steps == 1:
            return "depth 0 is refused; there is one depth"
        try:
            other = trace(self.system.model, lambda: self.system.rollout(self.batch, self.n_steps - 1))
        except ConfigError:
            return "every other depth is refused"
        assert self.seen is not None
        before, after = self.seen.rows, other.rows
        names = [_traced(p) for p in self.shared]
        if all(len(after.get(name, ())) == len(before.get(name, ())) for name in names):
            raise _Failed(
                f"a rollout of depth {self.n_steps - 1} makes as many calls as one of {self.n_steps}"
            )
        return f"depth {self.n_steps - 1} makes fewer calls; depth 0 is refused"

    def notes(self) -> tuple[str, ...]:
        """Facts that are not failures: short groups, functional uses, omitted weights."""
        ragged = sorted({p.in_features for p in self.shared if p.in_features % GROUP_SIZE})
        notes = [
            f"{width} inputs: the last group of {GROUP_SIZE} has {width % GROUP_SIZE} columns"
            for width in ragged
        ]
        if self.shared and isinstance(self.system, Describes):
            notes += self.system.describe_loop()
        names = names_of(self.system.model)
        reasons = {names.in_file(name): reason for name, reason in self.system.left_out().items()}
        notes += [f"left out: {name} ({reason})" for name, reason in list(reasons.items())[:8]]
        if len(reasons) > 8:
            notes.append(f"left out: {len(reasons) - 8} more")
        if self.seen is not None:
            hidden = [name for name in map(names.in_file, self.seen.uncalled) if name not in reasons]
            notes += [f"used without a call of its module: {name}" for name in hidden[:8]]
        return tuple(notes)


def _traced(parameter: SharedParameter) -> str:
    """Name of a weight in a trace."""
    return f"{parameter.owners[0]}.weight" if parameter.owners else parameter.name


def check_model(loaded: LoadedModel, *, n_steps: int | None = None, seed: int = 0) -> CheckReport:
    """Check that loopq's adapter fits a model.

    Returns
    -------
    CheckReport
        A verdict for every check. A check is skipped if it depends on a failed one.
    """
    system = loaded.system
    depth = system.n_steps if n_steps is None else n_steps
    probe = _Probe(system, depth, seed, vocabulary(system))
    report = loaded.report
    verdicts = [
        Verdict(
            "loaded whole",
            not report.unexpected,
            f"{report.n_parameters:,} parameters, {report.dtype}; {len(report.missing)} missing, "
            f"{len(report.unexpected)} unexpected, {len(report.repaired)} buffers set right",
        )
    ]
    needed = (("weights of the loop", probe.declared), ("rollout", probe.rolls_out))
    further = (
        ("same seed, same bits", probe.reproducible),
        ("calls", probe.counted),
        ("nothing forgotten", probe.complete),
        ("single steps", probe.steps_chain),
        ("initial state", probe.state_is_paired),
        ("depth", probe.depth_matters),
    )
    verdicts += [_judge(name, run) for name, run in needed]
    if all(v.ok is not False for v in verdicts[1:]):
        verdicts += [_judge(name, run) for name, run in further]
    return CheckReport(system.name, depth, tuple(verdicts), probe.notes())


def _judge(name: str, run: Callable[[], str]) -> Verdict:
    try:
        return Verdict(name, True, run())
    except _Idle as reason:
        return Verdict(name, None, str(reason))
    except (_Failed, LoopqError) as failure:
        return Verdict(name, False, str(failure))
    except _OF_THE_MODEL as failure:
        return Verdict(name, False, f"the model's own code failed: {type(failure).__name__}: {failure}")


def vocabulary(system: LoopedSystem) -> int:
    """Token ids that a probe can safely draw.

    Raises
    ------
    ConfigError
        If the model has no embedding that defines them.
    """
    sizes = token_rows(system)
    if not sizes:
        raise ConfigError(f"{type(system.model).__name__}: no vocab_size and no embedding in it")
    # The last ids are often special tokens.
    return max(2, max(sizes) - 8)


def token_rows(system: LoopedSystem) -> set[int]:
    """Return the vocabulary size of the model's config, or else the rows of the tables that one run reads by token.

    They are those of all embedding tables if that run fails.
    """
    import torch  # lazy: loopq imports without torch
    from torch import nn  # lazy: loopq imports without torch

    config: Any = getattr(system.model, "config", None)
    size = getattr(config, "vocab_size", None)
    tables = [m for m in system.model.modules() if isinstance(m, nn.Embedding)]
    sizes = {m.num_embeddings for m in tables} if size is None else {int(size)}
    if len(sizes) < 2:
        return sizes
    # A table of positions or steps may be larger or smaller than the token table.
    ids, called = torch.tensor([[1, 0, 1, 1]]), []
    # The checked rollout reports the model's error in a verdict.
    with contextlib.suppress(*_OF_THE_MODEL):
        called = token_tables(system.model, ids, lambda: system.rollout(Batch(ids, (0,)), system.n_steps))
    return {m.num_embeddings for m in called} or sizes
