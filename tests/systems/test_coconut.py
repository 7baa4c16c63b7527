"""COCONUT: latents between two marks; what every system must show."""

from __future__ import annotations

import torch

from loopq.diagnosis import survey
from loopq.diagnosis.config import DiagnoseConfig
from loopq.diagnosis.context import Context
from loopq.diagnosis.rollouts import trace
from loopq.diagnosis.sections import overlap
from loopq.settings.execution import Execution
from tests.support.conformance import SteppingConformance
from tests.support.looptoys import tokens
from tests.support.systems import CASES, open_system, prompts

GPT2 = CASES["transformers GPT-2 COCONUT"]


class TestCoconut(SteppingConformance):
    system = "coconut"


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
    found = survey.diagnose(context, only=["overlap", "feedback", "displacement", "jacobian"])
    assert set(found["sections"]) == {"overlap", "feedback", "displacement"}
    assert [u["section"] for u in found["unavailable"]] == ["jacobian"]
    assert "no state of fixed size" in found["unavailable"][0]["reason"]
    # The first state is empty, so the first thought is compared with all.
    assert compared == [[1, 3]]
    error = found["sections"]["feedback"]["settings"]["per channel"]["all columns"]["error"]
    assert 0 < error[0] < error[-1]
