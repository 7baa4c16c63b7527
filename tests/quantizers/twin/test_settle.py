"""All stages of gptq-cd in torch against the core's."""

from __future__ import annotations

import pytest

from loopq.quantizers.twin import solve
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


def assert_nearly_the_same(solved, wanted):
    """Products of other shapes may take another kernel of the library, which sums in another order."""
    assert (solved["codes"] == wanted["codes"]).mean() > 0.99
    assert (solved["scales"] == wanted["scales"]).mean() > 0.99
    assert solved["proxy_settled"] == pytest.approx(wanted["proxy_settled"], rel=1e-3)


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


def test_parts_of_the_rows_give_the_same(monkeypatch):
    config, layers = problems(24, 40, 2, method="gptq-cd", metric="inputs", group_size=8, beam=4)
    whole = config.method.twin(layers)
    # One input fits into no less than its batch, of which some rows at a time.
    monkeypatch.setattr(solve, "BYTES", 7 * 40 * solve.ROW_BYTES)
    for part, solved in zip(config.method.twin(layers), whole, strict=True):
        assert_nearly_the_same(part, solved)


def test_layers_of_two_inputs_do_not_know_of_each_other():
    config, first = problems(24, 40, method="gptq-cd", metric="inputs", group_size=8)
    _, second = problems(24, 40, seed=1, method="gptq-cd", metric="inputs", group_size=8)
    together = config.method.twin([*first, *second])
    for problem, solved in zip([*first, *second], together, strict=True):
        (alone,) = config.method.twin([problem])
        assert_nearly_the_same(solved, alone)
