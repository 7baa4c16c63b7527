"""Inputs of the full-precision rollout and its variants; memory limits and kills change no byte."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import loopq
from loopq.errors import ConfigError
from loopq.run.config import QuantConfig
from loopq.run.open_loop import ClosedLoop, EqualRows, Open
from tests.support.accelerator import DEVICE, accelerator
from tests.support.kills import Kill, Killer, counting
from tests.support.marks import slow_unless
from tests.support.runs import SETTINGS, digest, run_of


def test_memory_limit_means_more_passes_and_the_same_bytes(loaded, tokens, tmp_path, checkpoint_folder):
    out = tmp_path / "limited"
    loopq.quantize(loaded, tokens, out=out, batch_size=3, memory=140_000, threads=1, **SETTINGS)
    assert digest(out) == digest(checkpoint_folder)
    with pytest.raises(ConfigError, match=r"alone it takes 0\.10 MiB, above the limit"):
        loopq.quantize(loaded, tokens, batch_size=3, memory=1000, **SETTINGS)


@pytest.mark.parametrize(
    ("at", "rollouts"), slow_unless(lambda c: c[0] in (4, 14), [(0, 4), (4, 3), (9, 1), (11, 1), (14, 1)])
)
def test_a_killed_run_is_resumed(loaded, tokens, tmp_path, checkpoint_folder, monkeypatch, at, rollouts):
    monkeypatch.setattr("loopq.storage.journal.Snapshots.due", lambda _: True)
    out, seen = tmp_path / "killed", []
    # In both runs: the key of a run holds the code of the adapter.
    monkeypatch.setattr(type(loaded.system), "rollout", counting(type(loaded.system).rollout, seen))
    with pytest.raises(Kill):
        loopq.quantize(loaded, tokens, out=out, batch_size=3, progress=Killer(at), **SETTINGS)
    assert not out.exists()
    seen.clear()
    loopq.quantize(loaded, tokens, out=out, batch_size=3, **SETTINGS)
    assert digest(out) == digest(checkpoint_folder)
    assert not list(tmp_path.glob(".killed*"))
    # The probe, and those of the four batches that no part on disk covers.
    assert len(seen) == rollouts


def test_choices_of_steps_really_differ(loaded, tokens):
    results = [loopq.quantize(loaded, tokens, steps=s, **SETTINGS) for s in ("first", "all", "1:")]
    name = "transformer.core_block.0.mlp.fc.weight"
    codes = [r.layers[name].codes for r in results]
    assert not np.array_equal(codes[0], codes[1])
    assert not np.array_equal(codes[1], codes[2])


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


def test_equal_rows_spread_the_rows_of_one_step(tiny, tokens):
    config = QuantConfig.of(group_size=16, metric="inputs", rank_threshold=None)
    run = run_of(tiny, tokens, config, batch_size=5)
    expected = run.solve_from(EqualRows(run.job))
    result = loopq.quantize(tiny, tokens, config, inputs="equal-rows", batch_size=5, threads=1)
    plain = loopq.quantize(tiny, tokens, config, batch_size=5, threads=1)
    assert all(result.layers[n].same_as(x) for n, x in expected.items())
    assert any(not result.layers[n].same_as(x) for n, x in plain.layers.items())
    n_positions = sum(s.size for s in tokens.sequences)
    assert {x.report["n_rows"] for x in result.layers.values() if x.report["steps"]} == {n_positions}
    with pytest.raises(ConfigError, match="they go with metric 'inputs'"):
        loopq.quantize(tiny, tokens, config, inputs="equal-rows", method="gptq-cd", metric="loop")


def test_equal_rows_uses_each_position_once(tiny, tokens):
    config = QuantConfig.of(method="gptq-cd", bits=3, group_size=16, rank_threshold=None)
    run = run_of(tiny, tokens, config, batch_size=5, seed=1)
    rows = EqualRows(run.job)
    n_positions = sum(s.size for s in tokens.sequences)
    for p in run.job.selection.distinct_inputs:
        acc = rows.accumulator(p.name, [0, 1, 2])
        counts = [acc.n_rows(t) for t in range(3)]
        assert sum(counts) == n_positions
        assert max(counts) - min(counts) <= 1
    layers = run.solve_from(rows)
    assert all(layer.report["n_rows"] == n_positions for layer in layers.values() if layer.report["steps"])
    steps = rows.step_of(np.arange(30), 3)
    assert all(sorted(steps[i : i + 3]) == [0, 1, 2] for i in range(0, 30, 3))
    other = EqualRows(run_of(tiny, tokens, config, batch_size=5, seed=2).job)
    assert (steps != other.step_of(np.arange(30), 3)).any()


def test_rows_are_summed_where_the_model_is(tiny, tokens):
    run = run_of(tiny, tokens, QuantConfig.of(method="gptq", group_size=16), seed=1)
    name = run.job.selection.distinct_inputs[0].name
    expected = EqualRows(run.job).accumulator(name, [0, 1, 2]).matrix()
    with accelerator():
        tiny.model.to(DEVICE)
        sums = EqualRows(run.job).accumulator(name, [0, 1, 2]).matrix()
    np.testing.assert_allclose(sums, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
