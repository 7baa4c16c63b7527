"""The public functions of the quantizer: quantize a model, solve a dump, load, and evaluate."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, Unpack

from loopq.annotations import listed
from loopq.calibrate.calls import CallSet
from loopq.calibrate.prompts import CalibrationTake, Prompts, Take, calibration_tokens, evaluation_tokens
from loopq.errors import ConfigError
from loopq.evaluation.compare import compare, content, overlap
from loopq.formats.base import Format, FormatOptions
from loopq.formats.checkpoint import Checkpoint, fitted
from loopq.formats.convert import read_any
from loopq.formats.native import NATIVE
from loopq.models.depths import at_depths
from loopq.models.from_python import Opening, open_model
from loopq.models.load import LoadedModel
from loopq.models.plain import plain_modes
from loopq.models.restore import load_checkpoint, name_module
from loopq.run.allocate import allocate
from loopq.run.config import PRESETS, QuantConfig, divided
from loopq.run.destination import Wanted
from loopq.run.dump_source import DumpSource, refuse_rollouts
from loopq.run.export import exported, folded, quantized_format, refuse_early
from loopq.run.gate import Gate, Proof
from loopq.run.kept import Kept
from loopq.run.model_source import ModelSource
from loopq.run.plan import Plan
from loopq.run.ranks import Ranks
from loopq.run.result import Write, apart, output
from loopq.run.route import carry_out
from loopq.run.together import Team
from loopq.settings.execution import Execution
from loopq.storage.model_files import model_tensors
from loopq.systems.base import LoopedSystem
from loopq.systems.capabilities import Describes, Discovers
from loopq.terminal.progress import Silent

if TYPE_CHECKING:
    from torch import nn

    from loopq.calibrate.calls import Score
    from loopq.calibrate.data import TokenSet
    from loopq.evaluation.compare import Measurement
    from loopq.models.coded import Activations
    from loopq.run.keywords import MeasureKeywords, QuantizeKeywords, SolveKeywords

    Model: TypeAlias = str | Path | LoadedModel | LoopedSystem | nn.Module


def quantize(
    model: Model,
    calibration: Prompts = None,
    config: QuantConfig | None = None,
    *,
    out: str | Path | None = None,
    n_steps: int | Sequence[int] | None = None,
    write: str | Write | None = None,
    ranks: Ranks | None = None,
    keep: Sequence[str] = (),
    requantize: bool = False,
    **options: Unpack[QuantizeKeywords],
) -> Checkpoint:
    """Quantize the shared layers of a looped model over its trajectory.

    Parameters
    ----------
    model : str, Path, LoadedModel, LoopedSystem or torch module
        Embedded model, folder, hub id, loaded model, or any torch module. Where no adapter knows a class, loopq
        runs it once and discovers its loop.
    calibration : TokenSet, token ids, path, list of batches, or None
        Calibration prompts (`loopq.calibrate.prompts.calibration_tokens`). A module that takes no token ids gets
        batches: each is the arguments of one call, as a tuple, a dict (keyword arguments) or one float tensor.
    config : QuantConfig, optional
        Settings of the run.
    out : path, optional
        Folder for the checkpoint. The same call resumes an interrupted run.
    n_steps : int or several, optional
        Depth; the model's own when absent. With several each prompt runs at each (`loopq.models.depths.Depths`).
    write : str or callable, optional
        Format of `loopq.export` for `out`, checked before the run, or a function that writes the checkpoint to `out`.
    ranks : loopq.run.ranks.Ranks, optional
        This process among those started by torchrun. They divide the work.
    keep : str or sequence of str
        Patterns of tensors in the model's files, codes too, that stay bit for bit unchanged.
    requantize : bool
        Accept a folder that loopq wrote as the model. Folders of other quantizers are always accepted.
    **options
        "preset", settings of `QuantConfig` ("bits", "method", "steps", ...), which replace those of `config`, and of
        `Execution` ("seed", "memory", ...). "n_prompts", "seq_len" and "random_tokens" (0.05 of a text's tokens by
        default) apply to prompts, "tokenizer" and "trust_remote_code" to the model
        (`loopq.models.from_python.Opening`). "engine" names the program that will run `out` ("loopq", "transformers",
        "vllm", "sglang", "gptqmodel" or "llama.cpp"), and decides format, levels and rotation. With `write` it is only
        checked, as are "force" and "verify" (`loopq.run.gate.Gate`).

    Returns
    -------
    Checkpoint
        Quantized layers, each with a report, and the rest of the model. The method minimises tr(D H D^T) over each
        weight's error D, with H summed over the chosen steps of the full-precision rollout.

    Raises
    ------
    LoopqError
        Settings, calibration or model are invalid. The message names the layer and the step.

    Examples
    --------
    >>> len(quantize("huginn_small", bits=4, group_size=32, n_prompts=2, seq_len=32, n_steps=2).layers) > 0
    True
    """
    job = _Quantization(model, calibration, n_steps, listed(keep, tuple[str, ...]), requantize)
    with plain_modes():
        return job.run(config or QuantConfig(), options, out, write, ranks)


@dataclasses.dataclass(frozen=True)
class _Quantization:
    """The model and the prompts of `quantize`."""

    model: Model
    calibration: Prompts
    n_steps: int | Sequence[int] | None
    keep: tuple[str, ...]
    requantize: bool

    def run(
        self,
        config: QuantConfig,
        options: Mapping[str, Any],
        out: str | Path | None,
        write: str | Write | None,
        ranks: Ranks | None,
    ) -> Checkpoint:
        config, execution, take, gate, opening = divided(
            options, config, Execution(), CalibrationTake(), Gate(), Opening()
        )
        source = self.model
        if gate.engine is not None and write is None:
            source = open_model(source, opening, requantize=self.requantize)
            given = {*options, *PRESETS.get(options.get("preset") or "", ())}
            at_depth, depth = at_depths(source, self.n_steps)
            choice = Wanted(at_depth, config, given, n_steps=depth, gate=gate).choose(gate.engine)
            execution.progress.note(choice.line())
            config, target, values = choice.config, choice.target, choice.options
        else:
            target = quantized_format(write if isinstance(write, str) else NATIVE.name)
            values = target.values()
        own_format = target.own and not callable(write)
        proof = Proof(trust_remote_code=opening.trust_remote_code)
        if own_format:
            write = None
        elif not callable(write):
            write = partial(_export, out=out, target=target, gate=gate, proof=proof, values=values)
        config = config.for_format(own_format, target.outside)
        team = None if ranks is None else Team.of_ranks(ranks, config, out, own_format=own_format)
        with output(out, execution, write, shared=team is not None) as (execution, finish):
            opened = open_model(source, opening, requantize=self.requantize)
            loaded, depth = at_depths(opened, self.n_steps)
            kept = Kept.of(loaded.folder, self.keep)
            if self.keep:
                steps = loaded.system.n_steps if depth is None else depth
                config = kept.exclude(config, (p.name for p in loaded.system.shared_parameters(steps)))
            refuse_early(loaded, config, target.name, depth, gate, values)
            plan, source = self._prepared(loaded, take, config, depth, execution)
            put = kept.put if own_format else lambda solved: folded(kept.put(solved), loaded)
            checkpoint = carry_out(plan, source, lambda solved: finish(put(solved)), team)
        assert checkpoint is not None
        del plan, source
        # A team's checkpoint is read from its folder.
        return apart(kept.put(checkpoint)) if team is None else checkpoint

    def _prepared(
        self, loaded: LoadedModel, take: Take, config: QuantConfig, n_steps: int | None, execution: Execution
    ) -> tuple[Plan, ModelSource]:
        """Plan a quantization of a model, report its cost, and choose grids if there is a budget."""
        tokens = calibration_tokens(loaded, self.calibration, take, matters=config.reads_text)
        system, missed = loaded.system, {}
        if isinstance(system, Discovers):
            system.look(tokens.first(execution.seed))
            missed = system.missed()
        about = system.describe_loop() if isinstance(system, Describes) else ()
        if isinstance(execution.progress, Silent):
            names = "; ".join(f"{n}: {why}" for n, why in missed.items())
            for line in filter(None, (f"not quantized: {names}" if missed else "", loaded.report.left)):
                warnings.warn(line, stacklevel=4)
        used = (
            (f"calibration: {tokens.size} of {tokens.source}", tokens.shortage) if config.reads_text else ()
        )
        for line in filter(None, (*loaded.report.notes, loaded.report.left, *about, *used)):
            execution.progress.note(line)
        source = ModelSource.of(
            system, tokens, config, n_steps=n_steps, execution=execution, files=loaded.side_files
        )
        return allocate(source.prepare(source.plan(config)), source), source


def _export(
    solved: Checkpoint, *, out: Any, target: Format, gate: Gate, proof: Proof, values: FormatOptions
) -> None:
    exported(solved, Path(out), target.name, gate, proof, values)


def solve(
    dump: str | Path,
    config: QuantConfig | None = None,
    *,
    out: str | Path | None = None,
    several: bool = False,
    shard: tuple[int, int] | None = None,
    **options: Unpack[SolveKeywords],
) -> Checkpoint | None:
    """Quantize from a calibration dump. It needs no torch and gives the same bytes as `quantize`.

    Parameters
    ----------
    dump : path
        Dump of rows or of Hessians.
    config : QuantConfig, optional
        Settings. All processes must have the same settings.
    out : path, optional
        Folder for the checkpoint. The same call resumes an interrupted run.
    several : bool
        Share the work with processes on any machines that see the same folders. Each claims unclaimed layers and those
        of killed ones. The process that finds all layers solved writes the checkpoint.
    shard : (int, int), optional
        K of N, from 1: solve the K-th of N parts of the layers without waiting for others, as in a job array.
    **options
        Settings by their flat names, as in `quantize`.

    Returns
    -------
    Checkpoint or None
        As of `quantize`. None if layers of other shards are missing, or another process writes the checkpoint.

    Raises
    ------
    ConfigError
        `several` is given without `out`, or the shard does not exist.
    DumpError
        The dump is truncated or altered, or lacks a requested step.
    CheckpointError
        `out` holds something else.
    """
    config, execution = divided(options, config or QuantConfig(), Execution())
    refuse_rollouts(config, "a dump", "use `quantize`")
    team = None
    if several or shard is not None:
        if out is None:
            raise ConfigError("several processes meet in one folder: give out")
        team = Team(Path(out), shard)
    with output(out, execution, shared=team is not None) as (execution, finish):
        source = DumpSource.open(Path(dump), execution)
        return carry_out(source.prepare(source.plan(config)), source, finish, team)


def load(
    folder: str | Path | Checkpoint,
    model: Model | None = None,
    *,
    quantized: bool = False,
    activations: Activations = "float",
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load a checkpoint as a torch model.

    Parameters
    ----------
    folder : path or Checkpoint
        Checkpoint in any format of `loopq.formats.FORMATS`. The native format is one of them.
    model : LoadedModel, LoopedSystem or torch module, optional
        Model of the same kind that receives the weights. By default it is built from the checkpoint's config.
    quantized : bool
        Keep codes and scales, in `loopq.runtime.linear.QuantLinear`, packed for the CPU or, on a GPU, for the int4
        kernel. Modules other than `nn.Linear` keep the dequantized weight; the report's notes name them.
    activations : "float" or "int8"
        With ``quantized=True``, "int8" rounds inputs of quantized layers to 8 bits with one scale per token and group
        (W4A8). This is faster where a product is not memory-bound, but less exact.
    trust_remote_code : bool
        Allow code from the model's files to run.

    Returns
    -------
    LoadedModel
        The model in eval mode, its adapter and its tokenizer.

    Raises
    ------
    CheckpointError
        The checkpoint is damaged, or does not fit the model.
    """
    checkpoint = folder if isinstance(folder, Checkpoint) else read_any(Path(folder))
    with plain_modes():
        into = None if model is None else open_model(model, Opening(trust_remote_code=trust_remote_code))
        return load_checkpoint(
            checkpoint,
            into,
            quantized=quantized,
            activations=activations,
            trust_remote_code=trust_remote_code,
        )


def evaluate(
    model: Model,
    checkpoints: str | Path | Checkpoint | Sequence[str | Path] | Mapping[str, Checkpoint],
    text: Prompts = None,
    *,
    n_steps: int | None = None,
    seeds: Sequence[int] = (0,),
    score: Score | None = None,
    **options: Unpack[MeasureKeywords],
) -> list[Measurement]:
    """Measure checkpoints against the full-precision model on held-out prompts, with paired initial states.

    Parameters
    ----------
    model : str, Path, LoadedModel, LoopedSystem or torch module
        Full-precision model. The same kinds as in `quantize` are accepted.
    checkpoints : path, Checkpoint, sequence of paths, or mapping of str to Checkpoint
        Checkpoints of that model in any format of `loopq.formats.FORMATS`. Results of `quantize` are given by name. A
        single one is called "quantized".
    text : TokenSet, token ids, path, list of batches, or None
        Held-out prompts, or batches as in `quantize`. None takes the evaluation text that ships with loopq.
    n_steps : int, optional
        Depth. The model's own depth is the default.
    seeds : sequence of int
        Seeds of the initial states, the same for every set of weights.
    score : callable, optional
        Takes what a module returns for a batch, and the batch as it was given. Returns a number.
    **options
        "n_prompts" and "seq_len", "tokenizer" and "trust_remote_code" as in `quantize`, and settings of `Execution`.

    Returns
    -------
    list of Measurement
        Full precision first, then the checkpoints in order. A warning names one whose calibration used these prompts.
        Batches have `error` (by batch), `score` and `steps` in the place of KL and perplexity.

    Raises
    ------
    CheckpointError
        A checkpoint is damaged, or belongs to another system.

    Examples
    --------
    >>> import loopq
    >>> result = loopq.quantize("huginn_small", method="rtn", group_size=32)
    >>> measured = loopq.evaluate("huginn_small", {"INT4": result}, n_prompts=2, seq_len=32, n_steps=2)
    >>> [m.name for m in measured]
    ['full precision', 'INT4']
    """
    how, take, opening = divided(options, Execution(), Take(), Opening())
    with plain_modes():
        named, loaded = _named(checkpoints), open_model(model, opening)
        tokens = evaluation_tokens(loaded, text, take)
        if isinstance(tokens, CallSet):
            tokens = dataclasses.replace(tokens, score=score)
        elif score is not None:
            raise ConfigError("score: it is for batches of a module that takes no token ids; prompts have KL")
        return _measured(loaded, named, tokens, n_steps, seeds, how)


def _measured(
    loaded: LoadedModel,
    named: Mapping[str, Checkpoint],
    tokens: TokenSet,
    n_steps: int | None,
    seeds: Sequence[int],
    how: Execution,
) -> list[Measurement]:
    if isinstance(loaded.system, Discovers):
        loaded.system.look(tokens.first())
    if tokens.shortage:
        how.progress.note(tokens.shortage)
    for checkpoint in named.values():
        name_module(loaded, checkpoint)
    system, count = loaded.system, loaded.count_bytes
    overlaps = [overlap(name, c, system, tokens, how) for name, c in named.items()]
    weights = {name: content(system, c, len(named)) for name, c in named.items()}
    for checkpoint in named.values():
        fitted(system.model, checkpoint)
    measured = compare(
        system, weights, tokens, n_steps=n_steps, seeds=seeds, count_bytes=count, execution=how
    )
    dense = sum(tensor.data.size for tensor in model_tensors(system.model)[0].values())
    sizes = [dense, *(checkpoint.n_bytes for checkpoint in named.values())]
    rows = zip(measured, sizes, [None, *overlaps], strict=True)
    return [dataclasses.replace(m, n_bytes=n, overlap=o) for m, n, o in rows]


def _named(
    checkpoints: str | Path | Checkpoint | Sequence[str | Path] | Mapping[str, Checkpoint],
) -> Mapping[str, Checkpoint]:
    if isinstance(checkpoints, Checkpoint):
        return {"quantized": checkpoints}
    files = [checkpoints] if isinstance(checkpoints, str | Path) else checkpoints
    return files if isinstance(files, Mapping) else {str(f): read_any(f) for f in files}
