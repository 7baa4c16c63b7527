"""Sums on the rows' own device, tried on the CPU: true float32 within a block of rows, exact between blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import loopq._native as native
from loopq.calibrate import device
from loopq.calibrate.device import DeviceSums, Sums
from loopq.calibrate.hessian_set import HessianSet
from loopq.calibrate.rollouts import Collection
from loopq.calibrate.select import select
from loopq.errors import SolveError
from tests.support.accelerator import DEVICE, accelerator

DIM = 24


def on_device(rows, *, per_step, cut=()):
    sums = DeviceSums(DIM, per_step=per_step)
    for t, x in rows.items():
        for part in np.split(x, cut):
            sums.add(t, torch.from_numpy(part))
    return sums.accumulator([0, 2])


def in_the_core(rows, *, per_step):
    acc = native.HessianAccumulator(DIM, [0, 2], per_step=per_step)
    for t, x in rows.items():
        acc.update(t, x)
    acc.finish()
    return acc


def assert_same_state(a, b):
    a, b = dict(a.state()), dict(b.state())
    for limb in ("hi", "lo"):
        np.testing.assert_array_equal(a.pop(limb), b.pop(limb))
    assert a == b


@pytest.mark.parametrize("per_step", [False, True])
def test_sums_agree_with_the_core_and_count_rows(per_step):
    rng = np.random.default_rng(0)
    rows = {t: rng.normal(size=(n, DIM)).astype(np.float32) for t, n in ((0, 1500), (2, 700))}
    sums, expected = on_device(rows, per_step=per_step), in_the_core(rows, per_step=per_step)
    np.testing.assert_allclose(sums.matrix(), expected.matrix(), rtol=2e-6, atol=1e-3)
    assert [sums.n_rows(t) for t in (0, 2)] == [1500, 700]
    if per_step:
        np.testing.assert_allclose(sums.matrix([2]), expected.matrix([2]), rtol=2e-6, atol=1e-3)


@pytest.mark.parametrize("per_step", [False, True])
@pytest.mark.parametrize("strip", [DIM, 5 * DIM, 1 << 24])
def test_exact_sums_of_products_have_the_bits_of_the_core(per_step, strip, monkeypatch):
    monkeypatch.setattr(device, "_STRIP", strip)
    rng = np.random.default_rng(1)
    scale = 2.0 ** rng.integers(-20, 12, size=DIM)
    rows = {
        t: (rng.integers(-60, 60, size=(n, DIM)) * scale).astype(np.float32) for t, n in ((0, 1500), (2, 90))
    }
    assert_same_state(on_device(rows, per_step=per_step), in_the_core(rows, per_step=per_step))


def test_the_division_into_parts_changes_no_bit():
    """Whole blocks summed by several processes, in any order, are the sum of one."""
    rng = np.random.default_rng(2)
    rows = {
        0: (rng.normal(size=(2048, DIM)) * 10.0 ** rng.integers(-4, 4, size=(2048, 1))).astype(np.float32)
    }
    block = native.BLOCK_ROWS
    whole = on_device(rows, per_step=False)
    assert_same_state(whole, on_device(rows, per_step=False, cut=(block, 3 * block)))
    for order in ((0, 1, 2, 3), (3, 1, 2, 0)):
        parts = [on_device({0: rows[0][i * block :][:block]}, per_step=False) for i in order]
        for other in parts[1:]:
            parts[0].merge(other)
        assert_same_state(whole, parts[0])


@pytest.mark.parametrize(
    ("value", "said"), [(2.0**27 + 16, "1.34218e\\+08 at step 2"), (np.nan, "nan at step 2")]
)
def test_rows_beyond_the_grid_are_refused(value, said):
    rows = {t: np.ones((3, DIM), dtype=np.float32) for t in (0, 2)}
    rows[2][1, 7] = value
    with pytest.raises(SolveError, match=said):
        on_device(rows, per_step=True)


def collected(tiny, tokens):
    selection = select(tiny.system, tokens)
    steps = {p.name: [0, 1, 2] for p in selection.distinct_inputs}
    sums = HessianSet(Collection(tiny.system, tokens, selection), steps)
    sums.run_pass(list(steps))
    return {input_group: acc.matrix() for input_group, acc in sums.accumulators.items()}


def assert_near(sums, expected, tolerance):
    assert sums.keys() == expected.keys()
    for input_group, hessian in expected.items():
        np.testing.assert_allclose(sums[input_group], hessian, atol=tolerance * np.abs(hessian).max())


def test_a_collection_sums_where_the_model_is(tiny, tokens):
    expected = collected(tiny, tokens)
    with accelerator():
        tiny.model.to(DEVICE)
        assert_near(collected(tiny, tokens), expected, 1e-6)


@pytest.mark.parametrize("devices", [["cpu"], [DEVICE], ["cpu", DEVICE], []])
def test_sums_add_up_what_lies_on_either_device(devices):
    rows = torch.arange(6 * DIM, dtype=torch.float32).reshape(6, DIM)
    sums = Sums(DIM, [0, 1], per_step=True, threads=1)
    with accelerator():
        for name in devices:
            sums.add(1, rows.to(name))
        total = sums.finish()
    np.testing.assert_array_equal(total.matrix([1]), len(devices) * (rows.T @ rows).double().numpy())
    assert [total.n_rows(t) for t in (0, 1)] == [0, 6 * len(devices)]


@pytest.mark.gpu
def test_collection_on_a_gpu_agrees_with_the_cpu(tiny, tokens):
    expected = collected(tiny, tokens)
    tiny.model.cuda()
    assert_near(collected(tiny, tokens), expected, 1e-4)
