"""Where a file is to run: the engine decides format, levels and options, and all of it is checked before any work."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from loopq.errors import CheckpointError, ConfigError, MissingExtraError
from loopq.formats import FORMATS
from loopq.formats.base import Format, FormatOptions, WrittenFile, refuse_own
from loopq.formats.checkpoint import Checkpoint
from loopq.formats.convert import read_any, read_model
from loopq.formats.engines import ENGINES
from loopq.formats.engines.base import Way
from loopq.formats.hf_folder import looped_files
from loopq.formats.native import NATIVE
from loopq.formats.record import config_of
from loopq.formats.rules import check_system
from loopq.layers.transforms import AUTO, Rotation
from loopq.models.load import LoadedModel
from loopq.models.plain import plain_modes
from loopq.run.config import QuantConfig, divided
from loopq.run.export import Exported, exported, folded, refuse_early
from loopq.run.gate import LOOPQ, Gate, Proof
from loopq.run.imatrix import ObservedDump
from loopq.storage.lock import new_or_same

if TYPE_CHECKING:
    from loopq.run.keywords import ExportKeywords

_HERE = Way(NATIVE.name, 'loopq run OUT "..."')
#: Why an engine does not take a model or a file in some way.
_REFUSED = (CheckpointError, ConfigError)


def destinations() -> tuple[str, ...]:
    """Return the names that `--for` takes."""
    return (LOOPQ, *ENGINES.names())


def ways(engine: str) -> tuple[Way, ...]:
    """Return the ways to write a model for an engine, best first.

    Raises
    ------
    ConfigError
        The engine does not exist.
    """
    return (_HERE,) if engine == LOOPQ else ENGINES.get(engine).ways


@dataclass(frozen=True)
class Choice:
    """How a model is written for an engine.

    Parameters
    ----------
    engine : str
        Name of the engine.
    way : Way
        The chosen way.
    config : QuantConfig
        Settings of the run.
    options : FormatOptions
        Options of the format.
    """

    engine: str
    way: Way
    config: QuantConfig
    options: FormatOptions

    @property
    def target(self) -> Format:
        """The format."""
        return FORMATS.get(self.way.format)

    def line(self) -> str:
        """Return in one line what was chosen."""
        layer = self.config.layer.decided()
        grid = layer.grid.make()
        parts = [f"format {self.way.format}", f"{layer.method.name}, {grid.label}"]
        parts += [f"groups of {grid.group_size}"] if grid.group_size > 0 else ["one scale a row"]
        parts += ["inputs rotated where that pays"] if layer.rotates and layer.rotation.kind == AUTO else []
        parts += [
            f"{name} {value}" if value is not True else name for name, value in self.way.options.items()
        ]
        return f"for {self.engine}: {', '.join(parts)}"


@dataclass(frozen=True)
class Wanted:
    """A model and the settings that were given, to be written for some engine.

    Parameters
    ----------
    loaded : LoadedModel
        The model.
    config : QuantConfig
        Settings before a format is known.
    given : collection of str
        Names of settings that the user gave. No engine changes them.
    options : mapping
        Given options of formats. None stands for an absent one.
    n_steps : int, optional
        Depth; the model's own when absent.
    gate : Gate
        What is refused.
    """

    loaded: LoadedModel
    config: QuantConfig
    given: Collection[str] = ()
    options: Mapping[str, Any] | None = None
    n_steps: int | None = None
    gate: Gate = field(default_factory=Gate)

    def choose(self, engine: str) -> Choice:
        """Return the first way that the engine takes.

        Raises
        ------
        CheckpointError
            The engine takes the model in no way. The message has the reason of the best one, and the engines that do.
        """
        first: Exception | None = None
        for way in self._fitting(engine):
            try:
                return self._checked(engine, way)
            except _REFUSED as cause:
                first = first or cause
        others = self.others(engine)
        why = first or f"it has no file of {self.config.layer.grid.bits} bits"
        raise CheckpointError(f"not for {engine}: {why}. It can be written for {', '.join(others)} (--for)")

    def others(self, engine: str) -> list[str]:
        """Return the other engines that take the model with these settings, without any option of a format."""
        return [
            name for name in destinations() if name != engine and replace(self, options=None)._takes(name)
        ]

    def _fitting(self, engine: str) -> list[Way]:
        bits = self.config.layer.grid.bits
        return [way for way in ways(engine) if way.bits in (None, bits)]

    def _takes(self, engine: str) -> bool:
        for way in self._fitting(engine):
            try:
                self._checked(engine, way)
            except MissingExtraError:
                return True
            except _REFUSED:
                continue
            return True
        return False

    def _checked(self, engine: str, way: Way) -> Choice:
        target = FORMATS.get(way.format)
        mine = {name: value for name, value in way.settings.items() if name not in self.given}
        given = {name: value for name, value in (self.options or {}).items() if value is not None}
        options = target.taken({**way.options, **given})
        config = self.config.changed(**mine).for_format(target.own, target.outside)
        gate = self.gate.changed(engine=engine)
        refuse_early(self.loaded, config, way.format, self.n_steps, gate, options)
        return Choice(engine, way, config, options)


def export(
    source: str | Path | Checkpoint,
    out: str | Path,
    format_name: str | None = None,
    **options: Unpack[ExportKeywords],
) -> Exported:
    """Write a checkpoint for an engine, or in another tool's format, and check the result on disk.

    Parameters
    ----------
    source : path or Checkpoint
        Checkpoint, in memory or in a folder of any format that loopq reads. "gguf" also takes an unquantized model: a
        folder, or ``looped:FOLDER[FIRST:LAST]xTIMES``. "imatrix" takes a calibration dump.
    out : path
        New folder. For "gguf" and "imatrix" it is a new file.
    format_name : str, optional
        Name in `loopq.formats.FORMATS`. When absent, "engine" decides: "transformers", "vllm", "sglang", "gptqmodel",
        "llama.cpp" or "loopq".
    **options
        Options of the format, settings of `Gate` ("engine", "force", "verify"), and those of `Proof` ("n_prompts",
        "seq_len", "trust_remote_code"). "ragged" ("keep" or "split") handles a shorter last group in
        compressed-tensors, gptq and gptq_v2. "names" ("published") joins matrices as the published files of
        HRM-Text do, for vLLM and SGLang. "remote_code" puts a file beside a ``looped:`` checkpoint with
        which transformers runs the loop (``trust_remote_code=True``). "vocabulary" names a GGUF file with the tokenizer
        for gguf. "steps" selects the steps of imatrix.

    Returns
    -------
    Exported
        The written output and the comparison.

    Raises
    ------
    CheckpointError
        The format or the engine cannot hold the checkpoint, the values read back differ from the solved ones, or an
        engine gives other logits.
    ConfigError
        The format or the engine does not exist, or the format does not read an option.
    """
    out = Path(out)
    keys = set(Gate().flat()) | set(Proof().flat())
    gate, proof = divided({k: v for k, v in options.items() if k in keys}, Gate(), Proof())
    rest = {k: v for k, v in options.items() if k not in keys and v is not None}
    with plain_modes():
        if format_name is None:
            opened = _opened(source, NATIVE.takes, proof, own=False)
            place = "the checkpoint" if isinstance(source, Checkpoint) else source
            way = stored_way(gate, opened, place, rest)
            format_name, rest = way.format, {**way.options, **rest}
        else:
            target = FORMATS.get(format_name)
            opened = _opened(source, target.takes, proof, own=target.own)
        given = FORMATS.get(format_name).taken(rest)
        if isinstance(opened, Checkpoint):
            gate.of(format_name, opened, given)
        with new_or_same(out) as written:
            done = exported(opened, written, format_name, gate, proof, given)
    if written != out:
        said = (f"{out} was written before the interruption; compared, byte for byte",)
        return dataclasses.replace(done, written=WrittenFile(out, format_name, said))
    return done


#: Functions that open a path, by the source of a format.
_OPEN: Mapping[str, Callable[[str | Path], Any]] = {
    "checkpoint": read_any,
    "model": read_model,
    "dump": ObservedDump,
}


def _opened(source: Any, takes: str, proof: Proof, *, own: bool) -> Any:
    """Return what is exported. Scales of AWQ are folded unless loopq's own format is written."""
    opened = source if isinstance(source, Checkpoint) else _OPEN[takes](source)
    if isinstance(opened, Checkpoint) and not own:
        return folded(opened, trust_remote_code=proof.trust_remote_code)
    return opened


def stored_way(gate: Gate, source: Checkpoint, place: str | Path, options: Mapping[str, Any]) -> Way:
    """Return the way in which an engine takes a checkpoint that is there already.

    Raises
    ------
    ConfigError
        No engine is named.
    CheckpointError
        The engine takes it in no way. The message has the command that quantizes the model for it.
    """
    if gate.engine is None:
        raise ConfigError(
            "give a format (--format), or the program that will run the file (--for, engine=...)"
        )
    unable: Exception | None = None
    first: Exception | None = None
    turned = [name for name, layer in source.layers.items() if isinstance(layer.transform, Rotation)]
    for way in ways(gate.engine):
        target = FORMATS.get(way.format)
        try:
            given = target.taken({**way.options, **options})
            # Where the engine does not run the model at all, nothing is gained by quantizing anew.
            config = config_of(looped_files(source.side_files, given.remote_code))
            if gate.engine != LOOPQ:
                check_system(gate.engine, way.format, source.settings.get("system"), config)
        except _REFUSED as cause:
            unable = unable or cause
            continue
        try:
            if not target.own:
                refuse_own(target, list(source.layers.values()), turned, ())
            gate.of(way.format, source, given)
        except _REFUSED as cause:
            first = first or cause
            continue
        return way
    if first is None:
        raise CheckpointError(f"{place} cannot be written for {gate.engine}: {unable}")
    grid = source.settings.get("quantization", {}).get("layer", {}).get("grid", {})
    names = [name for name in ("bits", "group_size") if name in grid]
    flags = "".join(f" --{name.replace('_', '-')} {grid[name]}" for name in names)
    raise CheckpointError(
        f"{place} cannot be written for {gate.engine}: {first}. Quantize the model for it: "
        f"loopq quantize MODEL --for {gate.engine}{flags} --out DIR"
    )


def last_lines(choice: Choice, out: str | Path, others: Collection[str], model: str) -> list[str]:
    """Return where a file runs, and which command writes it for the other engines that take the model."""
    lines = [f"run it in {choice.engine}: {choice.way.runs.replace('OUT', str(out))}"]
    if choice.way.format == NATIVE.name and choice.engine == LOOPQ:
        beside = "; in transformers: import loopq.runtime.transformers, then from_pretrained"
        lines.append(f'in Python: loopq.load("{out}"){beside * ("transformers" in others)}')
    if others:
        lines.append(f"for another engine: loopq quantize {model} --for {'|'.join(others)} --out DIR")
    return lines
