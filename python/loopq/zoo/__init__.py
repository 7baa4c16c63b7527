"""Small trained looped models of each kind, for tests, the demo and the tables; one ships in the wheel."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from loopq.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from loopq.zoo._model import ZooModel

__all__ = ["available", "batches", "calibration_text", "evaluation_text", "folder", "load"]

_HERE = Path(__file__).resolve().parent
_DATA = _HERE / "data"
_SHIPPED = _HERE / "weights"
# In a checkout the larger part of the zoo lies beside the scripts that trained it.
_TRAINED = _HERE.parents[2] / "benches" / "zoo" / "weights"

_CLASSES = {
    "loopq-zoo-coconut": ("coconut", "ZooCoconut"),
    "loopq-zoo-control": ("control", "ZooControl"),
    "loopq-zoo-huginn": ("huginn", "ZooHuginn"),
    "loopq-zoo-loopformer": ("loopformer", "ZooLoopFormer"),
    "loopq-zoo-mamba": ("mamba", "ZooMamba"),
    "loopq-zoo-nanbeige": ("nanbeige", "ZooNanbeige"),
    "loopq-zoo-ouro": ("ouro", "ZooOuro"),
    "loopq-zoo-parcae": ("parcae", "ZooParcae"),
    "loopq-zoo-ponder": ("ponder", "ZooPonder"),
    "loopq-zoo-rllama": ("rllama", "ZooRLlama"),
}


def _folders() -> dict[str, Path]:
    found: dict[str, Path] = {}
    for root in (_TRAINED, _SHIPPED):
        if root.is_dir():
            found.update({p.parent.name: p.parent for p in sorted(root.glob("*/config.json"))})
    return found


def available() -> list[str]:
    """Return the names that `load` takes: the shipped models, and in a checkout the trained ones too."""
    return sorted(_folders())


def folder(name: str) -> Path:
    """Return the folder of a zoo model: ``config.json``, ``model.safetensors`` and its card.

    Parameters
    ----------
    name : str
        One of `available`.

    Returns
    -------
    Path

    Raises
    ------
    ConfigError
        If the zoo has no model of this name.
    """
    found = _folders()
    if name not in found:
        raise ConfigError(f"no zoo model {name!r}: use one of {sorted(found)}")
    return found[name]


def model_class(model_type: str) -> type[ZooModel]:
    """Return the class of a ``model_type`` as its ``config.json`` gives it.

    Raises
    ------
    ConfigError
        If no zoo model has this type.
    MissingExtraError
        If torch is not installed.
    """
    if model_type not in _CLASSES:
        raise ConfigError(f"model_type {model_type!r} is no zoo model; known: {sorted(_CLASSES)}")
    module, name = _CLASSES[model_type]
    try:
        found: type[ZooModel] = getattr(importlib.import_module(f"loopq.zoo.{module}"), name)
    except ModuleNotFoundError as exc:
        if exc.name != "torch":
            raise
        raise MissingExtraError("the zoo needs torch: pip install 'loopq[torch]'") from exc
    return found


def load(name: str | Path = "huginn_small") -> ZooModel:
    """Load a trained model of the zoo.

    Parameters
    ----------
    name : str or path
        One of `available`, or a folder with ``config.json`` and ``model.safetensors``.

    Returns
    -------
    ZooModel
        In eval mode, float32.

    Raises
    ------
    ConfigError
        If there is no such model.
    CheckpointError
        If its files are damaged.
    MissingExtraError
        If torch is not installed.
    """
    place = _folders().get(str(name), Path(name))
    config = place / "config.json"
    if not config.is_file():
        raise ConfigError(
            f"no zoo model {str(name)!r}: use one of {available()} or a folder with a config.json"
        )
    model_type = json.loads(config.read_text(encoding="utf-8")).get("model_type", "")
    return model_class(model_type).load(place)


def calibration_text() -> bytes:
    """Return the shipped text for calibration (public domain, ASCII)."""
    return (_DATA / "calibration.txt").read_bytes()


def evaluation_text() -> bytes:
    """Return the shipped text for evaluation, by another author (public domain, ASCII)."""
    return (_DATA / "evaluation.txt").read_bytes()


def batches(
    text: bytes, n_sequences: int, seq_len: int, offset: int = 0
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Cut a text into consecutive sequences of byte values.

    Parameters
    ----------
    text : bytes
        The text.
    n_sequences, seq_len : int
        Rows and columns of the result.
    offset : int
        Bytes to skip first.

    Returns
    -------
    int64 array (n_sequences, seq_len)

    Raises
    ------
    ConfigError
        If the text is too short or a number is out of range.
    """
    if n_sequences < 1 or seq_len < 1 or offset < 0:
        raise ConfigError(
            f"need n_sequences >= 1, seq_len >= 1, offset >= 0; got {n_sequences}, {seq_len}, {offset}"
        )
    need = offset + n_sequences * seq_len
    if len(text) < need:
        raise ConfigError(
            f"the text has {len(text)} bytes, {n_sequences} sequences of {seq_len} after {offset} need {need}"
        )
    flat = np.frombuffer(text, dtype=np.uint8, count=n_sequences * seq_len, offset=offset)
    return flat.reshape(n_sequences, seq_len).astype(np.int64)
