"""`loopq evaluate`: measure the distance of a checkpoint from the full-precision model."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loopq import zoo
from loopq.api import evaluate
from loopq.calibrate.data import TokenSet
from loopq.calibrate.prompts import CHUNK, Take, evaluation_chunks, evaluation_tokens
from loopq.commands import COMMANDS, Command, hooks
from loopq.commands.hooks import SPEEDS, Finished, HeldOut
from loopq.commands.options import (
    add_execution,
    add_text,
    execution,
    take,
    whole,
)
from loopq.commands.output import measurement_table, spread_table
from loopq.commands.source import ModelOptions, add_source
from loopq.errors import ConfigError
from loopq.evaluation.metric import Metric
from loopq.formats.checkpoint import Checkpoint
from loopq.formats.convert import check_readable, is_checkpoint, read_any
from loopq.formats.hf_folder import CONFIG
from loopq.models.load import LoadedModel
from loopq.models.restore import open_any
from loopq.settings.execution import Execution
from loopq.storage.schema import Object
from loopq.terminal.progress import Line
from loopq.terminal.table import render, short
from loopq.terminal.text import say

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


@dataclass(frozen=True)
class _Evaluate:
    """What to measure, on which text. `pages` are what the hooks of guests write."""

    source: ModelOptions
    folders: list[str]
    text: str | None
    take: Take
    chunks: bool
    execution: Execution
    n_seeds: int
    pages: Sequence[Callable[[Finished], str]]
    as_json: bool

    @classmethod
    def of(cls, args: argparse.Namespace) -> _Evaluate:
        """Read and check the options."""
        folders, chunks = args.checkpoints, args.llama_cpp_style
        if args.python is not None and args.model is not None:
            folders = [args.model, *folders]
        if not folders:
            raise ConfigError("name a checkpoint to compare with the model: DIR")
        for folder in folders:
            _check_order(args.model, folder)
            check_readable(folder)
        pages = hooks.asked(args, "evaluate")
        source = ModelOptions.of(args)
        if args.python is not None:
            source = dataclasses.replace(source, model=None)
        length = take(args, CHUNK if chunks else Take().seq_len)
        return cls(
            source, folders, args.text, length, chunks, execution(args), args.n_seeds, pages, args.json
        )


def _check_order(model: str | None, folder: str) -> None:
    """Reject a model in the place of a checkpoint."""
    full = folder in zoo.available() or folder.startswith("looped:")
    full |= (Path(folder) / CONFIG).is_file() and not is_checkpoint(Path(folder))
    if full:
        first = model if model and is_checkpoint(Path(model)) else "CHECKPOINT"
        raise ConfigError(
            f"{folder}: a model in full precision, not a checkpoint; the model comes first: loopq evaluate {folder} "
            f"{first}"
        )


def run(args: argparse.Namespace) -> int:
    """Measure and print a table."""
    asked = _Evaluate.of(args)
    loaded = asked.source.load()
    read = evaluation_chunks if asked.chunks else evaluation_tokens
    tokens = read(loaded, asked.text, asked.take)
    checkpoints = {folder: read_any(Path(folder)) for folder in asked.folders}
    measured = [
        measure(loaded, checkpoints, tokens, depth, asked.execution, asked.n_seeds)
        for depth in asked.source.depths
    ]
    if len(measured) > 1:
        return _print_depths(measured, loaded, checkpoints, as_json=asked.as_json)
    finished = Finished(asked.source, loaded, checkpoints, asked.execution, measured[0])
    lines = [write(finished) for write in asked.pages]
    if asked.as_json:
        say(json.dumps(measured[0].summaries, indent=1))
    else:
        print_measured(measured[0].summaries, measured[0].about)
        say("".join(f"{line}\n" for line in lines if line), end="")
    return 0


def _print_depths(
    measured: Sequence[HeldOut], loaded: LoadedModel, checkpoints: Mapping[str, Checkpoint], *, as_json: bool
) -> int:
    """Print one table of measurements at several depths, with the speed of generation."""
    rows = [row | {"n_steps": one.about["n_steps"]} for one in measured for row in one.summaries]
    prompt = measured[0].text.sequences[0].tolist()
    for name in (rows[0]["name"], *checkpoints):
        for _, speed in SPEEDS:
            # Codes stay packed, as in `loopq run`.
            model = open_any(name, quantized=True) if name in checkpoints else loaded
            for row in (row for row in rows if row["name"] == name):
                row["tokens_per_second"] = speed(model.system, row["n_steps"], prompt)
    if as_json:
        say(json.dumps(rows, indent=1))
        return 0
    depths = ", ".join(str(one.about["n_steps"]) for one in measured)
    print_measured(rows, {**measured[-1].about, "n_steps": depths})
    say("KL: at each depth to full precision at that depth; tokens/s: one text on this machine")
    return 0


def measure(
    loaded: LoadedModel,
    checkpoints: Mapping[str, Checkpoint],
    tokens: TokenSet,
    n_steps: int | None,
    how: Execution,
    n_seeds: int = 1,
) -> HeldOut:
    """Measure checkpoints of a model on prompts. Summarise each set of weights, and describe the prompts."""
    with Line() as progress:
        measured = evaluate(
            loaded,
            checkpoints,
            tokens,
            n_steps=n_steps,
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
    depth = n_steps if n_steps is not None else loaded.system.n_steps
    return HeldOut(tokens, summaries, {**tokens.describe(), "n_steps": depth, "n_seeds": n_seeds})


def print_measured(summaries: Sequence[dict[str, Any]], said: Mapping[str, Any]) -> None:
    """Print the table and the measured data."""
    say(
        f"{said['n_prompts']} prompts, {said['n_tokens']} tokens of {said['source']}, {said['n_steps']} steps, initial "
        f"states of each: {said['n_seeds']}, the same in every row"
    )
    if "tokens" in summaries[-1]:
        say(spread_table(summaries))
        say(f"{summaries[-1]['tokens']['n_scored']} positions scored, the second half of each chunk")
        return
    say(measurement_table(summaries))
    say("KL: to full precision, mean over tokens; 95 %: bootstrap over prompts; agreement: same top-1 token")
    if "answers" in summaries[0]:
        say(_answer_table(said["source"], summaries))


def _answer_table(task: str, summaries: Sequence[Object]) -> str:
    """Return the share of right answers of each set of weights, and its change from the first."""

    def cells(interval: Object | None, form: str) -> tuple[str | None, str | None]:
        if interval is None:
            return None, None
        value, low, high = (100 * interval[end] for end in ("estimate", "low", "high"))
        return form.format(value), f"[{low:.1f}, {high:.1f}]"

    table = [
        (
            task,
            "answer",
            row["name"],
            len(row["answers"]["values"]),
            *cells(row["answers"]["interval"], "{:.1f} %"),
            *cells(row["answers"]["change"], "{:+.1f}"),
            short(row["answers"]["p_value"]),
        )
        for row in summaries
    ]
    header = ("task", "metric", "weights", "items", "value", "95 %", "change", "95 % ", "McNemar p")
    return (
        f"{render(header, table)}\n95 %: Wilson's interval\n"
        "change: from the first weights on the same items, in points; paired bootstrap over items, exact McNemar test"
    )


COMMANDS.register("evaluate")(
    Command("measure checkpoints against the full-precision model", add, run, 11, epilog=_EXAMPLES)
)
