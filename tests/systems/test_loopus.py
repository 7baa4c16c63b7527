"""LoopUS: the gate, the loop, the folder that is published."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import loopq
from loopq.errors import ConfigError
from loopq.models.load import load_model
from loopq.systems.base import Batch
from loopq.systems.loopus import build_loopus
from tests.support.systems import CASES, build, loopus_config, open_system, prompts

pytest.importorskip("transformers")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As the published code saves a model: configuration and tensors, no tokenizer."""
    place = tmp_path / "model"
    place.mkdir()
    (place / "config.json").write_text(json.dumps(loopus_config()))
    save_file(build(CASES["LoopUS"]).state_dict(), place / "model.safetensors", {"format": "pt"})
    return place


def test_a_step_is_what_the_gate_lets_through() -> None:
    system = open_system(CASES["LoopUS"])
    gate = system.model.reasoning.gate
    state = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        # A gate that is wide open keeps the layers' result, a closed one the state before.
        gate.delta_proj.weight.zero_()
        gate.delta_proj.bias.fill_(-40.0)
        whole = system.step(state, None, 0, 3)
        gate.delta_proj.bias.fill_(40.0)
        gate.A_log.fill_(3.0)
        assert torch.equal(system.step(state, None, 0, 3), state)
        # softplus(b) exp(A_log) = ln 2 keeps half of each.
        gate.delta_proj.bias.fill_(0.0)
        gate.A_log.fill_(0.0)
        torch.testing.assert_close(system.step(state, None, 0, 3), (whole + state) / 2)
    assert not torch.allclose(whole, state)


def test_no_token_reads_a_later_one_whatever_the_attention() -> None:
    by_kind = {}
    for kind in ("sdpa", "eager"):
        system = open_system(CASES["LoopUS"])
        for part in (system.model.encoder, system.model.reasoning, system.model.decoder):
            for layer in part.layers:
                layer.self_attn.config._attn_implementation = kind
        batch = prompts(CASES["LoopUS"])
        by_kind[kind] = system.rollout(batch, 3)
        ids = batch.input_ids.clone()
        ids[:, -1] = 5
        other = system.rollout(Batch(ids, batch.prompts), 3)
        assert torch.equal(other[:, :-1], by_kind[kind][:, :-1])
        assert not torch.equal(other[:, -1], by_kind[kind][:, -1])
    torch.testing.assert_close(by_kind["eager"], by_kind["sdpa"])


def test_a_published_folder_is_opened_quantized_and_opened_again(folder: Path, tmp_path: Path) -> None:
    opened = load_model(folder)
    assert (opened.system.name, opened.system.n_steps) == ("loopus", 3)
    batch = prompts(CASES["LoopUS"])
    expected = open_system(CASES["LoopUS"]).rollout(batch, 3)
    assert torch.equal(opened.system.rollout(batch, 3), expected)
    loopq.quantize(
        folder, batch.input_ids.tolist(), out=tmp_path / "q", group_size=16, preset="fast", seq_len=10
    )
    again = loopq.load(tmp_path / "q")
    assert again.system.name == "loopus"
    calls = {p.name.split(".")[0]: p.invocations for p in again.system.shared_parameters(3)}
    assert calls == {"encoder": 1, "reasoning": 3, "decoder": 1}


def test_names_of_early_checkpoints_are_taken(folder: Path) -> None:
    tensors = build(CASES["LoopUS"]).state_dict()
    old = {name.replace("reasoning.layers.0", "plateau.module.layers.0"): t for name, t in tensors.items()}
    save_file(old, folder / "model.safetensors", {"format": "pt"})
    batch = prompts(CASES["LoopUS"])
    assert torch.equal(
        load_model(folder).system.rollout(batch, 3), open_system(CASES["LoopUS"]).rollout(batch, 3)
    )


def test_the_exit_head_says_when_to_leave() -> None:
    system = open_system(CASES["LoopUS"])
    with torch.no_grad():
        system.model.q_head[1].weight.zero_()
        system.model.q_head[1].bias.fill_(0.0)
        rule = system.exit_rule()
        assert rule(torch.randn(32), torch.randn(64), 0.5)
        assert not rule(torch.randn(32), torch.randn(64), 0.51)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"decoder_layer_indices": [2, 3]}, r"do not divide the 4 layers"),
        ({"decoder_layer_indices": []}, r"do not divide the 4 layers"),
        ({"N": None}, r"no N"),
    ],
)
def test_a_configuration_that_describes_no_model_is_refused(change: dict[str, object], said: str) -> None:
    config = {k: v for k, v in {**loopus_config(), **change}.items() if v is not None}
    with pytest.raises(ConfigError, match=said):
        build_loopus(config)
