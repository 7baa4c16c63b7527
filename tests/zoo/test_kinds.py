"""What only one kind of model does."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from loopq import zoo  # noqa: E402
from loopq.errors import ConfigError  # noqa: E402
from loopq.zoo.chains import CHAIN_LENGTH, QUESTION_LENGTH, chains  # noqa: E402
from loopq.zoo.coconut import CoconutConfig, Conv1D, ZooCoconut  # noqa: E402
from loopq.zoo.mamba import selective_scan  # noqa: E402

from .tiny import tiny  # noqa: E402

IDS = torch.arange(2 * 12).reshape(2, 12) * 5 % 251


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def coconut() -> ZooCoconut:
    torch.manual_seed(0)
    config = CoconutConfig(n_embd=32, n_heads=2, intermediate_size=48, block_size=32, question_length=7)
    model = ZooCoconut(config).eval()
    for p in model.parameters():
        if p.ndim < 2:
            torch.nn.init.normal_(p, 1.0 if p.min() == 1 else 0.0, 0.1)
    return model


def test_huginn_noise_is_cut_and_has_the_variance_asked_for() -> None:
    model = tiny("huginn")
    noise = model.initialize_state(torch.zeros(4, 64, 32), seed=0)
    std = math.sqrt(model.config.state_variance)
    assert noise.abs().max() <= 3 * std
    # Cutting at three standard deviations takes 2.7 % of the variance.
    assert abs(float(noise.var()) / std**2 - 0.973) < 0.05


def test_huginn_without_a_seed_follows_the_global_generator() -> None:
    model = tiny("huginn")
    with torch.no_grad():
        torch.manual_seed(1)
        a = model(IDS)
        b = model(IDS)
        torch.manual_seed(1)
        assert torch.equal(a, model(IDS))
    assert not torch.equal(a, b)


def test_ouro_exit_threshold_reads_an_earlier_loop() -> None:
    model = tiny("ouro")
    with torch.no_grad():
        one = model(IDS, num_steps=1)
        model.model["early_exit_gate"].bias.fill_(50.0)
        assert not torch.equal(model(IDS, num_steps=3), one)
        model.config.early_exit_threshold = 0.5
        torch.testing.assert_close(model(IDS, num_steps=3), one, atol=1e-6, rtol=0)


def test_ouro_exit_probabilities_sum_to_one() -> None:
    model = tiny("ouro")
    with torch.no_grad():
        p = model.exit_probabilities(model.states(IDS, 4)[1:])
    assert p.shape == (4, 2, 12)
    assert (p >= 0).all()
    torch.testing.assert_close(p.sum(0), torch.ones(2, 12))


def test_parcae_step_without_its_ids_is_refused() -> None:
    model = tiny("parcae")
    model.embed_inputs(IDS)
    with pytest.raises(ConfigError, match="embed_inputs"):
        model.iterate_one_step(torch.zeros(1, 12, 32), torch.zeros(1, 12, 32))


def test_parcae_starts_with_the_decay_of_its_paper() -> None:
    torch.manual_seed(0)
    model = zoo.model_class("loopq-zoo-parcae").from_config({"n_embd": 32, "n_heads": 2})
    state = torch.randn(2, 3, 32)
    after = model.transformer["adapter"](state, torch.zeros_like(state))
    torch.testing.assert_close(after, state * math.sqrt(0.2))


def test_loopformer_refuses_more_positions_than_it_has() -> None:
    with pytest.raises(ConfigError, match="block_size 16"):
        tiny("loopformer")(torch.zeros(1, 17, dtype=torch.int64))


def test_ponder_state_grows_by_mixtures_of_embeddings() -> None:
    model = tiny("ponder")
    with torch.no_grad():
        states = model.states(IDS, 4)
        assert len(states) == 4
        weights = model.predict_from_latents(states[1]).softmax(-1)
        table = model.gpt_neox["embed_in"].weight
    torch.testing.assert_close(states[2] - states[1], weights @ table, atol=1e-5, rtol=1e-4)


def test_nanbeige_heads_are_not_width_over_heads() -> None:
    attn = tiny("nanbeige").model["layers"][0].self_attn
    assert attn.q_proj.weight.shape == (24, 32)
    assert attn.k_proj.weight.shape == (12, 32)
    assert attn.o_proj.weight.shape == (32, 24)


def test_mamba_token_states_follow_the_recurrence() -> None:
    model = tiny("mamba")
    with torch.no_grad():
        states = model.token_states(IDS)
        shorter = model.token_states(IDS[:, :5])
    assert [s.shape for s in states] == [(2, 12, 48, 8)] * 3
    for whole, part in zip(states, shorter, strict=True):
        torch.testing.assert_close(whole[:, :5], part)


def test_mamba_identity_path_changes_the_scan_and_nothing_else() -> None:
    decay, drive = torch.rand(2, 5, 3, 2), torch.randn(2, 5, 3, 2)
    plain = torch.stack(selective_scan(decay, drive), 1)
    torch.testing.assert_close(torch.stack(selective_scan(decay - 0.25, drive, 0.25), 1), plain)
    model = tiny("mamba")
    with torch.no_grad():
        before = model(IDS)
        model.set_identity(0.5)
        assert not torch.equal(model(IDS), before)
        model.set_identity(0.0)
        assert torch.equal(model(IDS), before)


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


@torch.no_grad()
def test_coconut_passes_see_the_rows_of_the_real_one(coconut: ZooCoconut) -> None:
    hidden, logits = coconut.passes(IDS, 5)
    assert [h.shape[1] for h in hidden] == [8, 1, 1, 1, 1 + 1 + 5]
    assert [x.shape[2] for x in logits] == [259] * 5
    assert coconut(IDS, num_steps=5).shape == (2, 12, 259)
    assert [h.shape[1] for h in coconut.passes(IDS, 1)[0]] == [8 + 1 + 5]


@torch.no_grad()
def test_coconut_equals_full_runs_that_write_each_latent_in_turn(coconut: ZooCoconut) -> None:
    base, depth, q = coconut.base_causallm, 4, 7
    table = base.transformer["wte"].weight
    mark = lambda i: table[i].expand(2, 1, -1)  # noqa: E731
    text = table[IDS]
    embeds = torch.cat((text[:, :q], mark(256), torch.zeros(2, depth - 1, 32), mark(257), text[:, q:]), 1)
    for latent in range(depth - 1):
        hidden, _, _ = base(embeds, None)
        embeds[:, q + 1 + latent] = hidden[:, q + latent]
    _, logits, _ = base(embeds, None)
    expected = torch.cat((logits[:, : q - 1], logits[:, q + depth :]), 1)
    torch.testing.assert_close(coconut(IDS, num_steps=depth), expected, atol=1e-5, rtol=1e-4)


def test_coconut_calls_and_conv1d_orientation(coconut: ZooCoconut) -> None:
    calls: dict[str, int] = {}
    for name, module in coconut.named_modules():
        if isinstance(module, Conv1D | torch.nn.Linear):
            module.register_forward_hook(lambda *_, key=name: calls.update({key: calls.get(key, 0) + 1}))
    with torch.no_grad():
        coconut(IDS, num_steps=4)
    assert len(calls) == 2 * 4 + 1
    assert set(calls.values()) == {4}
    assert coconut.base_causallm.transformer["h"][0].mlp.c_fc.weight.shape == (32, 48)


def test_coconut_saves_loads_and_refuses_what_does_not_fit(coconut: ZooCoconut, tmp_path: Path) -> None:
    coconut.save(tmp_path)
    again = zoo.load(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(IDS, num_steps=3), coconut(IDS, num_steps=3))
    with pytest.raises(ConfigError, match="do not fit"):
        coconut(IDS[:, :6])
    with pytest.raises(ConfigError, match="do not fit"):
        coconut(IDS, num_steps=40)
    with pytest.raises(ConfigError, match="init_state"):
        coconut(IDS, init_state=torch.zeros(1))
