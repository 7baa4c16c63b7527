"""The public functions: quantize a model, solve a dump, evaluate a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from loopq.calibrate.data import TokenSet, check_count, check_vocabulary
from loopq.calibrate.dump import Dump, fingerprint
from loopq.calibrate.select import treat
from loopq.checkpoint import native as store
from loopq.checkpoint.convert import NATIVE, read_any, write_as
from loopq.checkpoint.files import RawTensor, check_new, own_folder, remove_own
from loopq.checkpoint.layer import QuantizedLayer
from loopq.checkpoint.model_files import model_tensors
from loopq.checkpoint.native import Checkpoint
from loopq.config import AllocateConfig, LayerConfig, QuantConfig, check_threads
from loopq.config import preset as named
from loopq.errors import CheckpointError, ConfigError
from loopq.jobs.run import Run, side_files
from loopq.jobs.several import held_back, mixed, on_top, refuse_short_scales, tuned, validated
from loopq.progress import Progress, Silent
from loopq.quantizers import check_methods
from loopq.quantizers.solve import Solver, tasks_of
from loopq.systems.base import LoopedSystem

if TYPE_CHECKING:
    from loopq.evaluate.compare import Measurement
    from loopq.systems.load import LoadedModel
    from loopq.tune.tuner import TuneConfig


def settings_of(
    config: QuantConfig, *, system: str, n_steps: int, seed: int, calibration: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything that fixes a result, as plain data: what a checkpoint's `loopq.json` holds."""
    return {
        "quantization": config.to_json(),
        "system": system,
        "n_steps": n_steps,
        "seed": seed,
        "calibration": dict(calibration),
    }


def quantize(
    model: str | Path | LoadedModel | LoopedSystem,
    calibration: TokenSet | Sequence[Sequence[int]] | str | Path | None = None,
    config: QuantConfig | None = None,
    *,
    out: str | Path | None = None,
    n_steps: int | None = None,
    n_prompts: int | None = None,
    seq_len: int | None = None,
    batch_size: int = 8,
    seed: int = 0,
    memory: int | None = None,
    threads: int = 0,
    progress: Progress | None = None,
    allocate: AllocateConfig | None = None,
    tune: TuneConfig | None = None,
    n_held_out: int | None = None,
    preset: str | None = None,
    **layer: Any,
) -> Checkpoint:
    """Quantize the shared layers of a looped model over its trajectory.

    Parameters
    ----------
    model : str, Path, LoadedModel or LoopedSystem
        Zoo name, folder or hub id; or a model that is loaded already.
    calibration : TokenSet, token ids, path, or None
        Calibration prompts. A path is read by its kind (`loopq.calibrate.data.read_tokens`); None takes the
        text that ships with the zoo and needs a model that reads bytes.
    config : QuantConfig, optional
        Settings. Fields of `LayerConfig` and "steps" may be given as keywords instead.
    out : path, optional
        Folder for the checkpoint. A run that was interrupted goes on where it stopped.
    n_steps : int, optional
        Depth of the rollout; the model's own when absent.
    n_prompts, seq_len : int, optional
        Prompts to take and tokens of a window, where `calibration` is text.
    batch_size : int
        Prompts that run together.
    seed : int
        Seed of the initial states.
    memory : int, optional
        Bytes that Hessian accumulators may take; the calibration set is run several times if need be.
    threads : int
        Threads of accumulation and solver; 0 takes all cores. It changes no result.
    progress : Progress, optional
        Told of prompts and layers.
    allocate : AllocateConfig, optional
        Choose bits and group size of every layer under a byte budget first.
    tune : TuneConfig, optional
        Go on from the closed form by gradient: a tier of its own, which the report names.
    n_held_out : int, optional
        Calibration prompts that are held back for early stopping of `tune` and for `step_weights="validated"`,
        where either is asked for; a quarter when absent.
    preset : str, optional
        A name of `loopq.config.PRESETS`, whose settings replace those of `config`: "best" is the full solver in the
        loop metric, closest to full precision at the same bytes, for a backward pass more for each prompt and draw.
    **layer
        Fields of `LayerConfig` and `QuantConfig` ("bits", "steps", ...) that replace those of `config` and `preset`.

    Returns
    -------
    Checkpoint
        Quantized layers with a report each, and the rest of the model.

    Raises
    ------
    LoopqError
        Bad settings, calibration or model; the message names the layer and the step.

    Notes
    -----
    GPTQ (paper, A3) with H = sum over the steps chosen of X_t^T X_t (Eq. 3), X_t the rows that a layer sees
    at its t-th invocation in the full-precision rollout.

    Examples
    --------
    >>> import loopq
    >>> result = loopq.quantize("huginn_small", bits=4, group_size=32, n_prompts=2, seq_len=32, n_steps=2)
    >>> len(result.layers) > 0
    True
    """
    progress = progress or Silent()
    check_threads(threads)
    config = _config(named(preset, config) if preset is not None else config, layer)
    folder = Path(out) if out is not None else None
    if folder is not None:
        check_new(folder)
    loaded = _load(model)
    tokens = calibration_tokens(loaded, calibration, n_prompts=n_prompts, seq_len=seq_len)
    held: TokenSet | None = None
    if tune is not None or config.layer.step_weights == "validated":
        tokens, held = held_back(tokens, n_held_out)
    first = config
    if config.layer.step_weights == "validated":
        first = dataclasses.replace(config, layer=dataclasses.replace(config.layer, step_weights="sum"))
    run = Run.prepare(loaded, tokens, first, n_steps, batch_size, seed, threads)
    if tune is not None:
        refuse_short_scales(run.tasks)
    depth = run.job.selection.n_steps
    estimate = run.estimate(memory)
    progress.note(f"{len(run.tasks)} layers, {depth} steps: {estimate}{on_top(run, allocate, tune)}")
    work = own_folder(folder.with_name(f".{folder.name}.work")) if folder is not None else None
    extra: dict[str, Any] = {}
    if allocate is not None:
        config, extra["allocation"] = mixed(run, config, allocate, progress)

    def solve_as(asked: QuantConfig) -> dict[str, QuantizedLayer]:
        return run.asking(asked).solve(memory, work, progress)

    if config.layer.step_weights == "validated":
        assert held is not None
        layers, config, extra["validation"] = validated(loaded.system, solve_as, config, held, depth, seed)
    else:
        layers = solve_as(config)
    if tune is not None:
        assert held is not None
        layers, extra["tuning"] = tuned(loaded.system, layers, tokens, held, tune, depth, progress)
    tensors, ties = model_tensors(loaded.system.model)
    settings = extra | settings_of(
        config, system=loaded.system.name, n_steps=depth, seed=seed, calibration=run.job.describe()
    )
    checkpoint = _assemble(layers, tensors, ties, settings, side_files(loaded))
    if folder is not None:
        write_as(folder, checkpoint, NATIVE)
        if work is not None:
            remove_own(work)
    return checkpoint


def solve(
    dump: str | Path,
    config: QuantConfig | None = None,
    *,
    out: str | Path | None = None,
    threads: int = 0,
    progress: Progress | None = None,
    **layer: Any,
) -> Checkpoint:
    """Quantize from a calibration dump; needs no torch and gives the very bytes of `quantize`.

    Parameters
    ----------
    dump : path
        Dump of rows or of Hessians.
    config : QuantConfig, optional
        Settings, or fields of `LayerConfig` and "steps" as keywords.
    out : path, optional
        Folder for the checkpoint. A run that was interrupted goes on where it stopped.
    threads : int
        Threads; 0 takes all cores. It changes no result.
    progress : Progress, optional
        Told of layers.
    **layer
        Fields of `LayerConfig` and `QuantConfig` ("bits", "steps", ...) that replace those of `config`.

    Returns
    -------
    Checkpoint
        Quantized layers with a report each, and the rest of the model.

    Raises
    ------
    DumpError
        The dump is truncated or altered, or lacks a step that is asked for.
    """
    progress = progress or Silent()
    check_threads(threads)
    config = _config(config, layer)
    if config.inputs != "open":
        raise ConfigError(
            f"inputs {config.inputs!r} run the model between layers, which a dump cannot: use `quantize`"
        )
    folder = Path(out) if out is not None else None
    if folder is not None:
        check_new(folder)
    source = Dump(Path(dump))
    manifest = source.manifest
    # What a dump was told to leave out it did not observe; include cannot bring it back.
    parameters = treat(manifest.parameters, (), config.exclude)
    tasks, _ = tasks_of(parameters, manifest.leaders, config)
    for task in tasks:
        if task.config.metric == "loop":
            raise ConfigError(
                f"layer {task.parameter.name}: metric 'loop' needs gradients through the loop, and a dump holds "
                "activations alone: use `quantize` on the model, or metric 'inputs' here"
            )
    work = own_folder(folder.with_name(f".{folder.name}.work")) if folder is not None else None
    solver = Solver(
        weight=source.weight,
        source=source,
        rank_threshold=config.rank_threshold,
        threads=threads,
        work=work,
        key=fingerprint(config.to_json(), manifest.model, manifest.rows, manifest.files),
        progress=progress,
    )
    layers = solver.run(tasks)
    settings = settings_of(
        config,
        system=manifest.system,
        n_steps=manifest.n_steps,
        seed=manifest.seed,
        calibration=manifest.calibration,
    )
    checkpoint = _assemble(layers, source.model_tensors(), dict(manifest.ties), settings, source.side_files())
    if folder is not None:
        write_as(folder, checkpoint, NATIVE)
        solver.clear()
    return checkpoint


def load(
    folder: str | Path,
    model: LoadedModel | None = None,
    *,
    quantized: bool = False,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load a checkpoint as a torch model.

    Parameters
    ----------
    folder : path
        Checkpoint, native or of any format in `loopq.checkpoint.FORMATS`.
    model : LoadedModel, optional
        A model of the same kind to put the weights into; built from the checkpoint's own config when absent.
    quantized : bool
        Hold codes and scales instead of dequantized weights: symmetric layers in
        `loopq.kernels.modules.QuantLinear` (int4 on a GPU where the kernel fits), asymmetric ones and those that
        transform their input in `loopq.kernels.reference.PackedLinear`. A layer whose module is no `nn.Linear`
        keeps its dequantized weight; the report's notes say which and why.
    trust_remote_code : bool
        Allow code that came with the model to run.

    Returns
    -------
    LoadedModel
        The model in eval mode, its adapter and its tokenizer.

    Raises
    ------
    CheckpointError
        The checkpoint is damaged, or does not fit the model.
    """
    checkpoint = read_any(Path(folder))
    return load_checkpoint(checkpoint, model, quantized=quantized, trust_remote_code=trust_remote_code)


def load_checkpoint(
    checkpoint: Checkpoint,
    model: LoadedModel | None = None,
    *,
    quantized: bool = False,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load a checkpoint that has been read already; see `load`."""
    from loopq.systems.build import build_model

    loaded = model or build_model(
        checkpoint.side_files,
        system=checkpoint.settings.get("system"),
        trust_remote_code=trust_remote_code,
    )
    store.load_into(loaded.model, checkpoint)
    if not quantized:
        return loaded
    from loopq.systems.quantized import install

    kept = install(loaded.model, checkpoint)
    notes = tuple(f"dequantized weight kept: {name}: {reason}" for name, reason in kept.items())
    report = dataclasses.replace(loaded.report, notes=(*loaded.report.notes, *notes))
    return dataclasses.replace(loaded, report=report)


def weights_of(checkpoint: Checkpoint) -> dict[str, NDArray[np.float32]]:
    """Return the dequantized weights of the quantized layers in the model's orientation, float32."""
    return {name: layer.in_model_orientation() for name, layer in checkpoint.layers.items()}


def calibration_tokens(
    loaded: LoadedModel,
    calibration: TokenSet | Sequence[Sequence[int]] | str | Path | None,
    *,
    n_prompts: int | None = None,
    seq_len: int | None = None,
) -> TokenSet:
    """Read calibration prompts in whatever way they were given; see `quantize`."""
    tokens = _tokens(loaded, calibration, n_prompts, seq_len)
    settings = getattr(loaded.model, "config", None)
    known = loaded.config.get("vocab_size", getattr(settings, "vocab_size", None))
    if isinstance(known, int):
        check_vocabulary(tokens, known)
    return tokens


def _tokens(
    loaded: LoadedModel,
    calibration: TokenSet | Sequence[Sequence[int]] | str | Path | None,
    n_prompts: int | None,
    seq_len: int | None,
) -> TokenSet:
    from loopq.calibrate.data import from_ids, read_tokens, windows
    from loopq.config import CALIBRATION_PROMPTS, SEQ_LEN

    length = seq_len if seq_len is not None else SEQ_LEN
    count = n_prompts if n_prompts is not None else CALIBRATION_PROMPTS
    if isinstance(calibration, TokenSet):
        check_count(n_prompts)
        return calibration.take(0, n_prompts) if n_prompts is not None else calibration
    if calibration is None:
        from loopq import zoo

        if loaded.tokenizer is not None:
            raise ConfigError(
                "this model has a tokenizer of its own, and the text that ships with loopq is for models that read "
                "bytes: give it a text (--calibration FILE, --text FILE)"
            )
        return windows(
            zoo.calibration_text().decode(), loaded.encode, length, count, "embedded calibration text"
        )
    if isinstance(calibration, str | Path):
        return read_tokens(Path(calibration), loaded.encode, length, count)
    return from_ids(list(calibration)[:n_prompts])


def _config(config: QuantConfig | None, changes: dict[str, Any]) -> QuantConfig:
    base = config or QuantConfig()
    names = {f.name for f in dataclasses.fields(QuantConfig)} - {"layer"}
    known = {f.name for f in dataclasses.fields(LayerConfig)}
    unknown = sorted(set(changes) - names - known)
    if unknown:
        raise ConfigError(f"unknown setting {', '.join(unknown)}; known: {', '.join(sorted(names | known))}")
    run = {k: v for k, v in changes.items() if k in names}
    layer = {k: v for k, v in changes.items() if k not in names}
    found = dataclasses.replace(base, layer=dataclasses.replace(base.layer, **layer), **run)
    check_methods(found)
    return found


def _load(model: str | Path | LoadedModel | LoopedSystem) -> LoadedModel:
    from loopq.systems.load import LoadedModel, describe, encode_bytes, load_model

    if isinstance(model, LoadedModel):
        return model
    if not isinstance(model, LoopedSystem):
        return load_model(model)
    return LoadedModel(
        model=model.model,
        system=model,
        encode=encode_bytes,
        tokenizer=None,
        config={},
        folder=None,
        config_files=(),
        report=describe(model.model, type(model.model).__name__, "module"),
    )


def _assemble(
    layers: dict[str, QuantizedLayer],
    tensors: dict[str, RawTensor],
    ties: dict[str, str],
    settings: dict[str, Any],
    side_files: dict[str, bytes],
) -> Checkpoint:
    dense = {name: tensor for name, tensor in tensors.items() if name not in layers}
    kinds = {name: tensors[name].dtype for name in layers}
    return Checkpoint(layers, dense, ties, settings | {"weight_dtypes": kinds}, side_files)


def evaluate(
    model: str | Path | LoadedModel | LoopedSystem,
    checkpoints: Sequence[str | Path],
    text: TokenSet | str | Path | None = None,
    *,
    n_steps: int | None = None,
    n_prompts: int | None = None,
    seq_len: int | None = None,
    batch_size: int = 8,
    seeds: Sequence[int] = (0,),
    progress: Progress | None = None,
) -> list[Measurement]:
    """Measure checkpoints against the full-precision model on held-out text, with paired initial states.

    Parameters
    ----------
    model : str, Path, LoadedModel or LoopedSystem
        Full-precision model.
    checkpoints : sequence of paths
        Checkpoints of that model, native or of any format in `loopq.checkpoint.FORMATS`.
    text : TokenSet, path, or None
        Held-out prompts; None takes the evaluation text that ships with the zoo.
    n_steps, n_prompts, seq_len, batch_size : int, optional
        As of `quantize`, but for the number of prompts (`loopq.config.EVALUATION_PROMPTS`).
    seeds : sequence of int
        Seeds of the initial states; each prompt starts from the same state in every set of weights.
    progress : Progress, optional
        Told of prompts.

    Returns
    -------
    list of Measurement
        Full precision first, then the checkpoints in order, with their bytes.

    Raises
    ------
    CheckpointError
        A checkpoint is damaged, or of another system.
    """
    from loopq.evaluate.compare import compare

    opened = {str(folder): read_any(folder) for folder in checkpoints}
    loaded = _load(model)
    tokens = evaluation_tokens(loaded, text, n_prompts=n_prompts, seq_len=seq_len)
    for folder, checkpoint in opened.items():
        # A file that another tool wrote does not say; its names and shapes are compared with the model's.
        if checkpoint.settings["system"] not in (None, loaded.system.name):
            raise CheckpointError(
                f"{folder}: a checkpoint of system {checkpoint.settings['system']!r}; "
                f"the model is {loaded.system.name!r}"
            )
    variants = {folder: weights_of(checkpoint) for folder, checkpoint in opened.items()}
    measured = compare(
        loaded.system,
        variants,
        tokens,
        n_steps=n_steps,
        seeds=seeds,
        batch_size=batch_size,
        progress=progress,
    )
    dense = sum(tensor.data.size for tensor in model_tensors(loaded.system.model)[0].values())
    sizes = [dense, *(checkpoint.n_bytes for checkpoint in opened.values())]
    return [dataclasses.replace(m, n_bytes=n) for m, n in zip(measured, sizes, strict=True)]


def evaluation_tokens(
    loaded: LoadedModel,
    text: TokenSet | str | Path | None,
    *,
    n_prompts: int | None = None,
    seq_len: int | None = None,
) -> TokenSet:
    """Read held-out prompts; None takes the text that ships with the zoo, for models that read bytes."""
    from loopq import zoo
    from loopq.calibrate.data import windows
    from loopq.config import EVALUATION_PROMPTS, SEQ_LEN

    length = SEQ_LEN if seq_len is None else seq_len
    count = EVALUATION_PROMPTS if n_prompts is None else n_prompts
    if text is None and loaded.tokenizer is None:
        held_out = zoo.evaluation_text().decode()
        text = windows(held_out, loaded.encode, length, count, "embedded evaluation text")
    if not isinstance(text, TokenSet):
        n_prompts = count
    return calibration_tokens(loaded, text, n_prompts=n_prompts, seq_len=length)
