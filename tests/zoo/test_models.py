"""The small models of published classes: what each class does by itself, beside what its adapter makes of it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from benches.zoo.chains import CHAIN_LENGTH, QUESTION_LENGTH, chains
from benches.zoo.measure import bits_per_byte, thought_movement
from benches.zoo.models import CLASSES
from benches.zoo.models import build as build_model
from benches.zoo.models.mamba import selective_scan
from benches.zoo.store import save_model
from loopq.models.load import load_model
from loopq.systems import find_system
from loopq.systems.base import Batch
from tests.support.systems import CASES, build, small
from tests.support.zoo import IDS

KINDS = sorted(name.removeprefix("loopq-zoo-") for name in CLASSES)


def rollout(model: torch.nn.Module, ids: torch.Tensor = IDS, n_steps: int | None = None) -> torch.Tensor:
    system = find_system(model)
    return system.rollout(Batch(ids, tuple(range(len(ids))), 3), n_steps or system.n_steps)


@pytest.mark.parametrize("kind", KINDS)
def test_save_then_load_is_exact(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = small(kind)().eval()
    save_model(model, tmp_path)
    loaded = load_model(tmp_path)
    assert type(loaded.model) is type(model)
    assert loaded.model.config == model.config
    assert loaded.report.missing == loaded.report.unexpected == ()
    assert loaded.tokenizer is None
    assert loaded.encode("ab") == [97, 98]
    assert torch.equal(rollout(loaded.model), rollout(model))
    save_model(model, tmp_path, torch.float16)
    for a, b in zip(model.parameters(), load_model(tmp_path).model.parameters(), strict=True):
        assert b.dtype == torch.float32
        assert torch.equal(a.half().float(), b)


@torch.no_grad()
def test_ouro_without_a_step_reads_the_gates_loop() -> None:
    model = build(CASES["Ouro, early exit"])
    loops = [model(IDS, exit_at_step=t).logits for t in range(3)]
    model.model.early_exit_gate.weight.zero_()
    for bias, chosen in ((50.0, 0), (-50.0, 2)):
        model.model.early_exit_gate.bias.fill_(bias)
        assert torch.equal(model(IDS).logits, loops[chosen])
    # Left with a third at the first loop and at the second: past a half after two.
    model.model.early_exit_gate.bias.fill_(math.log(0.5))
    assert torch.equal(model(IDS).logits, loops[1])


@torch.no_grad()
def test_parcae_without_a_pair_draws_a_depth_for_each_sequence() -> None:
    model = build(CASES["Parcae"])
    model.initialize_state = lambda embeds: torch.zeros_like(embeds)
    torch.manual_seed(0)
    drawn = model(IDS, return_logits=True)["logits"]
    fixed = [model(IDS, return_logits=True, num_steps_pair=[n, 0])["logits"] for n in range(10)]
    depths = [next(n for n, f in enumerate(fixed) if torch.allclose(f[i], drawn[i])) for i in range(3)]
    assert len(set(depths)) > 1


def test_parcae_starts_with_the_decay_of_its_paper() -> None:
    model = small("parcae")()
    state = torch.randn(2, 3, 32)
    after = model.transformer.adapter(state, torch.zeros_like(state))
    torch.testing.assert_close(after, state * math.sqrt(0.2))


@torch.no_grad()
def test_loopformer_gives_the_last_position_without_targets() -> None:
    model = build(CASES["LoopFormer"])
    last, nothing = model(IDS)
    full, loss = model(IDS, targets=IDS)
    assert nothing is None
    assert loss > 0
    torch.testing.assert_close(last, full[:, -1:])


@torch.no_grad()
@pytest.mark.parametrize("name", ["Ponder", "Mamba", "control", "Nanbeige"])
def test_forward_is_the_rollout(name: str) -> None:
    model = build(CASES[name])
    torch.testing.assert_close(model(IDS).logits, rollout(model), atol=1e-6, rtol=1e-5)


def test_nanbeige_heads_are_not_width_over_heads() -> None:
    attention = small("nanbeige", n_heads=4, head_dim=6)().model.layers[0].self_attn
    assert attention.q_proj.weight.shape == (24, 32)
    assert attention.k_proj.weight.shape == (12, 32)
    assert attention.o_proj.weight.shape == (32, 24)


def test_scan_follows_the_recurrence() -> None:
    decay, drive = torch.rand(2, 5, 3, 2), torch.randn(2, 5, 3, 2)
    states = selective_scan(decay, drive)
    assert torch.equal(states[0], drive[:, 0])
    assert torch.equal(states[3], decay[:, 3] * states[2] + drive[:, 3])


def test_chains_follow_their_own_map() -> None:
    rows = chains(20, seed=4)
    assert rows.shape == (20, CHAIN_LENGTH)
    assert np.array_equal(rows, chains(20, seed=4))
    for row in rows:
        text = bytes(row.astype(np.uint8)).decode()
        question, start, hops = text[: QUESTION_LENGTH - 2], text[QUESTION_LENGTH - 1], text[QUESTION_LENGTH:]
        follow = dict(question.split())  # type: ignore[arg-type]
        assert len(follow) == 10
        for hop in hops:
            start = follow[start]
            assert start == hop


def thinking(n_latents: int) -> torch.Tensor:
    """Seven tokens of question, start, latents, end, three tokens of answer; vocabulary 64."""
    middle = torch.tensor([[61] + [63] * n_latents + [62]]).expand(3, -1)
    return torch.cat((IDS[:, :7], middle, IDS[:, 7:10]), 1)


@torch.no_grad()
def test_coconut_equals_full_runs_that_write_each_latent_in_turn() -> None:
    model = build(CASES["COCONUT"])
    seen: list[int] = []
    base = model.base_causallm
    ids = thinking(3)
    with base.lm_head.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1])):
        got = model(ids)
    assert seen == [8, 1, 1, 1 + 1 + 3]
    embeds = model.embedding(ids)
    for position in (8, 9, 10):
        embeds[:, position] = base.transformer(inputs_embeds=embeds).last_hidden_state[:, position - 1]
    expected = base.lm_head(base.transformer(inputs_embeds=embeds).last_hidden_state)
    torch.testing.assert_close(got.logits, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(got.inputs_embeds, embeds, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_coconuts_adapter_makes_the_latents_between_the_marks() -> None:
    model = build(CASES["COCONUT"])
    whole = model(thinking(3)).logits
    got = rollout(model, thinking(0), 4)
    torch.testing.assert_close(got, torch.cat((whole[:, :8], whole[:, 11:]), 1), atol=1e-5, rtol=1e-4)


def test_thoughts_move_in_each_pass_but_the_last_two() -> None:
    torch.manual_seed(0)
    model = build_model({"model_type": "loopq-zoo-coconut", "n_embd": 32, "block_size": 64}).eval()
    moves = thought_movement(find_system(model), chains(3, 0), 5)
    assert len(moves) == 3
    assert min(moves) > 0


def test_bits_per_byte_do_not_depend_on_the_batch() -> None:
    system = find_system(build(CASES["Huginn"]))
    rows = IDS.numpy()
    a = bits_per_byte(system, rows, 3, size=3)
    assert abs(a - bits_per_byte(system, rows, 3, size=2)) < 1e-5
