"""lm-evaluation-harness asks for likelihoods and texts; where it is not installed its two classes are stood for."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

import loopq
from loopq.models.load import encode_bytes
from loopq.systems.base import Batch


@pytest.fixture
def harness(monkeypatch):
    """`loopq.runtime.lm_eval`, over lm_eval or over what it takes from it."""
    stood_for = importlib.util.find_spec("lm_eval") is None
    if stood_for:
        names = ("lm_eval", "lm_eval.api", "lm_eval.api.model", "lm_eval.api.registry")
        modules = {name: ModuleType(name) for name in names}
        modules["lm_eval.api.model"].LM = type("LM", (), {})
        modules["lm_eval.api.registry"].register_model = lambda name: lambda cls: cls
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.delitem(sys.modules, "loopq.runtime.lm_eval", raising=False)
    yield importlib.import_module("loopq.runtime.lm_eval")
    # lm_eval takes a name once: its own registry keeps the class.
    if stood_for:
        sys.modules.pop("loopq.runtime.lm_eval", None)


def asked(*args):
    return SimpleNamespace(args=args)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("q") / "q"
    loopq.quantize("huginn_small", out=out, group_size=32, method="gptq", n_prompts=2, seq_len=32, n_steps=2)
    return str(out)


def test_likelihoods_are_those_of_the_rollout_in_any_batch(harness, folder):
    pairs = [("The sea", " was"), ("The sea ", "was calm"), ("", "It"), ("A", "b"), ("c", "d")]
    model = harness.LoopqLM(folder, n_steps=2, batch_size=4)
    scores = model.loglikelihood([asked(*pair) for pair in pairs])
    alone = harness.LoopqLM(folder, n_steps=2).loglikelihood([asked(*pair) for pair in pairs])
    assert [s for s, _ in scores] == pytest.approx([s for s, _ in alone], rel=1e-5)
    system = loopq.load(folder).system
    for (context, continuation), (score, greedy) in zip(pairs, scores, strict=True):
        ids = encode_bytes((context or "\n") + continuation)
        n = len(continuation) + len(context) - len(context.rstrip())
        batch = Batch(torch.tensor([ids[:-1]]), (0,), by_token=True)
        logits = system.rollout(batch, 2)[0].log_softmax(-1)[-n:]
        target = torch.tensor(ids[-n:])
        assert score == pytest.approx(float(logits.gather(-1, target[:, None]).sum()), rel=1e-3)
        assert greedy == bool((logits.argmax(-1) == target).all())


def test_a_text_longer_than_the_model_scores_every_token_once(harness, folder):
    model = harness.LoopqLM(folder, n_steps=2, max_length=4)
    (rolled,) = model.loglikelihood_rolling([asked("The sea was")])
    ids = [10, *encode_bytes("The sea was")]
    # Inputs of four tokens: the first four letters, the next four, then one behind three that were scored before.
    windows = [(ids[0:5], 4), (ids[4:9], 4), (ids[7:12], 3)]
    system, expected = loopq.load(folder).system, 0.0
    for window, n in windows:
        batch = Batch(torch.tensor([window[:-1]]), (0,), by_token=True)
        logits = system.rollout(batch, 2)[0].log_softmax(-1)[-n:]
        expected += float(logits.gather(-1, torch.tensor(window[-n:])[:, None]).sum())
    assert rolled == pytest.approx(expected, rel=1e-3)


def test_texts_end_at_a_stop_string_and_are_independent(harness):
    model = harness.LoopqLM("huginn_small", n_steps=4)
    ask = asked("The sea was", {"until": [" "], "max_gen_toks": 12})
    (first,) = model.generate_until([ask])
    assert " " not in first
    free = asked("The sea was", {"until": [], "max_gen_toks": 12})
    text, again, _ = model.generate_until([free, ask, ask])
    assert len(text) == 12
    assert again == first
    drawn = asked("The sea was", {"until": "zzz", "max_gen_toks": 12, "do_sample": True, "temperature": 0.9})
    assert model.generate_until([drawn])[0] != text


def test_the_entry_point_names_the_class():
    import tomllib
    from pathlib import Path

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["entry-points"]["lm_eval.models"] == {"loopq": "loopq.runtime.lm_eval:LoopqLM"}
