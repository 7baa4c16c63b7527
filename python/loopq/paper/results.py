"""Measure tables on models, resume an interrupted run, and write all results as one record."""

from __future__ import annotations

import datetime
import html
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import loopq
from loopq.analysis.diagnosis.survey import clean
from loopq.analysis.report.markup import PAGE, figure_html, page_html, table
from loopq.errors import ConfigError, LoopqError, MissingExtraError
from loopq.paper.bench import Bench
from loopq.paper.shown import TABLES, Found, PaperTable, Shown, order
from loopq.paper.stats import holm
from loopq.storage.files import json_bytes
from loopq.storage.folders import write_output
from loopq.storage.journal import Journal, fingerprint
from loopq.storage.schema import Object
from loopq.terminal.progress import Progress

FORMAT = 4


@dataclass(frozen=True)
class Made:
    """Result of one table.

    Parameters
    ----------
    name : str
        Its name in the registry.
    entry : PaperTable
        What it is.
    found : tuple of dict
        Data of each model that can have it.
    refused : dict
        Reasons why the other models do not, by model.
    shown : Shown
        Tables, claims and figures.
    """

    name: str
    entry: PaperTable
    found: tuple[Found, ...]
    refused: Mapping[str, str]
    shown: Shown

    def lines(self) -> list[str]:
        """Sentences on the paper's result, the result here, and models without the table."""
        lines = [f"{', '.join(self.entry.labels)}: {self.entry.title}.", f"The paper: {self.entry.paper}"]
        lines += [*self.shown.lines, *(claim.line() for claim in self.shown.claims)]
        return lines + [f"{model}: not measured: {why}" for model, why in self.refused.items()]

    def to_json(self) -> Object:
        """Plain data."""
        return {
            "labels": list(self.entry.labels),
            "title": self.entry.title,
            "paper": self.entry.paper,
            "claims": [c.to_json() for c in self.shown.claims],
            "refused": dict(self.refused),
            "models": list(self.found),
        }


def make(name: str, benches: Sequence[Bench], work: Path | None, progress: Progress) -> Made:
    """Measure one table on every model that supports it.

    Parameters
    ----------
    name : str
        As registered.
    benches : sequence of Bench
        The models.
    work : Path or None
        Folder with each model's saved data. Data of the same weights, prompts and settings are read again.
    progress : Progress
        Told of every model.
    """
    entry = TABLES.get(name)
    results, refused = [], {}
    for bench in benches if entry.measure else ():
        journal = Journal(work, fingerprint(FORMAT, loopq.__version__, name, bench.key()))
        bench.saved = journal
        piece = journal.find(bench.source.name)
        if piece is not None:
            progress.note(f"{name}, {bench.source.name}: read from {work}")
            results.append(json.loads(piece.facts["found"]))
            continue
        alone = bench.depth == 1 and not entry.one_step
        why = "the model has one step, so no loop" if alone else entry.refuses(bench)
        if why is None:
            progress.note(f"{name}, {bench.source.name}")
            try:
                results.append(clean(entry.measure(bench)))  # type: ignore[misc]
            except MissingExtraError:
                raise
            except LoopqError as error:
                # A model that fails does not discard the results of the others.
                why = str(error)
            else:
                # Stored as text because the journal sorts keys, but the layers of a model have an order.
                journal.save(bench.source.name, found=json.dumps(results[-1]))
        if why is not None:
            refused[bench.source.name] = why
    shown = entry.show(results) if results or entry.measure is None else Shown([])
    return Made(name, entry, tuple(results), refused, shown)


def judged(measured: Sequence[Made]) -> list[Made]:
    """Keep the claims with enough units. Adjust the p values of all tables' scores after Holm: they are one family."""
    asked = [[c for c in m.shown.claims if c.asked] for m in measured]
    raw = [c.p for claims in asked for c in claims if c.p is not None]
    p = iter(holm(raw).tolist() if raw else ())
    claims = [[c if c.p is None else replace(c, p=next(p)) for c in of_table] for of_table in asked]
    return [replace(m, shown=replace(m.shown, claims=c)) for m, c in zip(measured, claims, strict=True)]


def in_order() -> list[str]:
    """Names of all tables, figures first, in the paper's numbering."""
    return [name for name, _ in sorted(TABLES, key=lambda item: order(min(item[1].labels, key=order)))]


def write(measured: Sequence[Made], out: Path, figures: bool = True) -> Path:
    """Write one page, one Markdown text and the plain data of all tables. Return the page.

    Raises
    ------
    ConfigError
        Nothing was made.
    """
    if not measured:
        raise ConfigError("no table was made: there is nothing to write")
    out.mkdir(parents=True, exist_ok=True)
    name = measured[0].name if len(measured) == 1 else "paper"
    today = datetime.date.today().isoformat()
    path = out / f"{name}-{today}"
    head = {"date": today, "loopq": loopq.__version__, "machine": platform.machine()}
    data = json_bytes({"made": head, "tables": {m.name: m.to_json() for m in measured}})
    write_output(path.with_suffix(".json"), data, b'"loopq": "')
    title = measured[0].entry.title if len(measured) == 1 else "The paper's tables and figures"
    intro = f"loopq {loopq.__version__}, {today}, {platform.machine()}. Plain data: {path.name}.json."
    parts = [f"# {title}", intro, *(_markdown(m) for m in measured)]
    write_output(path.with_suffix(".md"), ("\n\n".join(parts) + "\n").encode(), b"Plain data: ")
    if figures:
        page = page_html(title, intro, "\n".join(map(_section, measured)))
        write_output(path.with_suffix(".html"), page.encode(), PAGE)
    return path.with_suffix(".html" if figures else ".md")


def _markdown(measured: Made) -> str:
    heading, *lines = measured.lines()
    tables = [t.markdown().replace("## ", "### ", 1) for t in measured.shown.tables]
    command = (
        f"`loopq reproduce {measured.name} {' '.join(str(f['model']) for f in measured.found)}`".replace(
            " `", "`"
        )
    )
    return "\n".join([f"## {heading}", "", command, "", *(f"* {x}" for x in lines), "", "\n".join(tables)])


def _section(measured: Made) -> str:
    heading, paper, *lines = measured.lines()
    items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    # Text of a table is not repeated under a figure.
    said = {t.text for t in measured.shown.tables}
    drawn = []
    for picture in measured.shown.pictures() if measured.shown.tables else ():
        drawn.append(figure_html(replace(picture, caption="") if picture.caption in said else picture))
        said.add(picture.caption)
    pictures = "".join(drawn)
    tables = [
        table(heading, t.header, [["-" if c is None else c for c in row] for row in t.rows], caption=t.text)
        for t in measured.shown.tables
    ]
    return (
        f'<section id="{measured.name}"><h2>{html.escape(heading)}</h2><p class="intro">{html.escape(paper)}</p>'
        f'<ul class="summary">{items}</ul><div class="figures">{pictures}</div>{"".join(tables)}</section>'
    )
