"""The kernel of GPTQ's open paths, emulated, against torch's operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from loopq.quantizers.twin import beam
from tests.support.cuda.backend import EmulatedBackend
from tests.support.twins import searched

pytestmark = pytest.mark.kernels


# A part of a block, two blocks, and three of which the last is not whole: then codes are decided before the end.
@pytest.mark.parametrize(
    ("d", "n_paths", "grid"),
    [
        (30, 2, {"bits": 3, "group_size": 16}),
        (128, 16, {"bits": 4, "group_size": 32}),
        (150, 8, {"bits": 2, "group_size": 16, "symmetric": False}),
        (150, 16, {"bits": 4, "group_size": 50, "levels": "uneven"}),
        (100, 64, {"bits": 3, "group_size": 20}),
    ],
)
def test_codes_are_those_of_torch(
    d: int, n_paths: int, grid: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, backend = searched(d, n_paths, **grid), EmulatedBackend()
    monkeypatch.setattr(beam, "kernels", lambda device: backend)
    codes = searched(d, n_paths, **grid)
    # A product is summed in another order: paths of nearly the same cost may change places.
    assert (codes == wanted).all(-1).float().mean() > 0.8
    assert backend.launches == {"loopq_beam": -(-d // 64)}


def test_other_numbers_of_paths_stay_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, backend = searched(30, 5, bits=3, group_size=16), EmulatedBackend()
    monkeypatch.setattr(beam, "kernels", lambda device: backend)
    assert torch.equal(searched(30, 5, bits=3, group_size=16), wanted)
    assert not backend.launches
