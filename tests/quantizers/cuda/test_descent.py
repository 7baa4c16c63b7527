"""The kernels of coordinate descent, emulated, against torch's operations: the same codes and scales."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch

from loopq.errors import MissingExtraError
from loopq.quantizers.cuda.load import Backend
from loopq.quantizers.twin import descent
from loopq.quantizers.twin.descent import change_codes, change_scales
from loopq.quantizers.twin.grid import Codes
from tests.support.cuda.backend import EmulatedBackend
from tests.support.twins import rounded


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("d", "signed", "grid"),
    [
        (48, True, {"bits": 3, "group_size": 16}),
        # Wider than the block of threads, and the last group is not whole.
        (600, False, {"bits": 4, "group_size": 128, "scale_dtype": "bfloat16"}),
        (70, False, {"bits": 4, "group_size": 32, "symmetric": False, "scale_dtype": "float32"}),
        (96, True, {"bits": 4, "group_size": 32, "levels": "uneven"}),
        (64, True, {"bits": 2, "group_size": -1}),
    ],
)
def test_both_give_the_same_codes_and_scales(
    d: int, signed: bool, grid: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    s, codes, rows = rounded(d, signed, **grid)
    ours, theirs, backend = copy.deepcopy(rows), rows, EmulatedBackend()
    n_moves = 0
    for sweeps in (0, 1, 30):
        wanted = change_codes(theirs, s, codes, sweeps)
        change_scales(theirs, s, codes)
        with monkeypatch.context() as on_kernels:
            on_kernels.setattr(descent, "kernels", lambda device: backend)
            assert torch.equal(change_codes(ours, s, codes, sweeps), wanted)
            change_scales(ours, s, codes)
        n_moves += int(wanted.sum())
        for name in ("steps", "scale"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
        for name in ("values", "gradient", "loss"):
            wanted, largest = getattr(theirs, name), float(getattr(theirs, name).abs().max())
            # A sum that nearly cancels is as exact as its largest neighbours.
            torch.testing.assert_close(
                getattr(ours, name), wanted, rtol=1e-10, atol=1e-11 * max(1.0, largest)
            )
    assert n_moves > 10
    assert backend.launches == {"loopq_descent": 3 + 3 * -(-d // codes.width)}


@pytest.mark.kernels
def test_scales_of_fewer_digits_stay_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    s, codes, rows = rounded(48, True, bits=3, group_size=16)
    codes, backend = Codes(codes.grid, 16, "mse", True, 6, None), EmulatedBackend()
    theirs = copy.deepcopy(rows)
    change_scales(theirs, s, codes)
    monkeypatch.setattr(descent, "kernels", lambda device: backend)
    change_scales(rows, s, codes)
    assert torch.equal(rows.scale, theirs.scale)
    assert not backend.launches


def test_a_gpu_without_cupy_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(index: int) -> Backend:
        raise MissingExtraError("install 'loopq[cuda13]'")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert descent.kernels(torch.device("cpu")) is None
    monkeypatch.setattr(descent, "cuda_backend", missing)
    with pytest.warns(UserWarning, match=r"several times as long .* install 'loopq\[cuda13\]'"):
        assert descent.kernels(torch.device("cuda", 0)) is None
