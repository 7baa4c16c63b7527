"""Models built by a Python file (`--python FILE.py:FUNCTION`) or passed to `loopq.quantize` as a torch module."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopq.errors import CheckpointError, ConfigError, LoopqError, model_code
from loopq.models import hf
from loopq.models.check import token_rows
from loopq.models.classes import Findings
from loopq.models.load import LoadedModel, check_values, describe, encode_bytes, load_model, to_device
from loopq.models.plain import plain
from loopq.models.restore import open_source
from loopq.models.systems.generic import Generic
from loopq.settings.declare import Settings, setting
from loopq.storage.journal import note_run
from loopq.systems import find_system, fitting_systems
from loopq.systems.base import LoopedSystem

if TYPE_CHECKING:
    from torch import nn


_BYTES = 256


@dataclass(frozen=True)
class Opening(Settings):
    """How Python opens a model.

    Parameters
    ----------
    tokenizer : tokenizer, callable or path, optional
        Tokenizer of transformers, function from text to token ids, or folder with tokenizer files. By default it is the
        one in the model's folder. That of a module is in the folder, or the hub's cache, that its `name_or_path` names.
    trust_remote_code : bool
        Allow code from the model's files to run.
    """

    tokenizer: Any = setting(None, option=False)
    trust_remote_code: bool = setting(False, option=False)

    def applied(self, loaded: LoadedModel) -> LoadedModel:
        """Return a loaded model with the given tokenizer, if there is one."""
        if self.tokenizer is None:
            return loaded
        tokenizer, encode = _given(self.tokenizer, loaded.config, self.trust_remote_code)
        return dataclasses.replace(loaded, tokenizer=tokenizer, encode=encode)


def open_model(
    model: str | Path | LoadedModel | LoopedSystem | nn.Module,
    opening: Opening | None = None,
    *,
    requantize: bool = False,
) -> LoadedModel:
    """Load a model by its name, or wrap a given one. Any torch module goes through discovery.

    A quantized folder gives the weights of its codes, one of loopq's only with `requantize`.

    Raises
    ------
    ConfigError
        It is something else.
    """
    opening = opening or Opening()
    if isinstance(model, LoadedModel):
        return opening.applied(model)
    if isinstance(model, str | Path):
        trusted = opening.trust_remote_code
        loaded = open_source(model, requantize=requantize, trust_remote_code=trusted)
        return opening.applied(loaded or load_model(model, trust_remote_code=trusted))
    if not isinstance(model, LoopedSystem) and not hasattr(model, "named_modules"):
        raise ConfigError(
            f"the model is a {type(model).__name__}; give a torch module, an adapter, the name of a model, or what "
            "loopq.load returns"
        )
    return wrap(model, opening.tokenizer, trust_remote_code=opening.trust_remote_code)


def wrap(
    model: nn.Module | LoopedSystem,
    tokenizer: Any = None,
    depth: str | None = None,
    *,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Wrap a torch module or an adapter as a loaded model.

    Parameters
    ----------
    model : nn.Module or LoopedSystem
        A module of a published class gets the adapter of that class. For any other module, one run discovers the loop
        (`loopq.models.systems.generic.Generic`). The module is set to eval mode and runs through
        `loopq.models.plain.plain`.
    tokenizer : tokenizer, callable or path, optional
        As of `Opening`. Without one, a module with 256 token ids takes bytes, and any other takes no text.
    depth : str, optional
        Argument of the module's forward that sets the number of steps. If given, the loop is discovered for any class.
    trust_remote_code : bool
        Allow code that comes with the tokenizer.
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
    if tokenizer is None:
        tokenizer, encode = _own_tokenizer(system, trust_remote_code)
    else:
        tokenizer, encode = _given(tokenizer, _config(inside), trust_remote_code)
    if encode is encode_bytes:
        notes += ("text is taken as UTF-8 bytes: the model has 256 token ids and no tokenizer",)
    return LoadedModel(
        model=system.model,
        system=system,
        encode=encode,
        tokenizer=tokenizer,
        config={},
        folder=None,
        side_files={},
        report=describe(system.model, type(system.model).__name__, "module", Findings(notes=notes)),
    )


def _config(model: Any) -> dict[str, Any]:
    config: Any = getattr(model, "config", None)
    return dict(config.to_dict()) if hasattr(config, "to_dict") else {}


def _own_tokenizer(
    system: LoopedSystem, trust_remote_code: bool
) -> tuple[Any, Callable[[str], Sequence[int]]]:
    """Return the tokenizer of the folder that a module was loaded from, or a function that refuses text."""
    model: Any = system.model
    name = str(getattr(model, "name_or_path", "") or "")
    folder = hf.cached_tokenizer(name, getattr(getattr(model, "config", None), "_commit_hash", None))
    reason = f"no tokenizer came with this {type(model).__name__} (name_or_path: {name!r})"
    if folder is not None:
        try:
            return hf.load_tokenizer(folder, _config(model), trust_remote_code)
        except LoopqError as error:  # token ids need none
            reason = str(error)
    elif _reads_bytes(system):
        return None, encode_bytes
    return None, hf.NoText(reason, "pass tokenizer=, or give prompts as token ids")


def _reads_bytes(system: LoopedSystem) -> bool:
    """Whether a model has one id for each byte. A run finds its token table where several tables could be it."""
    if all(getattr(m, "num_embeddings", None) != _BYTES for m in system.model.modules()):
        return False
    with contextlib.suppress(LoopqError):
        return token_rows(system) == {_BYTES}
    return False


def _given(
    tokenizer: Any, config: dict[str, Any], trust_remote_code: bool
) -> tuple[Any, Callable[[str], Sequence[int]]]:
    """Return a tokenizer from Python and the function that encodes text.

    Raises
    ------
    ConfigError
        It is neither a tokenizer of transformers, nor a function, nor a folder with tokenizer files.
    """
    if isinstance(tokenizer, str | Path):
        if not hf.has_tokenizer(Path(tokenizer)):
            raise ConfigError(
                f"tokenizer {str(tokenizer)!r}: not a folder with tokenizer files; pass the tokenizer"
            )
        return hf.load_tokenizer(Path(tokenizer), config, trust_remote_code)
    # That of a processor of texts and images.
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    if not callable(tokenizer):
        raise ConfigError(
            f"tokenizer: got {type(tokenizer).__name__}; give a tokenizer of transformers, a function from text to "
            "token ids, or a folder with tokenizer files"
        )
    if hasattr(tokenizer, "decode"):
        return tokenizer, hf.encoder(tokenizer, type(tokenizer).__name__)

    def encode(text: str) -> list[int]:
        with model_code("tokenizer", CheckpointError, "the function"):
            return list(tokenizer(text))

    return tokenizer, encode


def load_python(spec: str, depth: str | None = None, device: str = "cpu") -> LoadedModel:
    """Call a function of a Python file and wrap its result.

    Parameters
    ----------
    spec : str
        "FILE.py:FUNCTION". The function takes no arguments. It returns a torch module, an adapter (`LoopedSystem`), or
        one of them with a tokenizer as of `Opening`.
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
    model, tokenizer = result if isinstance(result, tuple) else (result, None)
    if not isinstance(model, LoopedSystem) and not hasattr(model, "named_modules"):
        raise ConfigError(
            f"{spec}: returned {type(model).__name__}, which is neither a torch module nor an adapter"
        )
    if device != "cpu":
        to_device(model.model if isinstance(model, LoopedSystem) else model, device)
    return wrap(model, tokenizer, depth)
