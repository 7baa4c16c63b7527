"""One rollout watched from outside."""

from __future__ import annotations

import pytest

from loopq.errors import CalibrationError
from loopq.models.trace import trace
from tests.support.odd_loop import Odd, _ids

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(mamba_ssm|causal_conv1d|fast path|kernels).*",
)


def test_idle_matrices_are_told_apart_from_uncalled_ones() -> None:
    model = Odd()
    ids = _ids().input_ids
    traced = trace(model, lambda: model(ids))
    assert traced.idle == ("idle.weight",)
    assert [name for name, _ in traced.calls][-1] == "once.weight"


def test_hooks_are_gone_after_an_error() -> None:
    model = Odd()

    def fail() -> None:
        model(_ids().input_ids)
        raise ValueError("made")

    with pytest.raises(CalibrationError, match=r"the model raises ValueError: made"):
        trace(model, fail)
    assert all(not m._forward_pre_hooks for m in model.modules())
