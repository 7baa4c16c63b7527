"""Prompts of the models of a table: damaged files are named with their line."""

from __future__ import annotations

import lzma
from pathlib import Path

import pytest

from loopq.errors import ConfigError
from loopq.models.load import load_model
from loopq.paper.models import PLBERT, Sizes, Source


def test_phonemes_are_cut_in_windows_and_damaged_lines_are_named(tmp_path: Path) -> None:
    source, folder = (
        Source(PLBERT, load_model("huginn_small"), tmp_path),
        tmp_path / "models" / "plbert_kokoro",
    )
    folder.mkdir(parents=True)
    valid, test = (folder / f"wikitext2_{part}_phonemes.jsonl.xz" for part in ("valid", "test"))

    def write(path: Path, *lines: bytes) -> None:
        path.write_bytes(lzma.compress(b"\n".join(lines)))

    write(valid, b'{"ids": [1, 2, 3]}', b'{"ids": [4, 5, 6, 7], "text": "x"}')
    write(test, b'{"ids": [8, 9, 10]}')
    made = source.prompts(Sizes(n_calibration=2, n_tuning_held_out=1, n_evaluation=1, seq_len=2))
    assert [s.tolist() for s in made.calibration.sequences] == [[1, 2], [3, 4]]
    assert [s.tolist() for s in made.evaluation.sequences] == [[8, 9]]
    for line, match in (
        (b'{"text": "x"}', "'ids' is missing"),
        (b'{"ids": [-1]}', r"ids\[0\]: -1"),
        (b"{", "JSON"),
    ):
        write(test, b'{"ids": [8]}', line)
        with pytest.raises(ConfigError, match=rf"test_phonemes\.jsonl\.xz, line 2: .*{match}"):
            source.prompts(Sizes(2, 1, 1, 2))
    test.write_bytes(test.read_bytes()[:-8])
    with pytest.raises(ConfigError, match=r"test_phonemes\.jsonl\.xz, line \d: cannot be read"):
        source.prompts(Sizes(2, 1, 1, 2))
