"""Figure 1b: agreement and KL by the number of recurrences."""

from __future__ import annotations

from pathlib import Path

from loopq.analysis.diagnosis import exposure, rollouts
from loopq.analysis.diagnosis.context import Context
from loopq.paper.bench import Bench
from loopq.paper.tables.depth_curve import depth_curve, show
from loopq.quantizers.config import LayerConfig
from loopq.settings.execution import Execution
from tests.support.looptoys import BlindSystem, LinearLoop, LinearSystem, numpy_rounder, tokens
from tests.support.paper import measured_shown_and_resumed

INT4 = LayerConfig.of(bits=4, group_size=-1)


def test_it_is_measured_shown_and_resumed(huginn: Bench, tmp_path: Path) -> None:
    measured_shown_and_resumed("depth-curve", huginn, tmp_path)


def test_no_step_function_is_needed():
    curve = depth_curve(Context(BlindSystem(LinearLoop()), tokens(), 8, rounder=numpy_rounder), (1, 4), INT4)
    assert [r["depth"] for r in curve] == [1, 4]
    assert all(0 <= r["agreement"] <= 1 and r["kl"] > 0 for r in curve)


def test_depths_are_compared_as_variants_are():
    system, data = LinearSystem(LinearLoop()), tokens(n_prompts=4, n_tokens=12)
    whole = exposure.injection_weights(system, 8, INT4, rounder=numpy_rounder)["all"]
    curve = depth_curve(
        Context(system, data, 8, rounder=numpy_rounder, execution=Execution(seed=3)), (2, 8), INT4
    )
    for row in curve:
        run = rollouts.run_variants(
            Context(system, data, row["depth"], execution=Execution(seed=3)), {"a": whole}
        )["a"]
        assert row["agreement"] == run.curve("agreement")[-1]
        assert row["kl"] == run.curve("kl")[-1]
        assert row["output_error"] == run.curve("output_error")[-1]


def test_agreement_and_kl_have_a_verdict_each() -> None:
    def row(depth: int, agreement: float, kl: float) -> dict[str, object]:
        last = {"agreement": [agreement] * 6, "kl": [kl] * 6}
        return {"depth": depth, "agreement": agreement, "kl": kl, "last": last}

    claims = show([{"model": "m", "rows": [row(1, 0.4, 2.0), row(8, 0.3, 1.0)]}]).claims
    assert [c.holds for c in claims] == [False, True]
    assert "-10.0 points of agreement" in claims[0].found
    # One prediction of each of six prompts is a score of six items.
    (kl,) = show([{"model": "m", "rows": [row(1, 0.0, 2.0), row(8, 1.0, 1.0)]}]).claims
    assert "KL" in kl.text
