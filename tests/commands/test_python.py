"""A plain torch module from a file of one's own: every command that opens a model takes it."""

from __future__ import annotations

import pytest

from tests.support.python_models import MODULE


@pytest.fixture
def spec(tmp_path):
    (tmp_path / "own.py").write_text(MODULE)
    return f"{tmp_path / 'own.py'}:make"


TEXT = ("--n-prompts", 2, "--seq-len", 24)


def test_every_command_takes_it(spec, tmp_path, command):
    model = ("--python", spec, "--depth", "n_steps")
    code, _, err = command("quantize", *model, "--out", tmp_path / "q", "--group-size", 16, *TEXT)
    assert code == 0, err
    for depth in (2, 4, 8):
        code, text, err = command("evaluate", *model, tmp_path / "q", "--n-steps", depth, *TEXT)
        assert code == 0, err
        assert f"{depth} steps" in text
    code, text, err = command("check", *model)
    assert code == 0, text
    code, text, err = command("diagnose", *model, "--only", "ranks", *TEXT)
    assert code == 0, err
    assert "core.weight: " in text
