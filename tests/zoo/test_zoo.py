"""Content of the wheel: texts, the embedded model's folder, and an import that needs no torch."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from loopq import zoo
from loopq.calibrate.read import json_lines
from loopq.errors import CalibrationError, ConfigError

DATA = Path(zoo.__file__).parent / "data"
USES = ("calibration", "evaluation")


def test_texts_are_the_ones_the_readme_names() -> None:
    readme = (DATA / "README.md").read_text(encoding="utf-8")
    sums = dict(reversed(line.split()) for line in re.findall(r"[0-9a-f]{64}  \S+", readme))
    texts = {path.name for path in DATA.iterdir()} - {"README.md"}
    assert set(sums) == texts == {f"{use}.{kind}" for use in USES for kind in ("txt", "jsonl.xz")}
    for name, digest in sums.items():
        content = (DATA / name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == digest
        assert f"{len(content):,}" in readme


def test_texts_are_ascii_prose_and_share_no_line() -> None:
    one, other = zoo.calibration_text(), zoo.evaluation_text()
    for text in (one, other):
        text.decode("ascii")
        assert b"Gutenberg" not in text
        assert b"\r" not in text
    lines = [{line for line in text.split(b"\n") if len(line) > 30} for text in (one, other)]
    assert min(len(part) for part in lines) > 50
    assert not lines[0] & lines[1]


def test_mixed_texts_share_no_source_and_no_line() -> None:
    """Problems, dialogues and the declaration have a common source, and other passages of it."""
    sources, lines = [], []
    for use in USES:
        records = [record for _, record in json_lines(zoo.mixed_text(use), CalibrationError)]
        assert len({r["kind"] for r in records[:6]}) == len({r["kind"] for r in records}) == 6
        sources.append(
            {r["source"] for r in records if not re.match("UDHR|loopq (problems|dialogues)", r["source"])}
        )
        lines.append({line for r in records for line in r["text"].split("\n") if len(line) > 90})
        assert min(len(sources[-1]), len(lines[-1])) > 100
    assert not sources[0] & sources[1]
    assert not lines[0] & lines[1]


def test_import_and_texts_need_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from loopq import zoo\n"
        "zoo.available(); zoo.calibration_text()\n"
        "from loopq.errors import MissingExtraError\n"
        "from loopq.models.load import load_model\n"
        "try: load_model('huginn_small')\n"
        "except MissingExtraError as exc: print(exc)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "loopq[torch]" in done.stdout


def test_the_embedded_model_is_a_folder() -> None:
    assert zoo.available() == ["huginn_small"]
    assert (zoo.folder("huginn_small") / "config.json").is_file()
    with pytest.raises(ConfigError, match=r"no embedded model 'nothing': use one of \['huginn_small'\]"):
        zoo.folder("nothing")
