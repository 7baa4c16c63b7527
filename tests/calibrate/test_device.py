"""Sums on the rows' own device, tried on the CPU: true float32, moved once, exact from there on."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import loopq._native as native
from loopq.calibrate.collect import Collection, HessianSet
from loopq.calibrate.device import DeviceSums, true_float32
from loopq.calibrate.select import select
from loopq.errors import ConfigError, NonFiniteError


@pytest.mark.parametrize("per_step", [False, True])
def test_sums_agree_with_float64_and_count_rows(per_step):
    rng = np.random.default_rng(0)
    rows = {t: rng.normal(size=(n, 24)).astype(np.float32) for t, n in ((0, 1500), (2, 700))}
    sums = DeviceSums(24, per_step=per_step)
    for t, x in rows.items():
        for part in np.array_split(x, 3):
            sums.add(t, torch.from_numpy(part))
    acc = native.HessianAccumulator(24, [0, 2], per_step=per_step)
    sums.move(acc)
    acc.finish()
    expected = sum(x.astype(np.float64).T @ x for x in rows.values())
    np.testing.assert_allclose(acc.matrix(), expected, rtol=2e-6, atol=1e-3)
    assert [acc.n_rows(t) for t in (0, 2)] == [1500, 700]
    if per_step:
        np.testing.assert_allclose(
            acc.matrix([2]), rows[2].astype(np.float64).T @ rows[2], rtol=2e-6, atol=1e-3
        )


def test_products_are_put_on_the_grid_exactly():
    values = np.array([[3.0**30, 2.0**-50], [2.0**-50, 1 / 3]])
    acc = native.HessianAccumulator(2, [0], per_step=False)
    for _ in range(3):
        acc.add_products([(0, 1)], values)
    acc.finish()
    np.testing.assert_array_equal(acc.matrix()[0], [3 * 3.0**30, 3 * 2.0**-50])
    assert abs(acc.matrix()[1, 1] - 3 * float(np.round(1 / 3 * 2.0**60) * 2.0**-60)) <= 2.0**-53


def test_products_that_cannot_be_are_refused():
    acc = native.HessianAccumulator(2, [0, 1], per_step=True)
    with pytest.raises(NonFiniteError, match="row 1, column 0"):
        acc.add_products([(0, 1)], np.array([[1.0, 1.0], [np.nan, 1.0]]))
    with pytest.raises(ConfigError, match="n_rows"):
        acc.add_products([(0, 1), (1, 1)], np.eye(2))
    with pytest.raises(ConfigError, match="products"):
        acc.add_products([(0, 1)], np.eye(3))
    with pytest.raises(ConfigError, match="step"):
        acc.add_products([(5, 1)], np.eye(2))


def test_precision_setting_is_put_back():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with true_float32():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.gpu
def test_collection_on_a_gpu_agrees_with_the_cpu(tiny, tokens):
    def collected():
        selection = select(tiny.system, tokens)
        steps = {p.name: [0, 1, 2] for p in selection.distinct_inputs}
        sums = HessianSet(Collection(tiny.system, tokens, selection), steps)
        sums.run_pass(list(steps))
        return {input_group: acc.matrix() for input_group, acc in sums.accumulators.items()}

    on_cpu = collected()
    tiny.model.cuda()
    for input_group, hessian in collected().items():
        scale = np.abs(on_cpu[input_group]).max()
        np.testing.assert_allclose(hessian, on_cpu[input_group], atol=1e-4 * scale)
