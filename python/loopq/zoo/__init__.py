"""The embedded model, a small trained model of Huginn's class, and the texts that ship with loopq."""

from __future__ import annotations

from pathlib import Path

from loopq.errors import ConfigError

__all__ = ["MODEL_TYPE", "available", "calibration_text", "evaluation_text", "folder", "mixed_text"]

# Class name in the embedded model's config.json.
MODEL_TYPE = "loopq-zoo-huginn"

_HERE = Path(__file__).resolve().parent
_DATA = _HERE / "data"
_WEIGHTS = _HERE / "weights"


def available() -> list[str]:
    """Return the names of the embedded models. `loopq.models.load.load_model` takes these names."""
    return sorted(path.parent.name for path in _WEIGHTS.glob("*/config.json"))


def folder(name: str) -> Path:
    """Return the folder of an embedded model: ``config.json``, ``model.safetensors`` and its card.

    Returns
    -------
    Path

    Raises
    ------
    ConfigError
        If there is no embedded model of this name.
    """
    if name not in available():
        raise ConfigError(f"no embedded model {name!r}: use one of {available()}")
    return _WEIGHTS / name


def calibration_text() -> bytes:
    """Return the embedded text for calibration (public domain, ASCII)."""
    return (_DATA / "calibration.txt").read_bytes()


def evaluation_text() -> bytes:
    """Return the embedded text for evaluation (public domain, ASCII, by another author)."""
    return (_DATA / "evaluation.txt").read_bytes()


def mixed_text(use: str) -> Path:
    """Return the file of passages for models with a tokenizer; `use` is "calibration" or "evaluation"."""
    return _DATA / f"{use}.jsonl.xz"
