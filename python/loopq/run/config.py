"""Settings of a run, and presets of useful settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from loopq.calibrate.prompts import CalibrationTake
from loopq.errors import ConfigError
from loopq.quantizers import QUANTIZERS
from loopq.quantizers.config import LayerConfig, Override
from loopq.quantizers.grid import AUTO
from loopq.run import INPUTS
from loopq.run.budget import Fit
from loopq.run.inputs import Inputs
from loopq.settings.declare import Settings, block, choice, leaves, optional, setting
from loopq.settings.patterns import check_syntax
from loopq.settings.registry import did_you_mean

#: Named settings: closest to full precision, with gradients; the smallest file; without gradients; the paper's method.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "best": {
        "method": "gptq-cd", "metric": "loop", "metric_draws": 4, "inputs": "asymmetric", "beam": 64, "rounds": 4
    },
    "small": {"method": "trellis", "rotation": "hadamard:64", "group_size": -1, "bits": 3, "outside": 8},
    "fast": {"method": "gptq-cd", "metric": "inputs", "levels": "even"},
    "paper": {"method": "gptq", "scale_search": "max", "levels": "even"},
}
#: What "auto" means in formats other than loopq's own.
_PLAIN: Mapping[str, str] = {"levels": "even", "rotation": "none"}
#: A preset's settings of calibration prompts, which do not belong to a run's settings.
PROMPTS: Mapping[str, Mapping[str, Any]] = {"paper": {"random_tokens": 0.0}}


@dataclass(frozen=True)
class QuantConfig(Settings):
    """Settings of one quantization run.

    Parameters
    ----------
    layer : LayerConfig
        Settings of every layer without an override.
    inputs : Inputs
        Rollout that provides the calibration inputs of the layers.
    overrides : tuple of Override
        Settings for some layers, applied in order. Later ones win.
    include : tuple of str
        Also calibrate these layers, which are dense or rounded by default.
    exclude : tuple of str
        Leave these layers dense. Patterns match names.
    rank_threshold : float, optional
        Threshold of the rank in the report, relative to the largest eigenvalue of H. No rank is computed when absent.
    outside : {4, 8, "q4_k", "q5_k", "q6_k", "q8_0", "none"}, optional
        Bits, or GGUF type, of the matrices outside the loop. These are embedding tables, heads, and layers before and
        after it. They are rounded to nearest with searched scales. They stay unchanged with "none", and when absent. In
        a GGUF file they are q6_k when absent, or q8_0 beside 8 bits. Only loopq's own format and GGUF support it.
    fit : Fit, optional
        Choice of each layer's grid and of the storage of matrices outside the loop, within a file size.
    """

    layer: LayerConfig = block(LayerConfig)
    inputs: Inputs = choice(INPUTS, "open")
    overrides: tuple[Override, ...] = setting((), option=False)
    include: tuple[str, ...] = setting((), option=False)
    exclude: tuple[str, ...] = setting((), option=False)
    rank_threshold: float | None = setting(None, at_least=0.0, at_most=0.99)
    outside: Literal[4, 8, "q4_k", "q5_k", "q6_k", "q8_0", "none"] | None = setting(None)
    fit: Fit | None = optional(Fit, "fit")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_syntax("pattern", (*self.include, *self.exclude))

    @property
    def reads_text(self) -> bool:
        """Whether any code depends on calibration prompts. This is false if all layers are rounded or dense."""
        named = [o.changes["method"] for o in self.overrides if "method" in o.changes]
        others = [QUANTIZERS.get(m) if isinstance(m, str) else m for m in named]
        return self.fit is not None or any(m.needs_hessian for m in (self.layer.method, *others))

    @classmethod
    def of(cls, *overrides: Override, preset: str | None = None, **changes: Any) -> QuantConfig:
        """Return the default settings, or those of a preset, with some flat names ("bits", "steps", ...) changed."""
        base = cls(overrides=overrides)
        return (base if preset is None else base.preset(preset)).changed(**changes)

    def preset(self, name: str) -> QuantConfig:
        """Return the settings with those of a preset applied.

        Raises
        ------
        ConfigError
            The preset does not exist.

        Examples
        --------
        >>> QuantConfig().preset("best").layer.method.name
        'gptq-cd'
        """
        if name not in PRESETS:
            raise ConfigError(f"preset must be one of {', '.join(PRESETS)}; got {name!r}")
        return self.changed(**PRESETS[name])

    def with_metric(self, kind: str, **more: Any) -> QuantConfig:
        """Return the settings with another metric, and its further settings, wherever it is "auto"."""
        new = {"metric": kind, **more}

        def resolved(changes: Mapping[str, Any]) -> Mapping[str, Any]:
            named = "method" in changes and "metric" in QUANTIZERS.get(changes["method"])().flat()
            unset = named and changes.get("metric", "auto") == "auto"
            return {**changes, **new} if unset or changes.get("metric") == "auto" else changes

        layer = self.layer.changed(**new) if self.layer.flat().get("metric") == "auto" else self.layer
        overrides = tuple(Override(o.pattern, resolved(o.changes)) for o in self.overrides)
        return dataclasses.replace(self, layer=layer, overrides=overrides)

    def for_format(self, native: bool, outside: Any = None) -> QuantConfig:
        """Return the settings of a format where they are left to it.

        Unless loopq's own format is written, levels that are "auto" become even, rotations that are "auto" none, and a
        method may name another in its place. `outside` is the format's own choice, and q8_0 where the layers have 8
        bits, as in llama.cpp. A `fit` chooses by itself.
        """
        if native:
            return self

        def held(changes: Mapping[str, Any]) -> dict[str, Any]:
            method = changes.get("method")
            other = QUANTIZERS.get(method).in_other_formats if isinstance(method, str) else ""
            plain = {name: value for name, value in _PLAIN.items() if changes.get(name) == AUTO}
            return {**changes, **plain, **({"method": other} if other else {})}

        overrides = tuple(Override(o.pattern, held(o.changes)) for o in self.overrides)
        layer = self.layer.changed(**held(self.layer.flat()))
        chosen = self.outside
        if chosen is None and self.fit is None and outside is not None:
            chosen = "q8_0" if layer.grid.make().bits == 8 else outside
        return dataclasses.replace(self, layer=layer, overrides=overrides, outside=chosen)

    def for_layer(self, name: str) -> LayerConfig:
        """Return the settings of the layer called `name`, with its levels decided.

        Raises
        ------
        ConfigError
            An override has a setting that the layer's method does not read.
        """
        config = self.layer
        for override in self.overrides:
            if override.matches(name):
                try:
                    config = config.changed(**override.changes)
                except ConfigError as error:
                    raise ConfigError(f"override {override.pattern!r}, layer {name}: {error}") from error
        return config.decided()


def flat_names() -> set[str]:
    """Every flat name of a run's settings."""
    return set(leaves(QuantConfig)) | {f.name for f in dataclasses.fields(QuantConfig)}


def divided(options: Mapping[str, Any], *bases: Settings) -> list[Any]:
    """Divide keywords among settings, and return these with their changes. "preset" changes several.

    Raises
    ------
    ConfigError
        None of the settings has a keyword, or a value is not allowed.
    """
    names = [set(base.flat()) for base in bases]
    if isinstance(bases[0], QuantConfig):
        names[0] = flat_names() | {"preset"}
    known = set().union(*names)
    unknown = sorted(set(options) - known)
    if unknown:
        hint = did_you_mean(unknown[0], known)
        raise ConfigError(f"unknown setting {', '.join(unknown)}{hint}; known: {', '.join(sorted(known))}")
    changes = [{k: v for k, v in options.items() if k in part and k != "preset"} for part in names]
    preset = options.get("preset")
    return [_preset(base, preset).changed(**part) for base, part in zip(bases, changes, strict=True)]


def _preset(settings: Settings, name: str | None) -> Settings:
    if name is not None and isinstance(settings, QuantConfig):
        return settings.preset(name)
    return (
        settings.changed(**PROMPTS.get(name or "", {})) if isinstance(settings, CalibrationTake) else settings
    )


def refuse_outside(config: QuantConfig, who: str, instead: str) -> None:
    """Refuse to round matrices outside the loop if `who` does not support it.

    Raises
    ------
    ConfigError
        The message says who does not support it, and what to do instead.
    """
    if config.outside not in (None, "none"):
        raise ConfigError(f"outside rounds embedding tables and heads too, which {who}: {instead}")
