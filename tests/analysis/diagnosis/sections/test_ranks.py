"""The output error of a rounded layer, step by step."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from loopq.analysis.diagnosis import rank, survey
from loopq.analysis.diagnosis.context import Context
from loopq.analysis.diagnosis.sections import SECTIONS
from loopq.analysis.diagnosis.sections import ablation as sensitivity
from loopq.analysis.diagnosis.sections import ranks as proxy
from loopq.errors import ConfigError
from loopq.models.from_python import wrap
from loopq.settings.execution import Execution
from tests.support.diagnosed import QUICK
from tests.support.experts import routed_loop
from tests.support.hessians import ArrayHessians
from tests.support.looptoys import LinearLoop, LinearSystem, tokens


def test_proxy_is_the_squared_output_error():
    rng = np.random.default_rng(0)
    x, d = rng.normal(size=(50, 8)), rng.normal(size=(3, 8))
    h = ArrayHessians.of_rows([x])
    d = d.astype(np.float32)
    assert proxy.step_proxies(d, h) == pytest.approx([np.sum((x @ d.T) ** 2)])
    with pytest.raises(ConfigError, match="columns of W"):
        proxy.step_proxies(d, ArrayHessians.of_rows([np.eye(7)]))
    with pytest.raises(ConfigError, match=r"the same number of steps can be summed; got \[1, 2\]"):
        proxy.summarise_proxies({"a": np.ones(1), "b": np.ones(2)})


def test_step_proxies_sum_to_the_deployed_proxy():
    rng = np.random.default_rng(0)
    h = ArrayHessians.of_rows([rng.normal(size=(30, 8)) * s for s in (1.0, 3.0, 2.0)])
    d = rng.normal(size=(5, 8)).astype(np.float32)
    steps = proxy.step_proxies(d, h)
    assert steps.sum() == pytest.approx(np.trace(d @ h.matrix([0, 1, 2]) @ d.T))
    summary = proxy.summarise_proxies({"a": steps, "b": steps})
    np.testing.assert_allclose(summary["per_step"], 2 * steps)
    assert summary["max_over_min"] == pytest.approx(steps.max() / steps.min())
    assert summary["step0_share"] == pytest.approx(steps[0] / steps.sum())
    assert summary["uniform_share"] == 1 / 3
    small = proxy.summarise_proxies({"a": steps / steps.sum() / 9})
    assert small["max_over_min"] == pytest.approx(steps.max() / steps.min())
    assert small["step0_share"] == pytest.approx(steps[0] / steps.sum())
    still = proxy.summarise_proxies({"a": np.zeros(2)})
    assert (still["max_over_min"], still["step0_share"]) == (None, None)


def test_magnitude_stability():
    rng = np.random.default_rng(0)
    scale = np.exp(rng.normal(size=64))
    stable = ArrayHessians.of_rows([rng.normal(size=(4000, 64)) * scale * s for s in (1.0, 20.0)])
    assert proxy.magnitude_stability(stable)["first_last"] > 0.99
    moved = ArrayHessians.of_rows([rng.normal(size=(4000, 64)) * s for s in (scale, rng.permutation(scale))])
    assert abs(proxy.magnitude_stability(moved)["first_last"]) < 0.5
    middle = ArrayHessians.of_rows([np.diag([1.0, 2, 3]), np.diag([3.0, 1, 2]), np.diag([1.0, 2, 3])])
    assert proxy.magnitude_stability(middle)["per_step"] == pytest.approx([1, -0.5, 1])
    assert proxy.magnitude_stability(middle)["first_last"] == pytest.approx(1)
    rms = proxy.channel_rms(np.diag([8.0, 0.08, -1e-12]), 2)
    assert rms == pytest.approx([2, 0.2, 0])
    assert proxy.channel_rms(np.diag([4.0]), 1) == proxy.channel_rms(np.diag([4.0]), 0) == [2.0]
    flat = ArrayHessians.of_rows([np.eye(4), np.eye(4)])
    assert proxy.magnitude_stability(flat)["first_last"] is None


def test_ranks_equal_those_of_the_observed_rows(whole):
    system, data = LinearSystem(LinearLoop(width=8)), tokens(n_prompts=3, n_tokens=12)
    rows = []
    for batch in data.batches(8):
        e = system.embed(batch)
        s = system.initial_state(batch, e)
        import torch

        rows.append(torch.cat([s, e], -1).reshape(-1, 16).detach().numpy())
    h = np.concatenate(rows).T @ np.concatenate(rows)
    ranks_of_layer = whole[0]["sections"]["ranks"]["layers"]["adapter.weight"]
    assert ranks_of_layer["per_step"][0]["n_rows"] == 36
    assert ranks_of_layer["first"]["rank"] == rank.thresholded_rank(rank.spectrum(h))
    assert ranks_of_layer["first"]["trace"] == pytest.approx(np.trace(h), rel=1e-5)
    assert set(ranks_of_layer["blocks"]) == {"state", "embedding"}
    # Step 0's state half is white noise: nearly every one of its 8 directions is seen.
    assert ranks_of_layer["blocks"]["state"]["first"]["rank"] == 8


def test_a_dump_gives_the_same_ranks_without_the_model(tmp_path):
    from loopq.calibrate.collect import collect_rows
    from loopq.calibrate.rollouts import Collection
    from loopq.calibrate.select import select

    model = LinearLoop(width=8).float()

    class Single(LinearSystem):
        def initial_state(self, batch, embedding):
            return super().initial_state(batch, embedding).float()

    system, data = Single(model), tokens(n_prompts=3, n_tokens=12)
    live = survey.diagnose(Context(system, data, 5, QUICK, execution=Execution(threads=1)), only=["ranks"])
    collect_rows(Collection(system, data, select(system, data, n_steps=5)), tmp_path / "dump")
    diagnosis = survey.diagnose_dump(tmp_path / "dump", config=QUICK, execution=Execution(threads=1))
    assert diagnosis["sections"]["ranks"] == live["sections"]["ranks"]
    assert {u["section"] for u in diagnosis["unavailable"]} == set(SECTIONS.names()) - {"ranks"}
    assert [layer["verdict"]["blind"] for layer in diagnosis["layers"]] == [
        layer["verdict"]["blind"] for layer in live["layers"]
    ]


def test_experts_are_judged_by_the_rows_that_they_get():
    system, prompts = wrap(routed_loop(closed=(2,))).system, tokens(n_prompts=2, n_tokens=4, vocab=60)
    config = dataclasses.replace(QUICK, group_size=8)
    diagnosis = survey.diagnose(
        Context(system, prompts, system.n_steps, config), only=["ranks"], name="experts"
    )
    layers = {layer["name"]: layer for layer in diagnosis["layers"]}
    closed = layers["block.experts.2.up_proj.weight"]
    assert closed["verdict"]["text"] == "Its input was not measured (no token was sent to it)."
    assert (closed["proxy"], closed["solved"], closed["verdict"]["blind"]) == (None, None, None)
    ranks = diagnosis["sections"]["ranks"]["layers"]["block.experts.0.gate_proj.weight"]
    rows = [step["n_rows"] for step in ranks["per_step"]]
    said = (
        f"An expert: {min(rows)} rows at least and {np.median(rows):g} typically at a step, fewer than it has"
    )
    assert layers["block.experts.0.up_proj.weight"]["verdict"]["text"].startswith(said)
    assert "An expert" not in layers["block.mix.weight"]["verdict"]["text"]
    weights = {name: system.model.get_parameter(name).detach().numpy() for name in layers}
    assert set(layers) - set(sensitivity.gains(system, prompts, system.n_steps, weights=weights)) == {
        f"block.experts.2.{part}.weight" for part in ("gate_proj", "up_proj", "down_proj")
    }
