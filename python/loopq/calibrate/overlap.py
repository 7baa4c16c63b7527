"""Find prompts of an evaluation among those of the calibration, from hashes in the checkpoint's settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from loopq.storage.schema import Allowed, Count, Object, Sha256, checked

#: Hashed tokens of a window of a text, from its start. Windows of other lengths are cut at other places.
_START = 64
#: Hashed prompts at most.
_MOST = 1024
#: Hexadecimal digits of a hash: 48 bits.
_DIGITS = 12
#: Odd numbers, so that they have an inverse modulo 2^64.
_BASE, _MIX = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9


Prompts = Sequence[NDArray[np.int64]]


def _is_hashes(text: str) -> bool:
    return len(text) % _DIGITS == 0 and not set(text) - set("0123456789abcdef")


@dataclass(frozen=True)
class _Hashes:
    """Hashes of prompts. `length` tokens of each, or all if it is 0."""

    length: Count
    hashes: Annotated[str, Allowed(f"hashes of {_DIGITS} hexadecimal digits", _is_hashes)]


@dataclass(frozen=True)
class _Told:
    """The entries of a checkpoint's settings that are read here. A merged dump has parts."""

    sha256: Sha256 | None = None
    prompt_hashes: _Hashes | None = None
    parts: tuple[Object, ...] = ()


@dataclass(frozen=True)
class Overlap:
    """Prompts of an evaluation that were used for calibration.

    Parameters
    ----------
    sha256 : str
        Digest of the evaluation's prompts (`TokenSet.digest`).
    calibration_sha256 : str or None
        Digest of the calibration's prompts. None for a merged dump, where each part has its own.
    n_prompts : int
        Number of the evaluation's prompts.
    n_shared : int
        Number of them that contain a prompt of the calibration, or the beginning of one of its windows.
    """

    sha256: str
    calibration_sha256: str | None
    n_prompts: int
    n_shared: int

    @property
    def warning(self) -> str:
        """Return a line for the reader of the measurement. Empty without shared prompts."""
        if not self.n_shared:
            return ""
        which = "these" if self.n_shared == self.n_prompts else f"{self.n_shared} of {self.n_prompts}"
        return f"{which} prompts were used for calibration: KL is too low"

    def to_json(self) -> Object:
        """Return plain data for a summary."""
        note = {"warning": self.warning} if self.warning else {}
        return {
            "prompts_sha256": self.sha256,
            "calibration_sha256": self.calibration_sha256,
            "n_prompts_of_calibration": self.n_shared,
        } | note


def hashes_of(sequences: Prompts, *, cut: bool) -> Object:
    """Return hashes of prompts for the settings.

    Parameters
    ----------
    sequences : sequence of ndarray, int64, 1-D
        Token ids of the prompts, without special tokens at their start and before tokens are replaced.
    cut : bool
        Whether the prompts are windows of one text. Only the first tokens of a window are hashed then.
    """
    length = min(_START, *(ids.size for ids in sequences)) if cut else 0
    plain = [ids[: length or None] for ids in sequences[:_MOST] if ids.size]
    hashes = [int(_rolling(ids, ids.size)[0]) for ids in plain]
    return {"hashes": "".join(f"{h:0{_DIGITS}x}" for h in hashes), "length": length}


def overlap(sequences: Prompts, digest: str, calibration: Any) -> Overlap | None:
    """Compare prompts of an evaluation with those of a calibration.

    Parameters
    ----------
    sequences : sequence of ndarray, int64, 1-D
        Token ids of the prompts, without special tokens at their start.
    digest : str
        Digest of the set (`TokenSet.digest`).
    calibration : Any
        Entry "calibration" of a checkpoint's settings.

    Returns
    -------
    Overlap or None
        None if the calibration is not known, as for files of other tools.

    Raises
    ------
    CheckpointError
        The entry has no valid checksums.
    """
    if not isinstance(calibration, Mapping):
        return None
    known = _read(calibration)
    if known.sha256 is None and not known.parts:
        return None
    parts = [known, *map(_read, known.parts)]
    shared = np.any([_shared(sequences, digest, part) for part in parts], axis=0)
    return Overlap(digest, known.sha256, len(sequences), int(shared.sum()))


def _read(calibration: Mapping[str, Any]) -> _Told:
    return checked(_Told, dict(calibration), "settings: calibration", others=True)


def _shared(sequences: Prompts, digest: str, part: _Told) -> NDArray[np.bool_]:
    """Whether each prompt was one of a part of the calibration. Shape (n_prompts)."""
    if part.sha256 == digest or part.prompt_hashes is None:
        return np.full(len(sequences), part.sha256 == digest)
    text, length = part.prompt_hashes.hashes, part.prompt_hashes.length
    known = np.array([int(text[i : i + _DIGITS], 16) for i in range(0, len(text), _DIGITS)], np.uint64)
    sized = [(ids, length or ids.size) for ids in sequences]
    return np.array([0 < n <= ids.size and np.isin(_rolling(ids, n), known).any() for ids, n in sized])


def _rolling(ids: NDArray[np.int64], length: int) -> NDArray[np.uint64]:
    """Hashes of all runs of `length` tokens, as polynomials modulo 2^64. Shape (n - length + 1)."""
    mixed = (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(_MIX)
    mixed ^= mixed >> np.uint64(31)
    powers = np.multiply.accumulate(np.full(ids.size, _BASE, np.uint64))
    back = np.multiply.accumulate(np.full(ids.size, pow(_BASE, -1, 1 << 64), np.uint64))
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mixed * powers, dtype=np.uint64)])
    runs: NDArray[np.uint64] = (sums[length:] - sums[:-length]) * back[: ids.size - length + 1]
    runs >>= np.uint64(64 - 4 * _DIGITS)
    return runs
