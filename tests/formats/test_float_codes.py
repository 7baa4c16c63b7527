"""FP8, NVFP4, MXFP4 and INT8 weights as float32: against torch's own types, and whole folders of compressed-tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from loopq.errors import CheckpointError
from loopq.formats.float_codes import plain
from loopq.storage.files import RawTensor
from loopq.storage.model_files import raw


def _weights(kind: str, rng: np.random.Generator) -> tuple[dict[str, RawTensor], torch.Tensor]:
    """Tensors of a layer, and its weight by torch alone."""
    packed = torch.from_numpy(rng.integers(0, 256, (4, 32), dtype=np.uint8))
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    fours = torch.stack((packed & 15, packed >> 4), -1).flatten(1).long()
    fours = values[fours & 7] * torch.where(fours & 8 > 0, -1.0, 1.0)
    scale = torch.rand(4, 4) + 0.5
    if kind == "nvfp4":
        eighths, outer = scale.to(torch.float8_e4m3fn), torch.tensor([3.0])
        tensors = {"weight_packed": packed, "weight_scale": eighths, "weight_global_scale": outer}
        return _raw(tensors), fours * (eighths.float() / outer).repeat_interleave(16, 1)
    if kind == "mxfp4":
        exponents = torch.from_numpy(rng.integers(120, 132, (4, 2), dtype=np.uint8))
        tensors = {"weight_packed": packed, "weight_scale": exponents}
        return _raw(tensors), fours * torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)
    if kind == "fp8":
        codes = torch.randn(4, 8).to(torch.float8_e4m3fn)
        return _raw({"weight": codes, "weight_scale": scale[:, :1]}), codes.float() * scale[:, :1]
    codes = torch.from_numpy(rng.integers(-127, 128, (4, 8)).astype(np.int8))
    return _raw({"weight": codes, "weight_scale": scale[0, :1]}), codes.float() * scale[0, 0]


def _raw(tensors: dict[str, torch.Tensor]) -> dict[str, RawTensor]:
    return {f"a.{name}": raw(tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4", "fp8", "int8"])
def test_a_layer_is_exact(kind: str) -> None:
    torch.manual_seed(0)
    stored, expected = _weights(kind, np.random.default_rng(0))
    dense = plain({**stored, "b.weight": raw(torch.ones(2))}, "here")
    assert set(dense) == {"a.weight", "b.weight"}
    np.testing.assert_array_equal(dense["a.weight"].array(), expected.numpy())
    with pytest.raises(CheckpointError, match="scales are missing"):
        plain({name: t for name, t in stored.items() if "scale" not in name}, "here")


def test_scales_that_are_not_finite_are_refused() -> None:
    stored, _ = _weights("int8", np.random.default_rng(0))
    bad = stored | _raw({"weight_scale": torch.tensor([float("inf")])})
    with pytest.raises(CheckpointError, match="codes times scales are NaN or infinite"):
        plain(bad, "here")


@pytest.mark.parametrize(("codes", "scale"), [((4,), (4, 1)), ((4, 8), (0,)), ((4, 8), (3, 1))])
def test_shapes_that_do_not_fit_are_refused(codes: tuple[int, ...], scale: tuple[int, ...]) -> None:
    stored = _raw({"weight": torch.zeros(codes, dtype=torch.int8), "weight_scale": torch.ones(scale)})
    with pytest.raises(CheckpointError, match=r"a\.weight"):
        plain(stored, "here")
