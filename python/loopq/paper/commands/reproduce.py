"""`loopq reproduce`: the paper's tables and figures, on the embedded model or on models of one's own."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loopq import zoo
from loopq.commands import COMMANDS, Command
from loopq.commands.options import add_execution, add_settings, check_place, execution, given
from loopq.commands.source import add_loading, loading
from loopq.errors import ConfigError
from loopq.paper.bench import Bench, BenchSettings
from loopq.paper.models import Sizes, open_source
from loopq.paper.planted import plant
from loopq.paper.plbert import PLBERT, data_folder
from loopq.paper.results import in_order, judged, make, write
from loopq.paper.shown import TABLES, find
from loopq.settings.execution import Execution
from loopq.terminal.progress import Line, Progress
from loopq.terminal.table import render
from loopq.terminal.text import say

_WORK = Path(".cache") / "reproduce"
ALL = "all"
# Prompts that choose the channel where something is planted.
_N_PLANT = 4


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "table",
        metavar="TABLE",
        nargs="?",
        help="a name of the list that `loopq reproduce` prints, the paper's number (table-6, figure-3), or all",
    )
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help="folders, hub ids, plbert (default: the embedded model, and plbert where there is a data folder)",
    )
    for name, text in (
        ("data", "data folder, for plbert and the tasks (default: LOOPQ_DATA)"),
        ("out", "write the record here: page, text and data"),
    ):
        parser.add_argument(f"--{name}", type=Path, metavar="DIR", help=text)
    for name in ("calibration", "text"):
        what = "calibrate" if name == "calibration" else "measure"
        parser.add_argument(
            f"--{name}",
            type=Path,
            metavar="FILE",
            help=f"text to {what} on (default: one that ships with loopq)",
        )
    parser.add_argument(
        "--work",
        type=Path,
        default=_WORK,
        metavar="DIR",
        help="keep each model's results here; what is there is not run again (default %(default)s)",
    )
    parser.add_argument(
        "--plant",
        choices=("outlier", "spike", "token"),
        help="also measure each model with a planted outlier that leaves its output unchanged: a loud weight column in "
        "the exposed layer, or a loud MLP channel at step 0 (spike) or at the first token",
    )
    add_settings(parser, BenchSettings)
    add_loading(parser)
    add_execution(parser, only=("threads", "seed", "batch_size"))


@dataclass(frozen=True)
class _Reproduce:
    """Which tables to measure, on which models."""

    tables: Sequence[str]
    models: Sequence[str]
    planted: Sequence[str | None]
    data: Path | None
    calibration: Path | None
    text: Path | None
    loading: Mapping[str, Any]
    n_steps: int | None
    settings: BenchSettings
    execution: Execution

    @classmethod
    def of(cls, args: argparse.Namespace) -> _Reproduce:
        """Read and check the options."""
        tables = in_order() if args.table == ALL else [find(args.table)[0]]
        for folder in filter(None, (args.work, args.out)):
            check_place(folder / "paper.json", b"")
        data = data_folder(args.data)
        models = args.models or [*zoo.available(), *([PLBERT] if data else [])]
        if len(set(models)) < len(models):
            raise ConfigError(f"a model is named twice: {', '.join(models)}; name it once")
        return cls(
            tables,
            models,
            (None, args.plant) if args.plant else (None,),
            data,
            args.calibration,
            args.text,
            loading(args),
            args.n_steps,
            BenchSettings().changed(**given(args, BenchSettings)),
            execution(args),
        )

    def benches(self, progress: Progress) -> list[Bench]:
        """Load all models before measuring any, so that a wrong name fails at once."""
        if all(TABLES.get(name).measure is None for name in self.tables):
            return []
        how, benches = self.execution.changed(progress=progress), []
        for name in self.models:
            for kind in self.planted:
                source = open_source(name, self.data, self.calibration, self.text, **self.loading)
                if kind:
                    tokens = source.prompts(Sizes(_N_PLANT, 1, 1, self.settings.seq_len)).calibration
                    source = plant(source, kind, tokens, how)
                benches.append(Bench(source, self.settings, how, self.n_steps))
        return benches


def run(args: argparse.Namespace) -> int:
    """Measure and print, then write the record."""
    if args.table is None:
        return _list()
    asked = _Reproduce.of(args)
    with Line() as progress:
        benches = asked.benches(progress)
        measured = judged([make(name, benches, args.work, progress) for name in asked.tables])
    for one in measured:
        say("\n".join(one.lines()) + "\n")
        say("\n".join(t.plain() for t in one.shown.tables))
    if args.out:
        say(f"written: {write(measured, args.out)}")
    return 0


def _list() -> int:
    rows = [(name, ", ".join(TABLES.get(name).labels), TABLES.get(name).title) for name in in_order()]
    say(render(("name", "in the paper", "title"), rows))
    say("\n`loopq reproduce NAME [MODEL ...]` measures one of them, `loopq reproduce all` every one.")
    return 0


COMMANDS.register("reproduce")(
    Command(
        "print a table or figure of the paper, measured on any model",
        add,
        run,
        50,
        keeps=lambda args: args.work,
    )
)
