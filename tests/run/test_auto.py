"""Metric auto: the loop metric wherever a backward pass works, for few prompts and for many."""

from __future__ import annotations

import pytest

import loopq
from loopq.quantizers.loop_metric import n_gradient_prompts
from loopq.run import auto
from loopq.terminal.progress import Silent


class Notes(Silent):
    """Keeps what a run says."""

    def __init__(self):
        self.lines = []

    def note(self, text):
        self.lines.append(text)

    def warn(self, text):
        self.lines.append(f"warning: {text}")


def kind_of(result):
    return result.settings["quantization"]["layer"]["method"]["metric"]["kind"]


def test_gradients_use_all_prompts_or_the_requested_number():
    assert [n_gradient_prompts(None, n) for n in (4, 129)] == [4, 129]
    assert [n_gradient_prompts(8, n) for n in (4, 129)] == [4, 8]


@pytest.mark.parametrize("n_prompts", [1, 10])
def test_few_prompts_do_not_change_the_method(loaded, tokens, n_prompts):
    notes = Notes()
    result = loopq.quantize(loaded, tokens.take(0, n_prompts), group_size=20, threads=1, progress=notes)
    assert kind_of(result) == "loop"
    (said,) = [line for line in notes.lines if "metric " in line]
    assert said.startswith(f"metric loop: gradients on {n_prompts} prompts")


def test_without_gradients_python_is_warned_and_a_log_told(loaded, tokens, monkeypatch):
    def fails(*args):
        raise RuntimeError("element 0 of tensors does not require grad")

    monkeypatch.setattr("loopq.gradients.backward.unroll", fails)
    few = tokens.take(0, 2)
    with pytest.warns(UserWarning, match="metric inputs, since .*element 0 of tensors"):
        assert kind_of(loopq.quantize(loaded, few, group_size=20, threads=1)) == "inputs"
    notes = Notes()
    loopq.quantize(loaded, few, group_size=20, threads=1, progress=notes)
    assert any(line.startswith("warning: metric inputs, since ") for line in notes.lines)


def test_a_layer_out_of_reach_is_named(loaded, tokens, monkeypatch):
    monkeypatch.setattr(auto, "reached", lambda *args: set())
    notes = Notes()
    loopq.quantize(loaded, tokens.take(0, 2), group_size=20, threads=1, progress=notes)
    assert any("no gradient reaches transformer." in line for line in notes.lines)
