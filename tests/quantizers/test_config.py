"""Settings of one layer are read strictly, and an override changes some of them."""

from __future__ import annotations

import numpy as np
import pytest

from loopq.errors import ConfigError
from loopq.quantizers import Problem
from loopq.quantizers.config import LayerConfig, Override


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bits", 5), ("bits", 16), ("bits", 4.0), ("bits", True), ("group_size", 0), ("group_size", -2),
        ("group_size", 64.0), ("damping", -0.1), ("damping", float("nan")), ("scales", "best"),
        ("scale_search", "l1"), ("scale_dtype", "int8"), ("precision", "float16"), ("block_size", 0),
        ("step_weights", "mean"), ("rotation", "hadamrd"),
    ],
)  # fmt: skip
def test_layer_config_refuses(field, value):
    with pytest.raises(ConfigError, match=rf"^{field}"):
        LayerConfig.of(**{field: value})


def test_override_refuses_unknown_setting():
    with pytest.raises(
        ConfigError, match=r"override '\*': unknown setting colour.*; known: act_order, beam, bits"
    ):
        Override("*", {"colour": 3})


def test_patterns_are_of_the_shell_or_regular_expressions():
    assert Override("*.fc.weight").matches("core.0.fc.weight")
    assert not Override("*.fc.weight").matches("core.0.fc.weight_packed")
    assert Override(r"re:mlp\.(fc|proj)").matches("core.0.mlp.fc.weight")
    assert not Override(r"re:^mlp").matches("core.0.mlp.fc.weight")


def test_results_of_a_hessian_are_computed_once_per_input_group():
    """Two layers with one input and one rotation share the rotated Hessian and its factor."""
    rng = np.random.default_rng(0)
    x, shared, calls = rng.normal(size=(64, 16)), {}, []
    config = LayerConfig.of(method="gptq-cd", bits=3, group_size=8, rotation="random:8")
    for seed in (1, 2):
        weight = np.random.default_rng(seed).normal(size=(4, 16)).astype(np.float32)
        problem = Problem("x", weight, x.T @ x, config.grid, threads=1, shared=shared)
        layer = config.quantize(problem)
        assert layer.same_as(config.quantize(Problem("x", weight, x.T @ x, config.grid, threads=1)))
        rotation = config.rotation.of(16, 8)
        calls.append(problem.once(("rotated", rotation), lambda: pytest.fail("computed again")))
    assert calls[0] is calls[1]
    hessian, inner = calls[0]
    assert list(inner) == [("factor", config.method.damping, "conditional", "float64")]
    assert hessian.shape == (16, 16)
