"""`loopq inspect`: describe the content of a checkpoint or a dump."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from loopq.calibrate.dump import Dump
from loopq.commands import COMMANDS, Command
from loopq.commands.output import print_checkpoint, print_dump
from loopq.commands.settable import shown
from loopq.errors import CheckpointError, ConfigError, UnknownNameError
from loopq.formats import hf_folder, native
from loopq.formats.base import Format
from loopq.formats.convert import format_of
from loopq.run.config import QuantConfig
from loopq.storage.files import read_json
from loopq.terminal.text import one_a_line, say


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "folder",
        metavar="DIR|DUMP|FILE",
        help="checkpoint of any format, a GGUF file among them, or a dump of `loopq collect`",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Identify the content and print it."""
    return _show(Path(args.folder), as_json=args.json)


def _show(path: Path, *, as_json: bool) -> int:
    """Print the content of a path."""
    if (path / "manifest.json").is_file() and not (path / native.INDEX).is_file():
        dump = Dump(path)
        if as_json:
            say(json.dumps(read_json(path / "manifest.json"), indent=1, sort_keys=True))
        else:
            print_dump(dump.manifest)
        return 0
    target = _format(path)
    if not target.own:
        facts = target.facts(path)
        say(json.dumps(facts, indent=1) if as_json else one_a_line(target.describe(facts)))
        return 0
    checkpoint = target.read(path)
    if as_json:
        layers = [{"layer": layer.name, **layer.report} for layer in checkpoint.layers.values()]
        say(json.dumps({"settings": checkpoint.settings, "layers": layers}, indent=1))
        return 0
    print_checkpoint(checkpoint, None)
    say(_settings(path, checkpoint.settings))
    return 0


def _format(path: Path) -> Format:
    """The format of a checkpoint, or a suggestion of what the user meant."""
    try:
        return format_of(path)
    except CheckpointError:
        if path.is_dir() and not (path / hf_folder.CONFIG).is_file():
            raise CheckpointError(
                f"{path}: neither a checkpoint (loopq.json or config.json) nor a dump (manifest.json); an interrupted "
                "collection is finished by giving its command again"
            ) from None
        raise


def _settings(folder: Path, settings: dict[str, Any]) -> str:
    """The settings of the run, one line per group. `--json` prints all of them.

    A method that is not installed made the same codes, so the rest of the checkpoint is shown.
    """
    try:
        calibration = settings["calibration"]
        depths = settings.get("depths") or [settings["n_steps"]]
        summary = (
            f"system {settings['system']}, {' and '.join(map(str, depths))} steps, seed {settings['seed']}; "
            f"calibrated on {calibration['n_prompts']} prompts, {calibration['n_tokens']} tokens of "
            f"{calibration['source']}"
        )
        asked = QuantConfig.from_json(settings["quantization"])
    except UnknownNameError as cause:
        return one_a_line([summary, f"settings are shown by --json only: {cause}"])
    except (ConfigError, KeyError, TypeError) as cause:
        raise CheckpointError(f"{folder}: settings that loopq cannot read: {cause}") from cause
    layer, run = asked.layer.flat(), asked.flat()
    lines = [
        summary,
        "layer settings: " + ", ".join(f"{k} {shown(v) or 'none'}" for k, v in layer.items()),
        "run settings: "
        + ", ".join(f"{k} {shown(v) or 'none'}" for k, v in run.items() if k not in (*layer, "overrides")),
    ]
    for override in asked.overrides:
        changes = ",".join(f"{k}={shown(v) or 'none'}" for k, v in override.changes.items())
        lines.append(f"for layers {override.pattern}: {changes}")
    return one_a_line(lines)


COMMANDS.register("inspect")(Command("show what a checkpoint or a dump holds", add, run, 12))
