"""Experts as modules of their own: names of the files, logits of the model, gates left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

import loopq
from loopq.formats.convert import read_any
from loopq.models.discovery import discover
from loopq.models.experts import Experts, unfuse
from loopq.models.files import find_names
from loopq.models.from_python import wrap
from loopq.models.load import load_model
from loopq.models.systems.generic import Generic
from loopq.storage.model_files import stored_state
from loopq.systems.base import Batch
from loopq.systems.routing import stacked_experts
from tests.support.experts import N_STEPS, RoutingBlock, routed_loop
from tests.support.marks import slow_unless

_SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_experts": 8,
    "shared_expert_intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_local_experts": 8, "num_experts_per_tok": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
fused = pytest.mark.skipif(
    transformers.__version__.startswith("4."), reason="experts are modules in transformers 4"
)


def _made(kind: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**_SIZES)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def _ids(n: int = 16) -> torch.Tensor:
    return torch.randint(4, 60, (2, n), generator=torch.Generator().manual_seed(0))


@fused
@pytest.mark.parametrize("kind", ["Olmoe", "Mixtral", "Qwen2Moe", "Qwen3Moe"])
def test_names_are_those_of_the_files_and_logits_are_equal(kind: str, tmp_path: Path) -> None:
    model = _made(kind)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    with torch.no_grad():
        before = model(_ids(), use_cache=False).logits
        assert unfuse(model) == ["experts of 2 blocks: linear layers"]
        after = model(_ids(), use_cache=False).logits
    torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-6)
    find_names(model, stored)
    state = stored_state(model)
    assert set(state) == set(stored)
    assert all(torch.equal(state[name], tensor) for name, tensor in stored.items())
    assert unfuse(model) == []


@pytest.mark.parametrize(
    ("kind", "n_gates"), [("Olmoe", 1), ("Mixtral", 1), ("Qwen2Moe", 2), ("Qwen3Moe", 1)]
)
def test_each_experts_matrices_are_declared_and_gates_are_left(
    kind: str, n_gates: int, tmp_path: Path
) -> None:
    _made(kind).save_pretrained(tmp_path)
    system = load_model(f"looped:{tmp_path}[1:2]x3").system
    shared = system.shared_parameters(3)
    experts = [p for p in shared if p.routed_in]
    assert len(experts) == 2 * 8 * 3
    assert {(p.role, p.invocations, p.routed_in.split(".")[2]) for p in experts} == {
        ("expert", 1, "0"), ("expert", 3, "1")
    }  # fmt: skip
    block = experts[0].routed_in
    assert experts[0].owners[0].startswith(f"{block}.experts.0.")
    stored = set(load_file(tmp_path / "model.safetensors"))
    assert {p.name for p in experts} <= stored
    gate = {name: reason for name, reason in system.left_out().items() if "chooses or weighs" in reason}
    assert len(gate) == 2 * n_gates
    assert f"{block}.gate.weight" in gate
    assert not set(gate) & {p.name for p in shared}
    shared_experts = [p for p in shared if "shared_expert" in p.name]
    assert all(not p.routed_in for p in shared_experts)
    assert bool(shared_experts) == (kind == "Qwen2Moe")


@fused
@pytest.mark.parametrize(
    ("kind", "place", "first"),
    [("GptOss", "mlp", "gate_proj"), ("GraniteMoe", "block_sparse_moe", "w1")],
)
def test_stacks_of_other_layouts_are_split_and_loaded_again(
    kind: str, place: str, first: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    settings = _SIZES | ({"head_dim": 8} if kind == "GptOss" else {})
    model = getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(**settings)
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "experts" in name:
                parameter.normal_(std=0.3)
        before = model(_ids(), use_cache=False).logits
    model.save_pretrained(tmp_path / "dense")
    loaded = load_model(f"looped:{tmp_path / 'dense'}[0:2]x1")
    after = loaded.system.rollout(Batch(_ids(), (0, 1)), 1)
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)
    experts = [p.name for p in loaded.system.shared_parameters(1) if p.routed_in]
    assert len(experts) == 2 * 8 * 3
    assert experts[0] == f"model.layers.0.{place}.experts.0.{first}.weight"
    result = loopq.quantize(
        loaded, _ids().numpy(), group_size=16, method="rtn", exclude=("*experts.3.*",), out=tmp_path / "coded"
    )
    assert sum(".experts." in name for name in result.layers) == 2 * 7 * 3
    codes = loopq.load(tmp_path / "coded", quantized=True).system.rollout(Batch(_ids(), (0, 1)), 1)
    again = loopq.load(tmp_path / "coded").system.rollout(Batch(_ids(), (0, 1)), 1)
    torch.testing.assert_close(codes, again, rtol=1e-4, atol=1e-5)
    assert (again - before).norm() < 0.5 * before.norm()


@fused
def test_experts_in_an_unknown_layout_are_named_with_the_reason() -> None:
    block = nn.Module()
    block.experts = nn.Module()
    block.experts.gate_up_proj = nn.Parameter(torch.zeros(4, 8, 16))
    assert unfuse(block) == []
    assert "three dimensions" in stacked_experts(block)["experts.gate_up_proj"]


@fused
def test_a_model_given_as_a_module_is_not_changed() -> None:
    model = _made("Olmoe")
    model.config.looped_layers = [0, 1, 2]
    system = wrap(model).system
    assert "model.layers.0.mlp.experts.gate_up_proj" in system.left_out()
    assert not any(p.routed_in for p in system.shared_parameters(2))
    assert not any(isinstance(m, Experts) for m in model.modules())


def test_one_run_finds_all_experts_even_uncalled_ones() -> None:
    model = routed_loop(closed=(2,))
    system = Generic(model)
    shared = {p.name: p for p in system.shared_parameters(N_STEPS)}
    assert {p.routed_in for n, p in shared.items() if ".experts." in n} == {"block"}
    assert len(shared) == 4 * 3 + 1
    assert all(p.invocations == N_STEPS for p in shared.values())
    assert (shared["block.experts.2.up_proj.weight"].role, shared["block.mix.weight"].role) == (
        "expert",
        "looped",
    )
    assert system.left_out() == {"block.gate.weight": "a gate, which chooses or weighs experts"}
    lines = discover(model, Batch(_ids(), (0, 1))).lines()
    assert "block.experts.2.up_proj.weight: an expert of block, 3 steps, rows 0 each" in lines


class _Alone(RoutingBlock):
    """The loop runs inside the module that holds the experts."""

    def __init__(self) -> None:
        super().__init__((), False)
        self.embed = nn.Embedding(64, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for _ in range(3):
            x = RoutingBlock.forward(self, x)
        return x


def test_experts_without_separable_steps_are_left_out_and_named() -> None:
    torch.manual_seed(0)
    system = Generic(_Alone())
    assert [p.name for p in system.shared_parameters(3)] == ["mix.weight"]
    left = system.left_out()
    assert "its steps cannot be told apart" in left["experts.0.up_proj.weight"]
    assert "chooses or weighs" in left["gate.weight"]


class _Layers(nn.Module):
    """A list of layers that all get every token, each step another one as well."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.own = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x + self.own[step](x)


class _Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.core = nn.Embedding(64, 16), _Layers()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for step in range(3):
            x = self.core(x, step)
        return x


def test_lists_whose_members_get_every_token_are_no_experts() -> None:
    torch.manual_seed(0)
    shared = Generic(_Plain()).shared_parameters(3)
    assert [(p.name, p.invocations, p.routed_in) for p in shared] == [
        ("core.layers.0.weight", 3, ""), ("core.layers.1.weight", 3, "")
    ]  # fmt: skip


@pytest.mark.parametrize("kind", slow_unless(lambda kind: kind == "Mixtral", ["Olmoe", "Mixtral"]))
def test_a_checkpoint_reopens_and_exports_under_the_files_names(kind: str, tmp_path: Path) -> None:
    _made(kind).save_pretrained(tmp_path / "model")
    spec = f"looped:{tmp_path / 'model'}[0:1]x2"
    ids = [row.tolist() for row in _ids()]
    loopq.quantize(spec, ids, out=tmp_path / "q", group_size=16, preset="fast", seq_len=16)
    opened = loopq.load(tmp_path / "q")
    filled = loopq.load(tmp_path / "q", load_model(spec))
    batch = Batch(_ids(), (0, 1))
    expected = filled.system.rollout(batch, 2)
    assert torch.equal(opened.system.rollout(batch, 2), expected)
    packed = loopq.load(tmp_path / "q", quantized=True).system.rollout(batch, 2)
    torch.testing.assert_close(packed, expected, rtol=1e-4, atol=1e-4)
    for form in ("compressed-tensors", "gptq"):
        loopq.export(tmp_path / "q", tmp_path / form, form, force=True)
        assert read_any(tmp_path / form).layers.keys() == read_any(tmp_path / "q").layers.keys()
    # All matrices of the files, with their names: what is quantized has a scale beside its codes.
    names = set(load_file(tmp_path / "model" / "model.safetensors"))
    packed_names = set(load_file(tmp_path / "compressed-tensors" / "model.safetensors"))
    assert {
        n.replace("weight_packed", "weight") for n in packed_names if "weight_" not in n or "packed" in n
    } == names
    assert len([n for n in packed_names if ".experts.7." in n and n.endswith("weight_packed")]) == 2 * 3
