"""What ships in the wheel: texts, names, and an import that needs no torch."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from loopq import zoo
from loopq.errors import ConfigError, MissingExtraError

DATA = Path(zoo.__file__).parent / "data"


def test_texts_are_the_ones_the_readme_names() -> None:
    readme = (DATA / "README.md").read_text(encoding="utf-8")
    sums = dict(reversed(line.split()) for line in re.findall(r"[0-9a-f]{64}  \S+", readme))
    assert set(sums) == {"calibration.txt", "evaluation.txt"}
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


def test_batches_cut_consecutive_bytes() -> None:
    text = bytes(range(100))
    rows = zoo.batches(text, 3, 10, offset=5)
    assert rows.dtype == np.int64
    assert rows.tolist() == [list(range(5 + 10 * i, 15 + 10 * i)) for i in range(3)]


@pytest.mark.parametrize("args", [(0, 10, 0), (3, 0, 0), (3, 10, -1), (11, 10, 0), (10, 10, 1)])
def test_batches_refuse_what_does_not_fit(args: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match=r"sequences|n_sequences"):
        zoo.batches(bytes(100), *args)


def test_import_and_texts_need_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from loopq import zoo\n"
        "zoo.available(); zoo.batches(zoo.calibration_text(), 2, 3)\n"
        "from loopq.errors import MissingExtraError\n"
        "try: zoo.model_class('loopq-zoo-huginn')\n"
        "except MissingExtraError as exc: print(exc)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "loopq[torch]" in done.stdout


def test_a_models_folder_holds_its_config() -> None:
    for name in zoo.available():
        assert (zoo.folder(name) / "config.json").is_file()
    assert zoo.folder("huginn_small").parent.name == "weights"


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"no zoo model 'nothing': use one of \[.*'huginn_small'"):
        zoo.folder("nothing")
    with pytest.raises(ConfigError, match="no zoo model 'nothing'"):
        zoo.load("nothing")
    with pytest.raises(ConfigError, match="is no zoo model"):
        zoo.model_class("llama")
    assert issubclass(MissingExtraError, ImportError)
