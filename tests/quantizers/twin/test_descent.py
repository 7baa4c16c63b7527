"""Descents on codes and scales in torch, against the reference that goes from column to column."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from loopq.quantizers.config import LayerConfig
from loopq.quantizers.twin.descent import Rows, change_codes, change_scales
from loopq.quantizers.twin.grid import Codes
from tests.support import gptq_cd_reference as reference
from tests.support.problems import correlated

GRID = {"bits": 3, "group_size": 12}


def made(rows=20, d=40):
    """Rows rounded to the nearest codes, far from settled."""
    rng = np.random.default_rng(0)
    s, w = correlated(rng, d), rng.normal(size=(rows, d))
    scales, zeros = reference.fit_scales(
        w, np.ones(d), symmetric=True, scale_dtype="float16", signed=True, **GRID
    )
    owner, _ = reference.groups(d, 12)
    codes = reference.to_code(w, scales[:, owner], zeros[:, owner], 3)
    return w, s, codes, scales, zeros, owner


def rows_of(w, s, codes, scales, zeros, owner):
    values = reference.value(codes, scales[:, owner], zeros[:, owner])
    gradient = (values - w) @ s
    loss = np.sum((values - w) * gradient, axis=1)
    tensors = [torch.from_numpy(np.array(x)[None]) for x in (codes - zeros[:, owner], values, gradient)]
    levels = [torch.from_numpy(np.array(x, dtype=np.float32)[None]) for x in (scales, zeros)]
    active = torch.ones(1, len(w), dtype=torch.bool)
    active[0, -1] = False
    return Rows(tensors[0].float(), *tensors[1:], *levels, torch.from_numpy(loss)[None], active)


def solver(d):
    settings = LayerConfig.of(method="gptq", **GRID).grid
    return Codes.of(settings.make(), d, "mse", True, None, torch.device("cpu"))


@pytest.mark.parametrize("sweeps", [0, 1, 30])
def test_codes_change_as_column_by_column(sweeps):
    w, s, codes, scales, zeros, owner = made()
    rows = rows_of(w, s, codes, scales, zeros, owner)
    moves = change_codes(rows, torch.from_numpy(s)[None], solver(len(s)), sweeps)
    wanted, values, n = reference.descend(w[:-1], s, codes[:-1], scales[:-1], zeros[:-1], 3, 12, sweeps)
    # Rows are independent. A tie that the libraries round differently changes one of them, not all.
    same = (rows.steps[0, :-1].numpy() + 4 == wanted).all(axis=1)
    assert same.mean() >= 0.8
    assert int(moves.sum()) == pytest.approx(n, rel=0.1)
    np.testing.assert_allclose(rows.values[0, :-1][same], values[same], rtol=1e-12)
    np.testing.assert_allclose(rows.loss[0, :-1][same], reference.loss(w[:-1], values, s)[same], rtol=1e-9)
    np.testing.assert_allclose(rows.gradient[0], (rows.values[0].numpy() - w) @ s, rtol=1e-6, atol=1e-8)
    # A row that is done stays.
    np.testing.assert_array_equal(rows.steps[0, -1].numpy() + 4, codes[-1])


def test_scales_change_as_group_by_group():
    w, s, codes, scales, zeros, owner = made()
    rows = rows_of(w, s, codes, scales, zeros, owner)
    change_scales(rows, torch.from_numpy(s)[None], solver(len(s)))
    wanted = reference.rescale(w, s, codes, scales, zeros, 12, "float16", signed=True)
    same = (rows.scale[0, :-1].numpy() == wanted[:-1]).all(axis=1)
    assert same.mean() >= 0.8
    np.testing.assert_array_equal(rows.scale[0, -1], scales[-1])
    values = reference.value(codes, wanted[:, owner], zeros[:, owner])
    np.testing.assert_allclose(rows.values[0, :-1][same], values[:-1][same], rtol=1e-12)
    np.testing.assert_allclose(rows.loss[0, :-1][same], reference.loss(w, values, s)[:-1][same], rtol=1e-9)
