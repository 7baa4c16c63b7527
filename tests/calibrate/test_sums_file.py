"""Files of sums: what is written is read, and what is damaged is refused."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import loopq._native as native
from loopq.calibrate.sums_file import (
    GradientSums,
    accumulator_from,
    accumulator_parts,
    gradient_sums_from,
    read_accumulator,
    write_accumulator,
    write_gradient_sums,
)
from loopq.errors import DumpError
from loopq.storage.files import read_tensors

PARAMETER = SimpleNamespace(in_features=3, out_features=5, routed_in="")


def summed(per_step):
    acc = native.HessianAccumulator(4, [0, 2], per_step=per_step, threads=1)
    random = np.random.default_rng(0)
    for step in (0, 2):
        acc.update(step, random.normal(size=(7 + step, 4)).astype(np.float32))
    acc.finish()
    return acc


@pytest.mark.parametrize("per_step", [False, True])
def test_a_hessian_is_read_with_the_same_bits(tmp_path, per_step):
    acc = summed(per_step)
    write_accumulator(tmp_path / "h.safetensors", acc)
    again = read_accumulator(tmp_path / "h.safetensors")
    assert (again.dim, again.steps, again.per_step) == (4, [0, 2], per_step)
    assert [again.n_rows(t) for t in (0, 2)] == [7, 9]
    assert again.matrix().tobytes() == acc.matrix().tobytes()


@pytest.mark.parametrize(
    "change",
    [
        lambda arrays, state: arrays.pop("lo.000"),
        lambda arrays, state: arrays.update({"hi.009": arrays["hi.000"]}),
        lambda arrays, state: state.update(dim=5),
        lambda arrays, state: state.update(steps=[2, 0]),
        lambda arrays, state: state.pop("n_rows"),
        lambda arrays, state: state.update(spec_version=2),
    ],
)
def test_a_damaged_state_is_refused(change):
    arrays, state = accumulator_parts(summed(True))
    change(arrays, state)
    with pytest.raises(DumpError, match="here"):
        accumulator_from(arrays, state, "here")


def test_gradient_sums_are_read_and_checked(tmp_path):
    sums = GradientSums((np.eye(2), 2 * np.eye(3)), np.full((3, 3), 0.5))
    path = tmp_path / "m.safetensors"
    write_gradient_sums(path, sums)
    again = gradient_sums_from(read_tensors(path), PARAMETER, "here")
    assert [a.tolist() for a in again.left] == [a.tolist() for a in sums.left]
    assert again.right.tolist() == sums.right.tolist()
    with pytest.raises(DumpError, match=r"here: blocks of \[2, 3\] outputs; the layer has 6"):
        gradient_sums_from(
            read_tensors(path), SimpleNamespace(in_features=3, out_features=6, routed_in=""), "here"
        )
    for left, right in ((-np.eye(5), np.eye(3)), (np.eye(5), np.full((3, 3), np.nan))):
        write_gradient_sums(path, GradientSums((left,), right))
        with pytest.raises(DumpError, match="no sum of squares can have"):
            gradient_sums_from(read_tensors(path), PARAMETER, "here")
