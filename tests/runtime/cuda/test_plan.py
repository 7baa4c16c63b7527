"""How products are cut: every layer fits every device, the cut covers all of it, and tokens share cuts."""

from __future__ import annotations

import pytest

from loopq.errors import ConfigError
from loopq.runtime.cuda.plan import A100, H200, DeviceLimits, GemmShape, fold_of, make_plan, token_tiles_for
from loopq.runtime.cuda.tiled import make_tiled_plan
from tests.support.cuda.plans import ADA, SHAPES


@pytest.mark.parametrize("group", [32, 128, -1])
@pytest.mark.parametrize("device", [A100, H200, ADA], ids=["A100", "H200", "Ada"])
@pytest.mark.parametrize("name", SHAPES)
def test_every_layer_fits_every_device(name: str, device: DeviceLimits, group: int) -> None:
    n, k = SHAPES[name]
    for tiles in (1, 2, 4):
        shape = GemmShape(n, 0, k, group, tiles)
        plan = make_plan(shape, device)
        assert plan.blocks * plan.slices <= device.multiprocessors, "every block must be resident at once"
        assert plan.shared_bytes(tiles * 8, tiles) <= device.shared_bytes
        assert plan.blocks <= shape.pairs
        assert plan.slice_tiles * plan.slices >= shape.tiles
        assert plan.warps * 32 <= (512 if tiles <= 2 else 256)


@pytest.mark.parametrize("device", [A100, H200])
@pytest.mark.parametrize("name", SHAPES)
def test_up_to_16_tokens_share_one_cut(name: str, device: DeviceLimits) -> None:
    n, k = SHAPES[name]
    cuts = [make_plan(GemmShape(n, 0, k, 128, tiles), device) for tiles in (1, 2)]
    assert {(cut.blocks, cut.slices, cut.warps) for cut in cuts} == {
        (cuts[0].blocks, cuts[0].slices, cuts[0].warps)
    }


@pytest.mark.parametrize("name", ["adapter", "Wqkv", "attn.proj", "mlp.fc", "mlp.proj"])
def test_a_hopper_chip_has_its_queue_filled(name: str) -> None:
    """48 KB of weights on their way per multiprocessor, warps to keep up, blocks within 10 % of evenly loaded."""
    n, k = SHAPES[name]
    for tiles in (1, 2):
        plan = make_plan(GemmShape(n, 0, k, 128, tiles), H200)
        assert (plan.stages - 1) * 2048 * plan.warps >= 48 * 1024
        pairs, all_tiles = n // 32, -(-k // 64)
        largest = -(-pairs // plan.blocks) * plan.slice_tiles
        assert largest * H200.multiprocessors <= 1.10 * pairs * all_tiles


def test_group_sizes() -> None:
    assert [fold_of(g) for g in (32, 64, 128, 256, 1024)] == [(0, 0), (1, 0), (3, 1), (2, 2), (2, 4)]
    assert fold_of(-1) == (2, 30)
    for group in (0, 16, 48, 96, -2):
        with pytest.raises(ConfigError, match="group sizes 32, 64, 128"):
            fold_of(group)


def test_token_tiles() -> None:
    assert [token_tiles_for(t) for t in (1, 8, 9, 16, 17, 32)] == [1, 1, 2, 2, 4, 4]


def test_refusals() -> None:
    shape = GemmShape(5280, 0, 5280, 128, 1)
    with pytest.raises(ConfigError, match=r"no cut of .* fits a device with 20000 bytes"):
        make_plan(shape, DeviceLimits(108, 20_000, (8, 0)))
    with pytest.raises(
        ConfigError, match=r"no ring of a product of 100 tokens fits a device with 20000 bytes"
    ):
        make_tiled_plan((5280, 0, 5280, 128), 100, DeviceLimits(108, 20_000, (8, 0)))
    with pytest.raises(ConfigError, match=r"no cut of .*k_end=96"):
        make_plan(GemmShape(32, 0, 96, 128, 1), H200, slices=2)
