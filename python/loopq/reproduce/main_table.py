"""The paper's main table: rounding, one-step and N-step calibration on every model, and the ranks beside it.

`measure_model` measures one model and gives plain data; `loopq.reproduce.main_text` makes numbers with intervals,
words and tables of it.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import loopq
from loopq.calibrate.collect import HessianSet
from loopq.calibrate.data import TokenSet
from loopq.calibrate.dump import fingerprint
from loopq.calibrate.select import Selection
from loopq.checkpoint.files import read_json, write_json
from loopq.checkpoint.model_files import model_tensors
from loopq.config import LayerConfig, Override, QuantConfig
from loopq.diagnose.rank import FOCAL, layer_ranks
from loopq.errors import ConfigError, LoopqError
from loopq.evaluate.compare import Measurement, compare
from loopq.jobs.run import duration
from loopq.progress import Progress, Silent
from loopq.quantizers.arms import collect_all_steps, solve_arm
from loopq.reproduce.models import PLBERT, PreparedModel, Sizes, prepare_model
from loopq.reproduce.probe import MASK_ID, MASK_SHARE, fit_probe, measure_states
from loopq.systems.base import LoopedSystem

FORMAT = 2
GRIDS = ((4, 128), (3, 32))
RTN, ONE, ALL = "RTN", "one step", "N steps"
# Name, method, steps whose Hessians are summed.
VARIANTS = ((RTN, "rtn", "all"), (ONE, "gptq", "first"), (ALL, "gptq", "all"))
ADAPTER_DAMPING = 0.1

Weights = dict[str, dict[str, NDArray[np.float32]]]


@dataclass(frozen=True)
class Settings:
    """How much is run.

    Parameters
    ----------
    n_calibration, n_evaluation : int
        Prompts of one calibration set, and held-out prompts.
    seq_len : int
        Tokens of a prompt of text.
    n_seeds : int
        Calibration seeds: each has prompts of its own and initial states of its own.
    hidden_calibration, hidden_evaluation, n_probe : int
        The same for PL-BERT, whose rollout costs thirty times as much, and prompts that its probe is fitted on.
    """

    n_calibration: int = 64
    n_evaluation: int = 64
    seq_len: int = 128
    n_seeds: int = 3
    hidden_calibration: int = 32
    hidden_evaluation: int = 24
    n_probe: int = 96

    def __post_init__(self) -> None:
        for name, least in (("n_calibration", 1), ("n_evaluation", 2), ("seq_len", 2), ("n_seeds", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}; got {getattr(self, name)}")

    def of(self, name: str) -> Settings:
        """Settings for one model: PL-BERT has its own counts."""
        if name != PLBERT:
            return self
        small = {"n_calibration": self.hidden_calibration, "n_evaluation": self.hidden_evaluation}
        return Settings(**(asdict(self) | small))


def run(
    names: Sequence[str],
    settings: Settings | None = None,
    *,
    data: Path | None = None,
    work: Path | None = None,
    threads: int = 0,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Measure every model; one that is in `work` with the same weights, prompts and settings is not run again.

    Parameters
    ----------
    names : sequence of str
        The embedded model, folders, hub ids, "plbert".
    settings : Settings, optional
        How much is run.
    data : Path, optional
        Data folder, for "plbert".
    work : Path, optional
        Folder where each model's results are kept.
    threads : int
        Threads of the core; 0 takes all.
    progress : Progress, optional
        Told of every stage.

    Returns
    -------
    list of dict
        What `measure_model` gives, in the order of the names.
    """
    progress = progress or Silent()
    settings = settings or Settings()
    found = []
    # All are loaded before any is measured: a name that is wrong shows at once.
    models = [(prepare_model(n, _sizes(settings.of(n)), data), settings.of(n)) for n in names]
    paths = [work / f"{model.name}.json" if work else None for model, _ in models]
    keys = [_key(model, own) for model, own in models]
    before = [_kept(path, key) for path, key in zip(paths, keys, strict=True)]
    progress.note(_estimate([m for m, kept in zip(models, before, strict=True) if kept is None], len(models)))
    for number, ((model, own), path, key, kept) in enumerate(
        zip(models, paths, keys, before, strict=True), start=1
    ):
        progress.note(f"{number}/{len(names)} {model.name}" + ": measured before" * (kept is not None))
        if kept is None:
            kept = measure_model(model, own, threads=threads, progress=progress) | {"key": key}
            if path is not None:
                write_json(path, kept)
        found.append(kept)
    return found


def _estimate(left: Sequence[tuple[PreparedModel, Settings]], total: int) -> str:
    """How long the models that are left will take, told before it starts."""
    if not left:
        return f"all {total} models were measured before"
    seconds = {model.name: expected_seconds(model, own) for model, own in left}
    longest = max(seconds, key=lambda name: seconds[name])
    return (
        f"{len(left)} of {total} models to measure: about {duration(sum(seconds.values()))}, of it {longest} "
        f"{duration(seconds[longest])}"
    )


def expected_seconds(model: PreparedModel, settings: Settings) -> float:
    """Seconds that `measure_model` spends in rollouts, from one short rollout that is timed now."""
    system = model.loaded.system
    batch = next(model.evaluation.take(0, 2).batches(2))
    began = time.monotonic()
    system.rollout(batch, system.n_steps)
    each = (time.monotonic() - began) / len(batch.prompts)
    variants = len(GRIDS) * (1 + (len(VARIANTS) - 1) * settings.n_seeds)
    n_rollouts = settings.n_seeds * settings.n_calibration + settings.n_evaluation * (1 + variants)
    if system.output == "hidden" and system.has_steps:
        n_rollouts += settings.n_probe + settings.n_evaluation * (1 + len(GRIDS) * len(VARIANTS))
    return each * n_rollouts


def _sizes(settings: Settings) -> Sizes:
    """One text, cut by `_calibration_sets`; the rest of it is the probe's."""
    return Sizes(
        settings.n_calibration * settings.n_seeds,
        settings.n_probe,
        settings.n_evaluation,
        settings.seq_len,
    )


def _key(model: PreparedModel, settings: Settings) -> str:
    weights = {
        name: hashlib.sha256(tensor.data.data).hexdigest()
        for name, tensor in model_tensors(model.loaded.model)[0].items()
    }
    texts = [t.digest() for t in (model.calibration, model.evaluation)]
    return fingerprint(FORMAT, loopq.__version__, weights, texts, asdict(settings), GRIDS, VARIANTS)


def _kept(path: Path | None, key: str) -> dict[str, Any] | None:
    if path is None or not path.is_file():
        return None
    try:
        found: dict[str, Any] = read_json(path)
    except LoopqError:
        return None
    return found if found.get("key") == key else None


def measure_model(
    model: PreparedModel, settings: Settings, *, threads: int = 0, progress: Progress | None = None
) -> dict[str, Any]:
    """Quantize one model by every variant, on every grid, from every calibration seed, and measure it.

    Returns
    -------
    dict
        `model`, `system`, `n_steps`, `output`, `looped` (whether any calibrated weight is called twice);
        `full_precision`: per prompt the negative log-likelihood in nats, null for hidden states; `variants`: for
        each grid and variant bytes and, by calibration seed and prompt, KL, agreement and negative log-likelihood
        (hidden states: squared relative error, cosine, null); `ranks`: see `rank_survey`; `states`: see
        `loopq.reproduce.probe.measure_states`, null where there are logits.
    """
    progress = progress or Silent()
    began = time.monotonic()
    system = model.loaded.system
    weights: Weights = {}
    sizes: dict[str, int] = {}
    survey: dict[str, Any] = {}
    selection: Selection | None = None
    for seed, text in enumerate(_calibration_sets(model.calibration, settings.n_seeds)):
        sums, selection = collect_all_steps(system, text, seed=seed, threads=threads, progress=progress)
        for name, layers in _solve(system, sums, selection, seed, threads).items():
            sizes[name] = sum(layer.n_bytes for layer in layers.values())
            weights[name] = {n: layer.in_model_orientation() for n, layer in layers.items()}
        if seed == 0:
            survey = rank_survey(sums, selection, threads)
    assert selection is not None
    measured = compare(system, weights, model.evaluation, scored_from=model.scored_from, progress=progress)
    by_name = {m.name: m for m in measured}
    states = None
    if system.output == "hidden" and system.has_steps:
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
            _variant(bits, group, variant, sizes, by_name, settings)
            for bits, group in GRIDS
            for variant, _, _ in VARIANTS
        ],
        "ranks": survey,
        "states": states,
        "settings": asdict(settings),
        "seconds": round(time.monotonic() - began, 1),
    }


def _calibration_sets(text: TokenSet, n_seeds: int) -> list[TokenSet]:
    each = len(text.sequences) // n_seeds
    if each < 1:
        raise ConfigError(f"{text.source}: {len(text.sequences)} prompts are too few for {n_seeds} seeds")
    return [text.take(s * each, (s + 1) * each) for s in range(n_seeds)]


def _name(bits: int, group: int, variant: str, seed: int) -> str:
    return f"INT{bits} g{group}, {variant}, seed {0 if variant == RTN else seed}"


def _solve(
    system: LoopedSystem, sums: HessianSet, selection: Selection, seed: int, threads: int
) -> dict[str, dict[str, Any]]:
    """Layers of every grid and variant from one calibration set; rounding needs none and is done once."""
    # The paper damps the feedback adapter by 10 %, everything else by 1 %.
    adapters = tuple(
        Override(p.name, {"damping": ADAPTER_DAMPING}) for p in selection.observed if p.role == "adapter"
    )
    solved = {}
    for bits, group in GRIDS:
        for variant, method, steps in VARIANTS:
            if variant == RTN and seed:
                continue
            layer = LayerConfig(method=method, bits=bits, group_size=group)
            config = QuantConfig(layer, steps=steps, overrides=adapters, rank_threshold=None)
            solved[_name(bits, group, variant, seed)] = solve_arm(sums, selection, system, config, threads)
    return solved


def _variant(
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
    """The prompts' values of the one evaluation seed, eight digits."""
    return [float(f"{v:.8g}") for v in values[0]]


def layer_class(name: str) -> str:
    """Name of a weight without what numbers it: "transformer.core_block.0.attn.Wqkv.weight" to "attn.Wqkv".

    Examples
    --------
    >>> layer_class("transformer.core_block.0.attn.Wqkv.weight"), layer_class("transformer.adapter.weight")
    ('attn.Wqkv', 'adapter')
    """
    parts = name.removesuffix(".weight").split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[numbers[-1] + 1 :]) if numbers else parts[-1]


def _readers_class(names: Sequence[str]) -> str:
    """Class of an input by the layers that read it: "self_attn.q_proj+k_proj+v_proj"."""
    first, *others = [layer_class(name) for name in names]
    return "+".join([first, *(other.rpartition(".")[2] for other in others)])


def rank_survey(sums: HessianSet, selection: Selection, threads: int = 0) -> dict[str, Any]:
    """Count the directions that calibration sees, at step 0, at the last step and over the trajectory.

    Returns
    -------
    dict
        `threshold` tau: an eigenvalue counts above tau times the largest; `layers`: for each distinct input the
        class of layer, the layers that read it, width, rows, steps, the three ranks and the gain (trajectory
        over step 0); `bottleneck`: the layer with the lowest step-0 rank over width.
    """
    layers = []
    for p in selection.input_groups:
        h: Any = sums.accumulators[p.name]
        found = layer_ranks(h, thresholds=(FOCAL,), steps=[], threads=threads)
        layers.append(
            {
                "layer": p.name,
                "class": _readers_class([n for n, leader in selection.leaders.items() if leader == p.name]),
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
