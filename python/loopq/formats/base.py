"""Interface of a format: its source, its files, and what loopq can report about them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

from loopq.errors import CheckpointError, ConfigError
from loopq.formats.checkpoint import Checkpoint
from loopq.layers.grid import Grid
from loopq.layers.layer import QuantizedLayer
from loopq.storage.folders import new_folder
from loopq.storage.schema import Object

#: Called with what was read back, before the output gets its name.
Check: TypeAlias = Callable[[Checkpoint], None]


@dataclass(frozen=True)
class Option:
    """An option of a format: a keyword of `loopq.export`, and `--NAME` on the command line.

    Parameters
    ----------
    name : str
        Name of the keyword.
    help : str
        One line.
    metavar : str, optional
        Placeholder of the value.
    choices : tuple of str, optional
        Allowed values.
    flag : bool
        True or absent. On the command line without a value.
    """

    name: str
    help: str
    metavar: str | None = None
    choices: tuple[str, ...] | None = None
    flag: bool = False


@dataclass(frozen=True)
class FormatOptions:
    """Values of a format's options, and what an export adds. A format with options of its own derives a class.

    Parameters
    ----------
    remote_code : bool
        Put the code of the loop into the folder (`loopq.formats.hf_folder.looped_files`).
    names : {"published"}, optional
        Use the names of the model's published files (`loopq.formats.fused`).
    typed : bool
        Name the type of the model in config.json.
    forced : str
        Why no engine reads the output right, for the output to say so. Empty if one does.
    """

    remote_code: bool = False
    names: str | None = None
    typed: bool = False
    forced: str = ""


#: No option is given.
DEFAULTS = FormatOptions()


@dataclass(frozen=True)
class Planned:
    """The known part of a run's result before the run.

    Parameters
    ----------
    layers : tuple of QuantizedLayer
        The layers, one row each, with zero codes and scales of 1.
    transformed : tuple of str
        Layers that will have a transformed input.
    loose : tuple of str
        Layers with weights that no module is called with.
    dense : mapping of str to str
        The other tensors of the model and their types. Both are named as in safetensors.
    ties : mapping of str to str
        Names of tied tensors. Each maps to the stored name.
    side_files : mapping of str to bytes
        Config and tokenizer files of the model.
    """

    layers: tuple[QuantizedLayer, ...]
    transformed: tuple[str, ...] = ()
    loose: tuple[str, ...] = ()
    dense: Mapping[str, str] = field(default_factory=dict)
    ties: Mapping[str, str] = field(default_factory=dict)
    side_files: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Written(ABC):
    """The written content, and its place."""

    path: Path
    format: str

    @abstractmethod
    def lines(self) -> list[str]:
        """Return the report as lines to print."""


@dataclass(frozen=True)
class WrittenFile(Written):
    """A written file with its summary lines."""

    said: tuple[str, ...]

    def lines(self) -> list[str]:
        """Return the report as lines to print."""
        return list(self.said)


@dataclass(frozen=True)
class WrittenLayers(Written):
    """A written folder with its size: bytes of the layers as stored by loopq and in the format.

    `notes` lists changes by layer (groups cut, padding). `checked` counts the layers that were read back and compared.
    `remarks` lists known problems of the format's readers with this file.
    """

    n_bytes_before: int
    n_bytes: int
    notes: dict[str, tuple[str, ...]]
    checked: int
    remarks: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Return the report as lines to print."""
        more = self.n_bytes - self.n_bytes_before
        lines = [
            f"{self.path}: {self.format}, {self.checked} layers in {self.n_bytes} bytes "
            f"({more:+d}, {more / max(self.n_bytes_before, 1):+.2%} against the native checkpoint)"
        ]
        lines += [f"{name}: {note}" for name, notes in self.notes.items() for note in notes]
        lines += [f"note: {remark}" for remark in self.remarks]
        return [*lines, f"read back from disk: {self.checked} layers equal, number by number"]


class Format(ABC):
    """A way to store a model or its measurements.

    A module of `loopq.formats` registers an instance in `FORMATS`. Its name then becomes a value of `--format` and of
    `loopq.export`.

    Attributes
    ----------
    name : str
        Name in the registry and on the command line.
    takes : {"checkpoint", "model", "dump"}
        Source: a quantized checkpoint, any model (quantized or not), or a calibration dump.
    own : bool
        Whether it is loopq's native format. That format holds every layer that loopq makes, with all its facts.
    one_file : bool
        Whether it is one file instead of a folder.
    reads : bool
        Whether loopq reads it back as a checkpoint.
    holds_tables : bool
        Whether it holds quantized embedding tables.
    outside : str, optional
        Type of matrices outside the loop, unless the settings name one.
    options : tuple of Option
        Options of `write`.
    values : type
        `FormatOptions`, or a class derived from it: a field for each of `options`.
    loads : str
        Line of Python that loads the model, for the model card.
    library : str
        The hub's name of the library that loads it, for the model card.
    """

    name: ClassVar[str]
    takes: ClassVar[Literal["checkpoint", "model", "dump"]] = "checkpoint"
    own: ClassVar[bool] = False
    one_file: ClassVar[bool] = False
    reads: ClassVar[bool] = True
    holds_tables: ClassVar[bool] = False
    outside: ClassVar[str | None] = None
    options: ClassVar[tuple[Option, ...]] = ()
    values: ClassVar[type[FormatOptions]] = FormatOptions
    loads: ClassVar[str] = "import loopq  # loopq.load(DIR)"
    library: ClassVar[str] = "loopq"

    @property
    def from_checkpoint(self) -> bool:
        """Whether its source is a quantized checkpoint."""
        return self.takes != "dump"

    @abstractmethod
    def holds(self, path: Path) -> bool:
        """Whether a file or a folder has this format."""

    @abstractmethod
    def write(self, out: Path, source: Any, options: Any = DEFAULTS, *, also: Check | None = None) -> Written:
        """Write to a new file or folder. It gets its name after it has been read back and compared.

        Parameters
        ----------
        out : Path
            New file or folder.
        source : Checkpoint or object
            A checkpoint in memory. For a format of dumps, the object that `loopq.run.export` opens.
        options : FormatOptions
            Of the class `values`.
        also : callable, optional
            Checks the content that was read back. Only for a format that loopq reads.

        Raises
        ------
        CheckpointError
            If the format cannot hold the source exactly, or the content read back differs. The message names the
            layer, the reason and a remedy.
        """

    @abstractmethod
    def facts(self, path: Path) -> dict[str, Any]:
        """Describe a file or a folder as plain data with its "format"."""

    @abstractmethod
    def describe(self, facts: Mapping[str, Any]) -> list[str]:
        """Return `facts` as lines to print."""

    def read(self, path: Path) -> Checkpoint:
        """Read a checkpoint.

        Raises
        ------
        CheckpointError
            If it is damaged, or loopq does not read the format.
        """
        raise CheckpointError(
            f"{path}: loopq writes {self.name} and does not read it as a checkpoint; `loopq inspect` says what it holds"
        )

    def read_settings(self, path: Path) -> Object:
        """Return the settings of the run that made a checkpoint.

        Raises
        ------
        CheckpointError
            They are not known.
        """
        raise CheckpointError(f"{path}: {self.name} does not hold the settings of the run")

    def verify(self, path: Path, checkpoint: Checkpoint) -> Checkpoint | None:
        """Read the written content back and compare it with the checkpoint. Return it if loopq reads the format.

        Raises
        ------
        CheckpointError
            Anything differs.
        """
        again = self.read(path)
        checkpoint.compare(again, path)
        return again

    def refuse(self, planned: Planned, options: Any = DEFAULTS) -> None:
        """Reject before a run what `write` would reject afterwards.

        Raises
        ------
        CheckpointError
            If the format cannot hold the planned layers.
        """
        if not self.own:
            refuse_own(self, planned.layers, planned.transformed, planned.loose)

    def can_hold(self, grid: Grid) -> bool:
        """Whether the format can hold codes of such a grid, as far as its kind shows."""
        return self.own or grid.portable

    def stored(
        self, layers: Mapping[str, QuantizedLayer], options: Any = DEFAULTS
    ) -> Mapping[str, QuantizedLayer]:
        """Return layers in the form that the format stores."""
        return layers

    def taken(self, options: Mapping[str, Any]) -> FormatOptions:
        """Return the given options as `values`. None stands for an absent one.

        Raises
        ------
        ConfigError
            If the format does not read an option, or does not allow its value.
        """
        given = {name: value for name, value in options.items() if value is not None}
        known = {option.name: option for option in self.options}
        for name, value in given.items():
            if name not in known:
                reads = ", ".join(known) or "none"
                raise ConfigError(f"format {self.name} does not read {name}; its options: {reads}")
            choices = known[name].choices
            if choices is not None and value not in choices:
                raise ConfigError(f"{name} must be one of {', '.join(choices)}; got {value!r}")
            if known[name].flag and not isinstance(value, bool):
                raise ConfigError(f"{name} must be True or False; got {value!r}")
        return self.values(**given)

    def refuse_checkpoint(self) -> None:
        """Reject a checkpoint for a format with another source.

        Raises
        ------
        ConfigError
            If the format has another source. The message names it.
        """
        if not self.from_checkpoint:
            raise ConfigError(
                f"format {self.name} is written from a calibration dump, not from a checkpoint: "
                f"`loopq collect MODEL --out DUMP`, then `loopq export DUMP --format {self.name}`"
            )


def refuse_own(
    target: Format, layers: Sequence[QuantizedLayer], transformed: Sequence[str], loose: Sequence[str]
) -> None:
    """Reject layers that only loopq's format holds.

    Such layers have a transformed input or a grid that the format cannot hold, are embedding tables, or do not belong
    to a linear layer.
    """
    other = [x for x in layers if not target.can_hold(x.grid)]
    tables = [x.name for x in layers if x.orientation == "table" and not target.holds_tables]
    grid, without = (other[0].grid.label, other[0].grid.instead) if other else ("", "")
    for names, what, instead in (
        (transformed, "for a transformed input", "without rotation and without awq"),
        ([x.name for x in other], grid, without),
        (tables, "of an embedding table", "without --outside"),
        (loose, "of no linear layer", "with --exclude"),
    ):
        if names:
            raise CheckpointError(
                f"layer {names[0]}: its codes are {what} ({len(names)} such layers), which {target.name} cannot hold; "
                f"quantize {instead}, or keep loopq's own format"
            )


def write_folder(
    target: Format,
    out: Path,
    checkpoint: Checkpoint,
    n_bytes: int,
    fill: Callable[[Path], object],
    also: Check | None,
) -> None:
    """Make a folder. It gets its name after it has been read back and compared, and `also` has checked it."""
    with new_folder(out, max(checkpoint.n_bytes, n_bytes)) as folder:
        fill(folder)
        again = target.verify(folder, checkpoint)
        if also is not None and again is not None:
            also(again)
