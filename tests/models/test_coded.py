"""Modules with codes come from a guest of the quantizer."""

from __future__ import annotations

import pytest

from loopq.errors import ConfigError
from loopq.models import coded
from loopq.runtime.quantized import install
from loopq.settings.registry import Registry


def test_the_runtime_brings_modules_with_codes():
    assert coded.coded_layers().install is install


def test_without_the_runtime_codes_are_refused(monkeypatch):
    nobody = Registry("kind of coded layers", "loopq.models.systems")
    monkeypatch.setattr(coded, "CODED", nobody)
    with pytest.raises(ConfigError, match="quantized=True needs the folder loopq/runtime"):
        coded.coded_layers()
