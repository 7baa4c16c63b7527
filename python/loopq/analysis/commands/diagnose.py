"""`loopq diagnose`: effects of the loop on its own error, as numbers and as one page."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from loopq.analysis.api import diagnose
from loopq.analysis.diagnosis.config import DiagnoseConfig
from loopq.analysis.diagnosis.sections import in_order
from loopq.analysis.diagnosis.survey import diagnose_dump
from loopq.analysis.report.page import write_data, write_page
from loopq.calibrate.prompts import calibration_tokens
from loopq.commands import COMMANDS, Command
from loopq.commands.numbers import tables
from loopq.commands.options import add_execution, add_settings, add_text, check_place, execution, given, take
from loopq.commands.source import add_source, load
from loopq.errors import ConfigError, require
from loopq.settings.execution import Execution
from loopq.terminal.progress import Line

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


def run(args: argparse.Namespace) -> int:
    """Diagnose a model or a dump, print the verdicts, write page and data."""
    if args.html:
        require("matplotlib")
    kept = Path(args.work) / "section.json" if args.work else None
    for file in filter(None, (args.html, args.json, kept)):
        check_place(file)
    config = config_of(args)
    with Line() as progress:
        diagnosis = (
            _dump(args, config, progress)
            if args.model is not None and (Path(args.model) / "manifest.json").is_file()
            else _model(args, config, progress)
        )
    if args.html:
        write_page(args.html, diagnosis=diagnosis)
        print(f"page: {args.html}")
    if args.json:
        write_data(diagnosis, args.json)
        print(f"data: {args.json}")
    _print(diagnosis)
    for name, section in diagnosis["sections"].items() if args.only else ():
        print(f"\n{name}\n" + "\n\n".join(tables(section)))
    return 0


def config_of(args: argparse.Namespace) -> DiagnoseConfig:
    """Read the settings of a diagnosis."""
    return DiagnoseConfig().changed(**given(args, DiagnoseConfig))


def _dump(args: argparse.Namespace, config: DiagnoseConfig, progress: Line) -> dict[str, Any]:
    if args.only or args.quick:
        raise ConfigError("a dump holds activations only: --only and --quick are for models")
    return diagnose_dump(Path(args.model), config=config, execution=execution(args, progress=progress))


def _model(args: argparse.Namespace, config: DiagnoseConfig, progress: Line) -> dict[str, Any]:
    if args.only and args.quick:
        raise ConfigError("--only and --quick both choose the sections: give one of them")
    loaded = load(args)
    return diagnose(
        loaded,
        calibration_tokens(loaded, args.calibration, take(args)),
        config,
        n_steps=args.n_steps,
        only=args.only.split(",") if args.only else QUICK if args.quick else None,
        name=args.model or args.python,
        work=Path(args.work) if args.work else None,
        progress=progress,
        **given(args, Execution),
    )


def _print(diagnosis: dict[str, Any]) -> None:
    for layer in diagnosis["layers"]:
        print(f"{layer['name']}: {layer['verdict']['text']}")
    print()
    print("\n".join(diagnosis["summary"]))
    said = (
        section.says(diagnosis["sections"][name])
        for name, section in in_order().items()
        if name in diagnosis["sections"]
    )
    print("".join(f"{line}\n" for line in said if line), end="")
    for entry in diagnosis["unavailable"]:
        print(f"not available: {entry['section']}: {entry['reason']}")


COMMANDS.register("diagnose")(
    Command(
        "measure how errors travel through the loop",
        add,
        run,
        22,
        keeps=lambda args: Path(args.work) if args.work else None,
    )
)
