"""The comparison with other tools: what its tables make of records, and its measure of memory."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from torch import nn

from benches import gguf, pages
from benches.pages import json_lines
from benches.quality import calls, peer, peers_table, real
from benches.quality.peak import Peak
from benches.quality.subjects import prepare
from loopq.errors import ConfigError, LoopqError
from loopq.paper.models import Sizes

OURS = ["loopq best", peers_table.SEARCHED]


def row(model, variant, kl, **more):
    given = {"draw": 0, "bits": 3, "group": 32, "seconds": 1.0, "memory_mib": 2.0, "kl_95": None, "cpu": "A"}
    return given | {"model": model, "variant": variant, "kl": kl, "agreement": 1.0} | more


RECORDS = [
    *(row(m, "llm-compressor", 1.0) for m in ("a", "b", "a+spike")),
    row("a", "llm-compressor, mse", 0.5),
    # More bits, and so no tool to be measured against.
    row("a", "HQQ", 0.01),
    row("a", peers_table.SEARCHED, 1.0),
    row("a", "loopq best", 0.1),
    row("b", "loopq best", 0.8),
    row("a+spike", "loopq best", 0.01),
]


def test_ratios_are_to_the_best_other_tool_at_equal_bits():
    kl = peers_table.by_draw(RECORDS)
    best = peers_table.best_other(kl, OURS)
    assert best == {("a", 0): 0.5, ("b", 0): 1.0, ("a+spike", 0): 1.0}
    ratio = peers_table.Ratio.of(kl, "loopq best", {(m, 0): best[m, 0] for m in "ab"})
    assert ratio.mean == pytest.approx((0.2 * 0.8) ** 0.5)
    assert ratio.worst == "0.80, b"


def test_ratios_are_taken_draw_by_draw_where_both_are_known():
    other = [row("a", "llm-compressor", kl, draw=draw) for draw, kl in enumerate((1.0, 4.0, 100.0))]
    mine = [row("a", "loopq best", kl, draw=draw) for draw, kl in enumerate((0.5, 0.5))]
    kl = peers_table.by_draw([*other, *mine])
    ratio = peers_table.Ratio.of(kl, "loopq best", peers_table.best_other(kl, OURS))
    assert ratio.by_model == {"a": pytest.approx((0.5 * 0.125) ** 0.5)}


def test_ratios_of_what_changes_no_answer_are_left_out():
    other = [row(m, "llm-compressor", kl) for m, kl in (("a", 1.0), ("certain", 1.0), ("b", 1e-7))]
    mine = [row(m, "loopq best", kl) for m, kl in (("a", 0.5), ("certain", 1e-6), ("b", 1e-3))]
    kl = peers_table.by_draw([*other, *mine])
    assert peers_table.Ratio.of(kl, "loopq best", peers_table.best_other(kl, OURS)).by_model == {"a": 0.5}


def test_planted_models_are_apart_and_bars_ignore_them():
    page = peers_table.page(RECORDS, OURS)
    summary, _, planted, *_ = page.split("\n\n")
    assert "| loopq best | 0.40 (0.80, b) | 1.0 | 2 |" in summary
    assert "| llm-compressor, mse | 1.00 of 1 (1.00, a) |" in summary
    assert "| loopq best | 0.01 (0.01, a+spike) |" in planted
    report = peers_table.report(RECORDS, {}, [], OURS)
    assert "| 0.400, bar 0.40 reached; 1 of 2 models |" in report
    assert (
        "| loopq best over GPTQ, trajectory, searched scales |  |  | 0.100, bar 0.30 reached; 1 of 1 models |"
        in report
    )


def test_the_record_names_what_was_refused():
    about = {"draw": 0, "bits": 3, "group": 32, "cpu": "B"}
    refused = {"model": "c", "variant": "auto-round", "refused": "no", **about}
    text = peers_table.report([*RECORDS, refused], {}, ["hqq"], OURS)
    assert "\nA, B; settings" in text
    assert "* auto-round, c, INT3 g32: no" in text
    assert "## INT3 g32, planted models" in text


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_is_what_was_taken_and_freed():
    peak = Peak()
    np.ones(2**25 // 8)
    assert 24 < peak.mib() < 64
    peak.restart()
    assert peak.mib() < 8


def test_a_page_without_marks_is_an_error(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("a <!-- t: begin -->\nold\n<!-- t: end --> z", "utf-8")
    pages.into(page, "t", "new")
    assert page.read_text("utf-8") == "a <!-- t: begin -->\nnew\n<!-- t: end --> z"
    assert pages.within(page, "t") == "new"
    with pytest.raises(ValueError, match="no <!-- u: begin -->"):
        pages.into(page, "u", "new")


def test_what_cannot_be_planted_is_named():
    with pytest.raises(ConfigError, match=r"huginn_small\+spikes: nothing is called 'spikes'"):
        prepare("huginn_small+spikes", Sizes(2, 2, 2, 16), None, 0)


def scores(variant, values, **more):
    return {
        "model": "a",
        "task": "lambada",
        "draw": 0,
        "bits": 3,
        "group": 32,
        "variant": variant,
        "values": values,
    } | more


def test_flips_count_items_that_one_of_two_rows_has_right():
    right, other = np.array([1.0, 1, 1, 0, 0]), np.array([1.0, 0, 0, 1, 0])
    assert peers_table.flips(right, other) == (2, 1)
    assert peers_table.flips(np.ones(6), np.zeros(6)) == (6, 0)


def test_answers_stand_beside_full_precision_and_the_best_tool():
    found = [
        scores(peers_table.FULL, [1.0] * 9 + [0.0], bits=0, group=0),
        scores("llm-compressor, mse", [0.0] * 9 + [0.0]),
        scores("loopq best", [1.0] * 8 + [0.0, 0.0]),
    ]
    lines = peers_table.answers(RECORDS, found, OURS).splitlines()
    assert "|  |  | full precision | 90.0% |  |  |" in lines
    # Both of nine: 2 / 2^9, times three comparisons. Of eight: 2 / 2^8, times the two that are left.
    assert "| INT3 g32 | 0 | llm-compressor, mse | 0.0% | 0 and 9, p 0.012 |  |" in lines
    assert "| INT3 g32 | 0 | loopq best | 80.0% | 0 and 1, p 1 | 8 and 0, p 0.016 |" in lines
    assert peers_table.answers(RECORDS, [], OURS) == ""


def test_answers_tell_rows_apart_after_holm_over_all_pairs():
    def right(variant, n, **more):
        return {"task": "lambada", "bits": 3, "variant": variant, "values": "1" * n + "0" * (20 - n)} | more

    rows = [right("loopq fast", 8), right("llm-compressor, mse", 0), right("llm-compressor", 8)]
    *_, line = real.told_apart({"scores": rows}).splitlines()
    assert line == "| 3 bits, LAMBADA | loopq, `--preset fast` | llm-compressor, `mse` | 0.016 |"
    # Of six pairs the same eight items decide nothing: 2 / 2^8 times seven is above 0.05.
    others = [right(r["variant"], 5, task=t) for t in ("arc_easy", "hellaswag") for r in rows]
    more = right("auto-round", 8)
    assert "none differ" in real.told_apart({"scores": [*rows, *others, more]})


def test_the_first_page_reads_exl3_at_equal_bits_and_pairs_seconds_with_their_kl():
    def smol(variant, kl4, kl3, seconds, group=64):
        both = ((4, kl4), (3, kl3))
        return [row(real.SMOLLM2, variant, kl, bits=b, group=group, seconds=seconds) for b, kl in both]

    rows = [
        *smol(peers_table.EVEN, 0.1, 0.4, 20.0),
        *smol("loopq default", 0.1, 0.2, None),
        *smol(peers_table.SMALL, 0.02, 0.1, 300.0),
        *smol("auto-round", 0.2, 0.8, 100.0),
        *smol("auto-round, best", 0.1, 0.5, 400.0),
        *smol("llm-compressor, imatrix_mse", 0.2, 1.0, 10.0),
    ]
    exl3 = smol(real.EXL3, 0.1, 0.4, None, group=0)
    _, _, *lines = real.claim({"peers": rows, "exl3": exl3}).splitlines()
    assert "| loopq, `--levels even` | auto-round, recipe `best` | 1.00 and 0.80 | 0.05 |" in lines
    assert "| loopq, `--levels even` | llm-compressor, `imatrix_mse` | 0.50 and 0.40 | 2 |" in lines
    # The default has no seconds here.
    assert "| loopq | auto-round, recipe `best` | 1.00 and 0.40 |  |" in lines
    # A factor of four for a bit: EXL3 stands a fifth of a bit below loopq's groups of 64.
    fifth = real.stored_bits(rows[0]) - real.stored_bits(exl3[0])
    assert f"| loopq | EXL3, at equal bits | {4**fifth:.2f} and {0.5 * 4**fifth:.2f} |  |" in lines
    assert real.exl3_at(exl3, real.stored_bits(rows[0])) == pytest.approx(0.1 / 4**fifth)
    assert len(lines) == 7


@pytest.mark.parametrize(
    ("kind", "name", "columns", "expected"),
    [
        ("IQ3_XXS", "model.layers.9.self_attn.q_proj.weight", 576, "iq4_nl"),
        ("IQ3_XXS", "model.layers.9.self_attn.q_proj.weight", 2048, "iq2_s"),
        ("IQ3_XXS", "model.layers.9.mlp.down_proj.weight", 1536, "iq3_xxs"),
        ("IQ2_XS", "model.layers.2.mlp.down_proj.weight", 1536, "q2_k"),
        ("IQ2_XS", "model.layers.3.mlp.down_proj.weight", 1536, "iq2_xs"),
        ("Q4_K_S", "model.layers.3.self_attn.v_proj.weight", 576, "q5_1"),
        ("Q4_K_M", "model.layers.5.mlp.down_proj.weight", 1536, "q6_k"),
        ("Q4_K_M", "model.layers.4.mlp.down_proj.weight", 1536, "q4_k"),
        ("iq3_s padded", "model.layers.9.self_attn.q_proj.weight", 576, "iq3_s padded"),
    ],
)
def test_types_of_files_are_those_of_llama_quantize(kind, name, columns, expected):
    assert gguf.held(gguf.chosen(kind, name, 30), columns) == expected


def test_a_result_takes_the_place_of_an_older_one_that_differs():
    key = {"model": "folder/looped", "draw": 0, "bits": 3, "group": 64, "variant": "RTN"}
    data = {"peers": [], "scores": [], "gguf": {}}
    for kl, seconds in ((1.0, 4.0), (1.0, 9.0)):
        real.add(data, {"settings": {}, "records": [key | {"kl": kl, "seconds": seconds}]})
    assert data["peers"] == [key | {"model": real.SMOLLM2, "kl": 1.0, "seconds": 4.0}]
    real.add(data, {"settings": {}, "records": [key | {"kl": 2.0, "seconds": 9.0}]})
    real.add(data, {"settings": {"names": "a", "calibration": "b/c"}, "records": [key | {"kl": 3.0}]})
    assert [r["kl"] for r in data["peers"]] == [2.0]
    assert [r["kl"] for r in data["loop"]] == [3.0]


def test_a_row_of_a_record_is_one_line():
    record = {
        "settings": {"n": 1},
        "rows": [{"kl": 0.1, "by_prompt": [0.25, 1e-7]}, {"kl": None}],
        "scores": [],
    }
    text = json_lines(record)
    assert json.loads(text) == record
    assert '{"kl":0.1,"by_prompt":[0.25,1e-07]},' in text.splitlines()


def test_a_tool_stands_beside_loopq_and_what_it_refuses_is_said():
    about = {"model": "a", "draw": 0, "bits": 3}
    rows = [
        about | {"variant": "loopq, even levels", "error": [1.0, 1.0, 1.0]},
        about | {"variant": "loopq", "error": [1.0, 1.0, 8.0]},
        about | {"variant": "tool", "tool": "t", "error": [2.0, 2.0, 4.0], "seconds": 3.0},
        *(
            about | {"variant": "other", "tool": "o", "bits": bits, "refused": "TypeError: no ids"}
            for bits in (4, 3)
        ),
    ]
    text = calls.beside(rows, "a").splitlines()
    assert text[2].startswith("| 3 bits: tool | 2.0000 | 0.50 (0.25-0.50), 3 of 3 | 0.50 (0.50-2.00), 2 of 3")
    assert text[-1] == "* other: `TypeError: no ids` (4 bits, 3 bits)"


def test_a_layer_that_is_narrower_than_a_group_is_a_row():
    subject = object.__new__(peer.Subject)
    layers = {"a.weight": nn.Linear(8, 4), "b.weight": nn.Linear(48, 4)}
    subject.job, subject.module = {"names": ["a.weight"]}, layers.get
    assert subject.modules(32) == {"a.weight": layers["a.weight"]}
    assert (peer.size_of(layers["a.weight"], 32), peer.size_of(layers["b.weight"], 32)) == (-1, 32)
    subject.job = {"names": [*layers]}
    with pytest.raises(LoopqError, match=r"b\.weight: 48 inputs are no multiple of 32"):
        subject.modules(32)
