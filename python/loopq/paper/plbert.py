"""PL-BERT, a published looped checkpoint, from a data folder: its weights and its phoneme inputs."""

from __future__ import annotations

import lzma
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loopq.calibrate.data import TokenSet
from loopq.calibrate.read import json_lines
from loopq.errors import ConfigError, DumpError
from loopq.models.load import LoadedModel, load_model
from loopq.storage.files import MAX_SIZE, check_size, read_bytes
from loopq.storage.schema import Count, checked

PLBERT = "plbert"
_FILES = {
    "calibration": "wikitext2_valid_phonemes.jsonl.xz",
    "evaluation": "wikitext2_test_phonemes.jsonl.xz",
}


def data_folder(named: Path | None) -> Path | None:
    """Return the data folder: `named`, else LOOPQ_DATA, else None.

    Raises
    ------
    ConfigError
        The folder does not exist.
    """
    place = named or Path(os.environ.get("LOOPQ_DATA", ""))
    if place == Path():
        return None
    if not place.is_dir():
        raise ConfigError(f"no data folder {place}: give another with --data or LOOPQ_DATA")
    return place


def plbert_folder(data: Path | None) -> Path:
    """Return the folder of PL-BERT in a data folder.

    Raises
    ------
    ConfigError
        No data folder is known.
    """
    if data is None:
        raise ConfigError("plbert needs a data folder: give --data DIR or set LOOPQ_DATA")
    return data / "models" / "plbert_kokoro"


def load_plbert(data: Path | None, **loading: Any) -> LoadedModel:
    """Load PL-BERT. Its weights are stored compressed."""
    source = plbert_folder(data)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        try:
            (place / "config.json").write_bytes(read_bytes(source / "config.json", MAX_SIZE, DumpError))
            check_size(packed := source / "model.safetensors.xz", error=DumpError)
            with lzma.open(packed) as file:
                unpacked = file.read(MAX_SIZE + 1)
            if len(unpacked) > MAX_SIZE:
                raise DumpError(f"{packed}: more than {MAX_SIZE} bytes, unpacked; copy it again")
            (place / "model.safetensors").write_bytes(unpacked)
        except (OSError, EOFError, lzma.LZMAError) as cause:
            raise DumpError(f"{source}: {cause}") from cause
        return load_model(place, **loading)


def phonemes(data: Path | None, use: str, seq_len: int, n_prompts: int) -> TokenSet:
    """Concatenate the paragraphs' phoneme ids and cut them into windows.

    Parameters
    ----------
    data : Path or None
        Data folder.
    use : {"calibration", "evaluation"}
        Name of the text. Each use has its own text.
    seq_len, n_prompts : int
        Tokens of a window, and number of windows from the start.
    """
    path = plbert_folder(data) / _FILES[use]
    lines = (checked(_Phonemes, x, at, ConfigError, others=True) for at, x in json_lines(path, ConfigError))
    ids = np.array([i for line in lines for i in line.ids], dtype=np.int64)
    n = min(n_prompts, ids.size // seq_len)
    return TokenSet(tuple(ids[: n * seq_len].reshape(n, seq_len)), path.name, "windows")


@dataclass(frozen=True)
class _Phonemes:
    """The part of a line that is read."""

    ids: tuple[Count, ...]
