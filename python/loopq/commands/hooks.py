"""What guests of the quantizer add to `quantize` and `evaluate`: options, and a page or card of what was measured."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loopq.calibrate.data import TokenSet
from loopq.commands.source import ModelOptions
from loopq.formats.checkpoint import Checkpoint
from loopq.models.load import LoadedModel
from loopq.run.config import QuantConfig
from loopq.settings.execution import Execution
from loopq.settings.registry import Registry
from loopq.systems.base import LoopedSystem


@dataclass(frozen=True)
class HeldOut:
    """Measurements of a model and its checkpoints on held-out text.

    Parameters
    ----------
    text : TokenSet
        Held-out prompts.
    summaries : sequence of dict
        Of each set of weights, full precision first (`loopq.commands.evaluate.measure`).
    about : mapping of str to value
        What the prompts were.
    """

    text: TokenSet
    summaries: Sequence[dict[str, Any]]
    about: Mapping[str, Any]


@dataclass(frozen=True)
class Quantized:
    """How a checkpoint was made.

    Parameters
    ----------
    config : QuantConfig
        Settings of the run.
    calibration : TokenSet
        Its prompts.
    folder : Path or None
        Folder of the checkpoint. None for a format of one file.
    """

    config: QuantConfig
    calibration: TokenSet
    folder: Path | None


@dataclass(frozen=True)
class Finished:
    """What a command has done, when a hook is called.

    Parameters
    ----------
    source : ModelOptions
        The model, and its depth.
    loaded : LoadedModel
        The full-precision model.
    checkpoints : mapping of str to Checkpoint
        Quantized weights by name.
    execution : Execution
        Seed, batch size and the like.
    measured : HeldOut or None
        None if nothing was measured.
    quantized : Quantized or None
        Of `loopq quantize` alone.
    """

    source: ModelOptions
    loaded: LoadedModel
    checkpoints: Mapping[str, Checkpoint]
    execution: Execution
    measured: HeldOut | None
    quantized: Quantized | None = None

    @property
    def prompts(self) -> TokenSet:
        """Return held-out prompts if there are any, else those of the calibration."""
        if self.measured is not None:
            return self.measured.text
        assert self.quantized is not None
        return self.quantized.calibration


@dataclass(frozen=True)
class Hook:
    """A page or card that a guest writes.

    Parameters
    ----------
    add : callable
        Adds its options, of (parser, name of the command).
    asked : callable
        Checks its options before any work, of (args, name of the command). Returns what writes the page and
        gives a line about it, or None if the options ask for none.
    """

    add: Callable[[argparse.ArgumentParser, str], None]
    asked: Callable[[argparse.Namespace, str], Callable[[Finished], str] | None]


HOOKS: Registry[Hook] = Registry("hook", "loopq.commands")

#: Tokens per second of (system, steps, token ids of a prompt); None for a model without text. The runtime brings it.
SPEEDS: Registry[Callable[[LoopedSystem, int, Sequence[int]], float | None]] = Registry(
    "measure of speed", "loopq.commands"
)


def add_hooks(parser: argparse.ArgumentParser, command: str) -> None:
    """Add the options of all hooks."""
    for _, hook in HOOKS:
        hook.add(parser, command)


def asked(args: argparse.Namespace, command: str) -> list[Callable[[Finished], str]]:
    """Check the options of all hooks. Return those that have something to write."""
    return [write for _, hook in HOOKS if (write := hook.asked(args, command)) is not None]
