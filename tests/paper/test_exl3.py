"""EXL3's published kernel, compiled for the processor."""

from pathlib import Path

import numpy as np
import pytest
import torch

from benches.quality import exl3
from loopq.errors import ConfigError
from tests.support.cuda.emulation import compiler
from tests.support.interop import environments

BITS = 4


@pytest.fixture(scope="module")
def kernel():
    compiler()
    python = Path(environments.interpreter("gptq"))
    found = sorted(python.parents[1].glob(f"lib/python*/site-packages/gptqmodel_ext/{exl3.SOURCE}"))
    assert found, f"{python}: no source of GPTQModel's kernels"
    return exl3.compiled(BITS, found[0])


def test_a_source_without_the_kernel_is_named(tmp_path):
    (tmp_path / "quantize.cu").write_text("template <int K, int cb> and no end", "utf-8")
    with pytest.raises(ConfigError, match=r"quantize\.cu: the kernel is not where GPTQModel 7\.7 has it"):
        exl3.source(tmp_path)


def test_codes_of_a_tile_are_a_closed_walk_near_its_weights(kernel):
    tiles = torch.from_numpy(np.random.default_rng(0).standard_normal((4, 256)).astype(np.float32))
    values, states = exl3.tiles_by(kernel, tiles)
    walk = states.numpy().view(np.uint16).astype(int)
    assert np.array_equal(np.roll(walk, -1, axis=1) >> BITS, walk & (0xFFFF >> BITS))
    # The best 16 levels for normal numbers have 0.0095, and no code of 4 bits has less than 0.0039.
    assert 0.0039 < (values - tiles).square().mean() < 0.006
