"""Rollouts of several depths are rollouts of their own."""

from loopq.diagnose import exposure, rollouts
from loopq.diagnose.context import Context
from loopq.paper.diagnose.depths import depth_curve
from loopq.quantizers.config import LayerConfig
from loopq.settings.execution import Execution
from tests.support.looptoys import BlindSystem, LinearLoop, LinearSystem, numpy_rounder, tokens

INT4 = LayerConfig.of(bits=4, group_size=-1)


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
