"""Runs of `awq` and `awq-fold`: their settings, a resumed solve, and exports with equal logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import benches.zoo.models  # noqa: F401  registers the classes
import loopq
from loopq.errors import CheckpointError
from loopq.formats.convert import read_any
from loopq.formats.engines.base import Question, ask
from loopq.layers.transforms import ChannelScale
from loopq.models.load import load_model
from loopq.models.restore import load_checkpoint
from loopq.quantizers import QUANTIZERS
from loopq.quantizers.config import Override
from loopq.run.config import QuantConfig
from loopq.run.destination import export
from loopq.run.solver import groups_of, save_layer
from loopq.storage.journal import Journal
from loopq.systems.base import Batch
from tests.support.looped import save_dense
from tests.support.runs import run_of


def test_awq_folds_in_formats_of_other_tools():
    config = QuantConfig.of(Override("*", {"method": "awq", "bits": 3}), method="awq", scale_search="max")
    assert config.for_format(native=True) == config
    folding = config.for_format(native=False)
    assert folding.layer.method == QUANTIZERS.get("awq-fold")(scale_search="max")
    assert [o.changes for o in folding.overrides] == [{"method": "awq-fold", "bits": 3}]


def test_layers_that_share_a_scale_are_solved_together_again(tokens, tmp_path):
    """A kill between two of them leaves a layer whose scale the others do not know."""
    model = load_model(f"looped:{save_dense(tmp_path / 'm')}[1:3]x2")
    norm = model.model.model.layers[1].input_layernorm
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(-4, 4, len(norm.weight)).exp())
    run = run_of(model, tokens, QuantConfig.of(method="awq-fold", bits=3, group_size=16))
    group = next(g for g in groups_of(run.tasks) if g[0].name.endswith("layers.1.self_attn.q_proj.weight"))
    sums, journal = run.all_steps(), Journal(tmp_path / "layers", "key")
    first = run.solver(sums, Journal(None)).run(group)
    assert len({layer.transform.scale.tobytes() for layer in first.values()}) == 1 < len(first)
    save_layer(journal, first[group[0].name])
    again = run.solver(sums, journal).run(group)
    assert all(again[name].same_as(layer) for name, layer in first.items())


def test_a_scale_without_a_place_is_refused_before_the_run(tiny_folder, tmp_path, command, monkeypatch):
    monkeypatch.setattr(loopq, "quantize", lambda *a, **k: pytest.fail("ran"))
    few = ["--group-size", "-1", "--n-prompts", "2", "--seq-len", "16"]
    code, _, err = command(
        "quantize", tiny_folder, "--out", tmp_path / "q", "--method", "awq", "--format", "gptq_v2", *few
    )
    assert code == 1
    assert "AWQ scale does not fold" in err
    assert not (tmp_path / ".q.work").exists()


IDS = np.random.default_rng(0).integers(4, 60, (4, 16))
AWQ = {"method": "awq", "bits": 4, "group_size": 16, "threads": 1}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A looped Llama with loud channels, and as many heads of v as of o."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        bos_token_id=1, eos_token_id=2, looped_layers=[1, 3, 2],
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(
                torch.randn_like(value).mul(2).exp() if "norm" in name else torch.randn_like(value) / 4
            )
    folder = tmp_path_factory.mktemp("llama") / "m"
    model.save_pretrained(folder)
    return folder


def _logits(checkpoint):
    import torch

    loaded = load_checkpoint(checkpoint)
    return loaded.system.rollout(Batch(torch.from_numpy(IDS), (0, 1, 2, 3)), loaded.system.n_steps).numpy()


@pytest.mark.parametrize("form", ["compressed-tensors", "gptq"])
def test_awq_for_another_format_is_folded_bit_for_bit(llama, tmp_path, form):
    result = loopq.quantize(llama, IDS.tolist(), out=tmp_path / "q", write=form, **AWQ)
    scaled = [x for x in result.layers.values() if isinstance(x.transform, ChannelScale)]
    assert {x.name.rpartition("layers.")[2][2:] for x in scaled} >= {
        "self_attn.q_proj.weight", "self_attn.o_proj.weight", "mlp.gate_proj.weight", "mlp.down_proj.weight",
    }  # fmt: skip
    again = read_any(tmp_path / "q")
    assert not any(layer.transform for layer in again.layers.values())
    assert (
        again.layers["model.layers.1.mlp.down_proj.weight"].report["folded_into"]
        == "model.layers.1.mlp.up_proj"
    )
    np.testing.assert_array_equal(_logits(again), _logits(result))
    # Solved for loopq's own format, it gives the same file.
    native = loopq.quantize(llama, IDS.tolist(), out=tmp_path / "own", **AWQ | {"method": "awq-fold"})
    assert any(layer.transform for layer in native.layers.values())
    assert export(tmp_path / "own", tmp_path / "e", form, force=True).difference == 0.0
    assert read_any(tmp_path / "e").digest() == again.digest()


def test_transformers_reads_folded_scales_with_equal_logits(llama, tmp_path):
    pytest.importorskip("compressed_tensors")
    result = loopq.quantize(llama, IDS.tolist(), **AWQ | {"method": "awq-fold"})
    export(result, tmp_path / "q", "compressed-tensors", remote_code=True, force=True, verify=False)
    (reading,) = ask(
        "transformers", [Question(tmp_path / "q", "compressed-tensors", IDS, _logits(result), True)]
    )
    assert reading.same, reading.line()


def test_scales_of_single_layers_are_refused_with_advice(llama, tmp_path):
    result = loopq.quantize(llama, IDS.tolist(), **AWQ)
    with pytest.raises(CheckpointError, match=r"AWQ scale does not fold.*--method awq-fold"):
        export(result, tmp_path / "q", "compressed-tensors")
    assert not (tmp_path / "q").exists()


def test_unlike_steps_of_one_input_are_refused_before_the_run(llama, tmp_path, monkeypatch):
    monkeypatch.setattr("loopq.api.carry_out", lambda *a: pytest.fail("ran"))
    other = loopq.Override("*up_proj*", {"steps": "first"})
    with pytest.raises(
        CheckpointError, match=r"up_proj.weight: reads the input of .*gate_proj.weight with another"
    ):
        loopq.quantize(llama, IDS.tolist(), write="gptq", out=tmp_path / "q", overrides=(other,), **AWQ)
