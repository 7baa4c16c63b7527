"""Looped systems with an adapter in loopq, and what published models and folders need to be loaded."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from loopq.layers.loop_spec import without_type
from loopq.models.hf import TESTED_TRANSFORMERS, has_tokenizer, is_known
from loopq.storage.files import read_json
from loopq.systems import SYSTEMS
from loopq.systems.base import LoopedSystem

_CODE = {
    "checkpoint": (
        "comes with the checkpoint; read it, then give --trust-remote-code",
        f"=={TESTED_TRANSFORMERS}",
    ),
    "transformers": ("a class of transformers", ">=4.57,<6"),
    "own": (
        "a plain torch class: build it as its code does and pass the module to loopq, or --register FILE",
        None,
    ),
}
_NO_TOKENIZER = (
    "none of transformers beside the weights: give token ids (.npy), or `encode` of register_model"
)
_DTYPE = "as stored; --dtype float32|bfloat16|float16 changes it"


def systems() -> list[dict[str, str | None]]:
    """Return a row for each system, by column."""
    return [
        {
            "system": name,
            "loop": system.summary,
            "weights quantized": ", ".join(
                f"{m}: {count}" for m, count in system.published.checkpoints.items()
            )
            or None,
            "feedback-exposed": ", ".join(system.published.exposed) or None,
        }
        for name, system in SYSTEMS
    ]


def needs(model: str) -> list[tuple[str, str]]:
    """Return what a model needs to be loaded, as pairs of a subject and a sentence.

    Parameters
    ----------
    model : str
        A published model, a system, or a folder with ``config.json``. Other names give no lines.
    """
    if (Path(model) / "config.json").is_file():
        return _of_folder(Path(model))
    wanted = model.rpartition("/")[2].lower()
    published = [(name, kind) for _, kind in SYSTEMS for name in kind.published.checkpoints]
    for name, kind in published:
        # A hub id may be longer than the name (Nanbeige4.2-3B-Base) or shorter (huginn-0125).
        if wanted.startswith(name.lower()):
            return _of_published(name, kind)
        if wanted == kind.name or wanted.startswith(f"{kind.name}-"):
            return _of_published(", ".join(kind.published.checkpoints), kind)
    return []


def _of_published(name: str, kind: type[LoopedSystem]) -> list[tuple[str, str]]:
    published = kind.published
    code, version = _CODE[published.code]
    version = published.transformers or version
    tokenizer = _NO_TOKENIZER if published.code == "own" else "beside the weights"
    lines = [(name, f"system {kind.name}: {kind.summary}"), ("code", code)]
    lines += [("transformers", _asked(version))] if version else []
    lines += [("also", published.also)] if published.also else []
    return [*lines, ("tokenizer", tokenizer), ("dtype", _DTYPE)]


def _of_folder(folder: Path) -> list[tuple[str, str]]:
    config: Mapping[str, Any] = read_json(folder / "config.json", finite=False)
    kind = config.get("model_type")
    # loopq builds the dense model of a loop, and needs no code beside it.
    config = without_type(config)
    code, version = _CODE[
        "transformers" if is_known(config) else "checkpoint" if "auto_map" in config else "own"
    ]
    written = config.get("transformers_version", "no version that it names")
    stored = config.get("dtype", config.get("torch_dtype"))
    lines = [(str(folder), f"model_type {kind}"), ("code", code)]
    lines += [("transformers", f"written with {written}; {_asked(version)}")] if version else []
    tokenizer = "beside the weights" if has_tokenizer(folder) else _NO_TOKENIZER
    return [*lines, ("tokenizer", tokenizer), ("dtype", f"{stored}, {_DTYPE}" if stored else _DTYPE)]


def _asked(version: str) -> str:
    """Install command of a version of transformers, with the installed version."""
    try:
        here = f"here: {metadata.version('transformers')}"
    except metadata.PackageNotFoundError:
        here = "not installed here"
    return f"pip install 'transformers{version}' ({here})"
