"""Decides whether a file is written for an engine, and checks it with the engine afterwards."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from loopq.errors import CheckpointError
from loopq.formats import FORMATS
from loopq.formats.base import FormatOptions
from loopq.formats.checkpoint import Checkpoint
from loopq.formats.engines import ENGINES
from loopq.formats.engines.base import Question, Reading, ask
from loopq.formats.hf_folder import looped_files
from loopq.formats.native import NATIVE
from loopq.formats.record import config_of
from loopq.formats.rules import Layers, check_engine, readers
from loopq.formats.support import KNOWN, READS, entry_of
from loopq.layers.loop_spec import LOOP
from loopq.settings.declare import Settings, setting
from loopq.settings.execution import available_bytes

#: loopq's own runtime, where a file runs unless another engine is named.
LOOPQ = "loopq"


@dataclass(frozen=True)
class Gate(Settings):
    """Engines that a file is for.

    Parameters
    ----------
    engine : str, optional
        Program that will run the file. It decides the format, and with it levels and rotation. Where a format is named,
        only what this engine is known to refuse or to load wrongly is refused, before the work; without an engine, what
        no engine reads right (docs/formats/engines.md).
    force : bool
        Write the file all the same. The output and the file say so.
    verify : bool
        Let every installed engine that reads the format load the file in a process of its own, and compare its logits;
        else only loopq reads it.
    """

    engine: Literal["transformers", "vllm", "sglang", "gptqmodel", "llama.cpp", "loopq"] | None = setting(
        None
    )
    force: bool = setting(False)
    verify: bool = setting(True)

    def of(self, format_name: str, source: Checkpoint, options: FormatOptions) -> tuple[tuple[str, ...], str]:
        """Return `readers` of a checkpoint."""
        system = source.settings.get("system")
        return self.readers(format_name, source.layers, system, source.side_files, options, source.dense)

    def readers(
        self,
        format_name: str,
        layers: Layers,
        system: str | None,
        side_files: Mapping[str, bytes],
        options: FormatOptions,
        dense: Collection[str],
    ) -> tuple[tuple[str, ...], str]:
        """Return the engines that read a checkpoint right, and why a forced file is refused otherwise.

        `options` are those of the format, `dense` the tensors that stay unchanged. The config.json is the one that
        the file will have: with `remote_code` it names the code of the loop.

        Raises
        ------
        CheckpointError
            The engine, or every engine, is known to refuse it or to load it wrongly.
        """
        config = config_of(looped_files(side_files, options.remote_code))
        try:
            if self.engine in (None, LOOPQ):
                return readers(format_name, layers, system, config, options, dense), ""
            check_engine(self.engine, format_name, layers, system, config, options, dense)
            return (self.engine,), ""
        except CheckpointError as cause:
            if not self.force:
                raise
            return (), str(cause)


def audience(
    format_name: str, engines: Collection[str], source: Checkpoint, options: FormatOptions, out: Path
) -> str:
    """Return in one line for which engines a file is, how each loads it, and what else needs the code of the loop.

    `engines` are those of `Gate.of`.
    """
    if FORMATS.get(format_name).own:
        return f'for loopq: loopq run {out} "..."'
    files, system = source.side_files, source.settings.get("system")
    config = config_of(looped_files(files, options.remote_code))
    said = []
    for engine in engines:
        ways = [way for way in ENGINES.get(engine).ways if way.format != NATIVE.name]
        coded = [way for way in ways if bool(way.options.get("remote_code")) == ("auto_map" in config)]
        entry = entry_of(engine, system, format_name, config) if system in KNOWN else None
        beside = (
            ", with loopq in the same environment (its plugin)" if entry and "plugin" in entry.how else ""
        )
        said.append(f"for {engine}: {(coded or ways)[0].runs.replace('OUT', str(out))}{beside}")
    if not said:
        said = [
            f'for loopq alone: loopq.load("{out}")'
            if FORMATS.get(format_name).reads
            else "for no known engine"
        ]
    if LOOP in config and not options.remote_code:
        coded_config = config_of(looped_files(files, True))
        more = []
        for engine, formats in READS.items():
            with contextlib.suppress(CheckpointError):
                if format_name in formats and engine not in engines and FORMATS.get(format_name).reads:
                    coded_options = dataclasses.replace(options, remote_code=True)
                    check_engine(
                        engine, format_name, source.layers, system, coded_config, coded_options, source.dense
                    )
                    more.append(engine)
        said += [f"not for {' and '.join(more)}: that needs --remote-code (remote_code=True)"] if more else []
    return "; ".join(said)


@dataclass(frozen=True)
class Proof(Settings):
    """Comparison of logits before and after.

    Parameters
    ----------
    n_prompts : int
        Number of random prompts.
    seq_len : int
        Their length in tokens.
    trust_remote_code : bool
        Allow code from the model's files to run. The comparison may need it.
    """

    n_prompts: int = setting(2, at_least=1)
    seq_len: int = setting(16, at_least=1)
    trust_remote_code: bool = setting(False)


@dataclass(frozen=True)
class Expectation:
    """What engines must say of a model at its own depth; the fields are those of `Question`."""

    ids: NDArray[np.int64]
    expected: NDArray[np.float32]
    slack: float = 0.0
    states: NDArray[np.float32] | None = None

    def of(self, out: Path, format_name: str, *, trust_remote_code: bool) -> Question:
        """Return the question to an engine about a written file."""
        return Question(out, format_name, self.ids, self.expected, trust_remote_code, self.slack, self.states)


@dataclass(frozen=True)
class Asked:
    """Engines that a written file is shown to."""

    format: str
    engines: tuple[str, ...]
    trust_remote_code: bool

    def lines(
        self, out: Path, source: Checkpoint, expectation: Callable[[], Expectation | str], *, force: bool
    ) -> tuple[str, ...]:
        """Ask the engines that are installed, and say who read the file.

        `expectation` gives what they must say, or why it is not known. It is called only if an engine is asked.

        Raises
        ------
        CheckpointError
            An engine reads another model, or cannot read it. The output is removed.
        """
        here = [engine for engine in map(ENGINES.get, self.engines) if engine.is_asked(self.format)]
        if not here:
            return (f"only loopq read it: none of {', '.join(self.engines)} is installed here",)
        needed, free = _dense_bytes(source), available_bytes()
        if free is not None and needed > free:
            return (
                f"only loopq read it: an engine needs {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} are free",
            )
        why = {engine.name: engine.unasked(out) for engine in here}
        readings = [
            Reading(e.version(self.format), problem=why[e.name], skipped=True) for e in here if why[e.name]
        ]
        if not all(why.values()):
            expected = expectation()
            if isinstance(expected, str):
                return (f"only loopq read it: {expected}",)
            question = expected.of(out, self.format, trust_remote_code=self.trust_remote_code)
            readings += [ask(name, [question])[0] for name, reason in why.items() if not reason]
        wrong = [reading for reading in readings if not (reading.same or reading.skipped)]
        if wrong and not force:
            if out.is_dir():
                shutil.rmtree(out)
            else:
                out.unlink()
            raise CheckpointError(
                f"{wrong[0].line()}. {out} was removed; keep loopq's own format, or give --force (force=True) to keep "
                "such a file, --verify no (verify=False) to ask no engine, or --for NAME (engine=...) to ask it alone"
            )
        return tuple(reading.line() for reading in readings)


def _dense_bytes(source: Checkpoint) -> int:
    """Bytes of a model with dequantized layers in float32."""
    weights = sum(4 * layer.shape[0] * layer.shape[1] for layer in source.layers.values())
    return weights + sum(int(t.data.size) for t in source.dense.values())
