"""`loopq inspect`: say what a checkpoint or a dump holds."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from loopq.calibrate.dump import Dump
from loopq.commands import COMMANDS, Command
from loopq.commands.output import print_checkpoint, print_dump
from loopq.errors import CheckpointError, ConfigError
from loopq.formats import native
from loopq.formats.convert import inspect_any
from loopq.run.config import QuantConfig
from loopq.storage.files import check_folder
from loopq.terminal.table import render, size


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "folder",
        metavar="DIR|DUMP",
        help="checkpoint of any format that loopq reads, or a dump of `loopq collect`",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Find out what the folder is and print it."""
    folder = Path(args.folder)
    if (folder / native.INDEX).is_file():
        checkpoint = native.read(folder)
        if args.json:
            layers = [{"layer": layer.name, **layer.report} for layer in checkpoint.layers.values()]
            print(json.dumps({"settings": checkpoint.settings, "layers": layers}, indent=1))
            return 0
        print_checkpoint(checkpoint, None)
        print(_settings(folder, checkpoint.settings))
        return 0
    if (folder / "manifest.json").is_file():
        dump = Dump(folder)
        if args.json:
            print((folder / "manifest.json").read_text("utf-8"))
        else:
            print_dump(dump.manifest)
        return 0
    if (folder / "config.json").is_file():
        return _foreign(folder, args.json)
    check_folder(folder)
    raise CheckpointError(
        f"{folder}: neither a checkpoint (loopq.json or config.json) nor a dump (manifest.json); an interrupted "
        "collection is finished by giving its command again"
    )


def _settings(folder: Path, settings: dict[str, Any]) -> str:
    """What was asked, one line a group; `--json` has all of it."""
    try:
        asked = QuantConfig.from_json(settings["quantization"])
        calibration = settings["calibration"]
        made = (
            f"system {settings['system']}, {settings['n_steps']} steps, seed {settings['seed']}; calibrated on "
            f"{calibration['n_prompts']} prompts, {calibration['n_tokens']} tokens of {calibration['source']}"
        )
    except (ConfigError, KeyError, TypeError) as cause:
        raise CheckpointError(f"{folder}: settings that loopq cannot read: {cause}") from cause
    layer, run = asked.layer.flat(), asked.flat()
    lines = [
        made,
        "layer settings: " + ", ".join(f"{k} {_word(v)}" for k, v in layer.items()),
        "run settings: "
        + ", ".join(f"{k} {_word(v)}" for k, v in run.items() if k not in (*layer, "overrides")),
    ]
    for override in asked.overrides:
        changes = ",".join(f"{k}={_word(v)}" for k, v in override.changes.items())
        lines.append(f"for layers {override.pattern}: {changes}")
    return "\n".join(lines)


def _word(value: Any) -> str:
    """A setting's value as options and overrides spell it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


def _foreign(folder: Path, as_json: bool) -> int:
    found = inspect_any(folder)
    if as_json:
        print(json.dumps(found, indent=1))
        return 0
    rows = [
        (
            layer["name"],
            "x".join(map(str, layer["shape"])),
            f"INT{layer['bits']}",
            "symmetric" if layer["symmetric"] else "asymmetric",
            layer["group_size"] if layer["group_size"] != -1 else "row",
            size(layer["n_bytes"]),
            f"{layer['bits_per_weight']:.3f}",
        )
        for layer in found["layers"]
    ]
    print(render(("layer", "shape", "grid", "kind", "group", "bytes", "bits a weight"), rows))
    print(
        f"format {found['format']}, {len(found['dense'])} dense tensors; {size(found['n_bytes_files'])} on disk, "
        f"{size(found['n_bytes'])} as a native checkpoint"
    )
    print(_origin(found))
    settings = {
        k: v for k, v in found["quantization_config"].items() if isinstance(v, str | int | float | bool)
    }
    print("config.json: " + ", ".join(f"{key} {value}" for key, value in settings.items()))
    return 0


def _origin(found: dict[str, Any]) -> str:
    if found["exported_by_loopq"] is None:
        return "written by another tool: no run report, true shapes as far as the file tells them"
    ragged = f", ragged groups: {found['ragged']}" if found["ragged"] else ""
    return f"exported by loopq {found['exported_by_loopq']}{ragged}; converting back gives the same bytes"


COMMANDS.register("inspect")(Command("say what a checkpoint or a dump holds", add, run, 12))
