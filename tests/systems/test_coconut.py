"""COCONUT: latents between two marks; what every system must show."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from loopq.analysis.diagnosis import survey
from loopq.analysis.diagnosis.config import DiagnoseConfig
from loopq.analysis.diagnosis.context import Context
from loopq.analysis.diagnosis.rollouts import trace
from loopq.analysis.diagnosis.sections import overlap
from loopq.errors import ConfigError, SystemContractError
from loopq.settings.execution import Execution
from loopq.systems import coconut
from loopq.systems.base import Batch
from tests.support.looptoys import tokens
from tests.support.systems import CASES, open_system, prompts

GPT2 = CASES["transformers GPT-2 COCONUT"]


def test_each_step_appends_the_thought_of_a_cached_pass():
    system, batch = open_system(GPT2), prompts(GPT2)
    thoughts = []
    hook = system.base.transformer.register_forward_hook(
        lambda module, args, out: thoughts.append(out.last_hidden_state[:, -1:])
    )
    with hook, torch.no_grad():
        system.rollout(batch, 4)
    states = trace(system, batch, 4, read=()).states
    assert [state.shape[1] for state in states] == [0, 1, 2, 3]
    torch.testing.assert_close(states[-1], torch.cat(thoughts[:-1], 1), rtol=1e-4, atol=1e-5)


def test_states_are_measured_and_a_jacobian_needs_a_square(monkeypatch):
    compared = []
    moments = overlap.state_moments
    monkeypatch.setattr(overlap, "state_moments", lambda *args: compared.append(args[3]) or moments(*args))
    context = Context(
        open_system(GPT2),
        tokens(n_prompts=3, n_tokens=8, vocab=56),
        4,
        DiagnoseConfig(n_prompts=3, seeds=(0,)),
        execution=Execution(threads=1),
    )
    diagnosis = survey.diagnose(context, only=["overlap", "feedback", "displacement", "jacobian"])
    assert set(diagnosis["sections"]) == {"overlap", "feedback", "displacement"}
    assert [u["section"] for u in diagnosis["unavailable"]] == ["jacobian"]
    assert "no state of fixed size" in diagnosis["unavailable"][0]["reason"]
    # The first state is empty, so the first thought is compared with all.
    assert compared == [[1, 3]]
    error = diagnosis["sections"]["feedback"]["settings"]["per channel"]["all columns"]["error"]
    assert 0 < error[0] < error[-1]


def batch(*rows):
    return Batch(torch.tensor(rows), tuple(range(len(rows))))


def test_ids_without_marks_are_cut_in_the_middle():
    system = open_system(GPT2)
    question, answer, marked = system.embed(batch([1, 2, 3, 4, 5]))
    assert (question.tolist(), answer.tolist(), marked) == ([[1, 2]], [[3, 4, 5]], False)
    assert [x.shape[1] for x in system.embed(batch([1]))[:2]] == [1, 0]
    system.question_length = 4
    assert [x.shape[1] for x in system.embed(batch([1, 2, 3, 4, 5]))[:2]] == [4, 1]
    assert [x.shape[1] for x in system.embed(batch([1, 2, 3, 4]))[:2]] == [4, 0]
    with pytest.raises(ConfigError, match="the question has 4 tokens, the prompt only 3"):
        system.embed(batch([1, 2, 3]))


def test_marks_stand_once_behind_the_question_of_every_prompt():
    system = open_system(GPT2)
    start, end = system.start_id, system.end_id
    question, answer, marked = system.embed(batch([1, 2, start, end, 3], [4, 5, start, end, 6]))
    assert (question.tolist(), answer.tolist(), marked) == ([[1, 2], [4, 5]], [[3], [6]], True)
    for rows in (
        ([start, end, 1, 2],),
        ([1, start, 2, end],),
        ([1, start, end, start, end],),
        ([1, start, end, 2], [1, 2, start, end]),
        ([1, 2, 3, end],),
        ([1, end, start, 2],),
    ):
        with pytest.raises(ConfigError, match="prompts hold the start token directly before the end token"):
            system.embed(batch(*rows))
    assert system.prompt_ids([1, 2]) == [1, 2, start, end]
    assert system.prompt_ids([1, start, end]) == [1, start, end]
    (line,) = system.describe_loop()
    assert f"tokens {start} (start) and {end} (end)" in line


def test_logits_stand_beside_the_ids_with_and_without_marks():
    system = open_system(GPT2)
    start, end = system.start_id, system.end_id
    with torch.no_grad():
        marked = system.rollout(batch([1, 2, start, end, 3, 4]), 3)
        system.question_length = 2
        plain = system.rollout(batch([1, 2, 3, 4]), 3)
    assert (marked.shape[1], plain.shape[1]) == (6, 4)
    # Logits of the question's last token, and of the start mark, come before latents; the end mark predicts the answer.
    torch.testing.assert_close(plain[:, :1], marked[:, :1])
    torch.testing.assert_close(plain[:, 1:], marked[:, 3:])


def test_an_answer_is_continued_from_the_cache():
    system = open_system(GPT2)
    start, end = system.start_id, system.end_id
    ids = [1, 2, start, end, 3, 4, 5]
    with torch.no_grad():
        whole = system.rollout(batch(ids), 3)
        first, cache = system.extend(batch(ids[:5]), 3, 0, None)
        rest, _ = system.extend(batch(ids), 3, 5, cache)
    torch.testing.assert_close(first, whole[:, :5], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(rest, whole[:, 5:], rtol=1e-4, atol=1e-5)


def test_steps_give_the_logits_of_the_rollout():
    system = open_system(GPT2)
    data = batch([1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1])
    with torch.no_grad():
        embedding = system.embed(data)
        state = system.initial_state(data, embedding)
        width = system.base.transformer.wte.weight.shape[1]
        assert state.shape == (2, 0, width)
        assert system.n_updates(4) == 3
        for t in range(3):
            state = system.step(state, embedding, t, 4)
        assert state.shape == (2, 3, width)
        logits = system.predict(state, embedding)
        torch.testing.assert_close(logits, system.rollout(data, 4), rtol=1e-4, atol=1e-5)


def test_positions_hold_question_latents_and_marks():
    system = open_system(GPT2)
    n = system.base.transformer.wpe.weight.shape[0]
    system.question_length = 1
    # Two marks and two latents.
    ids = [1] * (n - 4)
    assert system.rollout(batch(ids), 3).shape[1] == n - 4
    with pytest.raises(
        ConfigError, match=rf"{n - 3} tokens, 2 latents and two marks do not fit in {n} positions"
    ):
        system.rollout(batch([*ids, 1]), 3)
    assert system.n_steps == 5


def test_the_wrapper_has_the_names_of_the_published_files():
    size = {"vocab_size": 20, "n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2}
    model = coconut.build_coconut(size)
    assert (model.start_latent_id, model.end_latent_id, model.latent_token_id) == (17, 18, 19)
    assert model.embedding is model.base_causallm.transformer.wte
    assert not model.training
    ids = {"start_latent_id": 3, "end_latent_id": 4, "latent_token_id": 5}
    other = coconut.build_coconut(size | ids)
    assert (other.start_latent_id, other.end_latent_id, other.latent_token_id) == (3, 4, 5)
    with pytest.raises(SystemContractError, match="Linear is no GPT-2"):
        coconut.wrap_gpt2(nn.Linear(2, 2), 1, 2, 3)
    stored = {
        "transformer.wte": 1,
        "base_causallm.a": 2,
        "embedding.b": 3,
        "h.0.attn.bias": 4,
        "h.0.attn.masked_bias": 5,
    }
    assert coconut._published_names(stored) == {
        "base_causallm.transformer.wte": 1,
        "base_causallm.a": 2,
        "embedding.b": 3,
    }


def test_four_products_of_a_block_are_shared():
    system = open_system(GPT2)
    n_blocks = len(system.base.transformer.h)
    shared = system.shared_parameters(4)
    names = [p.name for p in shared if "lm_head" not in p.name]
    assert len(names) == 4 * n_blocks
    assert {p.invocations for p in shared if p.name in names} == {4}
    tied = system.base.lm_head.weight is system.base.transformer.wte.weight
    assert ("base_causallm.lm_head.weight" in system.left_out()) == tied
    assert ("base_causallm.lm_head.weight" not in [p.name for p in shared]) == tied
