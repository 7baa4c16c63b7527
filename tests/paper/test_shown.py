"""Tables and figures of the paper: each has one home, and a name that is found."""

from __future__ import annotations

import ast
import dataclasses
import re
import shlex
from pathlib import Path

import pytest

from benches import paper
from loopq.analysis.diagnosis.sections import SECTIONS
from loopq.cli import parse
from loopq.errors import ConfigError
from loopq.evaluation.stats import Interval
from loopq.paper.shown import TABLES, Claim, find

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python" / "loopq"
# Items of the paper: quantizers, calibration, rotations, Hessians, feedback, sensitivity, Jacobians, other recurrences,
# metrics, statistics and cost.
ITEMS = tuple(zip("ABCDEFGHIJ", (7, 12, 4, 13, 11, 3, 4, 3, 10, 13), strict=True))
# Figures 1a to 5, Tables 1 to 26, and Algorithm 1.
LABELS = [
    *(f"Figure {n}" for n in ("1a", "1b", "2", "3", "4", "5")),
    *(f"Table {n}" for n in range(1, 27)),
    "Algorithm 1",
]


def test_every_table_and_figure_has_one_home() -> None:
    owners = {label: name for name, entry in TABLES for label in entry.labels}
    assert [label for label in LABELS if label not in owners] == []
    assert sum(len(entry.labels) for _, entry in TABLES) == len(owners), "two files claim one table"
    assert find("table-6") == find("figure-3") == find("horizon")
    with pytest.raises(ConfigError, match=r"no table 'table-99'.*horizon.*figure-1a"):
        find("table-99")


@pytest.mark.parametrize(
    ("low", "high", "n", "below", "holds"),
    [
        (0.1, 0.3, 5, False, True),
        (0.1, 0.3, 5, True, False),
        (-0.3, -0.1, 5, False, False),
        (-0.3, -0.1, 5, True, True),
        (-0.1, 0.1, 5, False, None),
        (0.0, 0.1, 5, False, None),
        (0.1, 0.3, 4, False, None),
        (0.1, 0.1, 2, True, None),
    ],
)
def test_a_verdict_needs_an_interval_that_excludes_the_other(
    low: float, high: float, n: int, below: bool, holds: bool | None
) -> None:
    interval = Interval(0.2, low, high, 0.95, "test", n)
    claim = Claim("m", "more", "numbers", interval, below=below)
    assert claim.holds is holds
    word = {True: "holds", False: "does not hold", None: "is left open"}[holds]
    assert claim.verdict == claim.to_json()["verdict"] == word
    assert dataclasses.replace(claim, p=0.04).holds is None
    for changes, why in (
        ({"why_open": "below"}, "below"),
        ({"p": 0.05}, "p = 0.05 after Holm; p is not below 0.05"),
    ):
        changed = dataclasses.replace(claim, **changes, differs="x")
        assert changed.holds is None
        assert changed.line() == f"m: more: is left open (numbers; {why}; differs: x)"


def test_an_interval_within_the_margin_makes_no_difference() -> None:
    interval = Interval(0.2, -0.1, 0.3, 0.95, "test", 5)
    claim = Claim("m", "more", "numbers", interval, alike=(-0.1, 0.3))
    assert (claim.holds, claim.verdict) == (None, "makes no difference")
    assert dataclasses.replace(claim, alike=(-0.1, 0.29)).verdict == "is left open"
    assert dataclasses.replace(claim, alike=(-0.09, 0.3)).verdict == "is left open"
    few = dataclasses.replace(claim, interval=dataclasses.replace(interval, n=4))
    assert (few.asked, few.verdict) == (False, "is left open")


def test_a_claim_that_holds_by_construction_is_named() -> None:
    claim = Claim("m", "more", "9 of 9", Interval(1.0, 0.7, 1.0, 0.95, "test", 9), 0.5, given="an identity")
    assert claim.line() == "m: more: holds by construction (9 of 9; an identity)"
    # Where a code is wrong it does not hold, and the open ones stay open.
    wrong = dataclasses.replace(claim, interval=Interval(0.1, 0.0, 0.3, 0.95, "test", 9))
    assert wrong.verdict == "does not hold"
    assert (
        dataclasses.replace(claim, interval=Interval(0.5, 0.4, 0.6, 0.95, "test", 9)).verdict
        == "is left open"
    )


RECORD = """
* a: N steps better than RTN: holds (KL ratio 0.473 [0.408, 0.549]; differs: calibration)
* a: INT4 g128: N steps better than RTN: holds (KL ratio 0.49 [0.41, 0.55]; differs: calibration)
* a: GPTQ is closer than RTN: holds (KL ratio 0.473 [0.408, 0.549]; A against B, differs: calibration)
* b: GPTQ is closer than RTN: holds (KL ratio 0.473 [0.408, 0.549]; differs: calibration)
* a: in most layers: holds by construction (9 of 9 layers; the solver lowers this loss; differs: calibration)
* a: in all layers: holds by construction (9 of 9 layers; an identity; differs: calibration)
* a: it helps: is left open (KL ratio 0.9 [0.8, 1.1]; differs: steps)
* a: it turns: does not hold (KL ratio 1.9 [1.8, 2.1]; differs: steps)
"""


def test_verdicts_count_a_figure_once_and_name_constructions() -> None:
    counts = paper.counted(paper.claims_of(RECORD))
    assert counts.pop("makes no difference", 0) == 0
    assert counts == {"holds": 2, "holds by construction": 2, "is left open": 1, "does not hold": 1}
    said = paper.verdicts(RECORD)
    assert "| with 400 prompts for those left open | 2 | 1 | 0 | 1 |" in said
    assert "Another 2 of the 8 verdicts hold by construction" in said


def test_more_prompts_replace_open_verdicts_and_those_they_turn() -> None:
    first = (
        "## Table 1\n* a: it helps: is left open (KL ratio 0.9 [0.8, 1.1]; x)\n* a: it is closer: holds (KL ratio 0.5 "
        "[0.4, 0.6]; x)\n* a: it turns: holds (KL ratio 0.9 [0.8, 0.97]; x)\n## Table 2\n* a: it helps: is left open "
        "(KL ratio 0.7 [0.4, 1.2]; x)\n"
    )
    more = (
        "## Table 1\n* a: it helps: holds (KL ratio 0.95 [0.93, 0.98]; x)\n* a: it is closer: holds (KL ratio 0.6 [0.5,"
        " 0.7]; x)\n* a: it turns: does not hold (KL ratio 1.1 [1.05, 1.2]; x)\n"
    )
    claims = paper.claims_of(first, more)
    assert [(said, verdict) for _, said, verdict, _ in claims] == [
        ("it helps", "holds"),
        ("it is closer", "holds"),
        ("it turns", "does not hold"),
        ("it helps", "is left open"),
    ]
    # A verdict that more prompts confirm keeps its figure, which other tables share.
    assert "0.5 [" in claims[1][3]
    said = paper.verdicts(first, more)
    assert "| on 24 prompts or fewer | 2 | 0 | 0 | 2 |" in said
    assert "| with 400 prompts for those left open | 2 | 1 | 0 | 1 |" in said
    assert "| those left open, on 400 prompts | 1 | 0 | 0 | 0 |" in said
    assert "Not measured again: 1 of those left open. 400 prompts changed 1 that" in said


def test_what_400_prompts_leave_open_is_listed_with_its_numbers() -> None:
    first = (
        "## Table 1\n* a: it helps: is left open (KL ratio 0.9 [0.8, 1.1]; differs: x)\n* b: it helps: is left open "
        "(KL ratio 0.7 [0.4, 1.2]; differs: x)\n* a: it turns: is left open (KL ratio 0.7 [0.4, 1.2]; differs: x)\n"
    )
    more = (
        "## Table 1\n* a: it helps: is left open (KL ratio 0.98 [0.95, 1.01], agreement 8 and 9 %; differs: x)\n"
        "* a: it turns: holds (KL ratio 0.8 [0.7, 0.9]; differs: x)\n"
    )
    assert paper.undecided(first, more).splitlines()[2:] == [
        "| it helps | a: KL ratio 0.98 [0.95, 1.01]; b: KL ratio 0.7 [0.4, 1.2], not measured again |"
    ]


def test_scores_of_enough_items_are_one_family() -> None:
    def section(grid: str, model: str, p: float, n: int) -> str:
        text = f"## Last tokens at {grid} g64\n"
        for other in ("RTN", "GPTQ, one step"):
            claim = f"{model}: GPTQ, all steps gets more last tokens right than {other}: holds"
            text += f"* {claim} (+2.0 points [+1.0, +3.0], exact McNemar p = {p:.3g})\n"
        return f"{text}| {model} | full precision | 90 of {n} | 18.0 % | [1, 2] |\n"

    big = section("INT3", "a", 0.012, 500) + section("INT2", "a", 0.5, 500)
    few = section("INT3", "b", 1e-9, 499) + section("INT2", "b", 1e-9, 499)
    rows = paper.scores(big + few).splitlines()
    # Of four scores: 4 x 0.012 is below 0.05. Those of b have no verdict and take no share of it.
    assert rows[2] == "| `a` | 18.0 % | +2.0 | +2.0 | +2.0, open | +2.0, open |"
    assert "The 4 scores decide 2 verdicts, none of them" in rows[-1]
    assert len(rows) == 5


def _defined(file: Path) -> set[str]:
    """Functions and classes of a source file, and "Class.member"."""
    names = set()
    for node in ast.parse(file.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        for part in node.body if isinstance(node, ast.ClassDef) else ():
            target = getattr(part, "target", part)
            names.add(f"{node.name}.{getattr(target, 'id', getattr(target, 'name', ''))}")
    return names


def test_what_the_document_names_in_a_file_is_defined_there() -> None:
    text = paper.DOCUMENT.read_text("utf-8")
    named = re.findall(r"`([\w/]+\.py)`: ((?:`[\w.]+`(?:, )?)+)", text)
    assert sum(len(re.findall(r"[\w.]+", names)) for _, names in named) > 80
    for file, names in named:
        missing = set(re.findall(r"[\w.]+", names)) - _defined(PACKAGE / file)
        assert not missing, f"{file}: {missing}"


def test_the_document_has_a_command_for_each_item_of_the_paper() -> None:
    section = paper.DOCUMENT.read_text("utf-8").partition("## Every item")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")][1:]
    items = [item for row in rows for item in re.findall(r"(?:^|; )([A-J]\d+) ", row[0])]
    assert sorted(items) == sorted(f"{kind}{n}" for kind, last in ITEMS for n in range(1, last + 1))
    for _, command, place in rows:
        program, *words = shlex.split(command.strip("`"))
        if program in ("quantize", "reproduce", "diagnose", "evaluate", "check"):
            # As the page says: the model comes first, behind the name of a table, and --out ends what quantizes.
            name = [words.pop(0)] if program == "reproduce" else []
            args = parse([program, *name, "MODEL", *words, *["--out", "Q"] * (program == "quantize")])
            assert args.run
            # Text that the parser takes as free text.
            if name:
                find(args.table)
            for name in filter(None, (getattr(args, "only", None) or "").split(",")):
                assert name in SECTIONS.names()
        else:
            assert program == "lm-eval" or (ROOT / program).exists(), command
        files = re.findall(r"`([\w/]+\.py)`", place)
        assert files, place
        assert all((PACKAGE / f).exists() or (ROOT / f).exists() for f in files), place
