"""Options shared by several commands. Options of settings come from the settings' own declarations."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loopq.calibrate.prompts import RANDOM_TOKENS, CalibrationTake, Take
from loopq.commands.settable import Own, Set, flag_of, metavar_of, text_of
from loopq.errors import ConfigError
from loopq.formats import FORMATS
from loopq.formats.base import Option
from loopq.formats.convert import format_names, settings_of
from loopq.layers.loop_spec import MAX_STEPS
from loopq.quantizers.config import LayerConfig, Override
from loopq.run.config import PRESETS, PROMPTS, QuantConfig
from loopq.run.destination import destinations
from loopq.run.gate import LOOPQ
from loopq.run.ranks import Ranks
from loopq.settings.declare import Leaf, Settings, check, leaves, lowered, parse_text, summary
from loopq.settings.execution import Execution
from loopq.storage.files import check_replaceable, nearest
from loopq.terminal.progress import Line, Progress, Silent

#: Settings of a quantization and of prompts with an option of their own. ``--set`` takes all settings.
OWN = ("method", "bits", "group_size", "levels", "metric", "inputs", "outside", "fit", "n_prompts", "seq_len")


def add_settings(
    parser: argparse.ArgumentParser,
    kind: type[Settings],
    *,
    only: Sequence[str] | None = None,
    without: Sequence[str] = (),
    own: Sequence[str] | None = None,
    title: str | None = None,
) -> None:
    """Add options for the plain values below a settings type: own ones, and ``--set`` for the others.

    Parameters
    ----------
    parser : ArgumentParser
        Parser of the command.
    kind : type of Settings
        Its declarations give name, type, choices, default, help and group of each option.
    only, without : sequence of str
        Flat names to add, and to leave out. ``--help`` shows the options in `only`, by default the common ones.
    own : sequence of str, optional
        Flat names with an option of their own. With None all have one.
    title : str, optional
        Title of their group in the help. The default is the title of the settings type.
    """
    for name, entries in leaves(kind).items():
        if name in without or (only is not None and name not in only):
            continue
        flag = None
        if own is None or name in own:
            action = _add(group_of(parser, title or group_title(entries)), name, entries)
            action.rare = only is None and not any(e.metadata.get("common") for e in entries)  # type: ignore[attr-defined]
            flag = flag_of(entries[0])
        by_set = Set.on(parser) if flag is None else Set.of(parser)
        if by_set is not None:
            by_set.accept(entries[0], flag)


def group_of(parser: argparse.ArgumentParser, title: str) -> Any:
    """Return the group of options of that title."""
    groups = [group for group in parser._action_groups if group.title == title]
    return groups[0] if groups else parser.add_argument_group(title)


def group_title(entries: Sequence[Leaf]) -> str:
    """Return the owner of settings of one name: the first line about their class, or the choices that read them."""
    first = entries[0]
    if not first.choice:
        return lowered(summary(first.owner))
    return f"{first.choice} {', '.join(dict.fromkeys(e.chosen for e in entries))}"


def option_of(leaf: Leaf, own: Sequence[str] | None = OWN) -> str:
    """Return how a command line gives a setting: its own option, if `own` has its name, or ``--set``."""
    return flag_of(leaf) if own is None or leaf.name in own else f"--set {leaf.name}"


def _add(group: Any, name: str, entries: Sequence[Leaf]) -> argparse.Action:
    leaf = entries[0]
    how: dict[str, Any] = {"type": _reader(leaf.annotation, leaf.metadata), "metavar": metavar_of(leaf)}
    if leaf.annotation is bool:
        how = {"nargs": 0, "const": True}
    text = text_of(entries).replace("%", "%%")
    action: argparse.Action = group.add_argument(
        flag_of(leaf), action=Own, leaf=leaf, dest=name, default=argparse.SUPPRESS, help=text, **how
    )
    return action


def _reader(annotation: Any, metadata: Mapping[str, Any]) -> Any:
    parse = metadata.get("parse")

    def read(text: str) -> Any:
        try:
            value = parse(text) if parse else parse_text(annotation, text)
            check("", value, annotation, metadata)
        except (ValueError, ConfigError) as cause:
            raise argparse.ArgumentTypeError(str(cause).strip()) from cause
        return value

    return read


def whole(at_least: int, at_most: int) -> Any:
    """Return a reader of whole numbers for the text of an option."""
    return _reader(int, {"at_least": at_least, "at_most": at_most})


def depths(text: str) -> int | tuple[int, ...]:
    """Read one depth, or several joined by commas."""
    values = tuple(whole(1, MAX_STEPS)(part) for part in text.split(","))
    if len(set(values)) != len(values):
        raise argparse.ArgumentTypeError("a depth stands twice")
    return values[0] if len(values) == 1 else values


def given(args: argparse.Namespace, kind: type[Settings]) -> dict[str, Any]:
    """Return the given options of a settings type by flat name."""
    return {name: getattr(args, name) for name in leaves(kind) if hasattr(args, name)}


def override(text: str) -> Override:
    """Read PATTERN=>NAME=VALUE,..."""
    pattern, arrow, rest = text.rpartition("=>")
    if not arrow:
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
    """Add the settings of a quantization. Those that need gradients or rollouts require a model."""
    group_of(parser, group_title(leaves(LayerConfig)["method"])).add_argument(
        "--preset",
        choices=tuple(PRESETS),
        help="best: closest to full precision, with four gradients of every prompt and layers one after the other; "
        "small: the same with 3 bits on a trellis, 8 outside the loop; fast: even levels, no gradients; paper: GPTQ "
        "over the trajectory as published (default: one gradient of every prompt)"
        if model
        else "best: widest search; small: 3 bits on a trellis; fast: even levels, without the dump's gradients; "
        "paper: GPTQ over the trajectory as published",
    )
    needs_model = () if model else (*_RUN_THE_MODEL, *_METRIC)
    hidden = [name for name in leaves(QuantConfig) if name.startswith(needs_model)] if needs_model else []
    add_settings(parser, QuantConfig, without=hidden, own=OWN)
    add_layers(parser, include=model)


#: Settings without options in `solve`: it has no model to run.
_RUN_THE_MODEL = ("inputs", "alpha", "sweeps", "fit", "outside")
_METRIC = ("metric", "passes")
#: A setting of a preset that a dump can have, since it ignores the gradients.
_NO_GRADIENTS = ("metric", "inputs")
_LAYERS = "layers (PATTERN: a shell pattern on a parameter's name, or re:REGULAR-EXPRESSION)"


def add_layers(parser: argparse.ArgumentParser, *, include: bool) -> None:
    """Add options that select layers by patterns."""
    group_of(parser, _LAYERS).add_argument(
        "--layer",
        action="append",
        default=[],
        type=override,
        metavar="PATTERN=>NAME=VALUE,...",
        help="other settings for some layers, as in '*adapter*=>bits=8,steps=first'; repeatable. NAME: "
        + ", ".join(leaves(LayerConfig)),
    )
    texts = {"exclude": "leave these layers dense; repeatable"}
    if include:
        texts["include"] = "calibrate these layers too, which would stay dense or be rounded; repeatable"
    add_patterns(parser, texts)


def add_patterns(parser: argparse.ArgumentParser, texts: Mapping[str, str]) -> None:
    """Add options that take patterns, each with its text."""
    for name, text in texts.items():
        group_of(parser, _LAYERS).add_argument(
            f"--{name}", action="append", default=[], metavar="PATTERN", help=text
        ).rare = True


def quant_config(
    args: argparse.Namespace, base: QuantConfig | None = None, *, model: bool = True
) -> QuantConfig:
    """Read the options of `add_quantizer`: the changes to some settings, or to the defaults.

    Without a `model`, a preset's settings that need one are left out. The metric is then what the dump holds.

    Raises
    ------
    ConfigError
        If a value is not allowed, or the other choices make an option useless.
    """
    include = tuple(getattr(args, "include", ()))
    config = base or QuantConfig()
    config = dataclasses.replace(
        config,
        overrides=(*config.overrides, *args.layer),
        include=(*config.include, *include),
        exclude=(*config.exclude, *args.exclude),
    )
    if getattr(args, "preset", None):
        of_preset = PRESETS[args.preset]
        left_out = () if model else (*_RUN_THE_MODEL, *_METRIC)
        config = config.changed(
            **{k: v for k, v in of_preset.items() if (k, v) == _NO_GRADIENTS or not k.startswith(left_out)}
        )
    return config.changed(**given(args, QuantConfig))


def adopt_like(args: argparse.Namespace) -> tuple[argparse.Namespace, QuantConfig | None]:
    """Take what the options leave open from the checkpoint given by ``--like``.

    Returns
    -------
    options : Namespace
        With the checkpoint's depth, seed and share of random tokens where the command line gives none.
    config : QuantConfig or None
        Settings of the checkpoint. None without ``--like``.

    Raises
    ------
    ConfigError
        If the checkpoint holds no settings of a run.
    """
    if args.like is None:
        return args, None
    settings = settings_of(args.like)
    if "quantization" not in settings:
        raise ConfigError(f"--like {args.like}: no settings of a run in it; name a checkpoint of loopq")
    taken = {"seed": settings["seed"]} | vars(args)
    if args.n_steps is None:
        taken["n_steps"] = tuple(settings.get("depths", ())) or settings["n_steps"]
    share = settings["calibration"].get("random_tokens", 0.0)
    if share != RANDOM_TOKENS:
        taken.setdefault("random_tokens", share)
    return argparse.Namespace(**taken), QuantConfig.from_json(settings["quantization"])


def add_execution(parser: argparse.ArgumentParser, *, only: Sequence[str] | None = None) -> None:
    """Add execution options."""
    add_settings(parser, Execution, only=only)


def execution(args: argparse.Namespace, **more: Any) -> Execution:
    """Read what `add_execution` added."""
    return Execution().changed(**given(args, Execution), **more)


def ranks_of_environment() -> tuple[Ranks | None, contextlib.AbstractContextManager[Progress]]:
    """This process among those of torchrun, and its progress display. Only one process prints."""
    ranks = Ranks.of_environment()
    return ranks, Line() if ranks is None or ranks.rank == 0 else contextlib.nullcontext(Silent())


def add_text(parser: argparse.ArgumentParser, name: str, settings: type[Take] = Take) -> None:
    """Add the prompts of a command under the option of that name, and their settings."""
    title = f"{'evaluation' if name == 'text' else name} prompts"
    group_of(parser, title).add_argument(
        f"--{name}",
        metavar="FILE",
        help="text, .jsonl or .parquet of records, folder of these, .npy of token ids"
        + ", or 'self': text that the model writes" * (name == "calibration")
        + " (default: the text that ships with loopq)",
    )
    add_settings(parser, settings, own=OWN, title=title)


def take(args: argparse.Namespace, seq_len: int = Take().seq_len) -> Take:
    """Read the number and length of the prompts. `seq_len` is the default length."""
    return Take(seq_len=seq_len).changed(**given(args, Take))


def calibration_take(args: argparse.Namespace) -> CalibrationTake:
    """Read number, length and changes of the calibration prompts. A preset may also set them."""
    of_preset = dict(PROMPTS.get(getattr(args, "preset", None) or "", {}))
    return CalibrationTake().changed(**(of_preset | given(args, CalibrationTake)))


def add_format(parser: argparse.ArgumentParser, *, quantized: bool = False) -> None:
    """Add the choice of an engine or a format, and the options of the formats.

    If a quantized model is written (`quantized`), options of formats with other sources are left out. ``--help-all``
    shows the rest.
    """
    parser.add_argument(
        "--for",
        dest="engine",
        choices=destinations(),
        help="program that will run the file. It decides format, levels and rotation"
        + (f" (default {LOOPQ})" if quantized else ""),
    )
    form = parser.add_argument(
        "--format",
        choices=format_names(),
        help="format of the output, in place of the one that --for decides; then --for only refuses, before the work, "
        "what that program cannot run",
    )
    form.removed = FORMATS.removed  # type: ignore[attr-defined]
    readers: dict[Option, list[str]] = {}
    for name, target in FORMATS:
        for option in target.options:
            if target.from_checkpoint or not quantized:
                readers.setdefault(option, []).append(name)
    for option, names in readers.items():
        takes: dict[str, Any] = {"metavar": option.metavar, "choices": option.choices}
        parser.add_argument(
            f"--{option.name.replace('_', '-')}",
            **({"action": "store_const", "const": True} if option.flag else takes),
            help=f"for {', '.join(names)}: {option.help}",
        )
    parser.set_defaults(format_options=[option.name for option in readers])


def add_gate(parser: argparse.ArgumentParser) -> None:
    """Add what decides whether a file is written, and which engines read it afterwards."""
    parser.add_argument(
        "--force", action="store_true", help="write such a file all the same, and say so in it"
    )
    parser.add_argument(
        "--verify",
        choices=("yes", "no"),
        default="yes",
        help="let every installed engine load the file and compare its logits (default %(default)s)",
    )


def gate_options(args: argparse.Namespace) -> Mapping[str, Any]:
    """Read the options of `add_gate`."""
    return {"engine": args.engine, "force": args.force, "verify": args.verify == "yes"}


def format_options(args: argparse.Namespace) -> dict[str, Any]:
    """Read the format options of `add_format`. None for an absent one."""
    return {name: getattr(args, name) for name in args.format_options}


def check_place(file: str | Path, ours: bytes, args: argparse.Namespace | None = None) -> None:
    """Reject an unwritable file before any computation, and one that would replace a file of the user.

    Parameters
    ----------
    file : path
        The output.
    ours : bytes
        What each file of loopq of this kind holds.
    args : Namespace, optional
        Options of the command. No other one may name the file.
    """
    path = Path(file)
    named = [v for value in vars(args or argparse.Namespace()).values() for v in _paths(value)]
    if named.count(os.path.realpath(path)) > 1:
        raise ConfigError(f"{file}: stands twice in this command; name another file for this output")
    check_replaceable(path, ConfigError, ours)
    broken = (folder for folder in path.parents if folder.is_symlink() and not folder.exists())
    place = next(broken, nearest(path.parent))
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(f"{file}: {place} is no folder that can be written to; name another place")


def _paths(value: Any) -> list[str]:
    """Return the real paths that the value of an option names, if it names files."""
    if isinstance(value, list | tuple):
        return [path for part in value for path in _paths(part)]
    if not isinstance(value, str | Path) or "\0" in str(value):
        return []
    file, colon, _ = str(value).rpartition(":")
    # `--python` names FILE.py:FUNCTION.
    return [os.path.realpath(file if colon and file.endswith(".py") else value)]
