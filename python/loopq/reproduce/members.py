"""The models of a table, each with text to calibrate, to tune and to measure on, no prompt in two of them."""

from __future__ import annotations

import json
import lzma
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from loopq.calibrate.data import TokenSet, windows
from loopq.errors import ConfigError, DumpError
from loopq.systems.load import LoadedModel, load_model

PLBERT = "plbert"


@dataclass(frozen=True)
class Member:
    """A model of a table.

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
    """

    name: str
    loaded: LoadedModel
    calibration: TokenSet
    tuning_held_out: TokenSet
    evaluation: TokenSet


@dataclass(frozen=True)
class Sizes:
    """Prompts of each set, and tokens of a prompt."""

    n_calibration: int = 64
    n_tuning_held_out: int = 16
    n_evaluation: int = 32
    seq_len: int = 128


def load_member(name: str, sizes: Sizes, data: Path | None = None, draw: int = 0) -> Member:
    """Load a model of the zoo, a folder of that kind, or the real checkpoint "plbert".

    Parameters
    ----------
    name : str
        Zoo name, path of a folder whose model reads bytes, or "plbert".
    sizes : Sizes
        How many prompts.
    draw : int
        Which stretch of the calibration text is taken: each has prompts of its own.
    data : Path, optional
        Data folder; "plbert" is read from its `models/plbert_kokoro`.

    Raises
    ------
    ConfigError
        "plbert" without a data folder.
    """
    if name == PLBERT:
        if data is None:
            raise ConfigError("plbert needs the data folder: set LOOPQ_DATA or give --data")
        return _plbert(data / "models" / "plbert_kokoro", sizes, draw)
    from loopq import zoo

    loaded = load_model(name)
    length = min(sizes.seq_len, int(loaded.config.get("block_size", sizes.seq_len)))
    count = sizes.n_calibration + sizes.n_tuning_held_out
    text = windows(zoo.calibration_text().decode(), loaded.encode, length, None, "zoo calibration text")
    text = _stretch(text, draw, count)
    held_out = windows(
        zoo.evaluation_text().decode(), loaded.encode, length, sizes.n_evaluation, "zoo evaluation text"
    )
    return Member(
        Path(name).name, loaded, text.take(0, sizes.n_calibration), text.take(sizes.n_calibration), held_out
    )


def _stretch(text: TokenSet, draw: int, count: int) -> TokenSet:
    if (draw + 1) * count > len(text.sequences):
        raise ConfigError(
            f"{text.source} has {len(text.sequences)} prompts: draw {draw} of {count} prompts each is beyond its end"
        )
    return text.take(draw * count, (draw + 1) * count)


def _plbert(source: Path, sizes: Sizes, draw: int) -> Member:
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
    return Member(PLBERT, loaded, text.take(0, sizes.n_calibration), text.take(sizes.n_calibration), held_out)


def _phonemes(path: Path, length: int, count: int) -> TokenSet:
    """Cut the paragraphs' phoneme ids, one after the other, in windows."""
    ids = np.concatenate([np.asarray(i, dtype=np.int64) for i in _ids(path)])
    n = min(count, ids.size // length)
    return TokenSet(tuple(ids[: n * length].reshape(n, length)), path.name, "windows")


def _ids(path: Path) -> Iterator[list[int]]:
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["ids"]
