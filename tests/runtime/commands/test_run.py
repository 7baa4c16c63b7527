"""`loopq run`: text on the standard output, what is said about it beside it."""

from __future__ import annotations

import io
import os

import pytest

from loopq.models import restore
from loopq.runtime.commands import run as module
from loopq.runtime.graph import RECORDERS
from tests.support.looped import save_dense

SHORT = ("--n-tokens", "12")


def test_run_prints_text_of_a_model_and_of_its_checkpoint(saved_model, quantized, command, monkeypatch):
    code, text, said = command("run", saved_model, "abc", *SHORT)
    assert code == 0
    assert text.endswith("\n")
    assert "huginn, 3 steps, 3 tokens of prompt; loopq's cache\n" in said
    assert "12 tokens; the first after " in said
    assert "tokens/s" in said
    code, dense, _ = command("run", quantized, "abc", *SHORT)
    assert code == 0
    assert command("run", quantized, "abc", *SHORT, "--dense")[:2] == (0, dense)
    asked = []
    load = restore.load_checkpoint
    monkeypatch.setattr(
        "loopq.models.restore.load_checkpoint",
        lambda *args, **options: asked.append(options["activations"]) or load(*args, **options),
    )
    assert command("run", quantized, "abc", *SHORT, "--int8")[0] == 0
    assert asked == ["int8"]
    code, text, said = command("run", quantized, "abc", *SHORT, "--kv", 8)
    assert (code, text) == (0, dense)
    assert "loopq's runner" in said


def test_a_missing_prompt_is_named(command):
    code, text, said = command("run", "huginn_small")
    assert (code, text) == (2, "")
    assert 'the prompt is missing: loopq run huginn_small "TEXT"' in said


def _again(step, undo):
    """A recorder that calls the step itself."""
    logits = step().clone()
    undo()
    return lambda: logits.copy_(step()), logits


def _fails(step, undo):
    raise RuntimeError("capturing is not permitted")


@pytest.mark.parametrize(
    ("model", "recorder", "ends"),
    [
        ("looped", _again, "the model's own cache; each step is one CUDA graph\n"),
        ("huginn_small", _again, "loopq's cache; each step is one CUDA graph\n"),
        (
            "looped",
            _fails,
            "; no graph (a recorded step cannot be used (RuntimeError: capturing is not permitted))\n",
        ),
    ],
)
def test_the_first_line_says_whether_steps_are_recorded(
    model, recorder, ends, tmp_path, command, monkeypatch
):
    if model == "looped":
        model = f"looped:{save_dense(tmp_path / 'dense')}[1:3]x2"
    plain = command("run", model, "5, 9, 7", *SHORT)
    assert "graph" not in plain[2]
    monkeypatch.setitem(RECORDERS, "cpu", recorder)
    code, text, said = command("run", model, "5, 9, 7", *SHORT)
    assert (code, text) == plain[:2]
    assert said.splitlines(keepends=True)[0].endswith(ends)


def test_run_reads_the_prompt_from_stdin_and_exits_early(saved_model, command, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("abc"))
    code, _, said = command("run", saved_model, "-", *SHORT, "--exit", "1000", "--n-steps", 4)
    assert code == 0
    assert "4 steps, 3 tokens of prompt; no cache (left early)" in said


@pytest.mark.parametrize(
    ("args", "match"),
    [
        (["{model}", "abc", "--dense"], "--dense: {model} is not a quantized checkpoint"),
        (["{model}", "abc", "--int8"], "--int8: {model} is not a quantized checkpoint"),
        (["{model}", "abc", "--int8", "--dense"], "not allowed with argument"),
        (["{model}", ""], "the prompt has no tokens"),
        (["{model}", "abc", "--kv", "4"], "only loopq's runner keeps keys and values in fewer bits"),
        (["{model}", "abc", "--top-p", "2"], "argument --top-p: must be between 1e-06 and 1"),
        (
            ["{model}", "abc", "--n-tokens", "4000"],
            "--n-tokens 4000: with the prompt's 3 tokens more than the",
        ),
    ],
)
def test_errors_are_one_line(saved_model, command, args, match):
    code, out, err = command("run", *(a.format(model=saved_model) for a in args))
    assert (code, out) == (2, "")
    assert match.format(model=saved_model) in err.splitlines()[-1]


def test_a_prompt_that_is_no_text_is_refused(saved_model, command):
    code, _, err = command("run", saved_model, os.fsdecode(b"ab\xff"))
    assert code == 2
    assert "the prompt is no text in UTF-8, from character 2 on" in err


class _Endless(io.TextIOBase):
    def read(self, size=-1):
        assert size > 0
        return "x" * size


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (
            io.TextIOWrapper(io.BytesIO(b"ab\xff"), "utf-8"),
            "the standard input is no text: byte 2 is not utf-8",
        ),
        (_Endless(), "the standard input has more than"),
    ],
)
def test_a_standard_input_without_text_or_end_is_refused(saved_model, command, monkeypatch, given, why):
    monkeypatch.setattr("sys.stdin", given)
    code, _, err = command("run", saved_model, "-", *SHORT)
    assert code == 2
    assert why in err.splitlines()[-1]


@pytest.mark.parametrize(
    "option", ["--temperature", "--top-p", "--exit", "--n-tokens", "--seed", "--n-steps"]
)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1", "1e400", "9" * 23, "x", "0", "1e-320"])
def test_extremes_of_options_end_in_text_or_one_line(saved_model, command, option, value):
    # A later option replaces the first.
    code, _, err = command("run", saved_model, "a", "--n-tokens", 1, "--temperature", 1, option, value)
    assert code in (0, 2)
    assert "Traceback" not in err
    assert len(err.splitlines()[-1]) < 300


def test_speeds_leave_out_the_prompt():
    # A prompt of 8 tokens in 2 s, then 4 tokens in 1 s.
    assert module._speed(8, [1.0, 3.0, 3.25, 3.5, 3.75, 4.0], [3, 3]) == (
        "5 tokens; the first after 2.00 s (4.0 tokens of prompt/s), then 4.00 tokens/s"
    )
    assert module._speed(8, [1.0, 3.0], []) == "1 tokens; the first after 2.00 s (4.0 tokens of prompt/s)"
    assert module._speed(8, [1.0], []) == "no tokens: the model ends the text at once"
    assert module._speed(1, [1.0, 3.0], [2, 5, 2]).endswith("; 3.00 steps a token (2 to 5)")
    assert module._speed(0, [1.0, 1.0, 1.0], [2]).endswith(
        "(0.0 tokens of prompt/s), then 1000000000.00 tokens/s"
    )
