"""What a format is: where it comes from, what it writes, what loopq can say of it."""

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
from loopq.storage.files import new_folder
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
        What stands for the value.
    choices : tuple of str, optional
        Allowed values.
    """

    name: str
    help: str
    metavar: str | None = None
    choices: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Planned:
    """What a run will give, as far as that is known before it.

    Parameters
    ----------
    layers : tuple of QuantizedLayer
        The layers, one row each, with zero codes and scales of 1.
    transformed, trellis : tuple of str
        Layers whose codes will be for a transformed input, or on a trellis.
    loose : tuple of str
        Layers whose weight no module is called with.
    dense : mapping of str to str
        The other tensors of the model, and their types, named as in safetensors.
    ties : mapping of str to str
        Names of tied tensors to the name that is stored.
    side_files : mapping of str to bytes
        Config and tokenizer files of the model.
    """

    layers: tuple[QuantizedLayer, ...]
    transformed: tuple[str, ...] = ()
    trellis: tuple[str, ...] = ()
    loose: tuple[str, ...] = ()
    dense: Mapping[str, str] = field(default_factory=dict)
    ties: Mapping[str, str] = field(default_factory=dict)
    side_files: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Written(ABC):
    """What was written, and where."""

    path: Path
    format: str

    @abstractmethod
    def lines(self) -> list[str]:
        """Return the report as lines to print."""


@dataclass(frozen=True)
class WrittenFile(Written):
    """A file that was written, and what there is to say of it."""

    said: tuple[str, ...]

    def lines(self) -> list[str]:
        """Return the report as lines to print."""
        return list(self.said)


@dataclass(frozen=True)
class WrittenLayers(Written):
    """A folder that was written, and what it cost: bytes of the layers as loopq stores them and in the format.

    `notes` says by layer what had to be changed (groups cut, padding), `checked` how many layers were read back and
    compared, `remarks` what readers of the format are known not to do with this file.
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
    """A way to store a model, or what was measured of it.

    A module of `loopq.formats` that registers an instance in `FORMATS` makes its name a value of `--format` and of
    `loopq.export`.

    Attributes
    ----------
    name : str
        Name in the registry and on the command line.
    takes : {"checkpoint", "model", "dump"}
        What it is written from: a quantized checkpoint; that, or a model that is not quantized; a calibration dump.
    own : bool
        Whether it is loopq's own format, which holds every layer that loopq makes, and all that is known of it.
    one_file : bool
        Whether it is one file rather than a folder.
    reads : bool
        Whether loopq reads it back as a checkpoint.
    holds_tables : bool
        Whether it holds quantized embedding tables.
    options : tuple of Option
        Options of `write`.
    loads : str
        Line of Python by which the model is loaded, for the model card.
    """

    name: ClassVar[str]
    takes: ClassVar[Literal["checkpoint", "model", "dump"]] = "checkpoint"
    own: ClassVar[bool] = False
    one_file: ClassVar[bool] = False
    reads: ClassVar[bool] = True
    holds_tables: ClassVar[bool] = False
    options: ClassVar[tuple[Option, ...]] = ()
    loads: ClassVar[str] = "import loopq  # loopq.load(DIR)"

    @property
    def from_checkpoint(self) -> bool:
        """Whether it is written from a quantized checkpoint."""
        return self.takes != "dump"

    @abstractmethod
    def holds(self, path: Path) -> bool:
        """Whether a file or a folder is of this format."""

    @abstractmethod
    def write(self, out: Path, source: Any, *, also: Check | None = None, **options: Any) -> Written:
        """Write to a new file or folder, which gets its name when it has been read back and compared.

        Parameters
        ----------
        out : Path
            New file or folder.
        source : Checkpoint or object
            A checkpoint in memory; of a format that takes a dump, what `loopq.run.export` opens it as.
        also : callable, optional
            Checks what was read back; only of a format that loopq reads.
        **options
            Those that the format declares.

        Raises
        ------
        CheckpointError
            The format cannot hold the source exactly: the message names the layer, the reason and what can be done;
            or what was read back differs.
        """

    @abstractmethod
    def facts(self, path: Path) -> dict[str, Any]:
        """Say what a file or a folder holds, as plain data with its "format"."""

    @abstractmethod
    def describe(self, facts: Mapping[str, Any]) -> list[str]:
        """Return `facts` as lines to print."""

    def read(self, path: Path) -> Checkpoint:
        """Read a checkpoint.

        Raises
        ------
        CheckpointError
            It is damaged, or loopq does not read the format.
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
        """Read back what was written, compare it with the checkpoint, and return it where loopq reads the format.

        Raises
        ------
        CheckpointError
            Anything differs.
        """
        again = self.read(path)
        checkpoint.compare(again, path)
        return again

    def refuse(self, planned: Planned, **options: Any) -> None:
        """Refuse before a run what `write` would refuse after it.

        Raises
        ------
        CheckpointError
            The format cannot hold what is planned.
        """
        if not self.own:
            other = [x.name for x in planned.layers if not self.can_hold(x.grid)]
            refuse_own(planned.transformed, [*planned.trellis, *other], self, loose=planned.loose)

    def can_hold(self, grid: Grid) -> bool:
        """Whether it can hold codes of such a grid, as far as their kind tells."""
        return self.own or grid.portable

    def stored(self, layers: Mapping[str, QuantizedLayer], **options: Any) -> Mapping[str, QuantizedLayer]:
        """Return layers as the format stores them."""
        return layers

    def taken(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options that are given, None for one that is not.

        Raises
        ------
        ConfigError
            The format does not read one of them, or it has another value than those allowed.
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
        return given

    def refuse_checkpoint(self) -> None:
        """Refuse a checkpoint as the source of a format that is not written from one.

        Raises
        ------
        ConfigError
            The message says what it is written from.
        """
        if not self.from_checkpoint:
            raise ConfigError(
                f"format {self.name} is written from a calibration dump, not from a checkpoint: "
                f"`loopq collect MODEL --out DUMP`, then `loopq export DUMP --format {self.name}`"
            )


def refuse_own(
    transformed: Sequence[str],
    kinds: Sequence[str],
    target: Format,
    tables: Sequence[str] = (),
    loose: Sequence[str] = (),
) -> None:
    """Refuse layers that only loopq's own format holds: for a transformed input, of some grids, embedding tables, and
    weights of no linear layer.
    """
    for names, what, instead in (
        (transformed, "for a transformed input", "without rotation and without awq"),
        (kinds, "on a trellis, of a table or floats", "with another method than trellis, and --levels even"),
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
    """Make a folder that gets its name when it has been read back and compared, and `also` has checked it."""
    with new_folder(out, max(checkpoint.n_bytes, n_bytes)) as folder:
        fill(folder)
        again = target.verify(folder, checkpoint)
        if also is not None and again is not None:
            also(again)
