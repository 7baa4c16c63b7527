"""What is printed about a folder of another tool, and about one of loopq's."""

from __future__ import annotations

import pytest

from loopq.formats.folder_lines import folder_lines

_LAYER = {
    "name": "a.b.weight",
    "shape": [32, 64],
    "grid": "INT4",
    "group_size": -1,
    "n_bytes": 1024,
    "bits_per_weight": 4.5,
}
_FACTS = {
    "format": "gptq",
    "layers": [_LAYER],
    "dense": ["norm.weight"],
    "quantization_config": {"bits": 4, "modules": ["a.b"]},
    "n_bytes_files": 2048,
    "n_bytes": 1500,
}


@pytest.mark.parametrize(
    ("exported", "origin", "last"),
    [
        (
            {"exported_by_loopq": None, "ragged": None, "forced": None},
            "written by another tool: no run report, true shapes as far as the file tells them",
            "config.json: bits 4",
        ),
        (
            {"exported_by_loopq": "0.2", "ragged": "split", "forced": "no engine"},
            "exported by loopq 0.2, ragged groups: split; converting back gives the same bytes",
            "forced: no engine",
        ),
    ],
)
def test_a_folder_is_described_with_its_origin(exported, origin, last):
    lines = folder_lines(_FACTS | exported)
    assert ["a.b.weight", "32x64", "INT4", "row", "1.02", "kB", "4.500"] in [line.split() for line in lines]
    assert origin in lines
    assert lines[-1] == last
