"""Settings of one layer: its grid, its calibration, its rotation, its method."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from loopq.errors import ConfigError
from loopq.layers.grids.table import UNEVEN
from loopq.layers.layer import QuantizedLayer
from loopq.layers.transforms import AUTO as ROTATION_AUTO
from loopq.layers.transforms import Rotation, RotationConfig
from loopq.quantizers import QUANTIZERS, Method, Problem
from loopq.quantizers.damping import Damping
from loopq.quantizers.grid import AUTO, OWN_LEVELS, GridSettings
from loopq.quantizers.turn import compared
from loopq.settings.declare import Settings, block, check, choice, leaves
from loopq.settings.patterns import check_syntax, matches
from loopq.settings.registry import did_you_mean
from loopq.settings.steps import Calibration


@dataclass(frozen=True)
class LayerConfig(Settings):
    """How one weight is quantized.

    Parameters
    ----------
    grid : GridSettings
        Grid of the codes. It sets bits and group size.
    calibration : Calibration
        Steps that provide activations.
    rotation : RotationConfig
        Rotation of the input. It is applied before the method.
    method : Method
        Method that finds the codes.
    """

    grid: GridSettings = block(GridSettings)
    calibration: Calibration = block(Calibration)
    rotation: RotationConfig = block(RotationConfig, "rotation")
    method: Method = choice(QUANTIZERS, "gptq-cd", common=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.method.check(self.grid)

    @classmethod
    def of(cls, **changes: Any) -> LayerConfig:
        """Return the default settings with some flat names ("bits", "method", "damping", ...) changed."""
        return cls().changed(**changes)

    def decided(self) -> LayerConfig:
        """Return the settings with levels for "auto": uneven where the method prefers these and a table exists."""
        tabled = self.method.prefers_uneven and self.grid.symmetric and self.grid.bits in UNEVEN
        return self.changed(levels="uneven" if tabled else "even") if self.grid.levels == AUTO else self

    def quantize(self, problem: Problem) -> QuantizedLayer:
        """Quantize a layer, in the rotated basis if the settings have a rotation.

        Raises
        ------
        ConfigError
            The settings have a rotation, and the method transforms the input itself.
        """
        return quantize_all([(self, problem)])[0]

    @property
    def rotates(self) -> bool:
        """Whether the input may be rotated. With "auto" only codes that other programs do not read anyway are."""
        if self.rotation.kind != ROTATION_AUTO:
            return self.rotation.kind != "none"
        own = self.grid.levels in OWN_LEVELS and not self.method.make_grid(self.grid).portable
        return self.method.prefers_rotation and own

    def chosen(self, problem: Problem) -> tuple[Problem, Rotation | None, dict[str, Any]]:
        """Return the problem in the basis of the settings, its rotation if it has one, and report entries.

        With rotation "auto" GPTQ is tried on some rows in both bases (`loopq.quantizers.turn`).
        """
        rotation = None
        if self.rotates:
            rotation = self.rotation.of(problem.target.shape[1], self.grid.group_size)
        if rotation is None:
            return problem, None, {}
        turned = self.turned(problem, rotation)
        facts: dict[str, Any] = {}
        if self.rotation.kind == ROTATION_AUTO:
            damping: Damping = getattr(self.method, "damping", Damping())
            keep, facts = compared(damping, problem, turned)
            if not keep:
                return problem, None, facts
        return turned, rotation, {"rotation": rotation.describe(), **facts}

    def turned(self, problem: Problem, rotation: Rotation) -> Problem:
        """Return the problem in the rotated basis: W' = W R^T, and S' = R S R^T with the S of the plain basis."""
        target = rotation.fold(problem.target)
        if problem.metric is not None:
            combined, metric = problem.metric.united(problem.require_observed())
            return dataclasses.replace(
                problem, target=target, hessian=rotation.conjugate(combined), shared={}, metric=metric
            )

        def turned() -> tuple[Any, dict[Any, Any]]:
            return (None if problem.hessian is None else rotation.conjugate(problem.hessian), {})

        hessian, shared = problem.once(("rotated", rotation), turned)
        return dataclasses.replace(problem, target=target, hessian=hessian, shared=shared)


def quantize_all(asked: Sequence[tuple[LayerConfig, Problem]]) -> list[QuantizedLayer]:
    """Quantize layers as `LayerConfig.quantize` does. Layers with the same method run together.

    Raises
    ------
    ConfigError
        The settings have a rotation, and the method transforms the input itself.
    """
    chosen = [config.chosen(p) for config, p in asked]
    alike: dict[Method, list[int]] = {}
    for at, (config, _) in enumerate(asked):
        alike.setdefault(config.method, []).append(at)
    layers: dict[int, QuantizedLayer] = {}
    for method, places in alike.items():
        layers.update(zip(places, method.quantize_all([chosen[at][0] for at in places]), strict=True))
    for at, (_, rotation, facts) in enumerate(chosen):
        if rotation is not None:
            if layers[at].transform is not None:
                config, p = asked[at]
                raise ConfigError(
                    f"layer {p.name}: method {config.method.name!r} cannot be combined with a rotation"
                )
            layers[at] = layers[at].with_transform(rotation)
        layers[at] = layers[at].with_report(**facts)
    return [layers[at] for at in range(len(asked))]


@dataclass(frozen=True)
class Override:
    """Settings for the layers with names that match a pattern.

    Parameters
    ----------
    pattern : str
        Shell pattern for the parameter name. The prefix "re:" marks a regular expression.
    changes : mapping of str to Any
        Flat names of `LayerConfig` and their values.
    """

    pattern: str
    changes: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_syntax("override", [self.pattern])
        known = leaves(LayerConfig)
        unknown = sorted(set(self.changes) - set(known))
        if unknown:
            raise ConfigError(
                f"override {self.pattern!r}: unknown setting {', '.join(unknown)}"
                f"{did_you_mean(unknown[0], known)}; known: {', '.join(sorted(known))}"
            )
        for name, value in self.changes.items():
            leaf = known[name][0]
            if not isinstance(value, Settings):
                check(f"override {self.pattern!r}: {name}", value, leaf.annotation, leaf.metadata)

    def matches(self, name: str) -> bool:
        """Whether the pattern matches the layer called `name`."""
        return matches(name, self.pattern)

    def to_json(self) -> dict[str, Any]:
        """Return plain data, the inverse of `from_json`."""
        return {"pattern": self.pattern, "changes": dict(self.changes)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Override:
        """Rebuild from plain data."""
        whole = isinstance(data, Mapping) and isinstance(data.get("changes"), Mapping) and "pattern" in data
        if not whole:
            raise ConfigError(f"override: expected an object with a pattern and changes; got {data!r}")
        return cls(str(data["pattern"]), dict(data["changes"]))
