"""Closed loop: layers are solved on the inputs of the model as first quantized."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import loopq
from loopq.calibrate.data import from_ids
from loopq.errors import ConfigError
from loopq.models.from_python import wrap
from loopq.paper.run.closed_loop import ClosedLoop
from loopq.run.config import QuantConfig
from loopq.run.estimate import run_bytes
from loopq.run.open_loop import Open
from tests.support.experts import N_STEPS, routed_loop
from tests.support.runs import run_of


def test_closed_loop_collects_from_the_quantized_model(tiny, tokens):
    """At two bits the rollout of the quantized model has other Hessians than that of full precision."""
    config = QuantConfig.of(bits=2, group_size=16, rank_threshold=None)
    run = run_of(tiny, tokens, config, batch_size=5)
    plain = run.solve_from(run.all_steps())
    again = run.solve(ClosedLoop())
    assert list(again) == list(plain)
    assert not all(again[n].same_as(plain[n]) for n in plain)
    assert all(layer.report["inputs"] == "closed-loop" for layer in again.values())


def test_closed_loop_solves_original_weights_on_quantized_inputs(tiny, tokens):
    """The loss of a layer is summed over rows that hooks of torch read from the manually filled model."""
    name = "transformer.core_block.0.mlp.fc"
    config = QuantConfig.of(bits=2, group_size=16, rank_threshold=None, beam=1)
    run = run_of(tiny, tokens, config, batch_size=5)
    first, again = run.solve(Open()), run.solve(ClosedLoop())[f"{name}.weight"]
    weight = tiny.model.get_parameter(f"{name}.weight").detach().double().numpy().copy()
    rows = []
    with torch.no_grad():
        for other, layer in first.items():
            tiny.model.get_parameter(other).copy_(torch.from_numpy(layer.dequantize()))
        hook = tiny.model.get_submodule(name).register_forward_pre_hook(
            lambda module, args: rows.append(args[0].flatten(0, -2).double().numpy())
        )
        for batch in tokens.batches(5):
            tiny.system.rollout(batch, 3)
        hook.remove()
    x = np.concatenate(rows)
    # Reports look at every k-th row of a weight that has more than 32.
    part = slice(None, None, -(-len(weight) // 32))
    share = len(weight) / len(weight[part])
    assert again.report["proxy_total"] == pytest.approx(np.square(x @ weight[part].T).sum() * share, rel=1e-4)
    lost = (again.dequantize() - weight)[part]
    assert again.report["proxy"] == pytest.approx(np.square(x @ lost.T).sum() * share, rel=1e-4)
    assert first[f"{name}.weight"].report["proxy_total"] != pytest.approx(
        again.report["proxy_total"], rel=1e-3
    )


def test_closed_loop_with_next_to_no_error_is_open_loop(tiny, tokens):
    """First eight bits, which change the rollout by next to nothing: hardly any code turns."""
    config = QuantConfig.of(bits=8, group_size=16, rank_threshold=None)
    run = run_of(tiny, tokens, config, batch_size=5)
    plain, again = run.solve(), run.solve(ClosedLoop())
    assert np.mean([(again[n].codes == plain[n].codes).mean() for n in plain]) > 0.95


def test_inputs_of_the_quantized_rollout_count_its_own_rows():
    loaded = wrap(routed_loop(closed=(2,)))
    tokens = from_ids(np.random.default_rng(0).integers(0, 60, (7, 12)), "ids")
    result = loopq.quantize(loaded, tokens, method="gptq", inputs="closed-loop", bits=3, group_size=8)
    plain = loopq.quantize(loaded, tokens, method="gptq", bits=3, group_size=8)
    rows = [
        [r.layers[f"block.experts.{n}.up_proj.weight"].report["step_rows"] for n in range(4)]
        for r in (result, plain)
    ]
    assert rows[0] != rows[1]
    assert np.sum(rows[0]) == np.sum(rows[1]) == 7 * 12 * N_STEPS


def test_its_second_run_is_counted_and_is_not_divided(tiny, tokens):
    config = QuantConfig.of(inputs="closed-loop")
    free = run_of(tiny, tokens, config)
    assert free.estimate().n_passes == 2
    assert "2 passes over the calibration set" in str(free.estimate())
    need = run_bytes(free.plan, free.job)
    with pytest.raises(ConfigError, match="inputs closed-loop: takes"):
        run_of(tiny, tokens, config, memory=need - 1).estimate()
