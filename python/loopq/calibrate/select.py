"""Choice of the shared parameters to quantize and to observe, and groups of parameters with the same input."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from loopq.calibrate.data import TokenSet
from loopq.calibrate.hooks import damaged_weight, find_input_groups
from loopq.errors import ConfigError, NonFiniteError
from loopq.layers.shared import SharedParameter
from loopq.settings.patterns import check_patterns, matches
from loopq.systems.base import LoopedSystem
from loopq.systems.capabilities import Discovers


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
        Rows of each expert's parameter in a step, as a share of the tokens. One prompt's rollout gives them.
    """

    parameters: tuple[SharedParameter, ...]
    input_groups: dict[str, str]
    n_steps: int
    shares: dict[str, float] = field(default_factory=dict)

    @property
    def observed(self) -> tuple[SharedParameter, ...]:
        """Parameters whose inputs are collected."""
        return tuple(p for p in self.parameters if p.name in self.input_groups)

    @property
    def distinct_inputs(self) -> tuple[SharedParameter, ...]:
        """One parameter for each distinct input."""
        return tuple(p for p in self.observed if self.input_groups[p.name] == p.name)


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
    input_groups, shares = find_input_groups(system, observed, probe, depth) if observed else ({}, {})
    return Selection(parameters, input_groups, depth, shares)
