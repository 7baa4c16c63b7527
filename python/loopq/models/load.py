"""Load a looped model: the embedded one, a folder, or (with transformers) a hub id."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopq import zoo
from loopq.errors import ConfigError, SystemContractError, require
from loopq.formats import hf_folder
from loopq.layers.loop_spec import LOOP, parse_spec, with_loop, without_type
from loopq.models import hf
from loopq.models.blank import building, drawn
from loopq.models.classes import Findings, find_class, load_registered, register_model
from loopq.models.plain import plain
from loopq.models.precision import to_float32, widen
from loopq.models.stream import Stream
from loopq.storage.files import read_json
from loopq.storage.model_files import source_of
from loopq.storage.schema import checked
from loopq.systems import SYSTEMS, find_system
from loopq.systems.base import LoopedSystem
from loopq.systems.capabilities import Encode, ModelClass
from loopq.systems.looped import Looped, run_loop
from loopq.terminal.table import some

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import nn

#: Names of the number of positions in configurations.
_LENGTHS = ("block_size", "max_position_embeddings", "n_positions")
#: Floating types that a model can be cast to when it is loaded.
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class _Known:
    """Entries of ``config.json`` that are read here. The model's class reads the rest."""

    model_type: str | None = None
    architectures: tuple[str, ...] | None = None
    auto_map: dict[str, Any] | None = None
    transformers_version: str | None = None


@dataclass(frozen=True)
class LoadReport:
    """Result of loading, with every difference from the checkpoint.

    Parameters
    ----------
    source : str
        What was asked for.
    kind : str
        "registered" for a class of `loopq.models.classes`, "transformers", or "module" for one built by hand.
    dtype : str
        Floating types of the parameters, joined by commas.
    n_parameters : int
        Number of values in all parameters. A tied one counts once.
    missing : tuple of str
        Parameters that are neither in the checkpoint nor tied.
    unexpected : tuple of str
        Tensors of the checkpoint without a place in the model.
    tied : tuple of tuple of str
        Names of one parameter. The first name comes first.
    repaired : tuple of str
        Corrected buffers. Their values differed from those of a newly built model.
    notes : tuple of str
        Anything else worth saying.
    """

    source: str
    kind: str
    dtype: str
    n_parameters: int
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    tied: tuple[tuple[str, ...], ...] = ()
    repaired: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def left(self) -> str:
        """One line on tensors of the files without a place in the model. Empty without any."""
        if not self.unexpected:
            return ""
        return f"in the files, without a place in the model, and left out: {some(self.unexpected)}"

    def lines(self) -> list[str]:
        """Return the report as lines to print."""
        text = [f"{self.source}: {self.kind} model, {self.n_parameters:,} parameters, {self.dtype}"]
        text += [f"tied: {' = '.join(names)}" for names in self.tied]
        text += [f"not in the checkpoint: {name}" for name in self.missing]
        text += [f"in the checkpoint but not in the model: {name}" for name in self.unexpected]
        text += [f"buffer set right: {name}" for name in self.repaired]
        return text + list(self.notes)


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run.

    Parameters
    ----------
    model : nn.Module
        In eval mode, on its device.
    system : LoopedSystem
        Its adapter.
    encode : callable
        Text to token ids. No special tokens.
    tokenizer : object or None
        The tokenizer behind `encode`. None for models of bytes.
    config : dict
        Contents of ``config.json``.
    folder : Path or None
        Where the files lie.
    side_files : mapping of str to bytes
        Other files of the checkpoint: configuration, tokenizer, remote code.
    report : LoadReport
        What loading found.
    """

    model: nn.Module
    system: LoopedSystem
    encode: Encode
    tokenizer: Any
    config: dict[str, Any]
    folder: Path | None
    side_files: Mapping[str, bytes] = field(repr=False)
    report: LoadReport = field(repr=False)

    @property
    def context_length(self) -> int | None:
        """Number of positions in the model's configuration. None if it does not give one."""
        config = getattr(self.model, "config", None)
        return next((n for n in (getattr(config, name, None) for name in _LENGTHS) if n), None)

    @property
    def no_text(self) -> bool:
        """Whether no function turns text into token ids."""
        return isinstance(self.encode, hf.NoText)

    def count_bytes(self, ids: NDArray[np.int64]) -> int | None:
        """UTF-8 bytes of the text for token ids. None where `encode` has no known inverse.

        If the last token starts an incomplete character, the bytes of U+FFFD count for it.
        """
        if hasattr(self.tokenizer, "decode"):
            text = self.tokenizer.decode(
                ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
            return len(text.encode("utf-8"))
        return ids.size if self.encode is encode_bytes else None


def encode_bytes(text: str) -> list[int]:
    """Token ids of a byte-level model: the UTF-8 bytes of the text."""
    return list(text.encode("utf-8"))


def _embedded(config: dict[str, Any]) -> nn.Module:
    require("torch")
    from loopq.zoo.huginn import HuginnConfig, SmallHuginn  # lazy: loopq imports without torch

    return SmallHuginn(HuginnConfig.from_dict(config))


register_model(zoo.MODEL_TYPE, _embedded, encode=encode_bytes)


def parse_dtype(dtype: str | None) -> torch.dtype | None:
    """Turn "float32", "bfloat16" or "float16" into torch's type. None stays None."""
    if dtype is None:
        return None
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
    torch_dtype: torch.dtype = getattr(require("torch"), dtype)
    return torch_dtype


def tied_names(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Groups of names that share one parameter, ordered by first name."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return tuple(tuple(group) for group in names.values() if len(group) > 1)


def check_values(model: nn.Module) -> None:
    """Reject a model with parameters that have no values (device "meta" or lazy modules).

    Raises
    ------
    ConfigError
        If there are any. The message names the first one.
    """
    torch = require("torch")
    for name, parameter in model.named_parameters():
        if torch.nn.parameter.is_lazy(parameter) or parameter.is_meta:
            kind = (
                "lazy module: call the model once"
                if not parameter.is_meta
                else "device meta: load its values"
            )
            raise ConfigError(f"parameter {name} has no values ({kind} before)")


def describe(model: nn.Module, source: str, kind: str, found: Findings | None = None) -> LoadReport:
    """Build the report of a loaded model."""
    parameters = list(model.parameters())
    kinds = sorted({str(p.dtype).removeprefix("torch.") for p in parameters if p.is_floating_point()})
    return LoadReport(
        source=source,
        kind=kind,
        dtype=", ".join(kinds),
        n_parameters=sum(p.numel() for p in parameters),
        tied=tied_names(model),
        **vars(found or Findings()),
    )


def choose_system(model: nn.Module, system: str | None) -> LoopedSystem:
    """Return the named adapter, or the one that fits the model. A decoder with a loop added runs it from then on.

    Raises
    ------
    SystemContractError
        If none or several fit, or the named one does not.
    """
    chosen = find_system(model) if system is None else _named(model, system)
    if isinstance(chosen, Looped):
        run_loop(model)
    return chosen


def _named(model: nn.Module, system: str) -> LoopedSystem:
    cls = SYSTEMS.get(system)
    if cls.name != "generic" and not cls.matches(model):
        raise SystemContractError(
            f"system {system!r} does not fit {type(model).__name__}; leave --system out to have it found"
        )
    return cls(model)


def load_model(
    spec: str | Path,
    *,
    system: str | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    dtype: str | None = None,
    device: str = "cpu",
    revision: str | None = None,
    memory: int | None = None,
) -> LoadedModel:
    """Load a looped model and find its adapter.

    Parameters
    ----------
    spec : str or Path
        Name of an embedded model (`loopq.zoo.available`), a folder with ``config.json`` and safetensors, or a hub id
        ("owner/name"). ``looped:MODEL[8:20]x2`` runs layers 8 to 19 of a dense model twice. Only a hub id uses the
        network. Register classes that transformers does not know first, with `loopq.models.classes.register_model`.
    system : str, optional
        Name of the adapter, if loopq should not choose it.
    trust_remote_code : bool
        Allow the checkpoint to run its own Python code.
    allow_pickle : bool
        Allow weights in pickle files (``*.bin``). Reading them can run code.
    dtype : {"float32", "bfloat16", "float16"}, optional
        Type to compute in: the checkpoint's, or float32 if the processor lacks bfloat16. Outputs keep narrower types.
    device : str
        Device of the model.
    revision : str, optional
        Commit, tag or branch of a hub id.
    memory : int, optional
        Memory limit of the weights in bytes. Free memory when absent. Larger models read a layer's weights from the
        files at each of its visits.

    Returns
    -------
    LoadedModel

    Raises
    ------
    ConfigError
        If the name, dtype or device does not exist, or the code is not trusted.
    CheckpointError
        If files are damaged or do not fit, parameters are missing, or weights are pickled.
    SystemContractError
        If no looped system fits the model.

    Notes
    -----
    Buffers that a checkpoint does not store are compared with those of a newly built model. Differing ones are
    corrected and listed in the report.
    """
    how = hf.Loading(trust_remote_code, allow_pickle, parse_dtype(dtype), memory)
    return _load(str(spec), system, how, device, revision)


@dataclass(frozen=True)
class _ModelFolder:
    """A model's folder, its ``config.json``, and the class to build. With None transformers has the class."""

    source: str
    loop: list[int] | None
    path: Path
    config: dict[str, Any]
    registered: ModelClass | None

    @classmethod
    def find(cls, spec: str, system: str | None, revision: str | None, allow_pickle: bool) -> _ModelFolder:
        """Find the folder of a name and read its configuration."""
        source, loop = parse_spec(spec)
        path = _find_folder(source, revision, allow_pickle)
        where = path / "config.json"
        config = checked(dict[str, Any], read_json(where, finite=False), where)
        checked(_Known, config, where, others=True)
        config = without_type(config)
        return cls(source, loop, path, config, find_class(config, system, where))

    def filled(self, how: hf.Loading) -> tuple[nn.Module, Findings]:
        """Build the model and fill it from the files."""
        if self.registered is None:
            model, found = hf.load_hf(self.path, self.config, self.source, how)
        else:
            with building(), drawn(seed=0):
                model, found = load_registered(self.path, self.config, self.registered, how.allow_pickle)
            model = to_float32(model) if how.dtype == require("torch").float32 else model.to(dtype=how.dtype)
        if self.loop is not None:
            setattr(model.config, LOOP, self.loop)
        return model, found

    def looped(self) -> dict[str, Any]:
        """Return the configuration with the added loop."""
        return self.config if self.loop is None else with_loop(self.config, self.loop)

    def untyped(self, model: nn.Module) -> dict[str, str]:
        """Return the "dtype" of a model that has the type of its files, because its ``config.json`` names none.

        A model that is built from the configuration alone would have another.
        """
        named = any(part.get(key) for part in _parts(self.config) for key in ("dtype", "torch_dtype"))
        kinds = {str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.is_floating_point()}
        if named or self.registered is not None or len(kinds) != 1 or kinds == {"float32"}:
            return {}
        return {"dtype": kinds.pop()}

    def side_files(self, encode: Encode, more: Mapping[str, str]) -> dict[str, bytes]:
        """Read the files beside the weights. For a model with its own encoder they are only the configuration.

        `more` are entries that the configuration lacks.
        """
        own_encoder = self.registered is not None and encode is self.registered.encode
        paths = (self.path / "config.json",) if own_encoder else hf.side_files(self.path)
        files = {path.relative_to(self.path).as_posix(): path.read_bytes() for path in paths}
        if self.loop is not None or more:
            files["config.json"] = json.dumps(self.looped() | dict(more), indent=2).encode()
        plain = hf_folder.for_all_versions(hf_folder.unquantized(files))
        # A loop that the folder has itself gets the type of one that the name adds.
        return hf_folder.looped_files(plain, remote_code=False)


def _parts(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The configuration, and that of the text model in it."""
    return [part for part in (config, config.get("text_config")) if isinstance(part, Mapping)]


def _load(spec: str, system: str | None, how: hf.Loading, device: str, revision: str | None) -> LoadedModel:
    require("torch")
    folder = _ModelFolder.find(spec, system, revision, how.allow_pickle)
    model, found = folder.filled(how)
    more = folder.untyped(model) if how.dtype is None else {}
    widened = widen(model) if how.dtype is None and device == "cpu" else ""
    model, done = plain(to_device(model, device).eval())
    check_values(model)
    adapter = choose_system(model, system)
    hf.check_missing(spec, found.missing, adapter)
    tokenizer, encode = text_encoder(folder.registered, folder.path, folder.config, how.trust_remote_code)
    kind = "registered" if folder.registered else "transformers"
    report = describe(model, spec, kind, found.noted(*done, widened))
    side_files = folder.side_files(encode, more)
    return LoadedModel(model, adapter, encode, tokenizer, folder.looped(), folder.path, side_files, report)


def text_encoder(
    registered: ModelClass | None, folder: Path, config: Mapping[str, Any], trust_remote_code: bool
) -> tuple[Any, Encode]:
    """Return the tokenizer (None without one) and the encode function, by default the class's."""
    if registered is not None and registered.encode is not None and not hf.has_tokenizer(folder):
        return None, registered.encode
    return hf.load_tokenizer(folder, config, trust_remote_code)


def to_device(model: nn.Module, device: str) -> nn.Module:
    """Move a model. Weights that are read layer by layer are then read to that device.

    Raises
    ------
    ConfigError
        If the device cannot be used here.
    """
    source = source_of(model)
    try:
        if isinstance(source, Stream):
            source.move(device)
            return model
        return model.to(device=device)
    except (RuntimeError, AssertionError) as cause:
        # torch reports it on many lines. The first names the device.
        reason = str(cause).strip().splitlines()[0]
        raise ConfigError(f"device {device!r} cannot be used here: {reason}; use --device cpu") from cause


def _find_folder(spec: str | Path, revision: str | None, allow_pickle: bool) -> Path:
    folder = Path(spec)
    if (folder / "config.json").is_file():
        return folder
    if str(spec) in zoo.available():
        return zoo.folder(str(spec))
    if folder.is_dir():
        raise ConfigError(f"{folder}: no config.json in it; it is not a model's folder")
    if folder.is_file():
        raise ConfigError(f"{folder}: a file; name the folder with the model's config.json")
    if hf.HUB_ID.match(str(spec)):
        return hf.fetch(str(spec), revision, allow_pickle)
    raise ConfigError(
        f"no model {str(spec)!r}: neither a folder with a config.json, nor a hub id (owner/name), nor an "
        f"embedded model: {', '.join(zoo.available())}"
    )
