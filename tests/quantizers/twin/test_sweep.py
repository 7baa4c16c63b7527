"""GPTQ's sweep in torch against the core's."""

from __future__ import annotations

import pytest

from tests.support.twins import compared

CASES = [
    {"group_size": 16},
    {"group_size": 32, "scales": "static", "act_order": True},
    {"group_size": 25, "bits": 3, "scale_search": "max", "scale_dtype": "float32"},
    {"group_size": -1, "bits": 3, "scale_search": "half-range", "scale_dtype": "bfloat16"},
    {"group_size": 16, "bits": 3, "symmetric": False, "scale_bits": 5},
    {"group_size": 16, "bits": 3, "levels": "uneven"},
    {"group_size": 16, "bits": 4, "levels": "fitted", "precision": "float32", "damping": 0.1},
]


@pytest.mark.parametrize("shape", [(48, 64), (20, 150)])
@pytest.mark.parametrize("case", CASES)
def test_codes_and_scales_are_the_cores_but_for_rounding(shape, case):
    codes, scales, loss, reports = compared(*shape, 2, method="gptq", **case)
    # Two libraries sum in different orders: the last bits of a float32 factor can move a few scales.
    assert codes > 0.97
    assert scales > 0.97
    assert loss < 0.003
    for core, twin in reports:
        assert twin.keys() == core.keys()
        for key in ("damping_abs", "n_dead_columns", "min_pivot", "max_pivot", "proxy", "proxy_damped"):
            assert twin[key] == pytest.approx(core[key], rel=3e-3)
