"""SentencePiece files, read without their package."""

from __future__ import annotations

import pytest

from loopq.errors import CheckpointError
from loopq.formats.gguf.sentencepiece import Pieces


def message(*fields):
    """Bytes of a message: whole numbers, and bytes."""
    data = b""
    for number, value in fields:
        kind = 0 if isinstance(value, int) else 2
        rest = bytes([value]) if kind == 0 else bytes([len(value)]) + value
        data += bytes([(number << 3 & 127) | kind | (128 if number > 15 else 0)])
        data += (bytes([number >> 4]) if number > 15 else b"") + rest
    return data


def file(*trainer, normalizer=()):
    pieces = [(1, message((1, text), (3, kind))) for text, kind in ((b"<unk>", 2), (b"\xe2\x96\x81a", 1))]
    return message(*pieces, (2, message((3, 2), *trainer)), (3, message(*normalizer)))


def test_pieces_and_their_settings():
    pieces = Pieces.read(file((41, 7), normalizer=((1, b"nmt_nfkc"), (3, 0))))
    assert pieces.tokens == ["<unk>", "\u2581a"]
    assert pieces.kinds == [2, 1]
    assert pieces.scores == [0.0, 0.0]
    assert pieces.ids == {"unk": 0, "bos": 7, "eos": 2, "pad": -1}
    assert not pieces.prefix
    assert pieces.normalizer == "nmt_nfkc and single spaces"
    assert Pieces.read(file(normalizer=((1, b"identity"), (4, 0)))).normalizer == ""


def test_published_files_hold_the_pieces_of_their_package(data_folder):
    package = pytest.importorskip("sentencepiece", reason="NOT RUN: sentencepiece is not installed")
    for name in ("mistral_v1", "fineweb_8192"):
        data = (data_folder / "tokenizers" / name / "tokenizer.model").read_bytes()
        processor, pieces = package.SentencePieceProcessor(model_proto=data), Pieces.read(data)
        n = range(processor.get_piece_size())
        assert pieces.tokens == [processor.id_to_piece(i) for i in n]
        assert pieces.scores == [processor.get_score(i) for i in n]
        assert [kind == 6 for kind in pieces.kinds] == [processor.is_byte(i) for i in n]
        ids = {
            "unk": processor.unk_id(),
            "bos": processor.bos_id(),
            "eos": processor.eos_id(),
            "pad": processor.pad_id(),
        }
        assert pieces.ids == ids


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
