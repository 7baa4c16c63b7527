"""Choice of the shared parameters to quantize and to observe, and groups of parameters with the same input."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from loopq.calibrate.data import TokenSet
from loopq.calibrate.hooks import damaged_weight, find_input_groups
from loopq.calibrate.inputs import output_digest
from loopq.errors import ConfigError, NonFiniteError
from loopq.layers.shared import SharedParameter
from loopq.quantizers.task import Pool
from loopq.settings.patterns import check_patterns, matches
from loopq.systems.base import LoopedSystem
from loopq.systems.capabilities import Discovers

#: Experts of a block share sums if each gets fewer rows than this for each of its inputs on average.
FEW = 1.5


@dataclass(frozen=True)
class Selection:
    """Shared parameters of one run.

    Parameters
    ----------
    parameters : tuple of SharedParameter
        All parameters that the system declares. Each has its treatment in this run.
    input_groups : dict of str to str
        Maps each observed parameter to the first parameter with the same input.
    n_steps : int
        Depth of the rollout. It is the number of steps.
    shares : dict of str to float
        Rows of each expert's parameter in a step, as a share of the tokens. One prompt's rollout gives them. An input
        that experts share has the sum of their rows.
    output : str
        Digest of what that rollout gave; "" without one.
    """

    parameters: tuple[SharedParameter, ...]
    input_groups: dict[str, str]
    n_steps: int
    shares: dict[str, float] = field(default_factory=dict)
    output: str = ""

    @property
    def observed(self) -> tuple[SharedParameter, ...]:
        """Parameters whose inputs are collected."""
        return tuple(p for p in self.parameters if p.name in self.input_groups)

    @property
    def distinct_inputs(self) -> tuple[SharedParameter, ...]:
        """One parameter for each distinct input."""
        return tuple(p for p in self.observed if self.input_groups[p.name] == p.name)

    def pooled(self, n_tokens: int) -> Selection:
        """Let experts with few rows of `n_tokens` tokens share sums."""
        groups, shares = shared(self.observed, self.input_groups, self.shares, n_tokens)
        return dataclasses.replace(self, input_groups=groups, shares=shares)


def treat(
    parameters: Sequence[SharedParameter], include: Sequence[str], exclude: Sequence[str]
) -> tuple[SharedParameter, ...]:
    """Apply include and exclude patterns to the parameters of a system.

    Raises
    ------
    ConfigError
        A pattern matches no parameter, or nothing is left to quantize.
    """
    check_patterns("pattern", (*include, *exclude), (p.name for p in parameters))
    treated = []
    for p in parameters:
        if any(matches(p.name, e) for e in exclude):
            treated.append(dataclasses.replace(p, treatment="dense", reason="excluded by pattern"))
        elif p.treatment != "gptq" and any(matches(p.name, i) for i in include):
            treated.append(dataclasses.replace(p, treatment="gptq", reason=""))
        else:
            treated.append(p)
    if all(p.treatment == "dense" for p in treated):
        raise ConfigError(
            "nothing is left to quantize: all is excluded or dense; exclude less, or include some"
        )
    return tuple(treated)


def select(
    system: LoopedSystem,
    tokens: TokenSet,
    *,
    n_steps: int | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    rounded: bool = False,
    seed: int = 0,
) -> Selection:
    """Choose the parameters of a run and find shared inputs by one rollout of the first prompt.

    Parameters
    ----------
    tokens : TokenSet
        Calibration prompts. The first one is run.
    n_steps : int, optional
        Depth. The model's own depth is the default.
    include, exclude : sequence of str
        Patterns of parameter names. Exclusion wins.
    rounded : bool
        Also observe the inputs of parameters that the paper rounds.
    seed : int
        Seed of the initial state.

    Raises
    ------
    NonFiniteError
        A weight holds NaN or infinity. No rollout is run.
    """
    damaged = damaged_weight(system)
    if damaged:
        raise NonFiniteError(damaged)
    probe = tokens.first(seed)
    if isinstance(system, Discovers):
        system.look(probe)
    depth = system.check_depth(n_steps if n_steps is not None else system.n_steps)
    parameters = treat(system.shared_parameters(depth), include, exclude)
    observed = [p for p in parameters if p.treatment == "gptq" or (rounded and p.treatment == "rtn")]
    if not observed:
        return Selection(parameters, {}, depth)
    input_groups, shares, output = find_input_groups(system, observed, probe, depth)
    return Selection(parameters, input_groups, depth, shares, output_digest(output))


def select_shape(
    system: LoopedSystem,
    *,
    n_steps: int | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> Selection:
    """Choose the parameters of a run of a model without values, which cannot run.

    Layers of one module with one width are assumed to read one input. Experts share the tokens evenly.
    """
    depth = system.check_depth(n_steps if n_steps is not None else system.n_steps)
    parameters = treat(system.shared_parameters(depth), include, exclude)
    first: dict[tuple[str, int], str] = {}
    blocks: dict[str, set[str]] = {}
    groups = {}
    for p in (p for p in parameters if p.treatment != "dense"):
        module = p.owners[0].rpartition(".")[0]
        groups[p.name] = first.setdefault((module, p.in_features), p.name)
        if p.routed_in:
            blocks.setdefault(p.routed_in, set()).add(module)
    settings: Any = getattr(system.model, "config", None)
    settings = settings.get_text_config() if hasattr(settings, "get_text_config") else settings
    chosen = getattr(settings, "num_experts_per_tok", 1)
    routed = [p for p in parameters if p.name in groups and p.routed_in]
    shares = {p.name: min(1.0, chosen / len(blocks[p.routed_in])) for p in routed}
    return Selection(parameters, groups, depth, shares)


def shared(
    parameters: Sequence[SharedParameter],
    input_groups: Mapping[str, str],
    shares: Mapping[str, float],
    n_tokens: int,
) -> tuple[dict[str, str], dict[str, float]]:
    """Return input groups and shares in which experts with few rows have one input group for the rows that they read.

    Parameters
    ----------
    parameters : sequence of SharedParameter
        Observed parameters.
    input_groups : mapping of str to str
        Maps each parameter to the first one with the same input.
    shares : mapping of str to float
        Rows of each expert's parameter in a step, as a share of the tokens, in the order of the calls.
    n_tokens : int
        Tokens of the calibration set.

    Notes
    -----
    The layer that an expert calls first, and those with the same input, read rows of the block. A later layer reads the
    expert's own neurons, which mean something else in each expert.
    """
    experts, order = {p.name: p for p in parameters}, {p.name: i for i, p in enumerate(parameters)}
    # Parameters of each block by their name within an expert, in the order of the calls.
    blocks: dict[str, dict[str, list[SharedParameter]]] = {}
    for name in shares:
        if (place := experts[name].expert) is not None:
            blocks.setdefault(place[0], {}).setdefault(place[2], []).append(experts[name])
    groups, rows = dict(input_groups), dict(shares)
    for alike in blocks.values():
        first = next(iter(alike.values()))
        share, p = sum(shares[p.name] for p in first), first[0]
        if share * n_tokens * p.invocations >= FEW * p.in_features * len(first):
            continue
        # Another probe calls the experts in another order, and gives the same name.
        whole = input_groups[min((p.name for p in first), key=order.__getitem__)]
        for same in alike.values():
            if any(input_groups[q.name] == whole for q in same):
                groups.update((q.name, whole) for q in same)
        rows[whole] = share
    return groups, rows


def pools(parameters: Sequence[SharedParameter], input_groups: Mapping[str, str]) -> dict[str, Pool]:
    """Find the gradient sums that experts share: where they read one input, and where they write to one output.

    The sums between an expert's own neurons stay apart, since neuron k of one expert is not that of another.
    """
    experts = {p.name: (p, place) for p in parameters if (place := p.expert) and p.name in input_groups}
    of_others = [
        p for p, at in experts.values() if experts.get(input_groups[p.name], (p, at))[1][:2] != at[:2]
    ]
    shared_inputs = {input_groups[p.name] for p in of_others}
    widths = {p.routed_in: p.in_features for p in of_others}
    by_name: dict[str, Pool] = {}
    first: dict[tuple[str, str], str] = {}
    for p, (before, _, after) in experts.values():
        if input_groups[p.name] in shared_inputs:
            by_name[p.name] = Pool("inputs", input_groups[p.name])
        elif widths.get(p.routed_in) == p.out_features:
            by_name[p.name] = Pool("outputs", first.setdefault((before, after), p.name))
    return by_name
