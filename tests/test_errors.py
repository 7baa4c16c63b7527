"""Classes of errors."""

from __future__ import annotations

import inspect
import re

from loopq import errors
from tests.support.interpreters import ROOT


def test_every_error_class_has_a_test():
    tests = "\n".join(p.read_text("utf-8") for p in (ROOT / "tests").rglob("test_*.py"))
    raised = set(re.findall(r"raises\(\s*(?:\w+\.)*(\w+)", tests)) | {"LoopqError"}
    classes = {n for n, c in vars(errors).items() if inspect.isclass(c) and issubclass(c, errors.LoopqError)}
    assert classes <= raised | {"MissingExtraError"}, sorted(classes - raised)
