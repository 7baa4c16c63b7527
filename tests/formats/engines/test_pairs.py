"""Every system in every format: equal logits in the engine, or a refusal."""

from __future__ import annotations

import json

import pytest

from tests.support import pairs
from tests.support.marks import running, slow_unless

CASES = [(model, form) for model in pairs.MODELS for form in pairs.FORMATS]
#: One process of one engine.
QUICK = (
    ("Dory", "compressed-tensors"),
    ("looped GPTNeoX, code", "compressed-tensors"),
    ("looped Llama", "gptq_v2"),
)


@pytest.fixture(scope="module")
def walked(request, tmp_path_factory):
    """The result of every tested pair."""
    wanted = running(request, "model", "form")
    asked = []
    for model in dict.fromkeys(model for model, _ in wanted):
        forms = tuple(form for other, form in wanted if other == model)
        asked += pairs.written(tmp_path_factory.mktemp("pair"), model, forms)
    return {(pair.model, pair.format): pair for pair in pairs.ask_all(asked)}


@pytest.mark.parametrize(("model", "form"), slow_unless(QUICK.__contains__, CASES))
def test_a_pair_gives_equal_logits_or_is_refused(walked, model, form):
    pair = walked[model, form]
    assert bool(pair.refused) != bool(pair.engines)
    for engine in (*pair.engines, *pair.named):
        if engine in pair.readings:
            reading = pair.readings[engine]
            assert reading.same or reading.skipped, reading.line()
    # A refusal that names a run is one: the forced file is read wrong.
    for engine in pair.wrong:
        if engine in pair.readings:
            reading = pair.readings[engine]
            # Where rounding sends a token to another expert, what is allowed is as large as the logits.
            wrong = not reading.same or reading.difference > 0.1
            assert wrong, f"{engine} reads {model} in {form}: the table refuses it"


def test_the_record_has_every_pair_and_no_pair_is_read_wrong():
    record = json.loads(pairs.RECORD.read_text("utf-8"))["pairs"]
    assert [(model, form) for model, forms in record.items() for form in forms] == CASES
    for model, forms in record.items():
        for form, pair in forms.items():
            assert bool(pair["refused"]) != bool(pair["engines"]), (model, form)
            for engine in pair["engines"]:
                reading = pair["readings"].get(engine)
                same = reading and reading["difference"] is not None
                assert not reading or reading["skipped"] or same, (model, form, reading)
                assert not same or reading["difference"] <= reading["allowed"], (model, form, reading)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["Dory", "looped Llama", "HRM-Text", "Inkling-2, padded head"])
def test_a_model_without_its_loop_has_other_logits(tmp_path, model):
    """Else equal logits would not show that an engine runs the loop."""
    (pair,) = pairs.written(tmp_path, model, ("compressed-tensors",))
    assert pairs.without_loop(pair) > 100
