"""Verdicts of layers in words."""

from __future__ import annotations

import pytest

from loopq.analysis.diagnosis import verdict


def test_layers_carry_their_verdict(whole):
    adapter, core = whole[0]["layers"]
    assert adapter["exposed"]
    assert adapter["verdict"]["exposed"]
    assert "of 16 directions at step 0" in adapter["verdict"]["text"]
    assert "No identity path" in adapter["verdict"]["text"]
    assert "INT4 g128" in adapter["verdict"]["text"]
    assert {adapter["ablation"]["place"], core["ablation"]["place"]} == {1, 2}
    assert any("feedback-exposed" in line for line in whole[0]["summary"])


def ranks_of(first, late, dim=5632, share=0.3, total=None):
    steps = [{"step": t, "rank": r, "trace": 1.0, "n_rows": 9} for t, r in enumerate([first, *late])]
    return {
        "dim": dim,
        "per_step": steps,
        "first": {"rank": first},
        "all": {"rank": total or max(late, default=first)},
        "step0_trace_share": share,
    }


LAYER = {"name": "x", "role": "mlp", "exposed": False, "treatment": "gptq", "reason": ""}


OURO = ranks_of(1, [974, 1100, 1194], share=0.995, total=1)


@pytest.mark.parametrize(
    ("ranks", "blind", "dominated", "text"),
    [
        (OURO, None, True, "Its input has 1 of 5,632 directions at step 0"),
        (OURO, None, True, "99.5 % of the energy"),
        (ranks_of(43, [259, 363, 361], dim=10560), None, False, "misses part"),
        (ranks_of(65, [70, 80, 89], dim=17920), None, False, "already covers most"),
        (ranks_of(2000, [4500, 4600], dim=5280), None, False, "misses part"),
        (ranks_of(2111, [900, 800], dim=5280), None, False, "more than the 850"),
        (ranks_of(7, [], dim=10), False, False, "at one step only"),
    ],
)  # fmt: skip
def test_verdicts_in_plain_words(ranks, blind, dominated, text):
    verdicts = verdict.judge(LAYER, ranks)
    assert (verdicts["blind"], verdicts["dominated"]) == (blind, dominated)
    assert text in verdicts["text"]


def test_verdict_of_unmeasured_and_exposed_layers():
    verdicts = verdict.judge(LAYER | {"reason": "data-independent"}, None)
    assert verdicts["blind"] is None
    assert "not measured (data-independent)" in verdicts["text"]
    exposed = LAYER | {"exposed": True, "feedback_ratio": 1.989}
    assert "1.99 times that of one step" in verdict.judge(exposed, None)["text"]
    noise = LAYER | {"noise": {"overlap": 0.0057, "chance": 0.00606}}
    assert "state half is noise: 0.6 %" in verdict.judge(noise, None)["text"]
    assert "adds little" in verdict.judge(exposed | {"feedback_ratio": 1.01}, None)["text"]
    hidden = LAYER | {
        "ablation": {"place": 2, "of": 6, "setting": "INT4 g128", "changed": None, "output_error_last": 0.03}
    }
    assert "moves the output by 3 % (ranked 2 of 6)" in verdict.judge(hidden, None)["text"]


def test_a_returning_error_adds_or_cancels_by_its_cosine():
    def said(cosine, ratio=1.5):
        curve = {"ratio": {"estimate": ratio}, "returned": cosine}
        return verdict.returned({"settings": {"per channel": {"all columns": curve}}})

    (line,) = said(0.6)
    assert all(part in line for part in ("adds to", "+0.60", "1.50 times"))
    assert "cancels part of" in said(-0.2)[0]
    assert said(None) == verdict.returned({}) == []


def test_what_no_layer_was_measured_for_is_not_counted():
    layers = [LAYER | {"verdict": verdict.judge(LAYER, ranks)} for ranks in (None, None)]
    assert verdict.summary(layers) == ["0 of 2 layers feedback-exposed (no identity path)"]
    layers[0]["verdict"] = verdict.judge(LAYER, OURO)
    assert verdict.summary(layers)[0] == "1 of 2 layers dominated by step 0 in the summed Hessian: x"
