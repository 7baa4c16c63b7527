"""Models built by a Python file (`--python FILE.py:FUNCTION`) or passed to `loopq.quantize` as a torch module."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopq.errors import ConfigError
from loopq.models.classes import Findings
from loopq.models.load import LoadedModel, check_values, describe, encode_bytes, load_model, to_device
from loopq.models.plain import plain
from loopq.models.systems.generic import Generic
from loopq.storage.journal import note_run
from loopq.systems import find_system, fitting_systems
from loopq.systems.base import LoopedSystem

if TYPE_CHECKING:
    from torch import nn


def open_model(model: str | Path | LoadedModel | LoopedSystem | nn.Module) -> LoadedModel:
    """Load a model by its name, or wrap a given one. Any torch module goes through discovery."""
    if isinstance(model, LoadedModel):
        return model
    return load_model(model) if isinstance(model, str | Path) else wrap(model)


def wrap(
    model: nn.Module | LoopedSystem, encode: Any = encode_bytes, depth: str | None = None
) -> LoadedModel:
    """Wrap a torch module or an adapter as a loaded model.

    Parameters
    ----------
    model : nn.Module or LoopedSystem
        A module of a published class gets the adapter of that class. For any other module, one run discovers the loop
        (`loopq.models.systems.generic.Generic`). The module is set to eval mode and runs through
        `loopq.models.plain.plain`.
    encode : callable
        Text to token ids. Bytes when absent.
    depth : str, optional
        Argument of the module's forward that sets the number of steps. If given, the loop is discovered for any class.
    """
    given = model.model if isinstance(model, LoopedSystem) else model
    # Dropout would add its own noise to calibration.
    notes: tuple[str, ...] = (
        ("the model was in train mode: it is in eval mode now",) if given.training else ()
    )
    inside, done = (given.eval(), ()) if isinstance(model, LoopedSystem) else plain(given.eval())
    notes += done
    check_values(inside)
    if isinstance(model, LoopedSystem):
        system = model
    elif depth is None and fitting_systems(inside):
        system = find_system(inside)
    else:
        system = Generic(inside, depth=depth)
    return LoadedModel(
        model=system.model,
        system=system,
        encode=encode,
        tokenizer=None if encode is encode_bytes else encode,
        config={},
        folder=None,
        side_files={},
        report=describe(system.model, type(system.model).__name__, "module", Findings(notes=notes)),
    )


def load_python(spec: str, depth: str | None = None, device: str = "cpu") -> LoadedModel:
    """Call a function of a Python file and wrap its result.

    Parameters
    ----------
    spec : str
        "FILE.py:FUNCTION". The function takes no arguments. It returns a torch module, an adapter (`LoopedSystem`), or
        one of them with a function that turns text into token ids.
    depth : str, optional
        As of `wrap`.
    device : str
        Device of the model. With "cpu" it stays where the function put it.

    Raises
    ------
    ConfigError
        If the file or function does not exist, or the function returns something else.
    """
    file, colon, name = spec.rpartition(":")
    path = Path(file)
    if not colon or path.suffix != ".py" or not path.is_file():
        raise ConfigError(f"{spec!r}: give FILE.py:FUNCTION, where FUNCTION returns a torch module")
    module_spec = importlib.util.spec_from_file_location(path.stem, path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    note_run(path)
    module_spec.loader.exec_module(module)
    make = getattr(module, name, None)
    if not callable(make):
        raise ConfigError(f"{path}: has no function {name!r}")
    result = make()
    model, encode = result if isinstance(result, tuple) else (result, encode_bytes)
    if not isinstance(model, LoopedSystem) and not hasattr(model, "named_modules"):
        raise ConfigError(
            f"{spec}: returned {type(model).__name__}, which is neither a torch module nor an adapter"
        )
    if device != "cpu":
        to_device(model.model if isinstance(model, LoopedSystem) else model, device)
    return wrap(model, encode, depth)
