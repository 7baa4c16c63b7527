"""`loopq reproduce`: the paper's tables, on the embedded model or on models of one's own."""

from __future__ import annotations

import argparse
import datetime
import platform
from pathlib import Path
from typing import Any

from loopq.commands import COMMANDS, Command
from loopq.commands.options import add_execution, check_place, execution, whole
from loopq.errors import ConfigError
from loopq.progress import Line

_WORK = Path(".cache") / "main-table"


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    from loopq.reproduce.main_table import Settings

    default = Settings()
    parser.add_argument("table", choices=("main-table",), help="which table")
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help="folders, hub ids, plbert (default: the embedded model, and plbert where there is a data folder)",
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="data folder, for plbert (default: LOOPQ_DATA)",
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=_WORK,
        metavar="DIR",
        help="keep each model's results here; what is there is not run again (default %(default)s)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="write the record here, as main-table-DATE.json and .md"
    )
    parser.add_argument(
        "--n-calibration",
        type=whole(1, 1 << 20),
        metavar="N",
        default=default.n_calibration,
        help="prompts of one calibration set (default %(default)s)",
    )
    parser.add_argument(
        "--n-evaluation",
        type=whole(2, 1 << 20),
        metavar="N",
        default=default.n_evaluation,
        help="held-out prompts (default %(default)s)",
    )
    parser.add_argument(
        "--seq-len",
        type=whole(2, 1 << 20),
        metavar="N",
        default=default.seq_len,
        help="tokens of a prompt (default %(default)s)",
    )
    parser.add_argument(
        "--n-seeds",
        type=whole(1, 1 << 20),
        metavar="N",
        default=default.n_seeds,
        help="calibration seeds (default %(default)s)",
    )
    add_execution(parser, only=("threads",))


def run(args: argparse.Namespace) -> int:
    """Measure every model, print the tables, write the record."""
    from loopq import zoo
    from loopq.reproduce import main_table, main_text
    from loopq.reproduce.models import PLBERT, data_folder

    for folder in filter(None, (args.work, args.out)):
        check_place(folder / "main-table.json")
    data = data_folder(args.data)
    names = args.models or [*zoo.available(), *([PLBERT] if data else [])]
    settings = main_table.Settings(
        n_calibration=args.n_calibration,
        n_evaluation=args.n_evaluation,
        seq_len=args.seq_len,
        n_seeds=args.n_seeds,
    )
    if len(set(names)) < len(names):
        raise ConfigError(f"a model is named twice: {', '.join(names)}")
    with Line() as progress:
        found = main_table.run(
            names, settings, data=data, work=args.work, threads=execution(args).threads, progress=progress
        )
    record = main_text.summarize(found)
    tables = main_text.tables(record)
    lines = main_text.headline(record)
    print("\n".join(lines) + "\n")
    print("\n".join(t.plain() for t in tables))
    if data is None and not args.models:
        print("plbert is left out: there is no data folder (give --data DIR or set LOOPQ_DATA)")
    if args.out:
        _write(args.out, record, lines, tables)
    return 0


def _write(out: Path, record: dict[str, Any], lines: list[str], tables: list[Any]) -> None:
    """Write the dated record, each file whole."""
    import loopq
    from loopq.checkpoint.files import replacing, write_json

    today = datetime.date.today().isoformat()
    out.mkdir(parents=True, exist_ok=True)
    made = {"date": today, "loopq": loopq.__version__, "machine": platform.machine()}
    path = out / f"main-table-{today}.json"
    write_json(path, {"made": made} | record)
    seconds = sum(m["seconds"] for m in record["models"])
    text = [
        "# Main table",
        "",
        f"`loopq reproduce main-table`, {today}, loopq {loopq.__version__}, {len(record['models'])} models, "
        f"{seconds / 60:.0f} minutes of wall time. Plain data beside it: [{path.name}]({path.name}).",
        "",
        *(f"{'  ' if line.startswith(' ') else ''}* {line.strip()}" for line in lines),
        "",
        "\n".join(t.markdown() for t in tables),
    ]
    with replacing(path.with_suffix(".md")) as temporary:
        temporary.write_text("\n".join(text), "utf-8")
    print(f"written: {path.with_suffix('.md')} and {path.name}")


COMMANDS.register("reproduce")(
    Command(
        "print a table of the paper, measured on small models", add, run, 50, keeps=lambda args: args.work
    )
)
