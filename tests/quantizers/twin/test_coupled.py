"""The solver under a metric between outputs, in torch against the core's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from loopq.errors import SolveError
from loopq.quantizers.twin.coupled import Left
from tests.support.problems import correlated
from tests.support.twins import compared, problems


@pytest.mark.parametrize(
    ("shape", "case"),
    [
        ((96, 64), {"group_size": 16}),
        ((40, 96), {"group_size": 32, "bits": 3, "rounds": 1}),
        # The last block has another size, and so has its last tile.
        ((45, 40), {"group_size": 16, "bits": 3, "block": 32, "beam": 4}),
        ((24, 40), {"group_size": -1, "bits": 2, "symmetric": False, "passes": 0, "beam": 1}),
    ],
)
def test_codes_are_the_cores_but_for_rounding(shape, case):
    codes, scales, loss, reports = compared(*shape, 2, loop=True, method="gptq-cd", metric="loop", **case)
    assert codes > 0.95
    assert scales > 0.95
    assert loss < 0.005
    for core, twin in reports:
        for key in ("coupled_swept", "coupled_settled"):
            assert twin[key] == pytest.approx(core[key], rel=0.005)
        assert twin["metric_gradients"] == core["metric_gradients"] == 64


def test_rows_of_a_smaller_block_stand_at_their_own_places():
    rng = np.random.default_rng(0)
    blocks = [torch.from_numpy(correlated(rng, n))[None] for n in (6, 6, 4)]
    left = Left.of(blocks, ["layer"])
    row = left.row[0]
    assert sorted(row.flatten().tolist()) == [*range(16), 16, 16]
    assert (row[2, 4:] == 16).all()
    for block, at, upper, start in zip(blocks, row, left.upper[0], (0, 6, 12), strict=True):
        n = block.shape[1]
        square = block[0][at[:n] - start][:, at[:n] - start]
        unit = upper[:n, :n]
        pivots = torch.diag(torch.linalg.solve(unit, square) @ torch.linalg.inv(unit.T))
        torch.testing.assert_close(unit @ torch.diag(pivots) @ unit.T, square)


def test_a_layer_without_gradients_is_refused_by_name():
    config, layers = problems(8, 16, method="gptq-cd", metric="loop", group_size=8)
    with pytest.raises(SolveError, match=r"layer layer-0: .*gradients"):
        config.method.twin(layers)
