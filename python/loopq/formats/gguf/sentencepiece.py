"""Read a SentencePiece file (tokenizer.model). It is a message of protocol buffers, and needs no package."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from loopq.errors import CheckpointError

FILE = "tokenizer.model"
#: `model_type` of byte pair encoding.
_BPE = 2
_VARINT, _LONG, _BYTES, _SHORT = 0, 1, 2, 5
#: Fields of the message, and of its parts.
_PIECE, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT, _SCORE, _KIND = 1, 2, 3
_MODEL_TYPE, _SUFFIX = 3, 24
_IDS = {"unk": (40, 0), "bos": (41, 1), "eos": (42, 2), "pad": (43, -1)}
_NAME, _PREFIX, _EXTRA_SPACES = 1, 3, 4


@dataclass(frozen=True)
class Pieces:
    """Content of a SentencePiece file.

    Parameters
    ----------
    tokens : list of str
        Pieces, with U+2581 for a space.
    scores : list of float
        Pairs with the largest score are merged first.
    kinds : list of int
        Their types, numbered as those of GGUF.
    ids : mapping of str to int
        Special tokens: "unk", "bos", "eos" and "pad". It is -1 for one that does not exist.
    prefix : bool
        Whether a space is put before a text.
    normalizer : str
        Name of a normalizer that changes text. Empty if text stays as it is.
    """

    tokens: list[str]
    scores: list[float]
    kinds: list[int]
    ids: dict[str, int]
    prefix: bool
    normalizer: str

    @staticmethod
    def read(data: bytes) -> Pieces:
        """Read a file.

        Raises
        ------
        CheckpointError
            If it is damaged, another kind of file, or not byte pair encoding.
        """
        try:
            fields = list(_fields(data))
            pieces = [dict(_fields(value)) for field, value in fields if field == _PIECE]
            trainer = {k: v for field, value in fields if field == _TRAINER for k, v in _fields(value)}
            how = {k: v for field, value in fields if field == _NORMALIZER for k, v in _fields(value)}
            tokens = [piece[_TEXT].decode() for piece in pieces]
            scores = [struct.unpack("<f", piece.get(_SCORE, bytes(4)))[0] for piece in pieces]
            kinds = [int(piece.get(_KIND, 1)) for piece in pieces]
            name = how.get(_NAME, b"").decode()
        except (ValueError, KeyError, AttributeError, TypeError, struct.error) as cause:
            raise CheckpointError(f"{FILE}: no SentencePiece file, or damaged ({cause!r})") from None
        if trainer.get(_MODEL_TYPE, 1) != _BPE or trainer.get(_SUFFIX, 0) or not tokens:
            raise CheckpointError(f"{FILE}: not byte pair encoding with spaces before words")
        ids = {key: _signed(trainer.get(field, default)) for key, (field, default) in _IDS.items()}
        spaces = "single spaces" if how.get(_EXTRA_SPACES, 1) else ""
        normalizer = " and ".join(part for part in (name.replace("identity", ""), spaces) if part)
        return Pieces(tokens, scores, kinds, ids, bool(how.get(_PREFIX, 1)), normalizer)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Numbers of a message's fields, with a whole number or the bytes of each."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while at < len(data) and shift < 64:
            byte = data[at]
            at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value
        raise ValueError("cut off")

    while at < len(data):
        key = varint()
        kind = key & 7
        if kind == _VARINT:
            yield key >> 3, varint()
            continue
        if kind not in (_LONG, _BYTES, _SHORT):
            raise ValueError(f"field of type {kind}")
        size = varint() if kind == _BYTES else 8 if kind == _LONG else 4
        if size > len(data) - at:
            raise ValueError("cut off")
        yield key >> 3, data[at : at + size]
        at += size
