"""`loopq evaluate`: measure the distance of a checkpoint from the full-precision model."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loopq.api import evaluate
from loopq.calibrate.data import TokenSet
from loopq.calibrate.prompts import CHUNK, Take, evaluation_chunks, evaluation_tokens
from loopq.commands import COMMANDS, Command, hooks
from loopq.commands.hooks import SPEEDS, Finished, HeldOut
from loopq.commands.options import (
    add_execution,
    add_text,
    each_depth,
    execution,
    take,
    whole,
)
from loopq.commands.output import measurement_table, spread_table
from loopq.commands.source import add_source, load, source_words
from loopq.errors import ConfigError
from loopq.evaluation.metric import Metric
from loopq.formats.checkpoint import Checkpoint
from loopq.formats.convert import check_readable, read_any
from loopq.models.load import LoadedModel
from loopq.models.restore import open_any
from loopq.storage.schema import Object
from loopq.terminal.progress import Line
from loopq.terminal.table import render, short

_EXAMPLES = """examples:
  loopq evaluate MODEL Q1 Q2                       KL, agreement and perplexity on the same prompts
  loopq evaluate MODEL Q --n-steps 1,2,4           one table, with tokens per second at each depth
  loopq evaluate MODEL Q --text held-out.txt       on a text of your own"""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_source(parser, several=True)
    parser.add_argument(
        "checkpoints",
        nargs="*",
        metavar="DIR",
        help="checkpoints of that model, of any format that loopq reads",
    )
    add_text(parser, "text")
    add_execution(parser, only=("seed", "batch_size"))
    parser.add_argument(
        "--n-seeds",
        type=whole(1, 1 << 16),
        default=1,
        metavar="N",
        help="paired initial states of each prompt (default %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    hooks.add_hooks(parser, "evaluate")
    parser.add_argument(
        "--llama-cpp-style",
        action="store_true",
        help=f"as llama-perplexity --kl-divergence: chunks of --seq-len (default {CHUNK}) tokens of the whole text, "
        "the first half of each not scored; mean, median and 99 %% of the KL, same top token",
    )


def run(args: argparse.Namespace) -> int:
    """Measure and print a table."""
    if args.python is not None and args.model is not None:
        args.model, args.checkpoints = None, [args.model, *args.checkpoints]
    if not args.checkpoints:
        raise ConfigError("name a checkpoint to compare with the model: DIR")
    for folder in args.checkpoints:
        check_readable(folder)
    pages = hooks.asked(args, "evaluate")
    loaded = load(args)
    read = evaluation_chunks if args.llama_cpp_style else evaluation_tokens
    tokens = read(loaded, args.text, take(args, CHUNK if args.llama_cpp_style else Take().seq_len))
    checkpoints = {folder: read_any(Path(folder)) for folder in args.checkpoints}
    if isinstance(args.n_steps, tuple):
        return _run_depths(args, loaded, checkpoints, tokens)
    summaries, said = measure(args, loaded, checkpoints, tokens, args.n_seeds)
    measured = HeldOut(tokens, summaries, said)
    finished = Finished(
        source_words(args),
        str(args.model or args.python),
        loaded,
        checkpoints,
        args.n_steps,
        execution(args),
        measured,
    )
    lines = [write(finished) for write in pages]
    if args.json:
        print(json.dumps(summaries, indent=1))
    else:
        print_measured(summaries, said)
        print("".join(f"{line}\n" for line in lines if line), end="")
    return 0


def _run_depths(
    args: argparse.Namespace,
    loaded: LoadedModel,
    checkpoints: Mapping[str, Checkpoint],
    tokens: TokenSet,
) -> int:
    """Measure at several depths, with the speed of generation. Print one table."""
    rows: list[dict[str, Any]] = []
    for one in each_depth(args):
        summaries, said = measure(one, loaded, checkpoints, tokens, args.n_seeds)
        rows += [summary | {"n_steps": one.n_steps} for summary in summaries]
    prompt = tokens.sequences[0].tolist()
    for name in (rows[0]["name"], *checkpoints):
        for _, speed in SPEEDS:
            # Codes stay packed, as in `loopq run`.
            model = open_any(name, quantized=True) if name in checkpoints else loaded
            for row in (row for row in rows if row["name"] == name):
                row["tokens_per_second"] = speed(model.system, row["n_steps"], prompt)
    if args.json:
        print(json.dumps(rows, indent=1))
        return 0
    print_measured(rows, said | {"n_steps": ", ".join(map(str, args.n_steps))})
    print("KL: at each depth to full precision at that depth; tokens/s: one text on this machine")
    return 0


def measure(
    args: argparse.Namespace,
    loaded: LoadedModel,
    checkpoints: Mapping[str, Checkpoint],
    tokens: TokenSet,
    n_seeds: int = 1,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Measure checkpoints of a model on prompts. Return a summary of each set of weights and the data description."""
    how = execution(args)
    with Line() as progress:
        measured = evaluate(
            loaded,
            checkpoints,
            tokens,
            n_steps=args.n_steps,
            seeds=range(how.seed, how.seed + n_seeds),
            progress=progress,
            batch_size=how.batch_size,
        )
    summaries = [m.summary() for m in measured]
    for summary, measurement in zip(summaries[1:], measured[1:], strict=True):
        interval = measurement.kl_interval()
        summary["kl_95"] = None if interval is None else [interval.low, interval.high]
        summary["kl_by_prompt"] = measurement.kl.mean(axis=0).tolist()
    if tokens.scored_from and tokens.packing != "chunks" and loaded.system.output == "logits":
        answers = [Metric("answer", m.answered[0]) for m in measured]
        for summary, metric in zip(summaries, answers, strict=True):
            summary["answers"] = metric.to_json(None if metric is answers[0] else answers[0])
    depth = args.n_steps if args.n_steps is not None else loaded.system.n_steps
    return summaries, {**tokens.describe(), "n_steps": depth, "n_seeds": n_seeds}


def print_measured(summaries: Sequence[dict[str, Any]], said: dict[str, Any]) -> None:
    """Print the table and the measured data."""
    print(
        f"{said['n_prompts']} prompts, {said['n_tokens']} tokens of {said['source']}, {said['n_steps']} steps, initial "
        f"states of each: {said['n_seeds']}, the same in every row"
    )
    if "tokens" in summaries[-1]:
        print(spread_table(summaries))
        print(f"{summaries[-1]['tokens']['n_scored']} positions scored, the second half of each chunk")
        return
    print(measurement_table(summaries))
    print(
        "KL: to full precision, mean over tokens; 95 %: bootstrap over prompts; agreement: same top-1 token"
    )
    if "answers" in summaries[0]:
        head = {"task": said["source"], "n_cut": 0}
        print(task_table([head | {"weights": s["name"]} | s["answers"] for s in summaries]))


def task_table(rows: Sequence[Object]) -> str:
    """Return the table of tasks, with a line for each metric and set of weights, and notes on cut contexts."""

    def cells(row: Object, key: str) -> tuple[str | None, str | None]:
        interval, share = row[key], row["sizes"] is None
        if interval is None:
            return None, None
        change, unit = key == "change", 100 if share else 1
        value, low, high = (unit * interval[end] for end in ("estimate", "low", "high"))
        if share:
            return f"{value:+.1f}" if change else f"{value:.1f} %", f"[{low:.1f}, {high:.1f}]"
        return f"x{value:.4f}" if change else f"{value:.4g}", f"[{low:.4g}, {high:.4g}]"

    table = [
        (
            r["task"],
            r["metric"],
            r["weights"],
            len(r["values"]),
            *cells(r, "interval"),
            *cells(r, "change"),
            short(r["p_value"]),
        )
        for r in rows
    ]
    header = ("task", "metric", "weights", "items", "value", "95 %", "change", "95 % ", "McNemar p")
    lines = [
        render(header, table),
        "95 %: Wilson's interval, of a perplexity bootstrap over items",
        "change: from the first weights on the same items, in points, of a perplexity the ratio; paired bootstrap over "
        "items, exact McNemar test",
    ]
    cut = {r["task"]: (r["n_cut"], len(r["values"])) for r in rows if r["n_cut"]}
    for task, (n_cut, n) in cut.items():
        lines.append(
            f"{task}: {n_cut} of {n} contexts are longer than the model reads and were cut at their left"
        )
    return "\n".join(lines)


COMMANDS.register("evaluate")(
    Command("measure checkpoints against the full-precision model", add, run, 11, epilog=_EXAMPLES)
)
