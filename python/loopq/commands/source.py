"""Options that name a model, and the model that they name."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
class ModelOptions:
    """The model that the options of `add_source` name, how it is loaded, and its depth.

    Parameters
    ----------
    model : str, optional
        Its name.
    python : str, optional
        FILE.py:FUNCTION instead of a name.
    argument : str, optional
        With `python`: argument of the module's forward that sets the number of steps.
    n_steps : int or tuple of int, optional
        One depth or several; the model's own when absent.
    loading : mapping of str to value
        Options of `load_model`.
    """

    model: str | None
    python: str | None
    argument: str | None
    n_steps: int | tuple[int, ...] | None
    loading: Mapping[str, Any]

    @classmethod
    def of(cls, args: argparse.Namespace) -> ModelOptions:
        """Read the options. Refuse files of `add_text` that hold no prompts: loading a large model takes minutes."""
        for name in ("calibration", "text", "evaluate"):
            file = getattr(args, name, None)
            if file is not None and (name, file) != ("evaluate", "-"):
                check_prompts(file, take(args))
        return cls(args.model, args.python, args.depth, args.n_steps, loading(args))

    @property
    def name(self) -> str:
        """What names the model."""
        return str(self.model or self.python)

    @property
    def depths(self) -> tuple[int | None, ...]:
        """Every depth."""
        return self.n_steps if isinstance(self.n_steps, tuple) else (self.n_steps,)

    @property
    def depth(self) -> int | None:
        """The depth, of several the last one."""
        return self.depths[-1]

    def words(self) -> list[str]:
        """The words of a command line that name the model and say how to load it."""
        words = [] if self.model is None else [self.model]
        values = {"python": self.python, "depth": self.argument, **self.loading}
        for name in ("python", "depth", "system", "revision", "dtype"):
            words += [] if values[name] is None else [f"--{name}", values[name]]
        allowed = [name for name in ("trust_remote_code", "allow_pickle") if values[name]]
        return words + [f"--{name.replace('_', '-')}" for name in allowed]

    def load(self) -> LoadedModel:
        """Load the model, of one quantized by another tool the weights of its codes."""
        if self.python is not None:
            if self.model is not None:
                raise ConfigError("MODEL and --python both name a model: give one of them")
            return load_python(self.python, self.argument, self.loading["device"])
        if self.model is None:
            raise ConfigError("name a model: MODEL, or --python FILE.py:FUNCTION")
        loaded = open_source(self.model, trust_remote_code=self.loading["trust_remote_code"])
        if loaded is None:
            return load_model(self.model, **self.loading)
        to_device(loaded.model, self.loading["device"])
        return loaded

    def load_any(self, **options: Any) -> LoadedModel:
        """Load the model or the checkpoint, the latter with own options of `open_any`."""
        if self.python is not None or self.model is None:
            return self.load()
        return open_any(self.model, **options, **self.loading)


def loading(args: argparse.Namespace) -> dict[str, Any]:
    """Read the options of `add_loading` as options of `load_model`."""
    names = ("system", "trust_remote_code", "allow_pickle", "dtype", "device", "revision")
    options = {name: getattr(args, name) for name in names}
    if args.device == "cuda" and "LOCAL_RANK" in os.environ:
        options["device"] = f"cuda:{os.environ['LOCAL_RANK']}"
    return options
