"""The beam search in torch: against the reference, and in parts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from loopq.quantizers.config import LayerConfig
from loopq.quantizers.twin import beam
from loopq.quantizers.twin.beam import search
from loopq.quantizers.twin.factor import Factors
from loopq.quantizers.twin.grid import Codes
from tests.support import gptq_cd_reference as reference
from tests.support.problems import correlated


def case(d, rows=12):
    rng = np.random.default_rng(d)
    s, w = correlated(rng, d), rng.normal(size=(rows, d)).astype(np.float32)
    settings = LayerConfig.of(method="gptq", bits=2, group_size=16).grid
    codes = Codes.of(settings.make(), d, "mse", True, None, torch.device("cpu"))
    factors = Factors.of(
        torch.from_numpy(s)[None], torch.zeros(1, d, dtype=torch.float64), "conditional", [""]
    )
    target = torch.from_numpy(w)[None]
    known = codes.fit(codes.groups(target.double()), codes.groups(factors.energies()[:, None]))
    return w, s, factors, codes, target, known


# One block, two of which the second is not whole, and three: only then codes are decided before the end.
@pytest.mark.parametrize("d", [30, 100, 150])
@pytest.mark.parametrize("n_paths", [2, 8])
def test_codes_are_the_references(d, n_paths):
    w, s, factors, codes, target, known = case(d)
    chosen = factors.back(search(factors.in_order(target), factors, codes, known, n_paths))
    order = factors.order[0].numpy()
    scales, zeros = (x[0].numpy().astype(np.float64) for x in known)
    wanted, _ = reference.beam(w.astype(np.float64), s, order, scales, zeros, 2, 16, n_paths)
    same = (chosen[0].numpy() == wanted).all(1)
    # Single precision can decide otherwise where paths cost nearly the same; and the reference never decides early.
    assert same.mean() > (0.9 if d <= 128 else 0.5)


def test_parts_of_rows_give_the_same_codes(monkeypatch):
    _, _, factors, codes, target, known = case(100)
    ordered = factors.in_order(target)
    whole = search(ordered, factors, codes, known, 4)
    monkeypatch.setattr(beam, "PATHS", 4 * 5)
    parts = search(ordered, factors, codes, known, 4)
    assert (parts == whole).double().mean() > 0.97
