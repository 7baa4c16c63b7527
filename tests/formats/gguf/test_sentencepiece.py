"""SentencePiece files, read without their package."""

from __future__ import annotations

import pytest

from loopq.errors import CheckpointError
from loopq.formats.gguf.sentencepiece import Pieces


def message(*fields):
    """Bytes of a message: whole numbers, and bytes."""
    found = b""
    for number, value in fields:
        kind = 0 if isinstance(value, int) else 2
        rest = bytes([value]) if kind == 0 else bytes([len(value)]) + value
        found += bytes([(number << 3 & 127) | kind | (128 if number > 15 else 0)])
        found += (bytes([number >> 4]) if number > 15 else b"") + rest
    return found


def file(*trainer, normalizer=()):
    pieces = [(1, message((1, text), (3, kind))) for text, kind in ((b"<unk>", 2), (b"\xe2\x96\x81a", 1))]
    return message(*pieces, (2, message((3, 2), *trainer)), (3, message(*normalizer)))


def test_pieces_and_their_settings():
    found = Pieces.read(file((41, 7), normalizer=((1, b"nmt_nfkc"), (3, 0))))
    assert found.tokens == ["<unk>", "\u2581a"]
    assert found.kinds == [2, 1]
    assert found.scores == [0.0, 0.0]
    assert found.ids == {"unk": 0, "bos": 7, "eos": 2, "pad": -1}
    assert not found.prefix
    assert found.normalizer == "nmt_nfkc and single spaces"
    assert Pieces.read(file(normalizer=((1, b"identity"), (4, 0)))).normalizer == ""


def test_published_files_hold_the_pieces_of_their_package(data_folder):
    package = pytest.importorskip("sentencepiece", reason="NOT RUN: sentencepiece is not installed")
    for name in ("mistral_v1", "fineweb_8192"):
        data = (data_folder / "tokenizers" / name / "tokenizer.model").read_bytes()
        own, found = package.SentencePieceProcessor(model_proto=data), Pieces.read(data)
        n = range(own.get_piece_size())
        assert found.tokens == [own.id_to_piece(i) for i in n]
        assert found.scores == [own.get_score(i) for i in n]
        assert [kind == 6 for kind in found.kinds] == [own.is_byte(i) for i in n]
        ids = {"unk": own.unk_id(), "bos": own.bos_id(), "eos": own.eos_id(), "pad": own.pad_id()}
        assert found.ids == ids


def test_other_kinds_and_damaged_files_are_refused():
    whole = file()
    for damaged in (
        whole[:-3],
        b"IQ== 0\nIg== 1\n",
        b"\xff" * 20,
        b"",
        message((1, b"\x0a\x01\xff")),
        b"\x0b",
    ):
        with pytest.raises(CheckpointError, match=r"tokenizer\.model"):
            Pieces.read(damaged)
    with pytest.raises(CheckpointError, match="not byte pair encoding"):
        Pieces.read(message((1, message((1, b"a"))), (2, message((3, 1)))))
