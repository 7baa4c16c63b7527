"""The update that makes a looped model of SmolLM2: its merge with a base, on a tiny one, and the file that is kept."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benches.zoo.smollm2 import (
    KEPT_RUNS,
    LOOPED_LAYERS,
    UPDATE,
    WEIGHTS,
    attach,
    digest,
    merge,
    merged,
    read_update,
    write_update,
)
from loopq.models.load import load_model
from loopq.systems.base import Batch

LOOP = [1, 3, 2]


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


def made_up(dense: Path, file: Path) -> dict[str, torch.Tensor]:
    """Write an update of random numbers for a model, as training would, and return its tensors."""
    trained = attach(load_model(f"looped:{dense}[1:3]x2", dtype="float32").model, LOOP)
    tensors = {
        name: (p.detach() + 0.1 * torch.randn(p.shape)).to(torch.float16) for name, p in trained.items()
    }
    write_update(tensors, {"base": digest(dense / WEIGHTS), "loop": json.dumps(LOOP)}, file)
    return tensors


def test_merged_weights_are_the_exact_sum_rounded_once() -> None:
    torch.manual_seed(1)
    weight = torch.randn(6, 8).to(torch.bfloat16)
    gain, up, down = (torch.randn(*shape).to(torch.float16) for shape in ((6,), (6, 5), (5, 8)))
    weights = merged(weight, gain, up, down)
    order = torch.tensor([3, 1, 4, 0, 2])
    assert torch.equal(weights, merged(weight, gain, up[:, order], down[order]))
    for i in range(6):
        for j in range(8):
            exact = Fraction(float(gain[i])) * Fraction(float(weight[i, j]))
            exact += sum(Fraction(float(up[i, k])) * Fraction(float(down[k, j])) for k in range(5))
            assert float(weights[i, j]) == float(exact)


def test_a_merged_model_is_what_was_trained(dense: Path, tmp_path: Path) -> None:
    tensors = made_up(dense, tmp_path / "update")
    merge(dense, tmp_path / "update", tmp_path / "looped")
    loaded = load_model(str(tmp_path / "looped"), dtype="float32")
    assert loaded.system.n_steps == 2
    training = load_model(f"looped:{dense}[1:3]x2", dtype="float32")
    for name, p in attach(training.model, LOOP).items():
        p.data.copy_(tensors[name])
    batch = Batch(torch.arange(24).reshape(2, 12), (0, 1), 0)
    with torch.no_grad():
        expected, logits = training.system.rollout(batch, 2), loaded.system.rollout(batch, 2)
    # The merged weights are in another basis and rounded to bfloat16, those of training are not.
    assert float((logits - expected).norm() / expected.norm()) < 0.02


def test_before_training_each_run_of_the_loop_adds_a_part(dense: Path) -> None:
    trained = attach(load_model(f"looped:{dense}[1:3]x2", dtype="float32").model, LOOP)
    assert trained["model.layers.1.mlp.down_proj.gain"].tolist()[0] == 0.5
    assert trained["model.layers.1.mlp.up_proj.gain"].tolist()[0] == 1.0
    assert trained["model.layers.3.mlp.down_proj.gain"].tolist()[0] == 1.0
    assert not any(name.startswith("model.layers.0") for name in trained)


def test_an_update_gives_the_same_file_and_refuses_another_base(dense: Path, tmp_path: Path) -> None:
    update = tmp_path / "update"
    tensors = made_up(dense, update)
    sha256 = merge(dense, update, tmp_path / "once")
    assert merge(dense, update, tmp_path / "again") == sha256 == digest(tmp_path / "again" / WEIGHTS)
    facts = {"base": digest(dense / WEIGHTS), "loop": json.dumps(LOOP)}
    write_update(tensors, {**facts, "merged": sha256}, update)
    assert merge(dense, update, tmp_path / "once") == sha256
    write_update(tensors, {**facts, "merged": "0" * 64}, update)
    with pytest.raises(ValueError, match="has the digest"):
        merge(dense, update, tmp_path / "once")
    save_file(load_file(dense / WEIGHTS), dense / WEIGHTS, metadata={"format": "other"})
    with pytest.raises(ValueError, match="is not the base"):
        merge(dense, update, tmp_path / "once")


def test_the_kept_update_is_small_and_its_card_has_its_digests() -> None:
    facts, tensors = read_update(UPDATE)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}
    assert json.loads(facts["loop"]) == [*LOOPED_LAYERS[:2], KEPT_RUNS]
    assert UPDATE.stat().st_size < 4_400_000
    card = (UPDATE.parent / "README.md").read_text(encoding="utf-8")
    assert facts["base"] in card
    assert facts["merged"] in card
    assert f"{int(facts['tokens']):,} tokens" in card
