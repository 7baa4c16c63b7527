"""Options that several commands share: those of settings are derived from the settings' own declarations."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loopq.calibrate.prompts import Take
from loopq.checkpoint.files import nearest
from loopq.errors import ConfigError
from loopq.execution import Execution
from loopq.quantizers.config import LayerConfig, Override
from loopq.run.config import PRESETS, QuantConfig
from loopq.settings import Leaf, Settings, choices_of, leaves, parse_text, summary
from loopq.systems.from_python import load_python
from loopq.systems.load import DTYPES, load_model


def add_settings(
    parser: argparse.ArgumentParser,
    kind: type[Settings],
    *,
    only: Sequence[str] | None = None,
    without: Sequence[str] = (),
) -> None:
    """Add an option for every plain value below a settings type.

    Parameters
    ----------
    parser : ArgumentParser
        Parser of the command.
    kind : type of Settings
        Its declarations give name, type, choices, default, help and group of each option.
    only, without : sequence of str
        Flat names to add, and to leave out.
    """
    groups: dict[str, Any] = {}
    for name, entries in leaves(kind).items():
        if name in without or (only is not None and name not in only):
            continue
        title = _title(entries)
        group = groups.get(title) or groups.setdefault(title, parser.add_argument_group(title))
        action = _add(group, name, entries)
        action.rare = not any(e.metadata.get("common") for e in entries)  # type: ignore[attr-defined]


def _title(entries: Sequence[Leaf]) -> str:
    first = entries[0]
    if not first.choice:
        return summary(first.owner)
    return f"{first.choice} {' and '.join(dict.fromkeys(e.chosen for e in entries))}"


def _add(group: Any, name: str, entries: Sequence[Leaf]) -> argparse.Action:
    leaf = entries[0]
    flag = f"--{name.replace('_', '-')}"
    text = leaf.help.removesuffix(".").replace("%", "%%")
    values = {e.chosen: _shown(e.default) for e in entries}
    several = ", ".join(f"{value} for {name}" for name, value in values.items())
    default = f"{text} (default {several if len(set(values.values())) > 1 else _shown(leaf.default)})"
    if leaf.annotation is bool:
        off = leaf.metadata.get("off")
        if leaf.default:
            inverse = f"--{off or 'no-' + name.replace('_', '-')}"
            action = group.add_argument(
                inverse,
                dest=name,
                action="store_const",
                const=False,
                default=argparse.SUPPRESS,
                help=f"not: {text}",
            )
        else:
            action = group.add_argument(
                flag, dest=name, action="store_const", const=True, default=argparse.SUPPRESS, help=text
            )
        found: argparse.Action = action
        return found
    allowed = choices_of(leaf.annotation)
    shown = leaf.metadata.get("metavar") or ("|".join(map(str, allowed)) if allowed else _metavar(leaf))
    made: argparse.Action = group.add_argument(
        flag,
        dest=name,
        type=_reader(leaf),
        choices=allowed,
        default=argparse.SUPPRESS,
        metavar=shown,
        help=default,
    )
    return made


def _metavar(leaf: Leaf) -> str:
    text = str(leaf.annotation)
    if "tuple" in text:
        return "A,B,..."
    return "X" if "float" in text else "N" if "int" in text else "TEXT"


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return "none" if value is None else str(value)


def _reader(leaf: Leaf) -> Any:
    own = leaf.metadata.get("parse")

    def read(text: str) -> Any:
        try:
            return own(text) if own else parse_text(leaf.annotation, text)
        except ValueError as cause:
            raise argparse.ArgumentTypeError(str(cause)) from cause

    return read


def given(args: argparse.Namespace, kind: type[Settings]) -> dict[str, Any]:
    """Return what was given of a settings type's options, by flat name."""
    return {name: getattr(args, name) for name in leaves(kind) if hasattr(args, name)}


def override(text: str) -> Override:
    """Read PATTERN=>NAME=VALUE,..."""
    pattern, found, rest = text.rpartition("=>")
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r}: write PATTERN=>bits=8,group_size=64")
    known = leaves(LayerConfig)
    changes: dict[str, Any] = {}
    for item in rest.split(","):
        key, equals, value = item.partition("=")
        key = key.strip()
        if not equals:
            raise argparse.ArgumentTypeError(f"{text!r}: {item!r} is not NAME=VALUE")
        try:
            changes[key] = parse_text(known[key][0].annotation, value.strip()) if key in known else value
        except ValueError as cause:
            raise argparse.ArgumentTypeError(f"{text!r}: {key}: {cause}") from cause
    try:
        return Override(pattern.strip(), changes)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_quantizer(parser: argparse.ArgumentParser, *, model: bool) -> None:
    """Add the settings of a quantization; those that need gradients or rollouts only where there is a model."""
    group = parser.add_argument_group("layers")
    if model:
        group.add_argument(
            "--preset",
            choices=tuple(PRESETS),
            help="best: closest to full precision, with gradients on all prompts; fast: without gradients; paper: "
            "GPTQ over the trajectory as published (default: as best with gradients on fewer prompts where they are "
            "cheap, else as fast)",
        )
        group.add_argument(
            "--include",
            action="append",
            default=[],
            metavar="PATTERN",
            help="calibrate these layers too: those that would stay dense, and those that would be rounded",
        )
    group.add_argument(
        "--exclude", action="append", default=[], metavar="PATTERN", help="leave these layers dense"
    )
    group.add_argument(
        "--layer",
        action="append",
        default=[],
        type=override,
        metavar="PATTERN=>NAME=VALUE,...",
        help="other settings for layers that match, e.g. '*adapter*=>bits=8,steps=first'; repeatable",
    )
    run_the_model = ("inputs", "alpha", "sweeps", "n_held_out", "tune", "allocate")
    hidden = [n for n in leaves(QuantConfig) if n.startswith(run_the_model)] if not model else []
    add_settings(parser, QuantConfig, without=hidden)


def quant_config(args: argparse.Namespace) -> QuantConfig:
    """Read what `add_quantizer` added.

    Raises
    ------
    ConfigError
        A value that is not allowed, or an option that what was chosen would not read.
    """
    include = tuple(getattr(args, "include", ()))
    config = QuantConfig(overrides=tuple(args.layer), include=include, exclude=tuple(args.exclude))
    if getattr(args, "preset", None):
        config = config.preset(args.preset)
    return config.changed(**given(args, QuantConfig))


def add_source(parser: argparse.ArgumentParser, what: str = "embedded model, folder or hub id") -> None:
    """Add what names a model and says how it is loaded and run."""
    parser.add_argument("model", metavar="MODEL", nargs="?", help=what)
    parser.add_argument(
        "--python",
        metavar="FILE.py:FUNCTION",
        help="instead of MODEL: a function that returns a torch module, whose loop is discovered by one run",
    )
    parser.add_argument(
        "--n-steps", type=int, metavar="N", help="depth of the rollout (default: the model's own)"
    )
    group = parser.add_argument_group("how the model is loaded")
    rare = [
        group.add_argument(
            "--depth",
            metavar="ARGUMENT",
            help="with --python: argument of the module's forward that sets the number of steps",
        ),
        group.add_argument(
            "--system",
            metavar="NAME",
            help="adapter to use, if it is not found by itself (`loopq systems` lists them)",
        ),
        group.add_argument(
            "--trust-remote-code", action="store_true", help="run code that comes with the model"
        ),
        group.add_argument(
            "--allow-pickle",
            action="store_true",
            help="read weights from pickles (*.bin), which can run code",
        ),
        group.add_argument("--revision", metavar="COMMIT", help="commit, tag or branch of a hub id"),
        group.add_argument("--dtype", choices=DTYPES, help="cast the model (default: as it is stored)"),
        group.add_argument(
            "--device", default="cpu", help="device of the model, such as cuda:0 (default %(default)s)"
        ),
    ]
    for action in rare:
        action.rare = True  # type: ignore[attr-defined]


def add_execution(parser: argparse.ArgumentParser, *, only: Sequence[str] | None = None) -> None:
    """Add how work is carried out."""
    add_settings(parser, Execution, only=only)


def execution(args: argparse.Namespace, **more: Any) -> Execution:
    """Read what `add_execution` added."""
    return Execution().changed(**given(args, Execution), **more)


def add_text(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the prompts of a command, under the option of that name."""
    parser.add_argument(
        f"--{name}",
        metavar="FILE",
        help="prompts: text, folder of *.txt, .jsonl or .npy of token ids (default: the text that ships with "
        "loopq, for models that read bytes)",
    )
    add_settings(parser, Take)


def take(args: argparse.Namespace) -> Take:
    """Read how much of the prompts is taken."""
    return Take().changed(**given(args, Take))


def add_format(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    """Add the options that choose a checkpoint format; without a default the format must be given."""
    from loopq.checkpoint.convert import format_names

    parser.add_argument(
        "--format",
        required=default is None,
        default=default,
        choices=format_names(),
        help="checkpoint format to write" + (" (default %(default)s)" if default else ""),
    )
    parser.add_argument(
        "--ragged",
        choices=("keep", "split", "pad"),
        help="a last group shorter than the others: keep it, cut all groups to a width that divides, or pad with zeros",
    ).rare = True  # type: ignore[attr-defined]


def check_place(file: str | Path) -> None:
    """Refuse a file that could not be written, before anything is computed for it."""
    path = Path(file)
    if path.is_dir():
        raise ConfigError(f"{file}: is a folder; name a file")
    place = nearest(path.parent)
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(f"{file}: {place} is no folder that can be written to; name another place")


def load(args: argparse.Namespace) -> Any:
    """Load the model that `add_source` named."""
    if args.python is not None:
        if args.model is not None:
            raise ConfigError("MODEL and --python both name a model: give one of them")
        return load_python(args.python, args.depth)
    if args.model is None:
        raise ConfigError("name a model: MODEL, or --python FILE.py:FUNCTION")
    return load_model(
        args.model,
        system=args.system,
        trust_remote_code=args.trust_remote_code,
        allow_pickle=args.allow_pickle,
        dtype=args.dtype,
        device=args.device,
        revision=args.revision,
    )
