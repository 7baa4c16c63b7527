"""`--set NAME=VALUE`, which takes every setting of a command, and the options of those that have one."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from loopq.annotations import choices_of
from loopq.errors import ConfigError
from loopq.settings.declare import Leaf, lowered, read_value
from loopq.settings.registry import did_you_mean


class Own(argparse.Action):
    """A setting's own option. Given more than once, the last one counts, but it may not contradict ``--set``."""

    def __init__(self, *names: Any, leaf: Leaf, **more: Any) -> None:
        super().__init__(*names, **more)
        self.leaf = leaf

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None
    ) -> None:
        value = self.const if self.nargs == 0 else values
        by_set = getattr(namespace, Set.DEST, {})
        if self.dest in by_set and by_set[self.dest] != value:
            raise argparse.ArgumentError(
                self, f"{value} contradicts --set {self.dest}={shown(by_set[self.dest])}: give one of them"
            )
        setattr(namespace, self.dest, value)


class Set(argparse.Action):
    """``--set NAME=VALUE``: it gives a setting as an own option of that name would.

    Attributes
    ----------
    settings : dict of str to Leaf
        Accepted settings by flat name.
    own : dict of str to str
        Options of those that have one.
    """

    DEST = "set"

    def __init__(self, option_strings: Sequence[str], dest: str, **more: Any) -> None:
        super().__init__(option_strings, dest, metavar="NAME=VALUE", **more)
        self.settings: dict[str, Leaf] = {}
        self.own: dict[str, str] = {}

    @classmethod
    def of(cls, parser: argparse.ArgumentParser) -> Set | None:
        """Return the action of a command. None if it has no such option."""
        return next((action for action in parser._actions if isinstance(action, cls)), None)

    @classmethod
    def on(cls, parser: argparse.ArgumentParser) -> Set:
        """Return the action of a command, which is added if it is not there. It accepts all own options before it."""
        by_set = cls.of(parser)
        if by_set is None:
            by_set = cls(["--set"], cls.DEST, default=argparse.SUPPRESS)
            parser._add_action(by_set)
            for action in parser._actions:
                if isinstance(action, Own):
                    by_set.accept(action.leaf, action.option_strings[0])
        return by_set

    def accept(self, leaf: Leaf, own: str | None) -> None:
        """Accept a setting, which may also have an option of its own."""
        self.settings[leaf.name] = leaf
        if own is not None:
            self.own[leaf.name] = own
        names = ", ".join(name for name in self.settings if name not in self.own)
        self.help = (
            "give any setting by its name; repeatable. Settings without an option of their own (docs/settings.md "
            f"explains them): {names}"
        )

    def _read(self, text: str) -> tuple[str, Any]:
        name, equals, value = text.partition("=")
        name = name.strip()
        if not equals:
            raise argparse.ArgumentError(self, f"{text!r} is not NAME=VALUE")
        if name not in self.settings:
            known = f"known: {', '.join(sorted(self.settings))}"
            raise argparse.ArgumentError(
                self, f"unknown setting {name!r}{did_you_mean(name, self.settings)}; {known}"
            )
        try:
            return name, read_value(self.settings[name], value.strip())
        except ConfigError as cause:
            raise argparse.ArgumentError(self, str(cause)) from cause

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None
    ) -> None:
        name, value = self._read(values)
        by_set = getattr(namespace, self.DEST, {})
        if name not in by_set and getattr(namespace, name, value) != value:
            other = f"{self.own[name]} {shown(getattr(namespace, name))}"
            raise argparse.ArgumentError(self, f"{name}={shown(value)} contradicts {other}: give one of them")
        setattr(namespace, self.DEST, {**by_set, name: value})
        setattr(namespace, name, value)


def flag_of(leaf: Leaf) -> str:
    """Return the own option of a setting."""
    return f"--{leaf.name.replace('_', '-')}"


def text_of(entries: Sequence[Leaf]) -> str:
    """Return the text of a setting's option, with its default, or the default of each choice that reads it."""
    leaf = entries[0]
    text = lowered(leaf.help.removesuffix("."))
    if leaf.default is None:
        return text
    defaults = {e.chosen: shown(e.default) for e in entries}
    default = ", ".join(f"{value} for {name}" for name, value in defaults.items())
    return f"{text} (default {default if len(set(defaults.values())) > 1 else shown(leaf.default)})"


def metavar_of(leaf: Leaf) -> str:
    """Return the placeholder of a setting's value."""
    allowed = ("true", "false") if leaf.annotation is bool else choices_of(leaf.annotation)
    text = str(leaf.annotation)
    kind = "A,B,..." if "tuple" in text else "X" if "float" in text else "N" if "int" in text else "TEXT"
    return leaf.metadata.get("metavar") or (
        "|".join(str(v) for v in allowed if v is not None) if allowed else kind
    )


def shown(value: Any) -> str:
    """Return a setting's value in the spelling of options."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return "none" if value is None else str(value)


# Options of the last release. Their errors name what replaces them. This part goes with the next release.

#: Options that turned a setting off, by name.
_TURNED_OFF = {"asymmetric": "symmetric", "unsigned-scales": "signed_scales", "no-refit": "refit"}
#: What to do instead of options that are not settings any more.
_INSTEAD = {
    "bits-per-weight": "write --fit {}",
    "engine": "write --for {}",
    "fit-levels": "write --levels {}",
    "fit-score": "leave it out, since the cost of a grid is always the measured KL",
    "fit-n-prompts": "leave it out, since grids are always compared on up to 16 prompts",
    "requantize": "call loopq.quantize(..., requantize=True) in Python",
}


def renamed(parser: argparse.ArgumentParser) -> Mapping[str, str]:
    """Return the options of the last release that are settings of ``--set`` now, with that spelling."""
    by_set = Set.of(parser)
    if by_set is None:
        return {}
    folded = {name: leaf for name, leaf in by_set.settings.items() if name not in by_set.own}
    names = {name.replace("_", "-"): name for name in folded} | _TURNED_OFF
    return {f"--{old}": f"--set {name}" for old, name in names.items() if name in folded}


def instead(parser: argparse.ArgumentParser, word: str, following: Sequence[str]) -> str | None:
    """Return what replaces an option of the last release.

    Parameters
    ----------
    parser : ArgumentParser
        Parser of the command.
    word : str
        The unknown option, as ``--option`` or ``--option=value``.
    following : sequence of str
        Arguments after it, of which the first may be its value.

    Returns
    -------
    str or None
        What to do. None if the last release had no such option.
    """
    option, equals, value = word.partition("=")
    value = value if equals else next(iter(following), "VALUE")
    name = option.removeprefix("--")
    known = Set.of(parser) is not None or any(action.dest == name for action in parser._actions)
    if name in _INSTEAD and known:
        return _INSTEAD[name].format(value)
    new = renamed(parser).get(option)
    if new is None:
        return None
    by_set = Set.of(parser)
    leaf = None if by_set is None else by_set.settings[new.removeprefix("--set ")]
    if leaf is not None and leaf.annotation is bool:
        value = "false" if option.removeprefix("--") in _TURNED_OFF else "true"
    return f"write {new}={value}"
