"""Options that name a model, and the model that they name."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from loopq.calibrate.prompts import check_prompts
from loopq.commands.options import depths, group_of, take, whole
from loopq.errors import ConfigError
from loopq.layers.loop_spec import MAX_STEPS
from loopq.models.from_python import load_python
from loopq.models.load import DTYPES, LoadedModel, load_model, to_device
from loopq.models.restore import open_any, open_source

_LOADING = "how the model is loaded and run"


def add_source(
    parser: argparse.ArgumentParser,
    what: str = "embedded model (huginn_small), folder or hub id",
    *,
    several: bool = False,
) -> None:
    """Add options that name a model and define how to load and run it, at one depth or at several."""
    parser.add_argument("model", metavar="MODEL", nargs="?", help=what)
    group = group_of(parser, _LOADING)
    group.add_argument(
        "--python",
        metavar="FILE.py:FUNCTION",
        help="instead of MODEL: a function that returns a torch module, whose loop is found by one run",
    )
    add_loading(parser, several=several)
    group.add_argument(
        "--depth",
        metavar="ARGUMENT",
        help="with --python: argument of the module's forward that sets the number of steps",
    ).rare = True


def add_loading(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """Add options for loading and running a model."""
    group = group_of(parser, _LOADING)
    group.add_argument(
        "--n-steps",
        type=depths if several else whole(1, MAX_STEPS),
        metavar="N" + ",..." * several,
        help="recurrence steps of a rollout (default: the model's own)"
        + "; several are run one after another, and all count" * several,
    )
    group.add_argument(
        "--device", default="cpu", help="device of the model, such as cuda:0 (default %(default)s)"
    )
    rare = [
        group.add_argument(
            "--system",
            metavar="NAME",
            help="adapter to use, if it is not found by itself (`loopq check` lists them)",
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
    ]
    for action in rare:
        action.rare = True


def check_texts(args: argparse.Namespace) -> None:
    """Refuse files of `add_text` that hold no prompts. Loading a large model takes minutes."""
    for name in ("calibration", "text", "evaluate"):
        file = getattr(args, name, None)
        if file is not None and (name, file) != ("evaluate", "-"):
            check_prompts(file, take(args))


def load(args: argparse.Namespace) -> LoadedModel:
    """Load the model of `add_source`, after a look at the texts."""
    check_texts(args)
    if args.python is not None:
        if args.model is not None:
            raise ConfigError("MODEL and --python both name a model: give one of them")
        return load_python(args.python, args.depth, loading(args)["device"])
    if args.model is None:
        raise ConfigError("name a model: MODEL, or --python FILE.py:FUNCTION")
    return load_model(args.model, **loading(args))


def source_words(args: argparse.Namespace) -> list[str]:
    """The words of a command line that name the model of `add_source` and say how to load it."""
    words = [] if args.model is None else [str(args.model)]
    for name in ("python", "depth", "system", "revision", "dtype"):
        value = getattr(args, name)
        words += [] if value is None else [f"--{name}", str(value)]
    allowed = [name for name in ("trust_remote_code", "allow_pickle") if getattr(args, name)]
    return words + [f"--{name.replace('_', '-')}" for name in allowed]


def load_source(args: argparse.Namespace) -> LoadedModel:
    """Load the model of `add_source` for quantization, including one quantized by another tool."""
    check_texts(args)
    if args.python is None and args.model is not None:
        loaded = open_source(Path(args.model), trust_remote_code=args.trust_remote_code)
        if loaded is not None:
            to_device(loaded.model, loading(args)["device"])
            return loaded
    return load(args)


def load_any(args: argparse.Namespace, **options: Any) -> LoadedModel:
    """Load the model or the checkpoint of `add_source`, the latter with own options of `open_any`."""
    if args.python is not None or args.model is None:
        return load(args)
    return open_any(args.model, **options, **loading(args))


def loading(args: argparse.Namespace) -> dict[str, Any]:
    """Read the options of `add_loading` as options of `load_model`."""
    names = ("system", "trust_remote_code", "allow_pickle", "dtype", "device", "revision")
    options = {name: getattr(args, name) for name in names}
    if args.device == "cuda" and "LOCAL_RANK" in os.environ:
        options["device"] = f"cuda:{os.environ['LOCAL_RANK']}"
    return options
