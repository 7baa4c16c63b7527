"""Every default and every setting of a run, validated where it comes in.

The Rust core takes each value explicitly; the command line prints its defaults from here.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal

from loopq.errors import ConfigError
from loopq.rotation import parse_rotation

BITS = (2, 3, 4, 8)
#: Floating types that a model can be cast to when it is loaded.
DTYPES = ("float32", "bfloat16", "float16")
SCALE_DTYPES = ("float32", "float16", "bfloat16")
#: Significant bits of a scale type, the leading one included.
SIGNIFICANT_BITS = {"float32": 24, "float16": 11, "bfloat16": 8}
PER_CHANNEL = -1
CALIBRATION_PROMPTS = 128
EVALUATION_PROMPTS = 64
SEQ_LEN = 128
BATCH_SIZE = 8
SNAPSHOT_SECONDS = 60.0
# Above this many tokens an int4 weight is dequantised for cuBLAS: an estimate, no GPU has measured it yet.
INT4_KERNEL_TOKENS = 64
# The paper's comparisons of kernels: token counts, warm-ups of each arm, paired trials.
BENCH_TOKENS = (1, 7, 16)
BENCH_WARM_UPS = 10
BENCH_TRIALS = 50

Precision = Literal["float64", "float32"]
ScaleMode = Literal["group", "static"]
ScaleSearch = Literal["max", "mse"]
ScaleCost = Literal["largest", "even", "diagonal", "conditional"]
Metric = Literal["inputs", "loop"]
ColumnOrder = Literal["natural", "diagonal", "conditional"]
DampingKind = Literal["mean", "median", "diagonal", "tail"]
Inputs = Literal["open", "asymmetric", "closed-loop", "equal-rows"]
STEP_WEIGHTS = ("sum", "trace", "balanced", "loss", "minimax", "validated")
#: What "validated" chooses from: the paper's sum, skip-0, and two that no loud step can decide.
VALIDATED = ("sum", "alpha=0", "balanced", "loss")
#: Share of the calibration prompts that is held back where something is chosen by them.
HELD_OUT_SHARE = 0.25
ScaleType = Literal["float32", "float16", "bfloat16"]
#: Fields of `LayerConfig` under one name. "best": the closest to full precision of all closed forms here, at the same
#: bytes and in the same files; it costs gradients (docs/quantizers.md).
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "best": {"method": "full", "metric": "loop", "damping_kind": "diagonal"}
}


def _choice(name: str, value: object, allowed: Sequence[object]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(map(str, allowed))}; got {value!r}")


def check_threads(threads: int) -> None:
    """Refuse a number of threads below 0; 0 takes all cores."""
    if threads < 0:
        raise ConfigError(f"threads must be 0 (all cores) or more; got {threads!r}")


@dataclass(frozen=True)
class LayerConfig:
    """How one weight is quantized.

    Parameters
    ----------
    method : str
        Name of a quantizer (`loopq.quantizers`), or "dense" to leave the layer as it is.
    bits : int
        2, 3, 4 or 8.
    group_size : int
        Input columns that share a scale; -1 is one scale per output row (per channel). A last group that is
        shorter has its own scale, taken from its real columns.
    symmetric : bool
        Signed codes without a zero point, or unsigned codes with one.
    damping : float
        Fraction of mean(diag H) added to the diagonal of H before it is factored (paper, A3).
    scales : {"group", "static"}
        "group": taken from the compensated weights when the column sweep reaches the group (the published
        GPTQ); "static": taken from the original weights before the sweep.
    scale_search : {"max", "mse"}
        Largest magnitude of the group, or the scale of least squared error on a shrink grid.
    scale_dtype : {"float32", "float16", "bfloat16"}
        Stored type. Scales are rounded to it before any code is computed.
    scale_bits : int, optional
        Significant bits that scales keep, the leading one included; all that `scale_dtype` has when absent.
        With 5, a symmetric INT4 weight code * scale is exact in bfloat16, so that what is simulated and what
        is deployed are the same numbers (docs/formats/scales.md).
    act_order : bool
        Sweep columns by falling diag(H); scales are static then and no index is stored.
    precision : {"float64", "float32"}
        Arithmetic of factorisation and sweep.
    block_size : int
        Columns swept before the trailing update; it changes speed, never a code.
    damping_kind : {"mean", "median", "diagonal", "tail"}
        What `damping` is a fraction of: the mean or the median of diag H; each column's own H_jj; the mean
        diagonal without the largest hundredth of the eigenvalues.
    step_weights : str
        How the Hessians of the steps are added: "sum" (the paper), "trace", "balanced", "loss", "minimax",
        "validated" (`quantize` alone: all of `VALIDATED` are tried, prompts that are held back decide), or
        "alpha=A" with A a fraction such as 0.25 or 1/4, the weight of step 0 against the mean of the others.
    signed_scales : bool
        "full", symmetric: a scale may be negative, which turns the grid's extra code to the other side.
    scale_cost : {"conditional", "diagonal", "even", "largest"}
        "full": how errors count in the search for the static scales: as they cost when the other columns make
        up for them, when none does, or all alike; "largest" takes the largest magnitude and searches nothing.
    order : {"conditional", "diagonal", "natural"}
        "full": order of the sweep. No index is stored.
    descent : int
        "full": most times round of coordinate descent on the codes; 0 leaves it out.
    refit : bool
        "full": closed-form scales for the codes found, and a new sweep from them.
    rounds : int
        "full": most rounds of descent, refit and new sweep.
    metric : {"inputs", "loop"}
        "full": what an error costs: the square error of the layer's own output, or what it does to the model's
        output through the rest of the loop, from gradients of drawn labels (`loopq.quantizers.metric`).
    passes : int
        "full" with metric "loop": most times round of solving each row again with all others fixed.
    rotation : str
        "none", "hadamard:SIZE", "random:SIZE", or "hadamard" for one block as wide as the layer: the input is
        rotated at run time, the weight against it (paper, C1 to C3).
    rotation_seed : int
        Seed of random rotations.
    """

    method: str = "gptq"
    bits: int = 4
    group_size: int = 128
    symmetric: bool = True
    damping: float = 0.01
    scales: ScaleMode = "group"
    scale_search: ScaleSearch = "max"
    scale_dtype: ScaleType = "float16"
    scale_bits: int | None = None
    act_order: bool = False
    precision: Precision = "float64"
    block_size: int = 128
    damping_kind: DampingKind = "mean"
    step_weights: str = "sum"
    signed_scales: bool = True
    scale_cost: ScaleCost = "conditional"
    order: ColumnOrder = "conditional"
    descent: int = 30
    refit: bool = True
    rounds: int = 8
    metric: Metric = "inputs"
    passes: int = 1
    rotation: str = "none"
    rotation_seed: int = 0

    def __post_init__(self) -> None:
        _choice("bits", self.bits, BITS)
        _choice("scales", self.scales, ("group", "static"))
        _choice("scale_search", self.scale_search, ("max", "mse"))
        _choice("scale_dtype", self.scale_dtype, SCALE_DTYPES)
        _choice("precision", self.precision, ("float64", "float32"))
        most = SIGNIFICANT_BITS[self.scale_dtype]
        if self.scale_bits is not None and not 1 <= self.scale_bits <= most:
            raise ConfigError(
                f"scale_bits must be between 1 and {most}, the significant bits of {self.scale_dtype}; "
                f"got {self.scale_bits!r}"
            )
        if not isinstance(self.group_size, int) or (self.group_size != PER_CHANNEL and self.group_size < 1):
            raise ConfigError(f"group_size must be -1 (per channel) or at least 1; got {self.group_size!r}")
        if not 0.0 <= self.damping < float("inf"):
            raise ConfigError(f"damping must be a finite fraction >= 0 of mean(diag H); got {self.damping!r}")
        if self.block_size < 1:
            raise ConfigError(f"block_size must be at least 1; got {self.block_size!r}")
        _choice("damping_kind", self.damping_kind, ("mean", "median", "diagonal", "tail"))
        _choice("scale_cost", self.scale_cost, ("conditional", "diagonal", "even", "largest"))
        _choice("order", self.order, ("conditional", "diagonal", "natural"))
        _choice("metric", self.metric, ("inputs", "loop"))
        for name in ("descent", "rounds", "passes"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be at least 0; got {getattr(self, name)!r}")
        parse_step_weights(self.step_weights)
        parse_rotation(self.rotation, dim=1)


@dataclass(frozen=True)
class AllocateConfig:
    """How bits are shared out between layers.

    Parameters
    ----------
    budget : float or int
        A float: bits a weight, scales and zero points included; an int: bytes of all quantized layers.
    score : {"ablation", "fisher"}
        What a way to quantize a layer costs: the KL measured with that layer alone quantized, or the KL that
        gradients through the loop predict.
    bits : tuple of int
        Widths that a layer may get.
    group_sizes : tuple of int
        Group sizes that a layer may get.
    n_prompts : int
        Calibration prompts that the score is taken on.
    """

    budget: float | int
    score: Literal["ablation", "fisher"] = "ablation"
    bits: tuple[int, ...] = BITS
    group_sizes: tuple[int, ...] = (32, 64, 128)
    n_prompts: int = 16

    def __post_init__(self) -> None:
        _choice("score", self.score, ("ablation", "fisher"))
        if not self.bits or not self.group_sizes:
            raise ConfigError("an allocation needs one or more bits and group sizes")
        for bits in self.bits:
            _choice("bits", bits, BITS)
        if not self.budget > 0:
            raise ConfigError(f"budget must be above 0; got {self.budget!r}")
        if self.n_prompts < 1:
            raise ConfigError(f"n_prompts must be at least 1; got {self.n_prompts!r}")

    def n_bytes(self, n_weights: int) -> int:
        """The budget in bytes for that many weights."""
        return int(self.budget * n_weights / 8) if isinstance(self.budget, float) else self.budget


@dataclass(frozen=True)
class Override:
    """Settings for the layers whose name matches a pattern.

    Parameters
    ----------
    pattern : str
        Shell pattern on the parameter name, or a regular expression after the prefix "re:".
    changes : mapping of str to Any
        Fields of `LayerConfig` (and "steps") that replace those of the run.
    """

    pattern: str
    changes: Mapping[str, Any]

    def __post_init__(self) -> None:
        known = {f.name for f in dataclasses.fields(LayerConfig)} | {"steps"}
        unknown = sorted(set(self.changes) - known)
        if unknown:
            raise ConfigError(
                f"override {self.pattern!r}: unknown setting {', '.join(unknown)}; "
                f"known: {', '.join(sorted(known))}"
            )

    def matches(self, name: str) -> bool:
        """Whether the layer called `name` is meant."""
        if self.pattern.startswith("re:"):
            return re.search(self.pattern[3:], name) is not None
        return fnmatch.fnmatchcase(name, self.pattern)


@dataclass(frozen=True)
class QuantConfig:
    """Settings of one quantization run.

    Parameters
    ----------
    layer : LayerConfig
        What holds for every layer that no override names.
    steps : str
        Recurrence steps whose Hessians are summed; see `parse_steps`.
    overrides : tuple of Override
        Applied in order; later ones win.
    include, exclude : tuple of str
        Patterns of parameter names; what a system leaves dense by default needs an include.
    rank_threshold : float or None
        Threshold, relative to the largest eigenvalue, of the rank in the report (D1); None leaves the
        eigenvalues out.
    inputs : {"open", "asymmetric", "closed-loop", "equal-rows"}
        "open": all inputs from the full-precision rollout (the paper). "asymmetric": layer after layer, on the
        inputs that the layers before it will cause, against the outputs of full precision. "closed-loop": open,
        then once more with inputs of the quantized rollout (paper, B8). "equal-rows": open, with as many rows
        over all steps together as one step has (paper, B7).
    alpha : float
        "asymmetric": share of the correction, 0 to 1.
    sweeps : int
        "asymmetric": times through all layers.
    metric_draws : int
        Metric "loop": draws of labels for each calibration prompt.
    """

    layer: LayerConfig = field(default_factory=LayerConfig)
    steps: str = "all"
    overrides: tuple[Override, ...] = ()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    rank_threshold: float | None = 1e-3
    inputs: Inputs = "open"
    alpha: float = 1.0
    sweeps: int = 1
    metric_draws: int = 4

    def __post_init__(self) -> None:
        _choice("inputs", self.inputs, ("open", "asymmetric", "closed-loop", "equal-rows"))
        if not 0.0 <= self.alpha <= 1.0:
            raise ConfigError(f"alpha must lie in [0, 1]; got {self.alpha!r}")
        if self.sweeps < 1:
            raise ConfigError(f"sweeps must be at least 1; got {self.sweeps!r}")
        if self.metric_draws < 1:
            raise ConfigError(f"metric_draws must be at least 1; got {self.metric_draws!r}")

    def for_layer(self, name: str) -> tuple[LayerConfig, str]:
        """Settings and steps of the layer called `name`."""
        changes: dict[str, Any] = {}
        for override in self.overrides:
            if override.matches(name):
                changes.update(override.changes)
        steps = str(changes.pop("steps", self.steps))
        return dataclasses.replace(self.layer, **changes), steps

    def to_json(self) -> dict[str, Any]:
        """Plain data, the inverse of `from_json`."""
        data = dataclasses.asdict(self)
        data["overrides"] = [{"pattern": o.pattern, "changes": dict(o.changes)} for o in self.overrides]
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> QuantConfig:
        """Rebuild the settings from plain data."""
        rest = dict(data)
        layer = LayerConfig(**rest.pop("layer"))
        overrides = tuple(Override(o["pattern"], o["changes"]) for o in rest.pop("overrides"))
        for key in ("include", "exclude"):
            rest[key] = tuple(rest[key])
        return cls(layer=layer, overrides=overrides, **rest)


def preset(name: str, base: QuantConfig | None = None) -> QuantConfig:
    """Return the settings that a name stands for.

    Parameters
    ----------
    name : str
        Key of `PRESETS`.
    base : QuantConfig, optional
        Settings for everything that the preset says nothing of; the defaults when absent.

    Raises
    ------
    ConfigError
        No such preset.

    Examples
    --------
    >>> preset("best").layer.metric, preset("best").layer.bits
    ('loop', 4)
    """
    _choice("preset", name, tuple(PRESETS))
    base = base or QuantConfig()
    return dataclasses.replace(base, layer=dataclasses.replace(base.layer, **PRESETS[name]))


def parse_step_weights(spec: str) -> Fraction | str:
    """Read a step weighting: its name, or the exact alpha of "alpha=A".

    Raises
    ------
    ConfigError
        A name that is not known, or an alpha outside [0, 1].

    Examples
    --------
    >>> parse_step_weights("sum"), parse_step_weights("alpha=1/4"), parse_step_weights("alpha=0.25")
    ('sum', Fraction(1, 4), Fraction(1, 4))
    """
    if spec in STEP_WEIGHTS:
        return spec
    allowed = (
        f"step_weights must be one of {', '.join(STEP_WEIGHTS)} or alpha=A with A in [0, 1]; got {spec!r}"
    )
    if not spec.startswith("alpha="):
        raise ConfigError(allowed)
    try:
        alpha = Fraction(spec.removeprefix("alpha="))
    except (ValueError, ZeroDivisionError) as cause:
        raise ConfigError(allowed) from cause
    if not 0 <= alpha <= 1:
        raise ConfigError(allowed)
    return alpha


_RANGE = re.compile(r"^(\d*):(\d*)$")


def parse_steps(spec: str, n_steps: int) -> list[int]:
    """Read a choice of recurrence steps.

    Parameters
    ----------
    spec : str
        "all" (the trajectory, B2), "first" (step 0 alone, B1), "a:b" (steps a to b-1; "0:8" is the first
        eight, B3, and "1:" leaves step 0 out, B5), or one number (a single step, B4). Several, joined by
        commas, are united.
    n_steps : int
        Recurrence steps that exist.

    Returns
    -------
    list of int
        Ascending, without repeats, never empty.

    Raises
    ------
    ConfigError
        A step that does not exist, an empty choice, or a spelling that is not known.

    Examples
    --------
    >>> parse_steps("all", 4), parse_steps("first", 4), parse_steps("1:", 4), parse_steps("0:2,3", 4)
    ([0, 1, 2, 3], [0], [1, 2, 3], [0, 1, 3])
    """
    chosen: set[int] = set()
    for raw in spec.split(","):
        part = raw.strip()
        found = _RANGE.match(part)
        if part == "all":
            steps = range(n_steps)
        elif part == "first":
            steps = range(1)
        elif found:
            low = int(found[1] or 0)
            high = int(found[2]) if found[2] else n_steps
            if high > n_steps:
                raise ConfigError(f"steps {part!r}: the rollout has {n_steps} steps, 0 to {n_steps - 1}")
            steps = range(low, high)
        elif part.isdigit():
            steps = range(int(part), int(part) + 1)
        else:
            raise ConfigError(f"steps {part!r}: use all, first, a:b, a: or one number, joined by commas")
        if len(steps) == 0 or steps[-1] >= n_steps:
            raise ConfigError(f"steps {part!r}: the rollout has {n_steps} steps, 0 to {n_steps - 1}")
        chosen.update(steps)
    return sorted(chosen)


@dataclass(frozen=True)
class DiagnoseConfig:
    """Settings of a diagnosis; the numbers of prompts are small, so that a survey takes minutes.

    Parameters
    ----------
    bits : int
        Width of the rounding whose damage is measured.
    group_size : int
        Group size of the ablation and of the grouped arms; the per-channel arms are run beside it.
    damping : float
        Damping of the solver, for the directions it feels.
    n_prompts : int
        Prompts of arms, feedback, group sizes, displacement and perturbations.
    n_ablation_prompts : int
        Prompts of the single-layer ablation.
    n_jacobian_prompts : int
        Prompts of spectral radius and identity bypass.
    seeds : tuple of int
        Initial states of the feedback intervention and the bypass, where the state is drawn.
    lambdas : tuple of float
        Feedback strengths.
    radii : tuple of float
        Perturbation sizes of the bypass control, relative to the state.
    n_directions : int
        Directions of the bypass control.
    group_sizes : tuple of int
        Group-size sweep; -1 is per channel.
    n_updates : int
        Optimiser steps of the trained rank-4 update.
    batch_size : int
        Prompts that run together.
    seed : int
        Seed of the initial states everywhere else.
    """

    bits: int = 4
    group_size: int = 128
    damping: float = 0.01
    n_prompts: int = 8
    n_ablation_prompts: int = 10
    n_jacobian_prompts: int = 3
    seeds: tuple[int, ...] = (0, 1, 2)
    lambdas: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    radii: tuple[float, ...] = (0.005, 0.01, 0.02)
    n_directions: int = 32
    group_sizes: tuple[int, ...] = (32, 64, 128, 256, PER_CHANNEL)
    n_updates: int = 50
    batch_size: int = BATCH_SIZE
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("n_prompts", "n_ablation_prompts", "n_jacobian_prompts", "n_directions", "batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1; got {getattr(self, name)}")
        if not self.seeds:
            raise ConfigError("seeds must name at least one initial state")
        self.layer(self.group_size)

    def layer(self, group_size: int) -> LayerConfig:
        """Rounding of this diagnosis at a group size."""
        return LayerConfig(method="rtn", bits=self.bits, group_size=group_size, damping=self.damping)
