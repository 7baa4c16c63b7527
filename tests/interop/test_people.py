"""Models of packages that other people publish: quantized, measured, saved and loaded by discovery alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import loopq
from loopq.models.from_python import wrap
from loopq.systems.base import Batch
from tests.support.interop import people

pytestmark = pytest.mark.filterwarnings("ignore")
_IDS = torch.randint(0, people.VOCABULARY, (4, 16), generator=torch.Generator().manual_seed(0))


def _made(name: str) -> torch.nn.Module:
    if not (people.FOLDER / "stamp").is_file():
        pytest.skip("NOT RUN: the packages are not installed; run `make interop`")
    return people.made(name)


@pytest.mark.parametrize("name", people.MODELS)
def test_a_model_with_a_loop_of_its_own_goes_all_the_way(name: str, tmp_path: Path) -> None:
    model = wrap(_made(name))
    result = loopq.quantize(model, _IDS, group_size=16, threads=1, out=tmp_path / "q")
    assert result.layers
    measured = loopq.evaluate(model, {"INT4": result}, _IDS, threads=1)
    assert 0 < measured[1].kl.mean() < 1
    batch, n_steps = Batch(_IDS, (0, 1, 2, 3)), model.system.n_steps
    outputs = [
        loopq.load(tmp_path / "q", wrap(_made(name)), quantized=quantized).system.rollout(batch, n_steps)
        for quantized in (False, True)
    ]
    torch.testing.assert_close(*outputs, rtol=1e-3, atol=1e-3)
    assert not torch.equal(outputs[0], model.system.rollout(batch, n_steps))
