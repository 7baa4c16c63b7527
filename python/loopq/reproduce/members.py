"""The models of a table, each with text to calibrate, to tune and to measure on, no prompt in two of them."""

from __future__ import annotations

import json
import lzma
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from loopq.calibrate.data import TokenSet, windows
from loopq.errors import ConfigError, DumpError
from loopq.systems.load import LoadedModel, load_model

PLBERT = "plbert"
_CHAINS_SEED = 2**62 + 1  # training draws its seeds below 2**62; the card measures on 2**62


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
    scored_from : int
        First position of a prompt that counts.
    """

    name: str
    loaded: LoadedModel
    calibration: TokenSet
    tuning_held_out: TokenSet
    evaluation: TokenSet
    scored_from: int = 0


@dataclass(frozen=True)
class Sizes:
    """Prompts of each set, and tokens of a prompt."""

    n_calibration: int = 64
    n_tuning_held_out: int = 16
    n_evaluation: int = 32
    seq_len: int = 128


def data_folder() -> Path | None:
    """Return the folder of data sets: LOOPQ_DATA, or `shared/data` beside a folder above this file."""
    named = os.environ.get("LOOPQ_DATA")
    places = [Path(named)] if named else [p / "shared" / "data" for p in Path(__file__).resolve().parents]
    return next((p for p in places if (p / "models").is_dir()), None)


def load_member(name: str, sizes: Sizes, data: Path | None = None, draw: int = 0) -> Member:
    """Load a model of the zoo, a folder of that kind, or the real checkpoint "plbert".

    Parameters
    ----------
    name : str
        Zoo name, path of a folder whose model reads bytes, or "plbert".
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
            raise ConfigError("plbert needs the data folder: set LOOPQ_DATA or give --data")
        return _plbert(data / "models" / "plbert_kokoro", sizes, draw)
    from loopq import zoo

    loaded = load_model(name)
    if loaded.system.name == "coconut" and loaded.system.is_zoo:
        return _chains(Path(name).name, loaded, sizes, draw)
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


def _chains(name: str, loaded: LoadedModel, sizes: Sizes, draw: int) -> Member:
    """Questions with the letters from the one that full depth reaches on, as the model was trained to answer."""
    from loopq.zoo.chains import QUESTION_LENGTH, chains

    def prompts(count: int, seed: int, what: str) -> TokenSet:
        rows = chains(count, seed)
        answers = rows[:, QUESTION_LENGTH + loaded.system.n_steps - 1 :]
        ids = np.concatenate([rows[:, :QUESTION_LENGTH], answers], axis=1)
        return TokenSet(tuple(ids), f"chains of letters, {what}", "prompts", int(ids.size))

    count = sizes.n_calibration + sizes.n_tuning_held_out
    text = prompts(count, _CHAINS_SEED + 2 * draw, "calibration")
    held_out = prompts(sizes.n_evaluation, _CHAINS_SEED + 1, "evaluation")
    # The end token's logits, which predict the answer, stand at the question's last position.
    first = QUESTION_LENGTH - 1
    calibration, tuning = text.take(0, sizes.n_calibration), text.take(sizes.n_calibration)
    return Member(name, loaded, calibration, tuning, held_out, first)


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
