"""The whole diagnosis: every section, what is left out and why, resuming, dumps, verdicts."""

import dataclasses
import json

import numpy as np
import pytest

from loopq.diagnose import rank, sensitivity, survey, verdict
from loopq.diagnose.config import DiagnoseConfig
from loopq.diagnose.context import Context
from loopq.diagnose.sections import SECTIONS, in_order
from loopq.errors import ConfigError, MissingExtraError
from loopq.models.from_python import wrap
from loopq.settings.execution import Execution
from loopq.terminal.progress import Silent
from tests.support.experts import routed_loop
from tests.support.looptoys import BlindSystem, LinearLoop, LinearSystem, tokens

#: Sections of the product; a room may add others.
OURS = ["ranks", "overlap", "ablation", "injection", "feedback", "groups"]
QUICK = DiagnoseConfig(
    n_prompts=2, n_ablation_prompts=2, seeds=(0, 1), group_sizes=(4, -1),
)  # fmt: skip


class Notes:
    """Progress that keeps what it is told."""

    def __init__(self):
        self.notes = []
        self.stages = {}

    def start(self, label, total, unit):
        self.stages[label] = total
        self.label, self.done = label, 0

    def advance(self, n=1):
        self.done += n

    def stop(self):
        assert self.done == self.stages[self.label], self.label

    def note(self, text):
        self.notes.append(text)


def replaced(monkeypatch, name, run):
    """Put a function in the place of what a section does."""
    monkeypatch.setitem(SECTIONS._entries, name, dataclasses.replace(SECTIONS.get(name), run=run))


@pytest.fixture(scope="module")
def whole():
    notes = Notes()
    found = survey.diagnose(
        Context(
            LinearSystem(LinearLoop(width=8)),
            tokens(n_prompts=3, n_tokens=12),
            5,
            QUICK,
            execution=Execution(threads=1, progress=notes),
        ),
        only=OURS,
        name="toy",
    )
    return found, notes


def test_a_section_that_cannot_be_had_takes_no_other_with_it(monkeypatch):
    def missing(context):
        raise MissingExtraError("this needs scipy, which is not installed")

    replaced(monkeypatch, "groups", missing)
    found = survey.diagnose(
        Context(
            LinearSystem(LinearLoop(width=8)),
            tokens(n_prompts=3, n_tokens=12),
            5,
            QUICK,
            execution=Execution(threads=1),
        ),
        only=["ranks", "groups"],
    )
    assert list(found["sections"]) == ["ranks"]
    assert found["unavailable"] == [
        {"section": "groups", "reason": "this needs scipy, which is not installed"}
    ]


def test_every_section_runs_and_the_result_is_plain_json(whole):
    found, _ = whole
    assert list(found["sections"]) == OURS
    assert [name for name in in_order() if name in OURS] == OURS
    assert found["unavailable"] == []
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["model"]["n_steps"] == 5
    assert set(found["seconds"]) == set(found["sections"])
    assert found["versions"]["numpy"] == np.__version__


def test_estimate_is_told_before_the_run(whole):
    found, notes = whole
    assert "about" in notes.notes[0]
    assert "rollouts" in notes.notes[0]
    estimate = found["estimate"]
    assert estimate["seconds"] == pytest.approx(sum(p["seconds"] for p in estimate["sections"].values()))
    # 2 prompts, 2 layers and the reference at two settings, and the inputs of gain and trace.
    assert estimate["sections"]["ablation"]["n_prompt_rollouts"] == 2 * 8
    assert estimate["hessian_bytes"] == 8 * 16 * 17 * 5 + 8 * 8 * 9 * 5
    assert {"hessians", "ranks", "ablation", "paired", "unpaired", "groups"} <= set(notes.stages)
    assert {"feedback grouped", "feedback per channel"} <= set(notes.stages)


def test_layers_carry_their_verdict(whole):
    adapter, core = whole[0]["layers"]
    assert adapter["exposed"]
    assert adapter["verdict"]["exposed"]
    assert "of 16 directions at step 0" in adapter["verdict"]["text"]
    assert "No identity path" in adapter["verdict"]["text"]
    assert "INT4 g128" in adapter["verdict"]["text"]
    assert {adapter["ablation"]["place"], core["ablation"]["place"]} == {1, 2}
    assert any("feedback-exposed" in line for line in whole[0]["summary"])


def test_ranks_equal_those_of_the_observed_rows(whole):
    system, data = LinearSystem(LinearLoop(width=8)), tokens(n_prompts=3, n_tokens=12)
    rows = []
    for batch in data.batches(8):
        e = system.embed(batch)
        s = system.initial_state(batch, e)
        import torch

        rows.append(torch.cat([s, e], -1).reshape(-1, 16).detach().numpy())
    h = np.concatenate(rows).T @ np.concatenate(rows)
    found = whole[0]["sections"]["ranks"]["layers"]["adapter.weight"]
    assert found["per_step"][0]["n_rows"] == 36
    assert found["first"]["rank"] == rank.thresholded_rank(rank.spectrum(h))
    assert found["first"]["trace"] == pytest.approx(np.trace(h), rel=1e-5)
    assert set(found["blocks"]) == {"state", "embedding"}
    # Step 0's state half is white noise: nearly every one of its 8 directions is seen.
    assert found["blocks"]["state"]["first"]["rank"] == 8


def test_systems_without_steps_say_what_is_missing_and_do_the_rest():
    found = survey.diagnose(
        Context(
            BlindSystem(LinearLoop(width=8)), tokens(n_tokens=12), 5, QUICK, execution=Execution(threads=1)
        ),
        only=OURS,
    )
    reasons = {u["section"]: u["reason"] for u in found["unavailable"]}
    assert set(reasons) == {"overlap", "feedback", "unpaired runs"}
    assert "single-step function, which the feedback intervention needs" in reasons["feedback"]
    assert set(found["sections"]) == {"ranks", "ablation", "injection", "groups"}
    assert found["layers"][0]["verdict"]["exposed"] is False


def test_parts_that_a_system_cannot_have_are_named():
    class Hidden(LinearSystem):
        output = "hidden"
        state_is_random = False

    found = survey.diagnose(
        Context(Hidden(LinearLoop(width=8)), tokens(n_tokens=12), 5, QUICK, execution=Execution(threads=1)),
        only=["ablation", "injection"],
    )
    reasons = {u["section"]: u["reason"] for u in found["unavailable"]}
    assert set(reasons) == {"agreement and KL", "unpaired runs"}
    assert "hidden states and no logits" in reasons["agreement and KL"]
    ranked = survey.diagnose(
        Context(Hidden(LinearLoop(width=8)), tokens(n_tokens=12), 5, QUICK, execution=Execution(threads=1)),
        only=["ranks"],
    )
    assert ranked["unavailable"] == []


def test_finished_sections_are_resumed(tmp_path, monkeypatch):
    system, data = LinearSystem(LinearLoop(width=8)), tokens(n_tokens=12)
    only = ["ranks", "groups"]

    def run(work=tmp_path, progress=None, config=QUICK):
        how = Execution(threads=1, work=work, progress=progress or Silent())
        return survey.diagnose(Context(system, data, 5, config, execution=how), only=only)

    def broken(context):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        replaced(patch, "groups", broken)
        with pytest.raises(KeyboardInterrupt):
            run()
    (saved,) = (p for p in tmp_path.rglob("*") if p.is_file())
    assert saved.name == "ranks.safetensors"
    stamp = saved.stat().st_mtime_ns
    notes = Notes()
    found = run(progress=notes)
    assert any("read from" in n for n in notes.notes)
    assert saved.stat().st_mtime_ns == stamp
    fresh = run(work=None)
    assert found["sections"] == fresh["sections"]
    again = Notes()
    run(progress=again, config=dataclasses.replace(QUICK, bits=3))
    assert not any("read from" in n for n in again.notes)


def test_unknown_sections_are_refused():
    with pytest.raises(ConfigError, match="known: ranks, overlap"):
        survey.diagnose(Context(LinearSystem(LinearLoop()), tokens(), 2), only=["rank"])
    with pytest.raises(ConfigError, match="n_prompts must be at least 1"):
        DiagnoseConfig(n_prompts=0)


def test_a_dump_gives_the_same_ranks_without_the_model(tmp_path):
    from loopq.calibrate.collect import Collection, collect_rows
    from loopq.calibrate.select import select

    model = LinearLoop(width=8).float()

    class Single(LinearSystem):
        def initial_state(self, batch, embedding):
            return super().initial_state(batch, embedding).float()

    system, data = Single(model), tokens(n_prompts=3, n_tokens=12)
    live = survey.diagnose(Context(system, data, 5, QUICK, execution=Execution(threads=1)), only=["ranks"])
    collect_rows(Collection(system, data, select(system, data, n_steps=5)), tmp_path / "dump")
    found = survey.diagnose_dump(tmp_path / "dump", config=QUICK, execution=Execution(threads=1))
    assert found["sections"]["ranks"] == live["sections"]["ranks"]
    assert {u["section"] for u in found["unavailable"]} == set(SECTIONS.names()) - {"ranks"}
    assert [layer["verdict"]["blind"] for layer in found["layers"]] == [
        layer["verdict"]["blind"] for layer in live["layers"]
    ]


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
    found = verdict.judge(LAYER, ranks)
    assert (found["blind"], found["dominated"]) == (blind, dominated)
    assert text in found["text"]


def test_verdict_of_unmeasured_and_exposed_layers():
    found = verdict.judge(LAYER | {"reason": "data-independent"}, None)
    assert found["blind"] is None
    assert "not measured (data-independent)" in found["text"]
    exposed = LAYER | {"exposed": True, "feedback_ratio": 1.989}
    assert "1.99 times that of one step" in verdict.judge(exposed, None)["text"]
    noise = LAYER | {"noise": {"overlap": 0.0057, "chance": 0.00606}}
    assert "state half is noise: 0.6 %" in verdict.judge(noise, None)["text"]
    assert "adds little" in verdict.judge(exposed | {"feedback_ratio": 1.01}, None)["text"]
    hidden = LAYER | {
        "ablation": {"place": 2, "of": 6, "setting": "INT4 g128", "changed": None, "output_error_last": 0.03}
    }
    assert "moves the output by 3 % (ranked 2 of 6)" in verdict.judge(hidden, None)["text"]


def test_not_finite_numbers_become_none():
    assert survey.clean({"a": np.float64("nan"), "b": (1, np.inf), "c": np.int64(3)}) == {
        "a": None,
        "b": [1, None],
        "c": 3,
    }


def test_experts_are_judged_by_the_rows_that_they_get():
    system, prompts = wrap(routed_loop(closed=(2,))).system, tokens(n_prompts=2, n_tokens=4, vocab=60)
    config = dataclasses.replace(QUICK, group_size=8)
    found = survey.diagnose(Context(system, prompts, system.n_steps, config), only=["ranks"], name="experts")
    layers = {layer["name"]: layer for layer in found["layers"]}
    closed = layers["block.experts.2.up_proj.weight"]
    assert closed["verdict"]["text"] == "Its input was not measured (no token was sent to it)."
    assert (closed["proxy"], closed["solved"], closed["verdict"]["blind"]) == (None, None, None)
    ranks = found["sections"]["ranks"]["layers"]["block.experts.0.gate_proj.weight"]
    rows = [step["n_rows"] for step in ranks["per_step"]]
    said = (
        f"An expert: {min(rows)} rows at least and {np.median(rows):g} typically at a step, fewer than it has"
    )
    assert layers["block.experts.0.up_proj.weight"]["verdict"]["text"].startswith(said)
    assert "An expert" not in layers["block.mix.weight"]["verdict"]["text"]
    weights = {name: system.model.get_parameter(name).detach().numpy() for name in layers}
    assert set(layers) - set(sensitivity.gains(system, prompts, system.n_steps, weights=weights)) == {
        f"block.experts.2.{part}.weight" for part in ("gate_proj", "up_proj", "down_proj")
    }
