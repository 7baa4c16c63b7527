"""Plans of the product of many tokens."""

from __future__ import annotations

import pytest

from loopq.runtime.cuda.plan import A100, H200, DeviceLimits
from loopq.runtime.cuda.tiled import make_tiled_plan
from tests.support.cuda.plans import ADA, SHAPES


@pytest.mark.parametrize("group", [32, 64, 128, -1])
@pytest.mark.parametrize("device", [A100, H200, ADA], ids=["A100", "H200", "Ada"])
@pytest.mark.parametrize("name", SHAPES)
def test_every_layer_of_many_tokens_fits_every_device(name: str, device: DeviceLimits, group: int) -> None:
    n, k = SHAPES[name]
    for tokens in (33, 64, 65, 128, 129, 256, 1000):
        plan = make_tiled_plan((n, 0, k, group), tokens, device)
        assert plan.shared_bytes <= device.shared_bytes
        block_tokens, block_outputs = 64 * plan.variant.token_warps, 256 // plan.variant.token_warps
        assert plan.blocks == -(-tokens // block_tokens) * -(-(n + n % 32) // block_outputs)
        assert 1 <= plan.slices <= -(-k // 64), "a slice has a tile at least"
        assert plan.token_blocks == (1 if tokens <= 128 else -(-tokens // 128)), (
            "up to 128 tokens share a block"
        )
        longer_scales = make_tiled_plan((n, 0, k, group), tokens, device, "fp16", "bf16")
        assert longer_scales.slices == plan.slices, "the workspace is sized without the types"


@pytest.mark.parametrize("name", ["adapter", "Wqkv", "attn.proj", "mlp.fc", "mlp.proj"])
def test_a_chip_has_blocks_for_all_its_multiprocessors(name: str) -> None:
    n, k = SHAPES[name]
    for device in (A100, H200):
        for tokens in (64, 128, 256):
            plan = make_tiled_plan((n, 0, k, 128), tokens, device)
            waves = plan.blocks * plan.slices / device.multiprocessors
            assert waves / -(-waves // 1) > 0.75, (name, tokens, plan)
