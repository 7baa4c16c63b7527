"""The models of a table, each with text to calibrate, to tune and to measure on, no prompt in two of them."""

from __future__ import annotations

import json
import lzma
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from loopq import zoo
from loopq.calibrate.data import TokenSet, windows
from loopq.errors import ConfigError, DumpError
from loopq.systems.load import LoadedModel, load_model

PLBERT = "plbert"


@dataclass(frozen=True)
class PreparedModel:
    """A model of a table, with its prompts.

    Parameters
    ----------
    name : str
        Its name in the table.
    loaded : LoadedModel
        The model.
    calibration : TokenSet
        Prompts that Hessians and gradients come from.
    tuning_held_out : TokenSet
        Prompts that decide when the gradient tier stops.
    evaluation : TokenSet
        Prompts that the table is measured on.
    scored_from : int
        First position of a prompt that counts.
    task : str
        What is measured, in words: "text", or what stands in its place.
    """

    name: str
    loaded: LoadedModel
    calibration: TokenSet
    tuning_held_out: TokenSet
    evaluation: TokenSet
    scored_from: int = 0
    task: str = "text"


@dataclass(frozen=True)
class Sizes:
    """Prompts of each set, and tokens of a prompt."""

    n_calibration: int = 64
    n_tuning_held_out: int = 16
    n_evaluation: int = 32
    seq_len: int = 128


# Gives a loaded model its prompts: name, model, sizes, and which stretch of the calibration prompts is taken.
PromptSource = Callable[[str, LoadedModel, Sizes, int], PreparedModel]
_SOURCES: dict[str, PromptSource] = {}


def register_prompts(model_type: str, source: PromptSource) -> None:
    """Let models whose ``config.json`` has this `model_type` be measured on prompts of their own in place of text.

    Parameters
    ----------
    model_type : str
        Of the models.
    source : callable
        Takes the name in the table, the loaded model, the sizes and the number of the draw (each draw has
        calibration prompts of its own); gives the prepared model.

    Raises
    ------
    ConfigError
        The type has its prompts.
    """
    if model_type in _SOURCES:
        raise ConfigError(f"prompts of model_type {model_type!r} are registered twice")
    _SOURCES[model_type] = source


def data_folder(named: Path | None) -> Path | None:
    """Return the folder of data sets: the one named, else what LOOPQ_DATA says, else None.

    Raises
    ------
    ConfigError
        There is no such folder.
    """
    place = named or Path(os.environ.get("LOOPQ_DATA", ""))
    if place == Path():
        return None
    if not place.is_dir():
        raise ConfigError(f"no data folder {place}: give another with --data or LOOPQ_DATA")
    return place


def prepare_model(name: str, sizes: Sizes, data: Path | None = None, draw: int = 0) -> PreparedModel:
    """Load a model and cut its prompts.

    Parameters
    ----------
    name : str
        The embedded model, a folder, a hub id, or the real checkpoint "plbert".
    sizes : Sizes
        How many prompts.
    data : Path, optional
        Data folder; "plbert" is read from its `models/plbert_kokoro`.
    draw : int
        Which stretch of the calibration text is taken: each has prompts of its own.

    Raises
    ------
    ConfigError
        "plbert" without a data folder.
    """
    if name == PLBERT:
        if data is None:
            raise ConfigError("plbert needs a data folder: give --data DIR or set LOOPQ_DATA")
        return _plbert(data / "models" / "plbert_kokoro", sizes, draw)
    loaded = load_model(name)
    own = _SOURCES.get(str(loaded.config.get("model_type", "")))
    if own is not None:
        return own(Path(name).name, loaded, sizes, draw)
    length = min(sizes.seq_len, int(loaded.config.get("block_size", sizes.seq_len)))
    count = sizes.n_calibration + sizes.n_tuning_held_out
    text = windows(zoo.calibration_text().decode(), loaded.encode, length, None, "embedded calibration text")
    text = _stretch(text, draw, count)
    held_out = windows(
        zoo.evaluation_text().decode(), loaded.encode, length, sizes.n_evaluation, "embedded evaluation text"
    )
    return PreparedModel(
        Path(name).name, loaded, text.take(0, sizes.n_calibration), text.take(sizes.n_calibration), held_out
    )


def _stretch(text: TokenSet, draw: int, count: int) -> TokenSet:
    if (draw + 1) * count > len(text.sequences):
        raise ConfigError(
            f"{text.source} has {len(text.sequences)} prompts: draw {draw} of {count} prompts each is beyond its end"
        )
    return text.take(draw * count, (draw + 1) * count)


def _plbert(source: Path, sizes: Sizes, draw: int) -> PreparedModel:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        try:
            (place / "config.json").write_bytes((source / "config.json").read_bytes())
            packed = (source / "model.safetensors.xz").read_bytes()
        except OSError as cause:
            raise DumpError(f"{source}: {cause}") from cause
        (place / "model.safetensors").write_bytes(lzma.decompress(packed))
        loaded = load_model(place)
    length = sizes.seq_len
    count = sizes.n_calibration + sizes.n_tuning_held_out
    text = _phonemes(source / "wikitext2_valid_phonemes.jsonl.xz", length, (draw + 1) * count)
    text = _stretch(text, draw, count)
    held_out = _phonemes(source / "wikitext2_test_phonemes.jsonl.xz", length, sizes.n_evaluation)
    return PreparedModel(
        PLBERT, loaded, text.take(0, sizes.n_calibration), text.take(sizes.n_calibration), held_out
    )


def _phonemes(path: Path, length: int, count: int) -> TokenSet:
    """Cut the paragraphs' phoneme ids, one after the other, in windows."""
    ids = np.concatenate([np.asarray(i, dtype=np.int64) for i in _ids(path)])
    n = min(count, ids.size // length)
    return TokenSet(tuple(ids[: n * length].reshape(n, length)), path.name, "windows")


def _ids(path: Path) -> Iterator[list[int]]:
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["ids"]
