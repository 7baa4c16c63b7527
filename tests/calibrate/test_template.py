"""Chat templates are code of a checkpoint: one that raises, never ends or takes all memory ends in one line."""

from __future__ import annotations

import subprocess
import time
from typing import Any

import pytest

from loopq.calibrate import template
from loopq.calibrate.template import applied
from loopq.errors import CalibrationError

transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
USER = [{"role": "user", "content": "u"}]


def _tokenizer(text: str) -> Any:
    words = tokenizers.models.WordLevel({"a": 0}, unk_token="a")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), chat_template=text, eos_token="a"
    )


def test_dialogues_keep_their_places_and_end_at_the_answer() -> None:
    tokenizer = _tokenizer(
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    asked = {"one": USER, "two": [*USER, {"role": "assistant", "content": "é\n"}]}
    assert applied(tokenizer, asked) == {"one": "u:uaa:", "two": "u:uaa:é\na"}


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (ENDLESS, "takes more than 0.5 s"),
        ("{{ 'x' * 10**10 }}", "takes more than"),
        ("{{ 'x' * 2**25 }}", "makes 33554432 characters; allowed: 16777216"),
        ("{{ raise_exception('roles') }}", "raises TemplateError: roles"),
        ("{{ ().__class__.__bases__ }}", "raises SecurityError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "raises RecursionError"),
    ],
)  # fmt: skip
def test_hostile_templates_end_in_one_line(monkeypatch: pytest.MonkeyPatch, text: str, why: str) -> None:
    monkeypatch.setattr(template, "SECONDS", 0.5 if text == ENDLESS else 10.0)
    began = time.monotonic()
    with pytest.raises(
        CalibrationError, match=r"^f\.jsonl, line 3: the chat template of the token"
    ) as refused:
        applied(_tokenizer(text), {"f.jsonl, line 3": USER})
    assert why in str(refused.value)
    assert "--set template=true" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("messages", [[1, 2], [{"role": 1, "content": None}]])
def test_messages_of_another_kind_are_refused(messages: Any) -> None:
    tokenizer = _tokenizer("{% for m in messages %}{{ m['role'] + m['content'] }}{% endfor %}")
    with pytest.raises(CalibrationError, match=r"^here: the chat template of the tokenizer raises"):
        applied(tokenizer, {"here": messages})


def test_the_first_dialogue_that_fails_is_named() -> None:
    tokenizer = _tokenizer("{% if messages[0].content == 'no' %}{{ raise_exception('x') }}{% endif %}")
    asked = {"a": USER, "b": [{"role": "user", "content": "no"}], "c": USER}
    with pytest.raises(CalibrationError, match=r"^b: "):
        applied(tokenizer, asked)


def test_a_tokenizer_that_cannot_be_sent_is_refused() -> None:
    tokenizer = _tokenizer("x")
    tokenizer.own = lambda: None
    with pytest.raises(CalibrationError, match=r"^here: giving the tokenizer to another process raises"):
        applied(tokenizer, {"here": USER})


def test_a_failed_process_is_not_said_to_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.CompletedProcess([], 1, b"", b"Traceback\nModuleNotFoundError: No module named 'x'\n")
    monkeypatch.setattr(subprocess, "run", lambda *a, **b: done)
    with pytest.raises(CalibrationError, match=r"a, line 1: .* failed \(ModuleNotFoundError"):
        template.applied(None, {"a, line 1": []})
