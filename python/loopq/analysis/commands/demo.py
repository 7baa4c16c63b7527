"""`loopq demo`: the main job on the embedded model, and the diagnosis of it and of PL-BERT as pages."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from loopq.analysis.diagnosis.config import DiagnoseConfig
from loopq.analysis.diagnosis.context import Context
from loopq.analysis.diagnosis.survey import diagnose
from loopq.analysis.report.alternatives import comparison
from loopq.analysis.report.markup import page_html
from loopq.analysis.report.page import write_data, write_page
from loopq.calibrate.data import TokenSet
from loopq.calibrate.plbert import PLBERT, data_folder, load_plbert, phonemes
from loopq.calibrate.prompts import Take, calibration_tokens, evaluation_tokens
from loopq.commands import COMMANDS, Command, variants
from loopq.commands.options import add_execution, check_place, execution, whole
from loopq.commands.output import layer_table, measurement_table
from loopq.errors import require
from loopq.models.load import LoadedModel, load_model
from loopq.settings.execution import Execution
from loopq.storage.files import write_text
from loopq.terminal.progress import Line

# Few prompts, so that both pages take about as long as the comparison; every page states its counts.
PAGES = {
    "huginn_small": DiagnoseConfig(
        n_prompts=4, n_ablation_prompts=4, n_jacobian_prompts=1, seeds=(0, 1), n_directions=8, n_updates=10
    ),
    PLBERT: DiagnoseConfig(n_prompts=2, n_ablation_prompts=2, n_jacobian_prompts=1, seeds=(0,)),
}
# Batch sizes that are smaller than usual.
_PAGE_BATCHES = {PLBERT: 2}
# Prompts for training the update, and prompts for the diagnosis.
_PAGE_TAKES = {"huginn_small": (Take(16), Take(32)), PLBERT: (Take(4), Take(16))}


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
        help="diagnose the embedded model and PL-BERT instead, and write a page for each into this folder",
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="data folder with models/plbert_kokoro (default: LOOPQ_DATA)",
    )


def run(args: argparse.Namespace) -> int:
    """Quantize the embedded model with each variant and print the comparison."""
    if args.html:
        return _pages(args)
    if args.page:
        check_place(args.page)
    with Line() as progress:
        result = variants.run(
            best=args.best,
            seeds=range(args.n_seeds),
            metric_seeds=range(args.n_metric_seeds),
            execution=execution(args, progress=progress),
        )
    if args.page:
        write_text(args.page, _page(result))
    if args.json:
        print(json.dumps(result, indent=1))
        return 0
    _print(result)
    if args.page:
        print(f"\nthe same as a page, to open in a browser: {args.page.resolve()}")
    return 0


def _print(result: dict[str, Any]) -> None:
    """Print the tables of a comparison."""
    print(_about(result))
    for grid in result["grids"]:
        print(f"\nINT{grid['bits']}, group {grid['group_size']}")
        print(measurement_table([result["reference"], *grid["variants"]]))
    print(
        "\nGPTQ, llm-compressor's rules: its default algorithm, computed by loopq: sums over all calls, a scale of "
        "half the range of codes, columns by falling diag H"
    )
    n = len(result["metric_seeds"])
    if n > 1:
        print(f"rows of loopq: mean and standard deviation (sd) over {n} draws of the loop metric's labels")
    else:
        print(
            "rows of loopq: one draw of the loop metric's labels; --n-metric-seeds 8 prints the spread over eight"
        )
    first = result["grids"][0]
    print(f"\nlayers of {first['variants'][-1]['name']}, INT{first['bits']}, group {first['group_size']}")
    print(layer_table(result["layers"]))


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


def _pages(args: argparse.Namespace) -> int:
    require("matplotlib")
    check_place(Path(args.html) / "page.html")
    with Line() as progress:
        written, left = pages(
            Path(args.html), data=data_folder(args.data), execution=execution(args, progress=progress)
        )
    for page in written:
        print(f"page: {page}; the same as data: {page.with_suffix('.json')}")
    print("\n".join(left), end="\n" if left else "")
    return 0


def pages(
    out: Path, *, data: Path | None = None, execution: Execution | None = None
) -> tuple[list[Path], list[str]]:
    """Diagnose the embedded model and PL-BERT, a published looped checkpoint, and write a page for each.

    Parameters
    ----------
    out : Path
        Folder for `NAME.html` and `NAME.json`. It is created if needed.
    data : Path, optional
        Data folder with `models/plbert_kokoro`. Without it PL-BERT is skipped, and the second result says so.

    Returns
    -------
    list of Path
        The pages.
    list of str
        Skipped models, with the reason.
    """
    execution = execution or Execution()
    out.mkdir(parents=True, exist_ok=True)
    written, left_out = [], []
    for name, config in PAGES.items():
        if name == PLBERT and (data is None or not (data / "models" / "plbert_kokoro").is_dir()):
            left_out.append(
                f"{name}: no page: its weights are not in {data or 'a data folder'}; give --data DIR or set LOOPQ_DATA"
            )
            continue
        loaded, train, held_out = _prepared(name, data)
        how = execution.changed(batch_size=_PAGE_BATCHES.get(name, execution.batch_size))
        depth = loaded.system.n_steps
        diagnosis = diagnose(
            Context(loaded.system, held_out, depth, config, execution=how, train=train), name=name
        )
        written.append(write_page(out / f"{name}.html", diagnosis=diagnosis))
        write_data(diagnosis, out / f"{name}.json")
    return written, left_out


def _prepared(name: str, data: Path | None) -> tuple[LoadedModel, TokenSet, TokenSet]:
    """Return a page's model, its training prompts, and its diagnosed prompts."""
    takes = dict(zip(("calibration", "evaluation"), _PAGE_TAKES[name], strict=True))
    if name == PLBERT:
        train, held_out = (phonemes(data, use, t.seq_len, t.n_prompts or 1) for use, t in takes.items())
        return load_plbert(data), train, held_out
    loaded = load_model(name)
    return (
        loaded,
        calibration_tokens(loaded, None, takes["calibration"]),
        evaluation_tokens(loaded, None, takes["evaluation"]),
    )


COMMANDS.register("demo")(Command("quantize the embedded model and print the comparison", add, run, 1))
