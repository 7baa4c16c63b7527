"""All stages of gptq-cd in torch against the core's."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.twins import compared, problems

CASES = [
    {"group_size": 16},
    {"group_size": 32, "bits": 3, "rounds": 3, "beam": 1},
    {"group_size": 16, "bits": 2, "order": "natural", "scale_dtype": "bfloat16"},
    {"group_size": 20, "bits": 3, "symmetric": False, "order": "diagonal"},
    {"group_size": 16, "bits": 3, "levels": "uneven", "beam": 4},
    {"group_size": -1, "bits": 3, "signed_scales": False, "refit": False},
    {"group_size": 16, "bits": 3, "rounds": 0},
]


@pytest.mark.parametrize("shape", [(96, 64), (40, 96)])
@pytest.mark.parametrize("case", CASES)
def test_codes_are_the_cores_but_for_rounding(shape, case):
    codes, scales, loss, reports = compared(*shape, 2, method="gptq-cd", metric="inputs", **case)
    assert codes > 0.99
    assert scales > 0.99
    assert loss < 0.005
    for core, twin in reports:
        for key in ("proxy_swept", "proxy_settled"):
            assert twin[key] == pytest.approx(core[key], rel=0.005)


def test_layers_of_two_inputs_do_not_know_of_each_other():
    config, first = problems(24, 40, method="gptq-cd", metric="inputs", group_size=8)
    _, second = problems(24, 40, seed=1, method="gptq-cd", metric="inputs", group_size=8)
    together = config.method.twin([*first, *second])
    for problem, found in zip([*first, *second], together, strict=True):
        (alone,) = config.method.twin([problem])
        np.testing.assert_array_equal(found["codes"], alone["codes"])
        np.testing.assert_array_equal(found["scales"], alone["scales"])
