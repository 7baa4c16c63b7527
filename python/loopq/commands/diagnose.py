"""`loopq diagnose`: what the loop does to its own error, as numbers and as one page."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from loopq import config as defaults
from loopq.commands import COMMANDS, Command
from loopq.commands.options import add_model, add_text, check_place, load, memory
from loopq.config import DiagnoseConfig
from loopq.errors import ConfigError
from loopq.progress import Line

QUICK = ("ranks", "overlap", "ablation", "arms")


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    config = DiagnoseConfig()
    add_model(parser, "folder, hub id or huginn_small; or a dump of `loopq collect`, without torch")
    add_text(parser, "calibration", defaults.CALIBRATION_PROMPTS)
    parser.add_argument("--html", metavar="FILE", help="write one self-contained page")
    parser.add_argument("--json", metavar="FILE", help="write the same as data")
    parser.add_argument(
        "--only", metavar="A,B", help="sections to run (default: all that the system can have)"
    )
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}: a minute, not many")
    parser.add_argument("--work", metavar="DIR", help="keep finished sections here and go on with them")
    parser.add_argument("--memory", type=memory, metavar="SIZE", help="limit for Hessians, as in 8G")
    parser.add_argument(
        "--bits",
        type=int,
        default=config.bits,
        metavar="N",
        help="bits of the rounding that is measured (default %(default)s)",
    )
    parser.add_argument(
        "--group-size",
        type=int,
        default=config.group_size,
        metavar="N",
        help="its group size; -1: one scale per output row (default %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Diagnose a model or a dump, print the verdicts, write page and data."""
    if args.html:
        from loopq.lazy import require

        require("matplotlib")
    kept = Path(args.work) / "section.json" if args.work else None
    for file in filter(None, (args.html, args.json, kept)):
        check_place(file)
    with Line() as progress:
        found = (
            _dump(args, progress)
            if (Path(args.model) / "manifest.json").is_file()
            else _model(args, progress)
        )
    if args.html:
        from loopq.report.page import write_report

        write_report(found, args.html)
        print(f"page: {args.html}")
    if args.json:
        from loopq.report.page import write_data

        write_data(found, args.json)
        print(f"data: {args.json}")
    _print(found)
    return 0


def _config(args: argparse.Namespace) -> DiagnoseConfig:
    return DiagnoseConfig(
        bits=args.bits, group_size=args.group_size, batch_size=args.batch_size, seed=args.seed
    )


def _dump(args: argparse.Namespace, progress: Line) -> dict[str, Any]:
    from loopq.diagnose.survey import diagnose_dump

    if args.only or args.quick:
        raise ConfigError("a dump holds activations only: --only and --quick are for models")
    return diagnose_dump(Path(args.model), config=_config(args), threads=args.threads, progress=progress)


def _model(args: argparse.Namespace, progress: Line) -> dict[str, Any]:
    from loopq.api import calibration_tokens
    from loopq.diagnose.survey import diagnose

    if args.only and args.quick:
        raise ConfigError("--only and --quick both choose the sections: give one of them")
    loaded = load(args)
    tokens = calibration_tokens(loaded, args.calibration, n_prompts=args.n_prompts, seq_len=args.seq_len)
    only = args.only.split(",") if args.only else list(QUICK) if args.quick else None
    return diagnose(
        loaded.system,
        tokens,
        args.n_steps,
        config=_config(args),
        only=only,
        train=tokens,
        name=str(args.model),
        work=Path(args.work) if args.work else None,
        memory=args.memory,
        threads=args.threads,
        progress=progress,
    )


def _print(found: dict[str, Any]) -> None:
    for layer in found["layers"]:
        print(f"{layer['name']}: {layer['verdict']['text']}")
    print()
    print("\n".join(found["summary"]))
    print(_radius(found), end="")
    for entry in found["unavailable"]:
        print(f"not available: {entry['section']}: {entry['reason']}")


def _radius(found: dict[str, Any]) -> str:
    """The spectral radius with what its estimates were held against; empty where it was not measured."""
    section = found["sections"].get("jacobian")
    if not section:
        return ""
    a, plain = section["acceptance"], section["states"]["plain"]
    text = f"spectral radius of a step: {a['n_accepted']} of {a['n_maps']} maps meet the acceptance rules"
    if plain["maps"]:
        radius, rounded = (plain["maps"][name]["radius"]["estimate"] for name in ("reference", "changed"))
        text += f"; mean {radius:.3f}, rounded {rounded:.3f} on {plain['n_accepted']} of {plain['n_prompts']} prompts"
    return (
        f"{text}; largest relative residual {a['largest_residual']:.1e}, largest disagreement of two starts "
        f"{a['largest_disagreement']:.1e}\n"
    )


COMMANDS.register("diagnose")(
    Command(
        "show what the loop does to its own error, as numbers and as a page",
        add,
        run,
        22,
        keeps=lambda args: Path(args.work) if args.work else None,
    )
)
