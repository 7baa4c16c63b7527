"""Where the real libraries are looked for, and what is said where they are not."""

import pytest

from tests.support.interop import environments


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(environments, "ROOT", tmp_path)
    monkeypatch.setattr(environments.importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("LOOPQ_GPTQ_PYTHON", raising=False)
    return tmp_path / ".cache"


def test_a_library_that_failed_to_install_is_named_with_reason(root):
    root.mkdir()
    (root / "venv-gptq.unavailable").write_text("ERROR: no\nwheel\n", "utf-8")
    with pytest.raises(
        pytest.skip.Exception, match=r"NOT RUN: gptqmodel could not be installed.*: ERROR: no wheel"
    ):
        environments.interpreter("gptq")


def test_a_half_made_environment_is_not_taken(root):
    (root / "venv-gptq" / "bin").mkdir(parents=True)
    (root / "venv-gptq" / "bin" / "python").touch()
    with pytest.raises(pytest.skip.Exception, match=r"NOT RUN: gptqmodel is not installed.*make interop"):
        environments.interpreter("gptq")
    (root / "venv-gptq" / "stamp").touch()
    assert environments.interpreter("gptq") == str(root / "venv-gptq" / "bin" / "python")


def test_a_named_python_comes_first(root, monkeypatch):
    monkeypatch.setenv("LOOPQ_GPTQ_PYTHON", "/some/python")
    assert environments.interpreter("gptq") == "/some/python"
