"""Layers of a run solved from its Hessians: saved one by one, and named where they cannot be."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import loopq
from loopq.commands.output import layer_table
from loopq.errors import NonFiniteError
from loopq.run.config import QuantConfig
from loopq.run.solver import loss_of, save_layer, saved_layer
from loopq.storage.files import RawTensor, read_header, read_tensors, write_tensors
from loopq.storage.journal import Journal
from loopq.systems.declare import parameter_of
from tests.support.kills import Kill, Killer, counting
from tests.support.runs import SETTINGS, digest, run_of


def test_a_saved_layer_that_was_altered_is_solved_again(loaded, tokens, tmp_path, checkpoint_folder):
    """Its codes are not those that were saved with the settings beside them."""
    out = tmp_path / "killed"
    with pytest.raises(Kill):
        loopq.quantize(loaded, tokens, out=out, batch_size=3, progress=Killer(12), **SETTINGS)
    saved = min((tmp_path / ".killed.work").glob("layers/*/*.safetensors"))
    kept, (_, metadata) = read_tensors(saved), read_header(saved)
    name = next(n for n in kept if n.endswith("weight_packed"))
    kept[name] = RawTensor.of(np.zeros_like(kept[name].array()))
    write_tensors(saved, kept, metadata)
    loopq.quantize(loaded, tokens, out=out, batch_size=3, **SETTINGS)
    assert digest(out) == digest(checkpoint_folder)


def test_journalled_layers_come_back_and_only_others_are_solved(tiny, tokens, tmp_path, monkeypatch):
    run = run_of(tiny, tokens, QuantConfig.of(bits=3, group_size=16))
    sums, journal = run.all_steps(), Journal(tmp_path / "layers", "key")
    first = run.solver(sums, journal).run(run.tasks)
    for name, layer in first.items():
        again = saved_layer(journal, name)
        assert again.same_as(layer)
        assert again.report == layer.report
        assert saved_layer(journal, name, "sweep-1/") is None
        save_layer(journal, layer, "sweep-1/")
        assert saved_layer(journal, name, "sweep-1/").same_as(layer)
    solved = []
    method = type(run.config.layer.method)
    monkeypatch.setattr(method, "quantize", counting(method.quantize, solved))
    next((tmp_path / "layers").glob("*/transformer.adapter*")).unlink()
    again = run.solver(sums, journal).run(run.tasks)
    assert len(solved) == 1
    assert list(again) == [t.name for t in run.tasks]
    assert all(again[n].same_as(layer) for n, layer in first.items())


def test_the_report_says_what_was_asked_and_what_it_cost(tiny, tokens):
    config = QuantConfig.of(
        method="gptq",
        bits=3,
        group_size=16,
        damping=0.02,
        damping_kind="median",
        steps="1:",
        rank_threshold=1e-3,
    )
    run = run_of(tiny, tokens, config)
    name = "transformer.adapter.weight"
    hessian = run.all_steps().accumulator(name, [1, 2]).matrix([1, 2])
    layer = run.solve()[name]
    weight = tiny.model.get_parameter(name).detach().numpy().astype(np.float64)
    error = layer.dequantize() - weight
    report = layer.report
    assert {
        k: report[k] for k in ("method_asked", "method_done", "bits", "group_size", "steps", "n_rows")
    } == {
        "method_asked": "gptq",
        "method_done": "gptq",
        "bits": 3,
        "group_size": 16,
        "steps": [1, 2],
        "n_rows": 480,
    }
    assert (report["damping"], report["damping_kind"]) == (0.02, "median")
    assert (report["step_weighting"], report["step_weights"]) == ("sum", None)
    assert report["proxy"] == pytest.approx(np.trace(error @ hessian @ error.T), rel=1e-9)
    assert report["proxy_total"] == pytest.approx(np.trace(weight @ hessian @ weight.T), rel=1e-9)
    assert report["proxy"] < report["proxy_rtn"] < report["proxy_total"]
    assert report["weight_error"] == pytest.approx(np.linalg.norm(error) / np.linalg.norm(weight), rel=1e-6)
    values = np.linalg.eigvalsh(hessian)
    assert report["rank"] == (values > 1e-3 * values[-1]).sum()
    assert report["rank_threshold"] == 1e-3
    assert report["n_bytes"] == layer.n_bytes


def test_losses_of_a_high_layer_are_taken_over_every_kth_row(monkeypatch):
    rng = np.random.default_rng(0)
    weight, x = rng.normal(size=(23, 8)).astype(np.float32), rng.normal(size=(40, 8))
    stored = (weight + 0.1 * rng.normal(size=weight.shape)).astype(np.float32)
    hessian = x.T @ x
    for limit, taken in ((23, slice(None)), (22, slice(None, None, 2)), (5, slice(None, None, 5))):
        monkeypatch.setattr("loopq.run.solver.REPORTED_ROWS", limit)
        for other, error in (
            (stored, stored.astype(np.float64) - weight),
            (None, -weight.astype(np.float64)),
        ):
            part = error[taken]
            assert len(part) <= limit
            expected = np.trace(part @ hessian @ part.T) * 23 / len(part)
            assert loss_of(weight, other, hessian, 1) == pytest.approx(expected, rel=1e-12)


def test_nan_in_a_weight_is_named(loaded, tokens):
    weight = parameter_of(loaded.system.model, loaded.system.shared_parameters(3)[4])
    with torch.no_grad():
        weight[3, 5] = float("inf")
    with pytest.raises(
        NonFiniteError,
        match=r"own transformer\.core_block\.0\.mlp\.proj\.weight holds NaN or inf",
    ):
        loopq.quantize(loaded, tokens, method="rtn")


class _Loop(torch.nn.Module):
    """A loop of one layer, of which a group of one row is as given."""

    def __init__(self, factor):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.core = torch.nn.Embedding(64, 64), torch.nn.Linear(64, 64)
        self.head = torch.nn.Linear(64, 64)
        with torch.no_grad():
            self.core.weight[3, :32] *= factor

    def forward(self, ids):
        x = self.table(ids)
        for _ in range(2):
            x = torch.tanh(self.core(x))
        return self.head(x)


_METHODS = [
    {"method": "rtn"}, {"method": "rtn", "symmetric": False}, {"method": "gptq"}, {"method": "awq"},
    {"method": "gptq-cd", "metric": "inputs"}, {"method": "trellis", "metric": "inputs", "bits": 2},
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("settings", _METHODS)
def test_a_group_near_zero_stops_no_run(settings, dtype):
    ids = [list(range(i, i + 24)) for i in range(3)]
    settings = {"bits": 4, "scale_dtype": dtype, **settings}
    layer = loopq.quantize(_Loop(1e-12), ids, group_size=32, threads=1, **settings).layers["core.weight"]
    assert np.isfinite(layer.dequantize()).all()
    if settings["method"] == "rtn":
        assert np.abs(layer.dequantize()[3, :32]).max() < 1e-9
        assert layer.report.get("n_zeroed_groups", 0) == (dtype == "float16")


def test_scales_that_float16_holds_imprecisely_are_counted():
    ids = [list(range(24))] * 2
    settings = {"method": "rtn", "bits": 4, "group_size": 32, "threads": 1}
    report = loopq.quantize(_Loop(1e-4), ids, **settings).layers["core.weight"].report
    assert report["n_subnormal_scales"] == 1
    assert "n_zeroed_groups" not in report
    assert "scales below 6.1e-5" in layer_table([{"layer": "core.weight", **report}])
    other = loopq.quantize(_Loop(1e-4), ids, scale_dtype="bfloat16", **settings).layers["core.weight"]
    assert "n_subnormal_scales" not in other.report
