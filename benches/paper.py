"""Write tables into ``docs/paper.md``: ``python -m benches.paper``.

They have verdicts on statements of the paper and scores, from the newest record of ``reproduce all``, and the share
of feedback.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Sequence
from pathlib import Path

from benches.pages import RECORD, into
from loopq.paper.shown import MIN_ANSWERS
from loopq.paper.stats import holm

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "paper.md"
#: Published models first. Their record has those tables that a model without logits can have.
MODELS = {"plbert": "PL-BERT", "fracast": "Fracast-0"}
MODELS |= {name: f"`{name}`" for name in ("huginn_small", "ouro_small", "rllama_small", "parcae_small")}
MODELS |= {"looped": "SmolLM2's loop"}
#: Statements of the page, and their text in the record.
STATEMENTS = (
    ("N steps beat rounding, INT4 g128 (Table 2)", "INT4 g128: N steps better than RTN"),
    ("... and one step", "INT4 g128: N steps better than one step"),
    ("N steps beat rounding, INT3 g32", "INT3 g32: N steps better than RTN"),
    ("... and one step", "INT3 g32: N steps better than one step"),
    (
        "N steps at the rows of one step beat one step, INT3 g128 (Table 10)",
        "GPTQ, all steps, rows of one is closer than GPTQ, one step",
    ),
    ("two steps gain on one already (Table 6)", "two steps already gain on one"),
    (
        "N steps agree more often than rounding, points (Section 5)",
        "GPTQ, all steps agrees at more positions than RTN",
    ),
    (
        "the loss of most layers is below that of one step (Alg. 1)",
        "over the trajectory its solution loses less than that of one step in most layers",
    ),
    (
        "the step matters less to AWQ than to GPTQ (Table 13)",
        "the step of calibration matters less to AWQ than to GPTQ",
    ),
    (
        "the ranks of the inputs at least double, times (Fig. 2, Table 18)",
        "the inputs' ranks at least double over the trajectory",
    ),
    (
        "rounding the exposed layers costs more than all others, points (Fig. 1a, Tables 3, 4)",
        "damage of rounding in exposed layers is larger than in all other layers",
    ),
    (
        "errors of rank 4 cost more in the adapter, points (Table 15)",
        "random rank 4: the adapter suffers more than the core",
    ),
    ("rotating the adapter helps per channel (Table 5)", "RTN, adapter rotated is closer than RTN"),
    (
        "a deeper rollout is closer to full precision (Fig. 1b)",
        r"at depth \d+ its KL is smaller than at depth 1",
    ),
    (
        "leaving step 0 out helps (Table 23; in the paper on 2 of 6)",
        r"leaving step 0 out helps \(in the paper on 2 of 6 models\)",
    ),
    (
        "closed loop and open loop are alike, within 1.1 (App. J)",
        "closed loop and open loop are alike, their KL within a factor of 1.1",
    ),
    (
        "one step predicts the displacement, within a factor of 1.5 (App. H, L)",
        "per channel: one step predicts the displacement within a factor of 1.5",
    ),
)
#: Of the main table, which has two calibration sets: Figure 2 and Table 13 have these figures of the first one.
REPEATED = re.compile("INT4 g128: N steps better than (RTN|one step)")
SAID = {
    "holds": "holds", "holds by construction": "given", "does not hold": "does not", "is left open": "open",
    "makes no difference": "equal",
}  # fmt: skip
OPEN = "is left open"
#: Where a verdict has its number.
NUMBER = re.compile(
    r"ratio ([\d.]+)|off by ([\d.]+)|(\d+ of \d+) layers|[+]?(-?[\d.]+)(?: \[.*?\])? ?(?:points|times)"
)
CLAIM = re.compile(rf"^\* (\w+): (.+): ({'|'.join(SAID)}) \((.*)\)$", re.MULTILINE)
#: Of a record of scores: a model's items, and the bits of a section whose pairs differ in calibration alone.
ITEMS = re.compile(r"^\| (\w+) \| full precision \| \d+ of (\d+)", re.MULTILINE)
GRID = re.compile(r"(?<!per row, )INT\d")
#: Model, statement, verdict and numbers.
Claims = Sequence[tuple[str, str, str, str]]


def claims_of(first: str, more: str = "") -> Claims:
    """Return the verdicts of a record of `reproduce`.

    Those of a second one, on more prompts, replace what the first left open, and what they turn.
    """
    found: dict[tuple[str, str, str], tuple[str, str, str, str]] = {}
    for record in (first, more):
        for section in record.split("\n## "):
            table = section.partition("\n")[0]
            for claim in CLAIM.findall(section):
                before = found.get((table, *claim[:2]), ("", "", OPEN, ""))
                if before[2] == OPEN or claim[2] != before[2]:
                    found[table, *claim[:2]] = claim
    return list(found.values())


def counted(claims: Claims) -> collections.Counter[str]:
    """Count verdicts by their word, a figure once.

    A figure is the numbers of one model with their interval. Several tables can have it. Numbers without an interval
    belong to their statement.
    """
    figures = {}
    for model, said, verdict, found in claims:
        if REPEATED.fullmatch(said):
            continue
        numbers = found.partition("; ")[0]
        figures[model, numbers if "[" in numbers else (said, numbers)] = verdict
    return collections.Counter(figures.values())


def verdicts(first: str, more: str = "") -> str:
    """Return the counts of verdicts and a row for each of `STATEMENTS`, as Markdown.

    The second record has the tables of open verdicts again, on more prompts.
    """
    before, claims = claims_of(first), claims_of(first, more)
    n, kinds = counted(claims), ("holds", "does not hold", "makes no difference", OPEN)
    again = [new for old, new in zip(before, claims, strict=True) if old[2] == OPEN and old != new]
    counts = {"on 24 prompts or fewer": counted(before), "with 400 prompts for those left open": n}
    if again:
        counts["those left open, on 400 prompts"] = collections.Counter(verdict for *_, verdict, _ in again)
    lines = [
        "| distinct figures | hold | do not | make no difference | are left open |",
        "|---|---|---|---|---|",
        *(f"| {name} | {' | '.join(str(c[kind]) for kind in kinds)} |" for name, c in counts.items()),
        "",
        f"Another {n['holds by construction']} of the {len(claims)} verdicts hold by construction, and only check the "
        "code.",
        *_again(before, claims),
        "",
        f"| statement of the paper | {' | '.join(MODELS.values())} |",
        f"|---|{'---|' * len(MODELS)}",
    ]
    for statement, text in STATEMENTS:
        cells = dict.fromkeys(MODELS, "-")
        for model, said, verdict, found in claims:
            if re.fullmatch(text, said):
                number = NUMBER.search(found)
                assert number is not None, found
                shown = next(filter(None, number.groups()))
                shown = f"{float(shown):.2f}" if re.fullmatch(r"[\d.]+\d{3}", shown) else shown
                shown = f"{float(shown):.1e}" if re.fullmatch(r"\d{5,}[.]\d+", shown) else shown
                cells[model] = f"{SAID[verdict]}: {shown}"
        lines.append(f"| {statement} | {' | '.join(cells.values())} |")
    return "\n".join(lines)


def _again(before: Claims, after: Claims) -> list[str]:
    """A sentence on the verdicts that more prompts were not taken for, and on those that they turned."""
    kept = sum(old[2] == OPEN and old == new for old, new in zip(before, after, strict=True))
    turned = sum(old[2] not in (OPEN, new[2]) for old, new in zip(before, after, strict=True))
    return [
        f"Not measured again: {kept} of those left open. 400 prompts changed {turned} that had been decided."
    ]


def undecided(first: str, more: str = "") -> str:
    """Return a row for each statement that more prompts leave open, as Markdown."""
    rows: dict[str, list[str]] = {}
    for old, new in zip(claims_of(first), claims_of(first, more), strict=True):
        model, said, verdict, found = new
        if verdict == OPEN:
            numbers = re.split(r"; |, agreement", found)[0] + ", not measured again" * (old == new)
            rows.setdefault(said, []).append(f"{MODELS.get(model, model)}: {numbers}")
    lines = ["| statement | models |", "|---|---|"]
    return "\n".join([*lines, *(f"| {said} | {'; '.join(models)} |" for said, models in rows.items())])


def scores(record: str) -> str:
    """Return the gains of all steps in last tokens, and how many of a record's scores are decided, as Markdown.

    All its scores on enough items are one family for Holm's correction. A pair that differs in two things is left out.
    """
    items = {model: int(n) for model, n in ITEMS.findall(record)}
    found: dict[tuple[str, str, str], tuple[str, float, str]] = {}
    for section in record.split("\n## "):
        grid = GRID.search(section.partition("\n")[0])
        for model, said, verdict, numbers in CLAIM.findall(section):
            p = re.search(r"McNemar p = ([\d.e-]+)", numbers)
            if p and grid and items.get(model, 0) >= MIN_ANSWERS:
                found[grid[0], model, said] = (numbers.split(" points")[0], float(p[1]), verdict)
    adjusted = dict(zip(found, holm([p for _, p, _ in found.values()]), strict=True))

    def cell(grid: str, model: str, other: str) -> str:
        key = (grid, model, f"GPTQ, all steps gets more last tokens right than {other}")
        return found[key][0] + ("" if adjusted[key] < 0.05 else ", open")

    shares = dict(
        re.findall(r"^\| (\w+) \| full precision \| \d+ of \d+ \| ([\d.]+ %)", record, re.MULTILINE)
    )
    heads = [
        f"{grid} g64: more than {other}" for grid in ("INT3", "INT2") for other in ("rounding", "one step")
    ]
    lines = [f"| model | right in full precision | {' | '.join(heads)} |", f"|{'---|' * (2 + len(heads))}"]
    for model in dict.fromkeys(model for grid, model, _ in found if grid == "INT2"):
        cells = [cell(grid, model, other) for grid in ("INT3", "INT2") for other in ("RTN", "GPTQ, one step")]
        lines.append(f"| `{model}` | {shares[model]} | {' | '.join(cells)} |")
    decided = [found[key][0] for key, p in adjusted.items() if p < 0.05]
    against = sum(gain.startswith("-") for gain in decided)
    same = sum(found[key][2] == "makes no difference" for key in found)
    lines += [
        "",
        f"The {len(found)} scores decide {len(decided)} verdicts, {against or 'none'} of them against the trajectory. "
        f"{same} {'makes' if same == 1 else 'make'} no difference, and {len(found) - len(decided) - same} are open.",
    ]
    return "\n".join(lines)


def _cells(record: str) -> list[list[str]]:
    """Return the rows of all tables of a record."""
    lines = (line for line in record.splitlines() if line.startswith("| "))
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]


def feedback(record: str) -> str:
    """Return each model's feedback in the order of what it adds to the error, as Markdown."""
    rows = [r for r in _cells(record) if r[1:3] == ["one scale per row", "all columns"]]
    lines = [
        "| one scale per row | agreement with the reset, without | feedback | final error, times that with the reset | "
        "cosine |",
        "|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda r: float(r[-2].split()[0])):
        model, reset, natural, share, (times, cosine) = row[0], row[3], row[-5], row[-4], row[-2:]
        lines.append(f"| `{model}` | {reset.removesuffix(' %')}, {natural} | {share} | {times} | {cosine} |")
    return "\n".join(lines)


def parts() -> dict[str, str]:
    """Return what stands between the marks, by their names."""
    newest = max(RECORD.glob("reproduce-*"))
    records = [newest / name for name in ("paper.md", "more-prompts.md")]
    texts = [file.read_text("utf-8") for file in records if file.is_file()]
    every = [(newest / "published.md").read_text("utf-8") + texts[0], *texts[1:]]
    loops = max(RECORD.glob("feedback-*.md")).read_text("utf-8")
    return {
        "verdicts": verdicts(*every),
        "undecided": undecided(*texts),
        "scores": scores((newest / "scores.md").read_text("utf-8")),
        "feedback": feedback(loops),
    }


def main() -> None:
    """Replace what stands between the marks."""
    for mark, text in parts().items():
        into(DOCUMENT, mark, text)


if __name__ == "__main__":
    main()
