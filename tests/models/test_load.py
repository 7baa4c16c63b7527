"""Loading: what is refused, what is reported, what is set right."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import loopq
from loopq.errors import CheckpointError, ConfigError, SystemContractError
from loopq.models.check import check_model
from loopq.models.load import load_model
from loopq.systems.base import Batch
from loopq.systems.coconut import wrap_gpt2
from tests.support.looped import save_dense
from tests.support.remote import _saved
from tests.support.systems import CASES, build, prompts
from tests.support.vendors import tokens


@pytest.mark.parametrize(
    "name", ["transformers HRM-Text", "transformers ALBERT, head", "transformers Zamba2"]
)
@pytest.mark.filterwarnings("ignore:.*(mamba_ssm|causal_conv1d|fast path|kernels).*")
def test_folder_gives_the_model_that_was_saved(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    folder = _saved(name, tmp_path)
    loaded = load_model(folder)
    assert loaded.system.name == case.system
    assert loaded.report.missing == loaded.report.unexpected == loaded.report.repaired == ()
    assert loaded.report.dtype == "float32"
    expected = build(case)
    n_steps = case.depths[0]
    got = loaded.system.rollout(prompts(case), n_steps)
    torch.testing.assert_close(got, type(loaded.system)(expected).rollout(prompts(case), n_steps))
    assert "config.json" in loaded.side_files
    assert not any(name.endswith(".safetensors") for name in loaded.side_files)
    with pytest.raises(ConfigError, match=r"no tokenizer"):
        loaded.encode("text")


@pytest.mark.filterwarnings("ignore:.*(mamba_ssm|causal_conv1d|fast path|kernels).*")
def test_tied_weights_stay_tied_and_are_reported(tmp_path: Path) -> None:
    loaded = load_model(_saved("transformers Zamba2", tmp_path))
    shared = loaded.system.shared_parameters(loaded.system.n_steps)
    assert all(len(p.owners) == 2 for p in shared)
    names = [group[0] for group in loaded.report.tied]
    assert {p.name for p in shared} <= set(names)


def test_dtype_is_cast_and_reported(tmp_path: Path) -> None:
    folder = _saved("transformers HRM-Text", tmp_path)
    assert load_model(folder, dtype="bfloat16").report.dtype == "bfloat16"
    with pytest.raises(ConfigError, match=r"float32, bfloat16, float16; got 'int4'"):
        load_model(folder, dtype="int4")


def test_parameters_that_a_rollout_needs_must_be_there(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = _saved("transformers HRM-Text", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    gone = next(name for name in tensors if name.endswith("down_proj.weight"))
    tensors["stray.weight"] = tensors.pop(gone)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"lacks .*{gone.split('.layers')[0]}.*random numbers"):
        load_model(folder)


def test_codes_are_not_taken_for_a_model_in_full_precision(tmp_path: Path) -> None:
    folder = _saved("transformers HRM-Text", tmp_path)
    loopq.quantize(folder, [[1, 2, 3]], out=tmp_path / "q", method="rtn")
    with pytest.raises(
        CheckpointError, match=r"q: holds codes, not weights .* name the model that it was made from"
    ):
        load_model(tmp_path / "q")


def test_unexpected_tensors_are_reported(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = _saved("transformers HRM-Text", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {**tensors, "stray.weight": torch.ones(2)}, folder / "model.safetensors", metadata={"format": "pt"}
    )
    report = load_model(folder).report
    assert report.unexpected == ("stray.weight",)
    assert "in the checkpoint but not in the model: stray.weight" in report.lines()


def test_names_that_are_nothing(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"neither a folder .* nor a hub id .* nor an embedded model: huginn_small"
    ):
        load_model("no such model")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"no config\.json in it"):
        load_model(tmp_path / "empty")
    (tmp_path / "empty" / "config.json").write_text('{"model_type": "nothing_known"}')
    (tmp_path / "empty" / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"'nothing_known' is not known to transformers"):
        load_model(tmp_path / "empty")
    (tmp_path / "empty" / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"allowed: an object"):
        load_model(tmp_path / "empty")


def test_wrong_system_is_refused(tmp_path: Path) -> None:
    folder = _saved("transformers HRM-Text", tmp_path)
    assert load_model(folder, system="hrm_text").system.name == "hrm_text"
    assert load_model(folder, system="generic").system.n_steps == 6
    with pytest.raises(SystemContractError, match=r"'ouro' does not fit HrmTextForCausalLM"):
        load_model(folder, system="ouro")


def test_coconut_state_dict(tmp_path: Path) -> None:
    """The published file is a pickled state dict of the wrapper; a converted one is taken without asking."""
    from safetensors.torch import save_file

    model = build(CASES["transformers GPT-2 COCONUT"])
    (tmp_path / "config.json").write_text(json.dumps(model.config.to_dict()))
    state = {k: v.clone() for k, v in model.state_dict().items()}
    assert "embedding.weight" in state
    torch.save(state, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pickles"):
        load_model(tmp_path, system="coconut")
    expected = type(CASES)({})
    case = CASES["transformers GPT-2 COCONUT"]
    pickled = load_model(tmp_path, system="coconut", allow_pickle=True)
    save_file(state, tmp_path / "model.safetensors")
    safe = load_model(tmp_path, system="coconut")
    assert (safe.system.start_id, safe.system.end_id) == (61, 62)
    assert safe.report.missing == safe.report.unexpected == expected.get("", ())
    again = wrap_gpt2(model.base_causallm, start_id=61, end_id=62, latent_id=63)
    outputs = [s.rollout(prompts(case), 3) for s in (pickled.system, safe.system, type(safe.system)(again))]
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
    del state["base_causallm.transformer.h.0.mlp.c_fc.weight"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks .*c_fc"):
        load_model(tmp_path, system="coconut")


@pytest.mark.data
def test_plbert_runs_its_twelve_steps(data_folder: Path, tmp_path: Path) -> None:
    """PL-BERT: a real looped checkpoint (one ALBERT layer, twelve times) with phonemes for tokens."""
    source = data_folder / "models" / "plbert_kokoro"
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(
        lzma.decompress((source / "model.safetensors.xz").read_bytes())
    )
    loaded = load_model(tmp_path)
    system = loaded.system
    assert (system.name, system.output, system.n_steps) == ("albert", "hidden", 12)
    assert len(system.shared_parameters(12)) == 6
    assert loaded.report.missing == ("pooler.bias", "pooler.weight")
    lines = lzma.decompress((source / "wikitext2_valid_phonemes.jsonl.xz").read_bytes()).splitlines()[:4]
    ids = torch.tensor([json.loads(line)["ids"][:64] for line in lines])
    batch = Batch(ids, (0, 1, 2, 3))
    hidden = system.rollout(batch, 12)
    assert hidden.shape == (4, 64, 768)
    with torch.no_grad():
        state = system.initial_state(batch, system.embed(batch))
        moved = []
        for t in range(12):
            after = system.step(state, None, t, 12)
            moved.append(float((after - state).norm() / state.norm()))
            state = after
    torch.testing.assert_close(state, hidden, rtol=1e-4, atol=1e-4)
    # It uses its loop: every step still moves the state.
    assert min(moved) > 0.05
    report = check_model(loaded)
    assert report.ok, "\n".join(report.lines())


def test_a_decoder_without_a_loop_is_told_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(SystemContractError, match=r"looped:MODEL\[FIRST:LAST\]xTIMES"):
        load_model(save_dense(tmp_path / "m"))


@pytest.mark.parametrize("stated", [None, "float32", "bfloat16"])
def test_a_result_computes_in_the_type_of_its_source(tmp_path: Path, stated: str | None) -> None:
    folder = save_dense(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    save_file({n: t.bfloat16() for n, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config.pop("dtype", None)
    (folder / "config.json").write_text(json.dumps(config | ({"dtype": stated} if stated else {})))
    source = f"looped:{folder}[1:3]x2"
    result = loopq.quantize(source, tokens(2), group_size=16, method="rtn")
    assert loopq.load(result).report.dtype == (stated or "bfloat16")
    written = json.loads(result.side_files["config.json"])
    assert written["dtype"] == (stated or "bfloat16")


def test_what_goes_on_has_rotary_settings_for_both_versions_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    if transformers.__version__.startswith("4."):
        pytest.skip("version 4 writes its own form alone")
    from transformers import LlamaConfig, LlamaForCausalLM

    rope = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
        rope_parameters=rope,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "m")
    result = loopq.quantize(
        f"looped:{tmp_path / 'm'}[1:2]x2",
        [[3, 4, 5, 6]] * 2,
        method="rtn",
        group_size=32,
        levels="even",
        threads=1,
    )
    loopq.export(result, tmp_path / "ct", "compressed-tensors", remote_code=True, verify=False)
    for data in (result.side_files["config.json"], (tmp_path / "ct" / "config.json").read_bytes()):
        written = json.loads(data)
        assert written["rope_parameters"] == rope
        assert (written["rope_theta"], written["rope_scaling"]) == (
            500.0,
            {"rope_type": "linear", "factor": 2.0},
        )
