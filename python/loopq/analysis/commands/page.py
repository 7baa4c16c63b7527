"""`--html` of `loopq quantize` and `loopq evaluate`: a page about what was measured."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

from loopq.analysis.api import diagnose
from loopq.analysis.commands.diagnose import QUICK
from loopq.analysis.diagnosis.config import DiagnoseConfig
from loopq.analysis.report.markup import PAGE
from loopq.analysis.report.page import write_page
from loopq.analysis.report.weights import tensors
from loopq.commands.hooks import HOOKS, Finished, Hook
from loopq.commands.options import check_place
from loopq.errors import ConfigError, require
from loopq.evaluation.layers import N_PROMPTS, layer_errors
from loopq.formats.checkpoint import weights_of
from loopq.systems.base import LoopedSystem
from loopq.terminal.progress import Line

_HELP = {
    "quantize": "write a page: what was done to every weight, its error at every step, with --evaluate KL, "
    f"and a diagnosis ({', '.join(QUICK)})",
    "evaluate": "write a page: what was done to every weight, its error at every step, KL against bytes",
}


def add(parser: argparse.ArgumentParser, command: str) -> None:
    """Add `--html`."""
    option = parser.add_argument("--html", metavar="FILE", help=_HELP[command])
    option.rare = command == "quantize"  # type: ignore[attr-defined]


def asked(args: argparse.Namespace, command: str) -> Callable[[Finished], str] | None:
    """Refuse a place where nothing can be written, before any work.

    Raises
    ------
    ConfigError
        The place cannot be written, or `evaluate` measures several depths.
    MissingExtraError
        matplotlib is not installed.
    """
    if not args.html:
        return None
    if command == "evaluate" and isinstance(args.n_steps, tuple):
        raise ConfigError("--html: a page is about one depth; give one by --n-steps, or leave --html out")
    if command == "quantize":
        require("matplotlib")  # of the diagnosis
    check_place(args.html, PAGE, args)
    return partial(write, args.html)


def write(place: str, finished: Finished) -> str:
    """Write the page, with a diagnosis of the model before quantization on the calibration prompts."""
    made = finished.quantized
    diagnosis = None
    if made is not None:
        grid, how = made.config.layer.grid, finished.execution
        with Line() as progress:
            diagnosis = diagnose(
                finished.loaded,
                made.calibration,
                DiagnoseConfig(bits=grid.bits, group_size=grid.group_size),
                n_steps=finished.source.depth,
                only=QUICK,
                name=finished.source.name,
                **how.changed(progress=progress).flat(),
            )
    held_out, measured = finished.measured, None
    if held_out is not None:
        measured = {"model": finished.source.name, "on": held_out.about, "weights": held_out.summaries}
    write_page(place, diagnosis=diagnosis, measured=measured, **known(finished))
    return f"page: {place}"


def known(finished: Finished) -> dict[str, Any]:
    """Treatment of every tensor, and every layer's error at every step, as keywords of `write_page`."""
    loaded, how, tokens = finished.loaded, finished.execution, finished.prompts
    with Line() as progress:
        errors = layer_errors(
            loaded.system,
            {name: weights_of(checkpoint) for name, checkpoint in finished.checkpoints.items()},
            tokens,
            n_steps=finished.source.depth,
            seed=how.seed,
            batch_size=how.batch_size,
            progress=progress,
        )
    why = reasons(loaded.system, finished.source.depth)
    return {
        "weights": {name: tensors(checkpoint, why) for name, checkpoint in finished.checkpoints.items()},
        "errors": {"on": tokens.take(0, N_PROMPTS).describe(), "weights": errors},
    }


def reasons(system: LoopedSystem, n_steps: int | None = None) -> dict[str, str]:
    """Why a weight of the loop stays unchanged, if no checkpoint quantizes it. By name."""
    shared = system.shared_parameters(n_steps or system.n_steps)
    return {p.name: p.reason or "excluded by the settings" for p in shared} | system.left_out()


HOOKS.register("html")(Hook(add, asked))
