"""Errors of loopq: one class per cause; every message says what to do next. Extras are imported by `require`."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

#: The extra that installs each optional dependency.
_EXTRA = {
    "torch": "torch",
    "transformers": "hf",
    "huggingface_hub": "hf",
    "lm_eval": "eval",
    "gguf": "gguf",
    "tokenizers": "gguf",
    "matplotlib": "report",
    "pyarrow": "parquet",
    "scipy": "stats",
    "threadpoolctl": "torch",
}


class LoopqError(Exception):
    """Base class of every error that loopq raises on purpose."""


class ConfigError(LoopqError, ValueError):
    """A setting is not allowed; the message lists the allowed values."""


class UnknownNameError(ConfigError):
    """A name is not registered, such as a method that a guest or a user's file would bring; the message says so."""


class MissingExtraError(LoopqError, ImportError):
    """An optional dependency is not installed; the message names the extra to install."""


class CalibrationError(LoopqError):
    """Calibration data or a rollout is unusable: empty, of the wrong depth, or without a call of some layer."""


class NonFiniteError(LoopqError, ValueError):
    """NaN or infinity in a weight or an activation; the message names layer, step and row."""


class DumpError(LoopqError):
    """A dump of activations or Hessians is truncated, altered or inconsistent."""


class CheckpointError(LoopqError):
    """A checkpoint is truncated, altered, of an unknown version, or does not fit the model."""


class SolveError(LoopqError):
    """A layer could not be solved; the message gives layer, pivot, reason and advice."""


class OutOfMemoryError(LoopqError, MemoryError):
    """The system has no memory for a buffer; the message gives its size, what it was for and what to do."""


class KernelError(LoopqError):
    """A CUDA kernel does not support these inputs or this device; the message says what it supports and what to do."""


class SystemContractError(LoopqError):
    """No system matches the model, or the model breaks the contract of its system."""


@contextlib.contextmanager
def naming(layer: str) -> Iterator[None]:
    """Prefix the solver's errors with a layer's name, once. NumPy's memory errors become loopq's."""
    start = f"layer {layer}: "
    try:
        yield
    except (SolveError, OutOfMemoryError) as cause:
        if str(cause).startswith(start):
            raise
        raise type(cause)(f"{start}{cause}") from cause
    except MemoryError as cause:
        advice = (
            "end other programs or take a machine with more memory; --memory bounds what a run holds at once"
        )
        raise OutOfMemoryError(f"{start}no memory: {cause}: {advice} besides the model") from cause


@contextlib.contextmanager
def model_code(
    where: str | Callable[[], str], error: type[LoopqError] = CalibrationError, what: str = "the model"
) -> Iterator[None]:
    """Run code of a model, or of `what` comes with it, inside the block. Its errors become one line with the place.

    Raises
    ------
    LoopqError
        Has the given class and wraps any error of the model's code. Errors of loopq and of memory pass unchanged.
    """
    try:
        yield
    except (LoopqError, MemoryError):
        raise
    except Exception as cause:
        first = next(iter(str(cause).strip().splitlines()), "")
        hint = "; take fewer or shorter prompts at once (--batch-size, --seq-len)" * (
            "memory" in first and what == "the model"
        )
        place = where if isinstance(where, str) else where()
        raise error(f"{place}: {what} raises {type(cause).__name__}: {first:.300}{hint}") from cause


def require(module: str, extra: str | None = None) -> Any:
    """Import an optional module.

    Parameters
    ----------
    module : str
        Name of the module.
    extra : str or None
        Extra that installs it, if it depends on the caller.

    Raises
    ------
    MissingExtraError
        The module is not installed, and the message gives the command that installs it. Or it cannot be loaded.
    """
    try:
        return importlib.import_module(module)
    except ImportError as cause:
        package = module.split(".")[0]
        if not isinstance(cause, ModuleNotFoundError):
            reason = next(iter(str(cause).strip().splitlines()), "")
            raise MissingExtraError(f"this needs {package}, which cannot be loaded: {reason:.300}") from cause
        raise MissingExtraError(
            f"this needs {package}, which is not installed; run: pip install 'loopq[{extra or _EXTRA[package]}]'"
        ) from cause
