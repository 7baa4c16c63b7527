"""PL-BERT from a data folder: where it is looked for, and its phonemes, of which damaged lines are named."""

from __future__ import annotations

import lzma
from pathlib import Path

import pytest

from loopq.errors import ConfigError, DumpError
from loopq.paper.plbert import data_folder, load_plbert, phonemes
from loopq.storage.files import MAX_SIZE


def test_data_sets_are_looked_for_where_they_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOOPQ_DATA", raising=False)
    assert data_folder(None) is None
    with pytest.raises(ConfigError, match="plbert needs a data folder: give --data DIR or set LOOPQ_DATA"):
        load_plbert(None)
    monkeypatch.setenv("LOOPQ_DATA", str(tmp_path))
    assert data_folder(None) == tmp_path
    assert data_folder(tmp_path.parent) == tmp_path.parent
    with pytest.raises(ConfigError, match="no data folder nowhere"):
        data_folder(Path("nowhere"))
    with pytest.raises(DumpError, match="plbert_kokoro"):
        load_plbert(tmp_path)


def test_phonemes_are_cut_in_windows_and_damaged_lines_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "plbert_kokoro"
    folder.mkdir(parents=True)
    path = folder / "wikitext2_test_phonemes.jsonl.xz"

    def write(*lines: bytes) -> None:
        path.write_bytes(lzma.compress(b"\n".join(lines)))

    write(b'{"ids": [1, 2, 3]}', b'{"ids": [4, 5, 6, 7], "text": "x"}')
    tokens = phonemes(tmp_path, "evaluation", 2, 9)
    assert [s.tolist() for s in tokens.sequences] == [[1, 2], [3, 4], [5, 6]]
    assert len(phonemes(tmp_path, "evaluation", 2, 1).sequences) == 1
    for line, match in (
        (b'{"text": "x"}', "'ids' is missing"),
        (b'{"ids": [-1]}', r"ids\[0\]: -1"),
        (b"{", "JSON"),
    ):
        write(b'{"ids": [8]}', line)
        with pytest.raises(ConfigError, match=rf"test_phonemes\.jsonl\.xz, line 2: .*{match}"):
            phonemes(tmp_path, "evaluation", 2, 1)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ConfigError, match=r"test_phonemes\.jsonl\.xz, line \d: cannot be read"):
        phonemes(tmp_path, "evaluation", 2, 1)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.xz"])
def test_a_file_of_any_size_is_refused_unread(tmp_path: Path, name: str) -> None:
    folder = _packed(tmp_path, b"")
    # A sparse file has any size and takes no space.
    with (folder / name).open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(DumpError, match=rf"{name}: 1099511627776 bytes; allowed: {MAX_SIZE}"):
        load_plbert(tmp_path)


def test_weights_that_unpack_to_too_much_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loopq.paper.plbert.MAX_SIZE", 1000)
    _packed(tmp_path, bytes(10_000))
    with pytest.raises(DumpError, match=r"model\.safetensors\.xz: more than 1000 bytes, unpacked"):
        load_plbert(tmp_path)


def test_weights_that_are_cut_off_are_refused(tmp_path: Path) -> None:
    packed = _packed(tmp_path, bytes(10_000)) / "model.safetensors.xz"
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(DumpError, match="plbert_kokoro: Compressed file ended"):
        load_plbert(tmp_path)


def _packed(data: Path, weights: bytes) -> Path:
    folder = data / "models" / "plbert_kokoro"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors.xz").write_bytes(lzma.compress(weights))
    return folder
