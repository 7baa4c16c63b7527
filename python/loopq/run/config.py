"""Settings of a run, and the names that stand for the most useful ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from loopq.errors import ConfigError
from loopq.quantizers import QUANTIZERS
from loopq.quantizers.config import LayerConfig, Override
from loopq.run import INPUTS
from loopq.run.budget import Fit
from loopq.run.inputs import Inputs
from loopq.settings.declare import Settings, block, choice, leaves, optional, setting
from loopq.settings.patterns import check_syntax

#: Settings under one name: closest to full precision, with gradients; the same without; the method of the paper.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "best": {
        "method": "gptq-cd",
        "metric": "loop",
        "metric_draws": 4,
        "beam": 64,
        "rounds": 4,
        "inputs": "asymmetric",
    },
    "fast": {"method": "gptq-cd", "metric": "inputs"},
    "paper": {"method": "gptq", "scale_search": "max"},
}
#: What a preset says of the calibration prompts, which are not of a run's settings.
PROMPTS: Mapping[str, Mapping[str, Any]] = {"paper": {"random_tokens": 0.0}}


@dataclass(frozen=True)
class QuantConfig(Settings):
    """Settings of one quantization run.

    Parameters
    ----------
    layer : LayerConfig
        What holds for every layer that no override names.
    inputs : Inputs
        Rollout whose inputs layers are calibrated on.
    overrides : tuple of Override
        Settings for some layers, applied in order; later ones win.
    include : tuple of str
        Calibrate these layers too: those that would stay dense by default, and those that would be rounded.
    exclude : tuple of str
        Leave these layers dense.
    rank_threshold : float, optional
        Threshold of the rank in the report, relative to the largest eigenvalue of H; absent, no rank is computed.
    outside : {4, 8, "q4_k", "q5_k", "q6_k", "q8_0"}, optional
        Bits, or type of GGUF, of the matrices outside the loop (embedding tables, heads, layers before and after it),
        which are rounded to nearest with searched scales; they stay as they are when absent. In loopq's own format and
        in GGUF alone.
    fit : Fit, optional
        Grid of each layer, and what becomes of the matrices outside the loop, within a size of the file.
    """

    layer: LayerConfig = block(LayerConfig)
    inputs: Inputs = choice(INPUTS, "open")
    overrides: tuple[Override, ...] = setting((), option=False)
    include: tuple[str, ...] = setting((), option=False)
    exclude: tuple[str, ...] = setting((), option=False)
    rank_threshold: float | None = setting(None, at_least=0.0, at_most=0.99)
    outside: Literal[4, 8, "q4_k", "q5_k", "q6_k", "q8_0"] | None = setting(None)
    fit: Fit | None = optional(Fit, "fit")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_syntax("pattern", (*self.include, *self.exclude))

    @property
    def reads_text(self) -> bool:
        """Whether any code depends on calibration prompts: not where all layers are rounded or left dense."""
        named = [o.changes["method"] for o in self.overrides if "method" in o.changes]
        others = [QUANTIZERS.get(m) if isinstance(m, str) else m for m in named]
        return self.fit is not None or any(m.needs_hessian for m in (self.layer.method, *others))

    @classmethod
    def of(cls, *overrides: Override, preset: str | None = None, **changes: Any) -> QuantConfig:
        """Return the default settings, or those of a preset, with some flat names ("bits", "steps", ...) set anew."""
        base = cls(overrides=overrides)
        return (base if preset is None else base.preset(preset)).changed(**changes)

    def preset(self, name: str) -> QuantConfig:
        """Return the settings with those of a preset in their place.

        Raises
        ------
        ConfigError
            No such preset.

        Examples
        --------
        >>> QuantConfig().preset("best").layer.method.name
        'gptq-cd'
        """
        if name not in PRESETS:
            raise ConfigError(f"preset must be one of {', '.join(PRESETS)}; got {name!r}")
        return self.changed(**PRESETS[name])

    def with_metric(self, kind: str, **more: Any) -> QuantConfig:
        """Return the settings with another metric, and more that goes with it, wherever it is "auto"."""
        new = {"metric": kind, **more}

        def resolved(changes: Mapping[str, Any]) -> Mapping[str, Any]:
            named = "method" in changes and "metric" in QUANTIZERS.get(changes["method"])().flat()
            unset = named and changes.get("metric", "auto") == "auto"
            return {**changes, **new} if unset or changes.get("metric") == "auto" else changes

        layer = self.layer.changed(**new) if self.layer.flat().get("metric") == "auto" else self.layer
        overrides = tuple(Override(o.pattern, resolved(o.changes)) for o in self.overrides)
        return dataclasses.replace(self, layer=layer, overrides=overrides)

    def for_layer(self, name: str) -> LayerConfig:
        """Settings of the layer called `name`.

        Raises
        ------
        ConfigError
            An override sets what the layer's method does not read.
        """
        found = self.layer
        for override in self.overrides:
            if override.matches(name):
                try:
                    found = found.changed(**override.changes)
                except ConfigError as error:
                    raise ConfigError(f"override {override.pattern!r}, layer {name}: {error}") from error
        return found


def flat_names() -> set[str]:
    """Every flat name of a run's settings."""
    return set(leaves(QuantConfig)) | {f.name for f in dataclasses.fields(QuantConfig)}


def refuse_outside(config: QuantConfig, who: str, instead: str) -> None:
    """Refuse to round what is outside the loop where that cannot be.

    Raises
    ------
    ConfigError
        The message says who cannot, and what to do instead.
    """
    if config.outside is not None:
        raise ConfigError(f"outside rounds embedding tables and heads too, which {who}: {instead}")
