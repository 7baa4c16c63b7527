"""`loopq demo`: the main job on the embedded model."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from loopq.commands import COMMANDS, Command
from loopq.commands.options import add_execution, check_place, execution, whole
from loopq.commands.output import layer_table, measurement_table
from loopq.lazy import require
from loopq.terminal.progress import Line


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
    from loopq import demo
    from loopq.report.comparison import write_comparison

    if args.html:
        return _pages(args)
    if args.page:
        check_place(args.page)
    with Line() as progress:
        result = demo.run(
            best=args.best,
            seeds=range(args.n_seeds),
            metric_seeds=range(args.n_metric_seeds),
            execution=execution(args, progress=progress),
        )
    if args.page:
        write_comparison(result, args.page)
    if args.json:
        print(json.dumps(result, indent=1))
        return 0
    cal, held = result["calibration"], result["evaluation"]
    print(
        f"model {result['model']}, {result['n_steps']} recurrence steps; calibrated on {cal['n_tokens']} tokens, "
        f"measured on {held['n_tokens']} held-out tokens, {len(result['seeds'])} paired initial states each"
    )
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
    if args.page:
        print(f"\nthe same as a page, to open in a browser: {args.page.resolve()}")
    return 0


def _pages(args: argparse.Namespace) -> int:
    from loopq import demo
    from loopq.calibrate.plbert import data_folder

    require("matplotlib")
    check_place(Path(args.html) / "page.html")
    with Line() as progress:
        written, left = demo.pages(
            Path(args.html), data=data_folder(args.data), execution=execution(args, progress=progress)
        )
    for page in written:
        print(f"page: {page}; the same as data: {page.with_suffix('.json')}")
    print("\n".join(left), end="\n" if left else "")
    return 0


COMMANDS.register("demo")(Command("quantize the embedded model and print the comparison", add, run, 1))
