"""`loopq diagnose`: effects of the loop on its own error, as numbers and as one page."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loopq.analysis.api import diagnose
from loopq.analysis.diagnosis.config import DiagnoseConfig
from loopq.analysis.diagnosis.sections import in_order
from loopq.analysis.diagnosis.survey import diagnose_dump
from loopq.analysis.report.diagnosis import DATA
from loopq.analysis.report.markup import PAGE
from loopq.analysis.report.page import write_data, write_page
from loopq.calibrate.prompts import Take, calibration_tokens
from loopq.commands import COMMANDS, Command
from loopq.commands.numbers import tables
from loopq.commands.options import add_execution, add_settings, add_text, check_place, execution, given, take
from loopq.commands.source import ModelOptions, add_source
from loopq.errors import ConfigError, require
from loopq.settings.execution import Execution
from loopq.terminal.progress import Line, Progress
from loopq.terminal.text import say

QUICK = ("ranks", "overlap", "ablation", "injection")


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_source(
        parser,
        "embedded model (huginn_small), folder or hub id; or a dump of `loopq collect`, for which SciPy is needed, and "
        "not torch",
    )
    parser.add_argument("--html", metavar="FILE", help="write the result as one self-contained page")
    parser.add_argument("--json", metavar="FILE", help="write the result as data")
    parser.add_argument(
        "--only",
        metavar="A,B",
        help="sections to run, and to print with their numbers (default: all that the model can have)",
    )
    parser.add_argument(
        "--quick", action="store_true", help=f"run only {', '.join(QUICK)}: a minute, not many"
    )
    parser.add_argument(
        "--work", metavar="DIR", help="save finished sections here, so that the same command resumes"
    )
    add_settings(parser, DiagnoseConfig)
    add_text(parser, "calibration")
    add_execution(parser)


@dataclass(frozen=True)
class _Diagnose:
    """What to diagnose, how, and where page and data go."""

    source: ModelOptions
    calibration: str | None
    take: Take
    config: DiagnoseConfig
    only: Sequence[str] | None
    execution: Execution
    html: str | None
    json: str | None

    @classmethod
    def of(cls, args: argparse.Namespace) -> _Diagnose:
        """Read and check the options."""
        if args.html:
            require("matplotlib")
        work = Path(args.work) if args.work else None
        for file, ours in ((args.html, PAGE), (args.json, DATA), (work and work / "section.json", b"")):
            if file:
                check_place(file, ours, args)
        if args.only and args.quick:
            raise ConfigError("--only and --quick both choose the sections: give one of them")
        return cls(
            ModelOptions.of(args),
            args.calibration,
            take(args),
            DiagnoseConfig().changed(**given(args, DiagnoseConfig)),
            args.only.split(",") if args.only else QUICK if args.quick else None,
            execution(args, work=work),
            args.html,
            args.json,
        )

    def diagnose(self, progress: Progress) -> dict[str, Any]:
        """Diagnose the model or the dump."""
        source, how = self.source, self.execution.changed(progress=progress)
        if source.model is not None and (Path(source.model) / "manifest.json").is_file():
            if self.only is not None:
                raise ConfigError("a dump holds activations only: --only and --quick are for models")
            return diagnose_dump(Path(source.model), config=self.config, execution=how)
        loaded = source.load()
        tokens = calibration_tokens(loaded, self.calibration, self.take)
        return diagnose(
            loaded,
            tokens,
            self.config,
            n_steps=source.depth,
            only=self.only,
            name=source.name,
            **how.flat(),
        )


def run(args: argparse.Namespace) -> int:
    """Diagnose a model or a dump, print the verdicts, write page and data."""
    asked = _Diagnose.of(args)
    with Line() as progress:
        diagnosis = asked.diagnose(progress)
    if asked.html:
        write_page(asked.html, diagnosis=diagnosis)
        say(f"page: {asked.html}")
    if asked.json:
        write_data(diagnosis, asked.json)
        say(f"data: {asked.json}")
    _print(diagnosis)
    for name, section in diagnosis["sections"].items() if args.only else ():
        say(f"\n{name}\n" + "\n\n".join(tables(section)))
    return 0


def _print(diagnosis: dict[str, Any]) -> None:
    for layer in diagnosis["layers"]:
        say(f"{layer['name']}: {layer['verdict']['text']}")
    say()
    say("\n".join(diagnosis["summary"]))
    said = (
        section.says(diagnosis["sections"][name])
        for name, section in in_order().items()
        if name in diagnosis["sections"]
    )
    say("".join(f"{line}\n" for line in said if line), end="")
    for entry in diagnosis["unavailable"]:
        say(f"not available: {entry['section']}: {entry['reason']}")


COMMANDS.register("diagnose")(
    Command(
        "measure how errors travel through the loop",
        add,
        run,
        22,
        keeps=lambda args: Path(args.work) if args.work else None,
    )
)
