"""The text that ships with loopq for models with a tokenizer: kinds of text in turn."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from loopq import zoo
from loopq.calibrate.data import TokenSet, check_count, cut
from loopq.calibrate.read import Served, json_lines
from loopq.errors import CalibrationError

#: Bytes that are encoded at first for every token that is needed.
_BYTES_PER_TOKEN = 8


def mixed(use: str, served: Served, seq_len: int, n_prompts: int | None) -> TokenSet:
    """Cut each kind of the text into windows and take one of each in turn.

    Parameters
    ----------
    use : str
        "calibration" or "evaluation". The two texts have different sources.
    served : Served
        Conversion of text to token ids.
    seq_len : int
        Tokens of a window.
    n_prompts : int or None
        Number of windows; None keeps all. Any first N hold equally many of each kind, as long as the text has them.

    Raises
    ------
    CalibrationError
        A kind of the text has fewer tokens than one window.
    """
    check_count(n_prompts)
    kinds: dict[str, list[str]] = {}
    for _, record in json_lines(zoo.mixed_text(use), CalibrationError):
        kinds.setdefault(record["kind"], []).append(record["text"])
    source = f"loopq's {use} text ({', '.join(kinds)})"

    def windows_of(each: int | None) -> list[NDArray[np.int64]]:
        columns = []
        for passages in kinds.values():
            ids = _encoded(passages, served, None if each is None else each * seq_len)
            columns.append(cut(ids, seq_len, each, source, served.first).sequences)
        turns = itertools.zip_longest(*columns)
        return [window for row in turns for window in row if window is not None]

    prompts = windows_of(None if n_prompts is None else -(-n_prompts // len(kinds)))
    if n_prompts is not None and len(prompts) < n_prompts:
        prompts = windows_of(None)  # one kind has too few, and the others give more
    return TokenSet(tuple(prompts[:n_prompts]), source, "windows", n_first=len(served.first))


def _encoded(passages: list[str], served: Served, n_tokens: int | None) -> NDArray[np.int64]:
    """Encode as many passages as give `n_tokens` tokens. The rest of a long text costs time and is not read."""
    ends = np.cumsum([len(p.encode()) + 2 for p in passages])
    n_bytes = int(ends[-1]) if n_tokens is None else _BYTES_PER_TOKEN * n_tokens
    while True:
        n_taken = int(np.searchsorted(ends, n_bytes)) + 1
        ids = np.asarray(served.encode("\n\n".join(passages[:n_taken])), dtype=np.int64)
        if n_taken >= len(passages) or (n_tokens is not None and ids.size >= n_tokens):
            return ids
        n_bytes *= 2
