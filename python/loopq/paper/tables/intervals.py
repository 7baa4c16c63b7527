"""Li, Table 24: Wilson intervals of the main rows' scores."""

from __future__ import annotations

from collections.abc import Sequence

from loopq.evaluation.stats import Interval, wilson
from loopq.paper.bench import Bench
from loopq.paper.compared import ALL, FULL, ONE, RTN, answers, three, without_logits
from loopq.paper.shown import TABLES, Claim, Found, PaperTable, Shown, ShownTable
from loopq.storage.schema import Object

TITLE = "Wilson intervals of the scores"
# Correct answers of 1,319 (Li, Tables 2 and 24), with the interval that the paper prints.
PAPER = (
    ("Huginn 3.5B", FULL, 460, "32.4, 37.5"),
    ("Huginn 3.5B", RTN, 368, "25.5, 30.4"),
    ("Huginn 3.5B", ONE, 355, "24.6, 29.4"),
    ("Huginn 3.5B", ALL, 462, "32.5, 37.6"),
    ("R-Llama 1.4B", FULL, 662, "47.5, 52.9"),
    ("R-Llama 1.4B", RTN, 521, "36.9, 42.2"),
    ("R-Llama 1.4B", ONE, 531, "37.6, 42.9"),
    ("R-Llama 1.4B", ALL, 597, "42.6, 48.0"),
)
N_PAPER = 1319


def measure(bench: Bench) -> Object:
    """Quantize into the three variants of the main table and count correct last tokens."""
    return bench.measure(three(bench))


def _cells(i: Interval) -> tuple[str, str]:
    return f"{100 * i.estimate:.1f} %", f"[{100 * i.low:.1f}, {100 * i.high:.1f}]"


def show(results: Sequence[Found]) -> Shown:
    """The paper's counts computed again, and the counts of the models."""
    rows, same = [], 0
    for model, name, hits, printed in PAPER:
        interval = wilson(hits, N_PAPER)
        rows.append((f"{model} (paper)", name, f"{hits} of {N_PAPER}", *_cells(interval)))
        same += f"{100 * interval.low:.1f}, {100 * interval.high:.1f}" == printed
    claims: list[Claim] = []
    for result in results:
        for name, v in result["variants"].items():
            hits, n = int(sum(v["answered"])), len(v["answered"])
            rows.append((result["model"], name, f"{hits} of {n}", *_cells(wilson(hits, n))))
        claims += [*answers(result, ALL, RTN), *answers(result, ALL, ONE)]
    text = "Correct answers of GSM8K (paper), prompts whose last token is predicted (models); 95 % Wilson intervals."
    table = ShownTable(TITLE, text, ("model", "variant", "right", "share", "95 %"), tuple(rows))
    line = f"Of the paper's intervals {same} of {len(PAPER)} come out of its counts."
    return Shown([table], claims, lines=[line])


TABLES.register("intervals")(
    PaperTable(
        ("Table 24",),
        TITLE,
        "GSM8K, 1,319 answers: Huginn 34.9, 27.9, 26.9, 35.0 %, R-Llama 50.2, 39.5, 40.3, 45.3 % for full precision, "
        "rounding, one step, trajectory.",
        measure,
        show,
        without_logits,
    )
)
