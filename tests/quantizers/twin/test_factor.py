"""The damped factor in torch: its order is the reference's, its product S."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from loopq.errors import SolveError
from loopq.quantizers.twin.factor import Factors, permuted
from tests.support import gptq_cd_reference as reference
from tests.support.problems import correlated


@pytest.mark.parametrize("rule", ["natural", "diagonal", "conditional"])
def test_the_factor_is_that_of_s_in_its_order(rule):
    rng = np.random.default_rng(0)
    # More than a block of pivots.
    h = np.stack([correlated(rng, 150), correlated(rng, 150)])
    mu = 0.01 * np.diagonal(h, axis1=1, axis2=2)
    factors = Factors.of(torch.from_numpy(h), torch.from_numpy(mu.copy()), rule, ["a", "b"])
    s = h + np.stack([np.diag(m) for m in mu])
    product = factors.upper @ torch.diag_embed(factors.pivots) @ factors.upper.mT
    torch.testing.assert_close(product, permuted(torch.from_numpy(s), factors.order), rtol=1e-9, atol=1e-6)
    assert (torch.tril(factors.upper, -1) == 0).all()
    for one, order, energies in zip(s, factors.order.numpy(), factors.energies().numpy(), strict=True):
        wanted = {
            "natural": np.arange(150),
            "diagonal": np.argsort(-np.diag(one), kind="stable"),
            "conditional": np.asarray(reference.conditional_order(one)),
        }[rule]
        np.testing.assert_array_equal(order, wanted)
        np.testing.assert_allclose(energies, reference.pivots(one, order), rtol=1e-9)
    columns = torch.from_numpy(rng.normal(size=(2, 3, 150)))
    assert torch.equal(factors.back(factors.in_order(columns)), columns)


def test_columns_that_cost_the_same_keep_their_order():
    h = torch.diag_embed(torch.tensor([[2.0, 5.0, 2.0, 5.0]], dtype=torch.float64))
    factors = Factors.of(h, torch.zeros(1, 4, dtype=torch.float64), "diagonal", ["a"])
    assert factors.order.tolist() == [[1, 3, 0, 2]]


def test_what_cannot_be_factored_is_named():
    h = torch.stack([torch.eye(3), -torch.eye(3)]).double()
    with pytest.raises(SolveError, match=r"layer second: .*raise the damping"):
        Factors.of(h, torch.zeros(2, 3, dtype=torch.float64), "natural", ["first", "second"])
