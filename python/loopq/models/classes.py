"""Model classes that transformers does not know, registered by the `model_type` of a ``config.json``."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from loopq.errors import CheckpointError, ConfigError, model_code, require
from loopq.formats.hf_folder import check_weight_files
from loopq.settings.execution import available_bytes
from loopq.storage.model_files import check_ties, raw
from loopq.storage.schema import Object
from loopq.systems import SYSTEMS
from loopq.systems.capabilities import Builds, Encode, ModelClass, Tensors

if TYPE_CHECKING:
    from torch import nn


MOST = 10_000  # Building 2^40 layers would never end.
_COUNT = re.compile(r"^(n|num)_.*(layer|block|expert|label)")
_CLASSES: dict[str, ModelClass] = {}


@dataclass(frozen=True)
class Findings:
    """Differences from the checkpoint, for the load report. Fields are those of `loopq.models.load.LoadReport`."""

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    repaired: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def noted(self, *notes: str) -> Findings:
        """Add notes. Empty ones are left out."""
        return dataclasses.replace(self, notes=(*self.notes, *filter(None, notes)))


def register_model(
    model_type: str,
    build: Callable[[Object], nn.Module],
    *,
    encode: Encode | None = None,
    rename: Callable[[Tensors], Tensors] | None = None,
) -> None:
    """Let `load_model` open folders by this `model_type` in ``config.json``.

    Parameters
    ----------
    model_type : str
        A name that no other class has.
    build : callable
        Takes the contents of ``config.json`` and returns the model with arbitrary weights. They are then filled from
        ``*.safetensors`` and keep the floating type they were built with.
    encode : callable, optional
        Text to token ids for models without a tokenizer file. Use `loopq.models.load.encode_bytes` for a model of
        bytes. A tokenizer beside the model takes precedence.
    rename : callable, optional
        Takes the stored tensors by name and returns them under the model's names.

    Raises
    ------
    ConfigError
        The name is taken.

    Examples
    --------
    >>> from torch import nn
    >>> register_model("my-linear", lambda config: nn.Linear(config["width"], config["width"]))
    """
    if model_type in _CLASSES:
        raise ConfigError(f"model_type {model_type!r} is registered twice")
    _CLASSES[model_type] = ModelClass(build, encode, rename)


def find_class(config: Mapping[str, Any], system: str | None, where: object) -> ModelClass | None:
    """Return the registered class of a ``config.json``, else that of an adapter, else None (transformers).

    An adapter provides one for the `model_types` that it names, and for any folder if the caller names the adapter.
    More layers, experts or labels than `MOST` are a ConfigError.
    """
    for part in (config, config.get("text_config")):
        for name, count in part.items() if isinstance(part, Mapping) else ():
            if _COUNT.search(name) and isinstance(count, int) and count > MOST:
                raise ConfigError(f"{where}: {name} is {count}; loopq builds at most {MOST}")
    kind = str(config.get("model_type", ""))
    if kind in _CLASSES:
        return _CLASSES[kind]
    named = None if system is None else SYSTEMS.get(system)
    if named is not None and issubclass(named, Builds):
        return named.model_class()
    classes = (cls.model_class() for _, cls in SYSTEMS if issubclass(cls, Builds))
    return next((model_class for model_class in classes if kind in model_class.model_types), None)


def load_registered(
    folder: Path, config: Mapping[str, Any], model_class: ModelClass, allow_pickle: bool
) -> tuple[nn.Module, Findings]:
    """Build a registered model and fill it from the files beside its ``config.json``.

    Returns
    -------
    model : nn.Module
        On the CPU.
    found : Findings
        Missing and unexpected tensors.

    Raises
    ------
    CheckpointError
        If weights are missing, unreadable, pickled without permission, or of a wrong shape.
    """
    tensors = _read_tensors(folder, allow_pickle)
    if model_class.rename is not None:
        tensors = model_class.rename(tensors)
    _check_size(folder, config, model_class, tensors)
    with model_code(f"{folder / 'config.json'}: building the model", CheckpointError):
        model = model_class.build(dict(config))
    state = model.state_dict(keep_vars=True)
    _check_shapes(folder, state, tensors)
    check_ties(state, {name: raw(t, copy=False) for name, t in tensors.items() if name in state}, folder)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    # The file stores a tied parameter under one of its names.
    filled = {id(state[name]) for name in tensors if name in state}
    missing = [name for name in missing if id(state[name]) not in filled]
    return model, Findings(tuple(sorted(missing)), tuple(sorted(unexpected)))


def _check_size(folder: Path, config: Mapping[str, Any], model_class: ModelClass, tensors: Tensors) -> None:
    """Reject a ``config.json`` that exceeds the weights or memory in size, before building anything."""
    import torch  # lazy: loopq imports without torch

    skeleton = None
    # A constructor that computes with its tensors cannot be tried without memory.
    with contextlib.suppress(Exception), torch.device("meta"):
        skeleton = model_class.build(dict(config))
    if skeleton is None:
        return
    _check_shapes(folder, skeleton.state_dict(), tensors)
    needed = sum(x.numel() * x.element_size() for x in (*skeleton.parameters(), *skeleton.buffers()))
    free = available_bytes()
    if free is not None and needed > free:
        raise CheckpointError(
            f"{folder}: with config.json the model takes {needed / 2**30:.3g} GiB of memory, "
            f"and {free / 2**30:.3g} are free; take a machine with more memory"
        )


def _check_shapes(folder: Path, state: Mapping[str, Any], tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        if name in state and state[name].shape != tensor.shape:
            raise CheckpointError(
                f"{folder}: {name} has shape {list(tensor.shape)}, with config.json it is {list(state[name].shape)}; "
                "config.json is not that of these weights"
            )


def _read_tensors(folder: Path, allow_pickle: bool) -> Tensors:
    torch = require("torch")
    check_weight_files(folder, allow_pickle)
    files = sorted(folder.glob("*.safetensors"))
    tensors: Tensors = {}
    try:
        for file in files:
            tensors.update(require("safetensors.torch", extra="torch").load_file(file))
        if not files:
            tensors = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
    except (OSError, SafetensorError, RuntimeError, pickle.UnpicklingError) as cause:
        raise CheckpointError(f"{folder}: the weights cannot be read ({cause}); copy them again") from cause
    return tensors
