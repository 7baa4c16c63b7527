"""Classes of errors, and packages that are imported where they are needed."""

from __future__ import annotations

import inspect
import re

import pytest

from loopq import errors
from tests.support.interpreters import ROOT, python


def test_every_error_class_has_a_test():
    tests = "\n".join(p.read_text("utf-8") for p in (ROOT / "tests").rglob("test_*.py"))
    raised = set(re.findall(r"raises\(\s*(?:\w+\.)*(\w+)", tests)) | {"LoopqError"}
    classes = {n for n, c in vars(errors).items() if inspect.isclass(c) and issubclass(c, errors.LoopqError)}
    assert classes <= raised | {"MissingExtraError"}, sorted(classes - raised)


def test_import_needs_numpy_and_safetensors_only():
    loaded = python("import sys, loopq; print(*{m.split('.')[0] for m in sys.modules})").split()
    extras = {
        "torch",
        "transformers",
        "scipy",
        "threadpoolctl",
        "matplotlib",
        "cupy",
        "lm_eval",
        "sentencepiece",
        "tokenizers",
    }
    assert not extras & set(loaded)
    code = (
        "import sys\n"
        f"for name in {sorted(extras)}: sys.modules[name] = None\n"
        "import loopq\n"
        "try: loopq.quantize('huginn_small', bits=4)\n"
        "except loopq.LoopqError as error: print(error)\n"
    )
    assert "loopq[torch]" in python(code)


def test_a_package_that_does_not_load_is_told_with_the_reason(tmp_path, monkeypatch):
    (tmp_path / "half_installed.py").write_text("raise ImportError('no libfoo.so\\nmore')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        errors.MissingExtraError, match=r"half_installed, which cannot be loaded: no libfoo\.so$"
    ):
        errors.require("half_installed")
