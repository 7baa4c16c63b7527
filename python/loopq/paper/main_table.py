"""The version of Li, Table 2: rounding, one-step and N-step calibration on every model, and its rank survey.

`measure_model` measures one model and returns plain data. `loopq.paper.main_text` turns it into estimates with
intervals, sentences and tables.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopq.calibrate.collect import HessianSet
from loopq.calibrate.data import TokenSet
from loopq.calibrate.plbert import PLBERT
from loopq.calibrate.select import Selection
from loopq.diagnosis.rank import FOCAL, layer_ranks
from loopq.errors import ConfigError
from loopq.evaluation.compare import Measurement, compare
from loopq.paper.bench import ADAPTER_DAMPING
from loopq.paper.models import PreparedModel, Sizes
from loopq.paper.probe import MASK_ID, MASK_SHARE, fit_probe, measure_states
from loopq.quantizers.config import Override
from loopq.run.config import QuantConfig
from loopq.run.solving import solve_from
from loopq.run.source import ModelSource
from loopq.settings.execution import Execution
from loopq.systems.stepwise import steps_of
from loopq.terminal.progress import Progress, Silent

GRIDS = ((4, 128), (3, 32))
RTN, ONE, ALL = "RTN", "one step", "N steps"
# Name, quantizer, and the steps of the summed Hessians.
VARIANTS = ((RTN, "rtn", "all"), (ONE, "gptq", "first"), (ALL, "gptq", "all"))

Weights = dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Settings:
    """Numbers of prompts and seeds of a run.

    Parameters
    ----------
    n_calibration, n_evaluation : int
        Prompts of one calibration set, and held-out prompts.
    seq_len : int
        Tokens of a prompt of text.
    n_seeds : int
        Calibration seeds. Prompts and initial states differ between seeds.
    hidden_calibration, hidden_evaluation : int
        Prompts for PL-BERT. Its rollout costs thirty times as much.
    n_probe : int
        Prompts for fitting PL-BERT's probe.
    """

    n_calibration: int = 64
    n_evaluation: int = 64
    seq_len: int = 128
    n_seeds: int = 3
    hidden_calibration: int = 32
    hidden_evaluation: int = 24
    n_probe: int = 96

    def of(self, name: str) -> Settings:
        """Settings for one model. PL-BERT has smaller counts."""
        if name != PLBERT:
            return self
        small = {"n_calibration": self.hidden_calibration, "n_evaluation": self.hidden_evaluation}
        return replace(self, **small)


def sizes_of(settings: Settings) -> Sizes:
    """Prompts to load from one text: the calibration prompts of all seeds, then those of the probe."""
    return Sizes(
        settings.n_calibration * settings.n_seeds,
        settings.n_probe,
        settings.n_evaluation,
        settings.seq_len,
    )


def measure_model(
    model: PreparedModel, settings: Settings, *, threads: int = 0, progress: Progress | None = None
) -> dict[str, Any]:
    """Quantize one model in every variant, on every grid, from every calibration seed, and measure it.

    Returns
    -------
    dict
        `model`, `system`, `n_steps` and `output` identify the run. `looped` tells whether any calibrated weight is
        called more than once. `full_precision` is the negative log-likelihood in nats by prompt, null for hidden
        states. `variants` has the bytes for each grid and variant. It lists KL, agreement and negative log-likelihood
        by calibration seed and prompt (for hidden states squared relative error, cosine and null). `ranks` comes from
        `rank_survey`. `states` comes from `loopq.paper.probe.measure_states` and is null for systems with logits.
    """
    progress = progress or Silent()
    began = time.monotonic()
    system = model.loaded.system
    weights: dict[str, Weights] = {}
    sizes: dict[str, int] = {}
    survey: dict[str, Any] = {}
    selection: Selection | None = None
    for seed, text in enumerate(_calibration_sets(model.calibration, settings.n_seeds)):
        execution = Execution(seed=seed, threads=threads, progress=progress)
        source = ModelSource.of(system, text, execution=execution)
        sums, selection = source.all_steps(source.plan(QuantConfig())), source.job.selection
        for name, layers in _solve(source, sums).items():
            sizes[name] = sum(layer.n_bytes for layer in layers.values())
            weights[name] = {n: layer.in_model_orientation() for n, layer in layers.items()}
        if seed == 0:
            survey = rank_survey(sums, selection, threads)
    assert selection is not None
    measured = compare(
        system,
        weights,
        model.evaluation,
        count_bytes=model.loaded.count_bytes,
        execution=Execution(progress=progress),
    )
    by_name = {m.name: m for m in measured}
    states = None
    if system.output == "hidden" and steps_of(system):
        first = {f"INT{b} g{g}, {a}": weights[_name(b, g, a, 0)] for b, g in GRIDS for a, _, _ in VARIANTS}
        probe = fit_probe(system, model.tuning_held_out, progress)
        states = measure_states(system, first, model.evaluation, probe, progress)
        states["probe"] = {"n_positions": probe.n_positions, "mask_share": MASK_SHARE, "mask_id": MASK_ID}
    return {
        "model": model.name,
        "system": system.name,
        "n_steps": system.n_steps,
        "output": system.output,
        "task": model.task,
        "looped": any(p.invocations > 1 for p in selection.observed),
        "bytes_per_token": measured[0].bytes_per_token,
        "full_precision": _rounded(measured[0].nll) if system.output == "logits" else None,
        "variants": [
            _result(bits, group, variant, sizes, by_name, settings)
            for bits, group in GRIDS
            for variant, _, _ in VARIANTS
        ],
        "ranks": survey,
        "states": states,
        "settings": asdict(settings),
        "seconds": round(time.monotonic() - began, 1),
    }


def on_grid(found: Mapping[str, Any], bits: int, group: int) -> dict[str, Mapping[str, Any]]:
    """Variants of one grid, by name."""
    return {a["variant"]: a for a in found["variants"] if (a["bits"], a["group_size"]) == (bits, group)}


def _calibration_sets(text: TokenSet, n_seeds: int) -> list[TokenSet]:
    each = len(text.sequences) // n_seeds
    if each < 1:
        raise ConfigError(
            f"{text.source}: {len(text.sequences)} prompts are too few for {n_seeds} seeds; each needs at least one"
        )
    return [text.take(s * each, (s + 1) * each) for s in range(n_seeds)]


def _name(bits: int, group: int, variant: str, seed: int) -> str:
    return f"INT{bits} g{group}, {variant}, seed {0 if variant == RTN else seed}"


def _solve(source: ModelSource, sums: HessianSet) -> dict[str, dict[str, Any]]:
    """Layers of every grid and variant from one calibration set. Rounding needs none and is done once."""
    # Li, Table 25: the adapter has 10 % damping, the core 1 %.
    adapters = tuple(
        Override(p.name, {"damping": ADAPTER_DAMPING})
        for p in source.job.selection.observed
        if p.role == "adapter"
    )
    seed = source.execution.seed
    solved = {}
    for bits, group in GRIDS:
        for variant, method, steps in VARIANTS:
            if variant == RTN and seed:
                continue
            config = QuantConfig.of(
                *(adapters if method == "gptq" else ()),
                method=method,
                scale_search="max",
                steps=steps,
                bits=bits,
                group_size=group,
                rank_threshold=None,
            )
            solved[_name(bits, group, variant, seed)] = solve_from(source.plan(config), source, sums)
    return solved


def _result(
    bits: int,
    group: int,
    variant: str,
    sizes: Mapping[str, int],
    measured: Mapping[str, Measurement],
    settings: Settings,
) -> dict[str, Any]:
    names = [_name(bits, group, variant, s) for s in range(1 if variant == RTN else settings.n_seeds)]

    def gather(field: Callable[[Measurement], NDArray[np.float64]]) -> list[Any]:
        return [_rounded(field(measured[n])) for n in names]

    hidden = measured[names[0]].output == "hidden"
    return {
        "bits": bits,
        "group_size": group,
        "variant": variant,
        "n_bytes": sizes[names[0]],
        "kl": gather(lambda m: m.kl),
        "agreement": gather(lambda m: m.agreement),
        "nll": None if hidden else gather(lambda m: m.nll),
    }


def _rounded(values: NDArray[np.float64]) -> list[float]:
    """Values of the prompts for the only evaluation seed, to eight digits."""
    return [float(f"{v:.8g}") for v in values[0]]


def layer_class(name: str) -> str:
    """Name of a weight without its block: "transformer.core_block.0.attn.Wqkv.weight" to "attn.Wqkv".

    Examples
    --------
    >>> layer_class("transformer.core_block.0.attn.Wqkv.weight"), layer_class("transformer.adapter.weight")
    ('attn.Wqkv', 'adapter')
    """
    parts = name.removesuffix(".weight").split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[numbers[-1] + 1 :]) if numbers else parts[-1]


def _readers_class(names: Sequence[str]) -> str:
    """Name of an input by the classes of the layers that read it: "self_attn.q_proj+k_proj+v_proj"."""
    first, *others = [layer_class(name) for name in names]
    return "+".join([first, *(other.rpartition(".")[2] for other in others)])


def rank_survey(sums: HessianSet, selection: Selection, threads: int = 0) -> dict[str, Any]:
    """Rank of every input Hessian at step 0, at the last step and over the trajectory (Li, Table 18).

    Returns
    -------
    dict
        `threshold` is tau: the ranks count eigenvalues above tau times the largest. `layers` describes each distinct
        input by the class of its layers, width, rows and steps. It also has the three ranks and the gain (trajectory
        over step 0). `bottleneck` is the layer with the lowest step-0 rank over width.
    """
    layers = []
    for p in selection.distinct_inputs:
        h: Any = sums.accumulators[p.name]
        found = layer_ranks(h, steps=[], threads=threads)
        layers.append(
            {
                "layer": p.name,
                "class": _readers_class(
                    [n for n, group in selection.input_groups.items() if group == p.name]
                ),
                "n_inputs": p.in_features,
                "n_rows": int(h.n_rows(0)),
                "n_steps": p.invocations,
                "first": found["first"]["rank"],
                "last": found["last"]["rank"],
                "all": found["all"]["rank"],
                "gain": found["rank_gain"],
                "step0_trace_share": found["step0_trace_share"],
            }
        )
    lowest = min(layers, key=lambda row: float(row["first"]) / float(row["n_inputs"]))
    return {"threshold": FOCAL, "layers": layers, "bottleneck": lowest["layer"]}
