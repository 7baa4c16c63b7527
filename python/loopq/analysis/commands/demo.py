"""`loopq demo`: the main job on the embedded model, and diagnoses as pages: of it, and of models that guests bring."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loopq.analysis.diagnosis.config import DiagnoseConfig
from loopq.analysis.diagnosis.context import Context
from loopq.analysis.diagnosis.survey import diagnose
from loopq.analysis.report.alternatives import comparison
from loopq.analysis.report.markup import PAGE, page_html
from loopq.analysis.report.page import write_data, write_page
from loopq.calibrate.data import TokenSet
from loopq.calibrate.prompts import Take, calibration_tokens, evaluation_tokens
from loopq.commands import COMMANDS, Command, variants
from loopq.commands.options import add_execution, check_place, execution, whole
from loopq.commands.output import layer_table, measurement_table
from loopq.errors import require
from loopq.models.load import LoadedModel, load_model
from loopq.settings.execution import Execution
from loopq.settings.registry import Registry
from loopq.storage.folders import write_output
from loopq.terminal.progress import Line
from loopq.terminal.text import say


@dataclass(frozen=True)
class DemoPage:
    """A model that `loopq demo --html` diagnoses.

    Parameters
    ----------
    config : DiagnoseConfig
        Settings of its diagnosis.
    open : callable
        Returns the model, prompts to train the update and prompts to diagnose, of the folder given by ``--data``.
    absent : callable or None
        Returns why the model is not there, of the folder given by ``--data``. The text is empty if it is there. None
        for a model that needs no data folder.
    batch_size : int or None
        Prompts at once, if they are fewer than usual.
    """

    config: DiagnoseConfig
    open: Callable[[Path | None], tuple[LoadedModel, TokenSet, TokenSet]]
    absent: Callable[[Path | None], str] | None = None
    batch_size: int | None = None


PAGES: Registry[DemoPage] = Registry("page of the demo", "loopq.commands")


def embedded(train: Take, held_out: Take) -> tuple[LoadedModel, TokenSet, TokenSet]:
    """Return the embedded model with its training prompts and its diagnosed prompts."""
    loaded = load_model("huginn_small")
    return loaded, calibration_tokens(loaded, None, train), evaluation_tokens(loaded, None, held_out)


# Few prompts, so that the pages take about as long as the comparison; every page states its counts.
PAGES.register("huginn_small")(
    DemoPage(
        DiagnoseConfig(
            n_prompts=4,
            n_ablation_prompts=4,
            n_jacobian_prompts=1,
            seeds=(0, 1),
            n_directions=8,
            n_updates=10,
        ),
        lambda data: embedded(Take(16), Take(32)),
    )
)


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_execution(parser, only=("threads",))
    parser.add_argument(
        "--n-seeds",
        type=whole(1, 1 << 16),
        default=3,
        metavar="N",
        help="paired initial states (default %(default)s)",
    )
    parser.add_argument(
        "--n-metric-seeds",
        type=whole(1, 1 << 16),
        default=1,
        metavar="N",
        help="draws of the loop metric; from two on their standard deviation is printed (default %(default)s)",
    )
    parser.add_argument(
        "--best", action="store_true", help="add preset best, which takes longer than all other rows together"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the comparison as an HTML page too")
    parser.add_argument(
        "--html",
        metavar="DIR",
        help=f"diagnose {' and '.join(PAGES.names())} instead, and write a page for each into this folder",
    )
    others = [name for name, page in PAGES if page.absent is not None]
    if others:
        parser.add_argument(
            "--data",
            type=Path,
            metavar="DIR",
            help=f"data folder with {', '.join(others)} (default: LOOPQ_DATA)",
        )


def run(args: argparse.Namespace) -> int:
    """Quantize the embedded model with each variant and print the comparison."""
    if args.html:
        return _pages(Path(args.html), getattr(args, "data", None), execution(args))
    if args.page:
        check_place(args.page, PAGE, args)
    with Line() as progress:
        result = variants.run(
            best=args.best,
            seeds=range(args.n_seeds),
            metric_seeds=range(args.n_metric_seeds),
            execution=execution(args, progress=progress),
        )
    if args.page:
        write_output(args.page, _page(result).encode(), PAGE)
    if args.json:
        say(json.dumps(result, indent=1))
        return 0
    _print(result)
    if args.page:
        say(f"\nthe same as a page, to open in a browser: {args.page.resolve()}")
    return 0


def _print(result: dict[str, Any]) -> None:
    """Print the tables of a comparison."""
    say(_about(result))
    for grid in result["grids"]:
        say(f"\nINT{grid['bits']}, group {grid['group_size']}")
        say(measurement_table([result["reference"], *grid["variants"]]))
    say(
        "\nGPTQ, llm-compressor's rules: its default algorithm, computed by loopq: sums over all calls, a scale of "
        "half the range of codes, columns by falling diag H"
    )
    n = len(result["metric_seeds"])
    if n > 1:
        say(f"rows of loopq: mean and standard deviation (sd) over {n} draws of the loop metric's labels")
    else:
        say(
            "rows of loopq: one draw of the loop metric's labels; --n-metric-seeds 8 prints the spread over eight"
        )
    first = result["grids"][0]
    say(f"\nlayers of {first['variants'][-1]['name']}, INT{first['bits']}, group {first['group_size']}")
    say(layer_table(result["layers"]))


def _about(result: dict[str, Any]) -> str:
    cal, held = result["calibration"], result["evaluation"]
    return (
        f"model {result['model']}, {result['n_steps']} recurrence steps; calibrated on {cal['n_tokens']} tokens, "
        f"measured on {held['n_tokens']} held-out tokens, {len(result['seeds'])} paired initial states each"
    )


def _page(result: dict[str, Any]) -> str:
    """Return the tables of a comparison as one HTML page that loads nothing."""
    tables = [
        comparison(f"INT{grid['bits']}, group {grid['group_size']}", [result["reference"], *grid["variants"]])
        for grid in result["grids"]
    ]
    return page_html("loopq demo", _about(result), "\n".join(tables))


def _pages(out: Path, data: Path | None, how: Execution) -> int:
    require("matplotlib")
    check_place(out / "page.html", PAGE)
    with Line() as progress:
        written, left = pages(out, data=data, execution=how.changed(progress=progress))
    for page in written:
        say(f"page: {page}; the same as data: {page.with_suffix('.json')}")
    say("\n".join(left), end="\n" if left else "")
    return 0


def pages(
    out: Path, *, data: Path | None = None, execution: Execution | None = None
) -> tuple[list[Path], list[str]]:
    """Diagnose the models of the demo, and write a page for each.

    Parameters
    ----------
    out : Path
        Folder for `NAME.html` and `NAME.json`. It is created if needed.
    data : Path, optional
        Data folder of models that are not embedded. A model that is not there is skipped, and the second result says
        so.

    Returns
    -------
    list of Path
        The pages.
    list of str
        Skipped models, with the reason.
    """
    execution = execution or Execution()
    reasons = {name: page.absent(data) if page.absent else "" for name, page in PAGES}
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for name, page in PAGES:
        if reasons[name]:
            continue
        loaded, train, held_out = page.open(data)
        how = execution.changed(batch_size=page.batch_size or execution.batch_size)
        depth = loaded.system.n_steps
        diagnosis = diagnose(
            Context(loaded.system, held_out, depth, page.config, execution=how, train=train), name=name
        )
        written.append(write_page(out / f"{name}.html", diagnosis=diagnosis))
        write_data(diagnosis, out / f"{name}.json")
    return written, [f"{name}: no page: {reason}" for name, reason in reasons.items() if reason]


COMMANDS.register("demo")(Command("quantize the embedded model and print the comparison", add, run, 1))
