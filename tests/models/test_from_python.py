"""Models of a Python file."""

from __future__ import annotations

import pytest

import loopq
from loopq.errors import ConfigError
from loopq.models.from_python import load_python
from loopq.models.systems.generic import Generic
from tests.support.accelerator import DEVICE, accelerator
from tests.support.python_models import MODULE


@pytest.fixture
def spec(tmp_path):
    (tmp_path / "own.py").write_text(MODULE)
    return f"{tmp_path / 'own.py'}:make"


def test_from_python_at_half_and_at_twice_the_depth(spec):
    model = load_python(spec).model
    ids = [[1, 2, 3, 4], [5, 6, 7, 8]]
    result = loopq.quantize(model, ids, group_size=16)
    assert list(result.layers) == ["core.weight"]
    with pytest.raises(ConfigError, match=r"Generic\(model, depth='...'\)"):
        loopq.evaluate(model, {"q": result}, ids, n_steps=2)
    named = Generic(model, depth="n_steps")
    for depth in (2, 8):
        _, measured = loopq.evaluate(named, {"q": result}, ids, n_steps=depth)
        assert measured.kl.mean() > 0
        again = loopq.quantize(named, ids, n_steps=depth, group_size=16)
        assert again.layers["core.weight"].report["steps"] == list(range(depth))
    assert "ranks" in loopq.diagnose(named, ids, n_steps=2, only=["ranks"])["sections"]


def test_a_model_of_a_file_goes_to_the_device_that_is_asked_for(spec):
    with accelerator():
        assert load_python(spec, device=DEVICE).system.device.type == DEVICE


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("own.py", r"give FILE\.py:FUNCTION, where FUNCTION returns a torch module"),
        ("absent.py:make", r"give FILE\.py:FUNCTION"),
        ("own.py:absent", "own.py: has no function 'absent'"),
        ("own.py:number", "returned int, which is neither a torch module nor an adapter"),
    ],
)
def test_a_file_that_gives_no_model_is_refused(tmp_path, name, said):
    (tmp_path / "own.py").write_text("def number():\n    return 3\n")
    with pytest.raises(ConfigError, match=said):
        load_python(f"{tmp_path}/{name}")
