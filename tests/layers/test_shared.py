"""The description of a shared weight."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from loopq.errors import CheckpointError, SystemContractError
from loopq.layers.shared import SharedParameter

SHARED = SharedParameter("core.weight", ("core",), 3, 2, "out_in", 4, "mlp")


@pytest.mark.parametrize(
    ("orientation", "shape"),
    [
        ("out_in", (2, 3)),
        ("table", (2, 3)),
        ("in_out", (3, 2)),
        ("conv", (2, 3, 1)),
        ("conv3x1", (2, 1, 3, 1)),
    ],
)
def test_every_orientation_is_viewed_outputs_first(orientation: str, shape: tuple[int, ...]) -> None:
    stored = torch.arange(6.0).reshape(shape)
    viewed = dataclasses.replace(SHARED, orientation=orientation).matrix(stored)
    assert viewed.shape == (SHARED.out_features, SHARED.in_features)
    assert viewed.data_ptr() == stored.data_ptr()


def test_a_kernel_that_does_not_fit_the_inputs_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"conv2: a kernel has 2 numbers .* multiple of that; got 3"):
        dataclasses.replace(SHARED, orientation="conv2")


@pytest.mark.parametrize("name", ["", "../core.weight", "a/b.weight"])
def test_a_name_that_is_no_file_name_is_refused(name: str) -> None:
    with pytest.raises(SystemContractError, match="parameter"):
        dataclasses.replace(SHARED, name=name)
