"""Experts: rows of their own at each step, and what becomes of those that get few, or none."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import loopq
from loopq.calibrate.collect import collect_rows
from loopq.calibrate.data import from_ids
from loopq.calibrate.dump import Dump
from loopq.calibrate.hessian_dump import collect_hessians
from loopq.calibrate.hooks import Observer, find_input_groups
from loopq.calibrate.merge import merge
from loopq.commands.output import layer_table
from loopq.errors import CalibrationError, NonFiniteError
from loopq.gradients.collect_metrics import collect_metrics
from loopq.models.from_python import wrap
from loopq.quantizers import Problem
from loopq.quantizers.rtn import RTN
from loopq.run.config import QuantConfig
from loopq.run.dump_source import DumpSource
from loopq.run.memory import pass_bytes, passes
from loopq.run.plan import loop_metrics
from loopq.settings.execution import Execution
from loopq.storage.journal import Journal
from loopq.systems.base import Batch
from tests.support.experts import N_STEPS, routed_loop
from tests.support.kills import Kill, Killer
from tests.support.marks import slow_unless
from tests.support.runs import digest, job_of, run_of

GRID = {"bits": 3, "group_size": 8}
CLOSED = "block.experts.2."


@pytest.fixture(scope="module")
def tokens():
    return from_ids(np.random.default_rng(0).integers(0, 60, (7, 12)), "ids")


@pytest.fixture
def loaded():
    return wrap(routed_loop(closed=(2,)))


@pytest.fixture
def apart(monkeypatch):
    """Experts that share nothing, however few rows they get."""
    monkeypatch.setattr("loopq.calibrate.select.FEW", 0.0)


@pytest.fixture
def sharing(monkeypatch):
    """Experts that share their sums."""
    monkeypatch.setattr("loopq.calibrate.select.FEW", 100.0)


def inputs_of(loaded, tokens):
    """Rows of each expert and step as the block itself shows them: {(expert, step): rows}."""
    block, inputs = loaded.model.block, {}
    step = -1

    def enter(module, args):
        nonlocal step
        step += 1
        for number in range(4):
            rows = args[0][module.chosen(args[0]) == number]
            inputs.setdefault((number, step % N_STEPS), []).append(rows.detach().numpy())

    handle = block.register_forward_pre_hook(enter)
    for batch in tokens.batches(3, 0):
        loaded.system.rollout(batch, N_STEPS)
    handle.remove()
    return {key: np.concatenate(parts) for key, parts in inputs.items()}


def _reports(result):
    return [
        {**x.report, **x.settings(), "layer": name, "n_bytes": x.n_bytes} for name, x in result.layers.items()
    ]


@pytest.mark.parametrize("empty", [False, True], ids=["not called", "called with no rows"])
def test_the_hessian_of_a_step_is_that_of_the_rows_routed(tokens, empty):
    loaded = wrap(routed_loop(closed=(2,), empty=empty))
    run = run_of(loaded, tokens, batch_size=3)
    sums, rows = run.all_steps(), inputs_of(loaded, tokens)
    assert len({len(x) for x in rows.values()}) > 3
    for (expert, step), x in rows.items():
        for name in ("gate_proj", "up_proj"):
            group = run.job.selection.input_groups[f"block.experts.{expert}.{name}.weight"]
            assert group == f"block.experts.{expert}.gate_proj.weight"
        acc = sums.accumulator(group, [step])
        assert acc.n_rows(step) == len(x)
        np.testing.assert_allclose(acc.matrix([step]), x.T @ x, rtol=1e-4, atol=1e-4)


def test_an_expert_outside_the_probe_shares_its_input_too(loaded):
    shared = loaded.system.shared_parameters(N_STEPS)
    probe = Batch(torch.zeros(1, 1, dtype=torch.long), (0,))
    groups, shares, _ = find_input_groups(loaded.system, shared, probe, N_STEPS)
    for number in range(4):
        inner = f"block.experts.{number}"
        assert (
            groups[f"{inner}.up_proj.weight"]
            == groups[f"{inner}.gate_proj.weight"]
            == f"{inner}.gate_proj.weight"
        )
        assert groups[f"{inner}.down_proj.weight"] == f"{inner}.down_proj.weight"
    assert sum(shares[f"block.experts.{n}.down_proj.weight"] for n in range(4)) == 1.0
    assert "block.mix.weight" not in shares


def test_calls_outside_their_module_are_refused_and_further_steps_are_summed(loaded):
    shared = loaded.system.shared_parameters(N_STEPS)
    batch = Batch(torch.zeros(1, 3, dtype=torch.long), (0,))
    expert = loaded.model.block.experts[0]
    with Observer(loaded.system, shared, lambda *_: None) as observer:
        with (
            pytest.raises(CalibrationError, match="called before block, whose calls are its steps"),
            observer.rollout(batch),
        ):
            expert(torch.zeros(1, 16))
        # The loop was discovered, so its number of steps is its own.
        with observer.rollout(batch):
            loaded.model(batch.input_ids)
            loaded.model(batch.input_ids)
        assert observer.differing == (3, 6)
        with pytest.raises(CalibrationError, match=r"selected but never observed"), observer.rollout(batch):
            pass


def test_a_row_that_is_not_finite_is_named_without_a_position(loaded):
    batch = Batch(torch.zeros(1, 3, dtype=torch.long), (0,))
    with (
        Observer(loaded.system, loaded.system.shared_parameters(N_STEPS), lambda *_: None) as observer,
        pytest.raises(NonFiniteError, match=r"experts\.0\.gate_proj\.weight, step 0, row 1, column 2: inf"),
        observer.rollout(batch),
    ):
        rows = torch.zeros(2, 16)
        rows[1, 2] = torch.inf
        loaded.model.block.register_forward_pre_hook(lambda module, args: module.experts[0](rows) and None)
        loaded.system.rollout(batch, N_STEPS)


@pytest.mark.parametrize("method", ["gptq-cd", "gptq", "trellis"])
def test_an_expert_without_rows_is_rounded_and_said_so(loaded, tokens, method):
    options = {"metric": "inputs"} if method == "gptq-cd" else {}
    result = loopq.quantize(loaded, tokens, method=method, **options, **GRID)
    for name, layer in result.layers.items():
        if not name.startswith(CLOSED):
            assert layer.report["method_done"] == method
            continue
        weight = loaded.model.get_parameter(name).detach().numpy()
        config = QuantConfig.of(method=method, **options, **GRID).for_layer(name)
        search = getattr(config.method, "scale_search", "mse")
        rounded = RTN(scale_search=search).quantize(Problem(name, weight, None, config.grid))
        np.testing.assert_array_equal(layer.codes, rounded.codes)
        np.testing.assert_array_equal(layer.scales, rounded.scales)
        assert layer.report["method_asked"] == method
        assert layer.report["method_done"] == "rtn"
        assert layer.report["reason"] == "no token of the calibration was sent to it"
        assert layer.report["step_rows"] == [0, 0, 0]
    said = layer_table(_reports(result))
    assert "3 weights of experts got no row, and are rounded to nearest" in said
    assert f"{CLOSED}gate_proj.weight, {CLOSED}up_proj.weight, {CLOSED}down_proj.weight" in said


def test_rows_of_experts_are_told_by_step(loaded, tokens, apart):
    result = loopq.quantize(loaded, tokens, method="gptq", **GRID)
    rows = inputs_of(loaded, tokens)
    for number in range(4):
        report = result.layers[f"block.experts.{number}.down_proj.weight"].report
        assert report["step_rows"] == [len(rows[number, step]) for step in range(N_STEPS)]
    assert "step_rows" not in result.layers["block.mix.weight"].report
    few = loopq.quantize(loaded, tokens, method="gptq", n_prompts=1, **GRID)
    named = [n for n, x in few.layers.items() if 0 < sum(x.report.get("step_rows", [])) < x.shape[1]]
    assert named
    said = layer_table(_reports(few))
    assert f"{len(named)} weights of experts got fewer rows than they have inputs" in said
    assert all(name in said.split("fewer rows")[1] for name in named[:12])


def test_dumps_of_rows_and_hessians_give_the_direct_runs_bytes(loaded, tokens, tmp_path):
    settings = {"method": "gptq", "steps": "1:", **GRID}
    loopq.quantize(loaded, tokens, out=tmp_path / "direct", batch_size=2, threads=1, **settings)
    expected = digest(tmp_path / "direct")
    for shards in (1, 3):
        collect_rows(job_of(loaded, tokens, batch_size=2), tmp_path / f"rows-{shards}", shard_batches=shards)
        loopq.solve(tmp_path / f"rows-{shards}", out=tmp_path / f"q-{shards}", threads=2, **settings)
        assert digest(tmp_path / f"q-{shards}") == expected
    collect_hessians(job_of(loaded, tokens, batch_size=2), tmp_path / "sums", steps=[1, 2], per_step=True)
    loopq.solve(tmp_path / "sums", out=tmp_path / "q", **settings)
    assert digest(tmp_path / "q") == expected
    source = DumpSource.open(tmp_path / "rows-1", run_of(loaded, tokens).execution)
    assert source.dump.manifest.rows[f"{CLOSED}gate_proj.weight"] == {0: 0, 1: 0, 2: 0}


def test_parts_with_other_rows_of_an_expert_merge_to_the_whole(loaded, tokens, tmp_path):
    collect_hessians(job_of(loaded, tokens, batch_size=3), tmp_path / "whole")
    for i, (first, last) in enumerate([(0, 3), (3, 7)]):
        collect_hessians(job_of(loaded, tokens.take(first, last), batch_size=3), tmp_path / f"part{i}")
    merge([tmp_path / "part1", tmp_path / "part0"], tmp_path / "merged")
    whole, merged = (Dump(tmp_path / name).manifest.rows for name in ("whole", "merged"))
    assert merged == whole
    assert {sum(steps.values()) for steps in merged.values()} > {0}
    for input_group, steps in whole.items():
        if sum(steps.values()):
            a, b = (
                Dump(tmp_path / name).accumulator(input_group, list(steps)).matrix()
                for name in ("whole", "merged")
            )
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * np.abs(a).max())


def test_a_dumped_loop_metric_omits_layers_without_gradient(loaded, tokens, tmp_path):
    settings = {"method": "gptq-cd", "metric": "loop", "metric_prompts": 2, "metric_draws": 1, **GRID}
    direct = loopq.quantize(loaded, tokens, threads=1, **settings)
    job = job_of(loaded, tokens, threads=1)
    collect_hessians(job, tmp_path / "dump", gradients=loop_metrics(job, 2, 1))
    again = loopq.solve(tmp_path / "dump", threads=1, **settings)
    for name, layer in direct.layers.items():
        assert layer.same_as(again.layers[name]), name
        assert layer.report.get("metric") == (None if name.startswith(CLOSED) else "loop")


def test_an_expert_without_gradients_takes_the_inputs_metric(loaded, apart):
    """Its rows come from prompts that no gradient is taken on."""

    def used(ids):
        rows = inputs_of(loaded, from_ids(ids, "ids"))
        return {n for n in range(4) if any(len(rows[n, t]) for t in range(N_STEPS))}

    # The first prompt is one token that leaves out an expert which others are sent to.
    ids = np.random.default_rng(0).integers(0, 60, (9, 2))
    ids[0] = next(i for i in range(60) if used(np.array([[i, i]])) < {0, 1, 3})
    tokens = from_ids(ids, "ids")
    without = used(ids) - used(ids[:1])
    assert without
    result = loopq.quantize(loaded, tokens, metric="loop", metric_prompts=1, metric_draws=1, **GRID)
    plain = loopq.quantize(loaded, tokens, metric="inputs", **GRID)
    for number in without:
        name = f"block.experts.{number}.up_proj.weight"
        assert result.layers[name].report.get("metric") is None
        assert result.layers[name].same_as(plain.layers[name])
    assert f"{3 * len(without)} weights of experts got rows and no gradient" in layer_table(_reports(result))
    assert "no gradient" not in layer_table(_reports(plain))


@pytest.mark.parametrize("at", slow_unless(lambda at: at == 6, [1, 3, 6, 12]))
def test_a_killed_run_is_resumed(loaded, tokens, tmp_path, monkeypatch, at):
    monkeypatch.setattr("loopq.storage.journal.Snapshots.due", lambda _: True)
    settings = {"method": "gptq", "batch_size": 2, "threads": 1, **GRID}
    loopq.quantize(loaded, tokens, out=tmp_path / "whole", **settings)
    with pytest.raises(Kill):
        loopq.quantize(loaded, tokens, out=tmp_path / "killed", progress=Killer(at), **settings)
    loopq.quantize(loaded, tokens, out=tmp_path / "killed", **settings)
    assert digest(tmp_path / "killed") == digest(tmp_path / "whole")


def test_layer_by_layer_calibration_solves_experts_first(loaded, tokens):
    """Pairs of rows exist only where both rollouts send the same tokens."""
    settings = {"method": "gptq", "inputs": "asymmetric", **GRID}
    result = loopq.quantize(loaded, tokens, **settings)
    plain = loopq.quantize(loaded, tokens, method="gptq", **GRID)
    for name, layer in result.layers.items():
        expert = ".experts." in name
        assert layer.report.get("inputs") == (None if expert else "asymmetric")
        assert layer.same_as(plain.layers[name]) == expert
    assert list(result.layers) == list(plain.layers)


def test_bits_can_be_divided_between_experts(loaded, tokens):
    result = loopq.quantize(
        loaded, tokens, method="gptq", levels="even", group_size=8, fit=17500, fit_bits=(3, 4), fit_group_sizes=(8,)
    )  # fmt: skip
    assert {layer.grid.bits for layer in result.layers.values()} <= {3, 4}


def test_the_quantized_model_runs_with_packed_codes(loaded, tokens, tmp_path):
    loopq.quantize(loaded, tokens, method="gptq", out=tmp_path / "q", **GRID)
    batch = next(iter(tokens.batches(7, 0)))
    dense = loopq.load(tmp_path / "q", wrap(routed_loop(closed=(2,))))
    packed = loopq.load(tmp_path / "q", wrap(routed_loop(closed=(2,), empty=True)), quantized=True)
    assert type(packed.model.block.experts[2].up_proj).__name__ == "QuantLinear"
    expected = dense.system.rollout(batch, N_STEPS)
    torch.testing.assert_close(packed.system.rollout(batch, N_STEPS), expected, rtol=1e-4, atol=1e-4)


def test_the_shared_hessian_has_the_rows_of_all_experts(loaded, tokens, sharing):
    run = run_of(loaded, tokens, batch_size=3)
    sums, rows = run.all_steps(), inputs_of(loaded, tokens)
    groups, whole = run.job.selection.input_groups, "block.experts.0.gate_proj.weight"
    assert {groups[f"block.experts.{n}.{x}_proj.weight"] for n in range(4) for x in ("gate", "up")} == {whole}
    assert groups["block.experts.1.down_proj.weight"] == "block.experts.1.down_proj.weight"
    assert run.job.selection.shares[whole] == 1.0
    for step in range(N_STEPS):
        x = np.concatenate([part for (_, at), part in rows.items() if at == step])
        acc = sums.accumulator(whole, [step])
        assert acc.n_rows(step) == len(x)
        np.testing.assert_allclose(acc.matrix([step]), x.T @ x, rtol=1e-4, atol=1e-4)


def test_shared_sums_do_not_depend_on_passes_or_a_dump(loaded, tokens, tmp_path, sharing):
    settings = {"method": "gptq-cd", "metric": "loop", "metric_draws": 2, **GRID}
    run = run_of(loaded, tokens, QuantConfig.of(**settings))
    units = run.sums().passes(lambda groups: 0)[0]
    most = max(pass_bytes(run.job, run.tasks, run.sums(), [x]) for x in units)
    together = [t.input_group for t in run.tasks if t.side == "outputs"]
    most = max(most, pass_bytes(run.job, run.tasks, run.sums(), together))
    limited = run_of(loaded, tokens, memory=most).job
    parts = passes(limited, run.tasks, run.plan.sums(limited))
    assert len(parts) > 1
    assert any(set(together) <= set(part) for part in parts)
    direct = loopq.quantize(loaded, tokens, threads=1, **settings)
    divided = loopq.quantize(loaded, tokens, threads=1, memory=most, **settings)
    job = job_of(loaded, tokens, threads=1)
    job = dataclasses.replace(job, selection=job.selection.pooled(tokens.n_tokens))
    collect_hessians(job, tmp_path / "dump", gradients=loop_metrics(job, None, 2))
    again = loopq.solve(tmp_path / "dump", threads=1, **settings)
    for name, layer in direct.layers.items():
        assert layer.same_as(divided.layers[name]), name
        assert layer.same_as(again.layers[name]), name
        assert layer.report.get("metric") == ("loop" if not name.startswith(f"{CLOSED}down") else None)


def test_an_expert_without_rows_is_solved_on_those_of_others(loaded, tokens, sharing):
    result = loopq.quantize(loaded, tokens, metric="loop", **GRID)
    done = {
        x: result.layers[f"{CLOSED}{x}_proj.weight"].report["method_done"] for x in ("gate", "up", "down")
    }
    assert done == {"gate": "gptq-cd", "up": "gptq-cd", "down": "rtn"}


def test_shared_gradient_sums_are_those_of_all_experts(loaded, tokens, monkeypatch):
    """Products of two experts have random signs, so they vanish on average over seeds."""
    config, traces = QuantConfig.of(metric="loop", **GRID), []
    for few in (0.0, 100.0):
        monkeypatch.setattr("loopq.calibrate.select.FEW", few)
        run = run_of(loaded, tokens, config)
        sums = run.sums()
        sums.run_pass(list(sums.steps))
        draws = [_metrics(run, sums, seed) for seed in range(24)]
        # The ridge is a share of the diagonal, so it adds up too.
        written = [m.left[0] for one in draws for name, m in one.items() if "down_proj" in name]
        traces.append(sum(map(np.trace, written)))
        read = draws[0]["block.experts.0.gate_proj.weight"]
        assert bool(read.left) == (few == 0.0)
        assert read.right.any()
    assert traces[1] == pytest.approx(traces[0], rel=0.25)


def _metrics(run, sums, seed):
    """Loop metrics of a run by their names."""
    how = Execution(threads=1, seed=seed)
    return collect_metrics(sums, run.job.system, run.job.tokens, run.tasks, N_STEPS, how, Journal(None))
