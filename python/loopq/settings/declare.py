"""Settings as frozen dataclasses. One declaration gives checks, flat names, JSON, options and help.

A field is a plain value, a *block*, an *optional block* or a *choice*. Plain values are int, float, bool, str, a
Literal, a tuple of these, or None. A block is another settings type. A choice is one of several settings types of a
registry, selected by its name. Every plain value has a flat name, unique among all settings of a run. It is the keyword
in Python, the name in `--set` and in a layer's override, and for some the option on the command line. In a block with a
prefix the first field is called by the prefix, the others `prefix_field`.

This is a small pydantic. Pydantic and the generators of command lines have no flat names across nested settings and no
settings that only some choices read, and `import loopq` needs numpy and safetensors alone.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from loopq.annotations import choices_of, fits, hints, is_union, listed, words
from loopq.errors import ConfigError
from loopq.settings.registry import Registry, did_you_mean

_NUMBER = r"[+-]?([0-9]{1,18}\.?[0-9]{0,18}|\.[0-9]{1,18})([eE][+-]?[0-9]{1,3})?"


def setting(
    default: Any,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    common: bool = False,
    parse: Callable[[str], Any] | None = None,
    metavar: str | None = None,
    option: bool = True,
    names: Registry[Any] | None = None,
) -> Any:
    """Declare a plain value.

    Parameters
    ----------
    default : Any
        Default of the value. It is written only here.
    at_least, at_most : float, optional
        Range of a number.
    common : bool
        Whether ``--help`` shows it. The others appear in ``--help-all``.
    parse : callable, optional
        Reads the option's text. By default the annotation determines it.
    metavar : str, optional
        Placeholder of the value in the help.
    option : bool
        Whether there is a command-line option.
    names : Registry, optional
        Its names are values. The text lists them.
    """
    metadata = {
        "at_least": at_least, "at_most": at_most, "common": common, "parse": parse, "metavar": metavar,
        "option": option, "names": names,
    }  # fmt: skip
    return dataclasses.field(default=default, metadata=metadata)


def block(kind: type[Settings], prefix: str = "", /, **values: Any) -> Any:
    """Declare settings within settings, possibly with other defaults. Without a prefix they keep their own names."""
    metadata = {"block": kind, "prefix": prefix, "values": values}
    return dataclasses.field(default_factory=lambda: kind(**values), metadata=metadata)


def optional(kind: type[Settings], prefix: str) -> Any:
    """Declare settings that may be absent. They exist only if the first of them is given."""
    return dataclasses.field(default=None, metadata={"block": kind, "prefix": prefix, "optional": True})


def choice(registry: Registry[Any], default: str, *, common: bool = False) -> Any:
    """Declare a choice between the settings types of a registry."""
    return dataclasses.field(
        default_factory=lambda: registry.get(default)(),
        metadata={"choice": registry, "default": default, "common": common},
    )


@dataclass(frozen=True)
class Leaf:
    """A plain value among nested settings.

    Parameters
    ----------
    name : str
        Flat name. It is unique except among choices.
    path : tuple of str
        Fields that lead to the value.
    annotation : Any
        Type of the value.
    default : Any
        Default of the value. Blocks can replace it.
    metadata : mapping
        As given to `setting`.
    help : str
        Text in the Parameters section of its class. A choice adds a line about each entry.
    owner : type
        Class that declares it.
    choice, chosen : str
        Its choice and the entry there ("method", "gptq"). Both are empty without a choice.
    """

    name: str
    path: tuple[str, ...]
    annotation: Any
    default: Any
    metadata: Mapping[str, Any]
    help: str
    owner: type
    choice: str = ""
    chosen: str = ""


class Settings:
    """Base of settings types: frozen dataclasses with values that are checked against their annotations.

    Any sequence is taken where several values are asked, and a text as the only one of them.
    """

    def __post_init__(self) -> None:
        kinds = hints(type(self))
        for field in dataclasses.fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            value = listed(getattr(self, field.name), kinds[field.name])
            check(field.name, value, kinds[field.name], field.metadata)
            object.__setattr__(self, field.name, value)

    def flat(self) -> dict[str, Any]:
        """Return every plain value by its flat name, and a choice by the name of its entry."""
        out: dict[str, Any] = {}
        for field, value in _fields(self):
            if "choice" in field.metadata:
                out[field.name] = value.name
                out |= value.flat()
            elif "block" not in field.metadata:
                out[field.name] = value
            elif value is not None:
                names = _names(field)
                out |= {names.get(k, k): v for k, v in value.flat().items()}
        return out

    def changed(self, **changes: Any) -> Self:
        """Return the settings with some flat names changed.

        If a choice changes, values that exist in the old and the new entry are kept. None for the first value of an
        optional block removes the block.

        Raises
        ------
        ConfigError
            These settings lack a name. The message says which choice would read it.
        """
        settings, rest = self._changed(dict(changes))
        if rest:
            raise ConfigError(_unread(settings, sorted(rest)[0]))
        return settings

    def _changed(self, rest: dict[str, Any]) -> tuple[Self, dict[str, Any]]:
        new: dict[str, Any] = {}
        for field, value in _fields(self):
            if isinstance(rest.get(field.name), Settings):
                new[field.name] = value = rest.pop(field.name)
            if "choice" in field.metadata:
                new[field.name], rest = _chosen(field, value, rest)
            elif "block" in field.metadata:
                names = _names(field)
                in_block = {k: rest.pop(flat) for k, flat in names.items() if flat in rest}
                if field.metadata.get("optional") and in_block:
                    new[field.name] = value = _opened(field, value, in_block)
                if value is not None:
                    inner = in_block if field.metadata["prefix"] else {**in_block, **rest}
                    new[field.name], left = _within(value, inner, names)
                    if not field.metadata["prefix"]:
                        rest = left
            elif field.name in rest:
                new[field.name] = rest.pop(field.name)
        return dataclasses.replace(self, **new), rest  # type: ignore[type-var]

    def to_json(self) -> dict[str, Any]:
        """Return plain data, the inverse of `from_json`."""
        out: dict[str, Any] = {}
        for field, value in _fields(self):
            if "choice" in field.metadata:
                out[field.name] = {"name": value.name, **value.to_json()}
            elif isinstance(value, Settings):
                out[field.name] = value.to_json()
            else:
                out[field.name] = [_plain(v) for v in value] if isinstance(value, tuple) else value
        return out

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Rebuild settings from plain data.

        Raises
        ------
        ConfigError
            A name is missing or unknown, or a value is not allowed.
        """
        fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
        if not isinstance(data, Mapping) or set(data) != set(fields):
            raise ConfigError(
                f"{cls.__name__}: expected an object with the keys {', '.join(sorted(fields))}; got "
                f"{', '.join(sorted(map(str, data))) if isinstance(data, Mapping) else data!r}"
            )
        kinds = hints(cls)
        values: dict[str, Any] = {}
        for name, field in fields.items():
            value = data[name]
            if "choice" in field.metadata:
                inner = dict(value) if isinstance(value, Mapping) else {}
                values[name] = field.metadata["choice"].get(str(inner.pop("name", value))).from_json(inner)
            elif "block" in field.metadata:
                values[name] = None if value is None else field.metadata["block"].from_json(value)
            else:
                values[name] = _from_plain(value, kinds[name])
        return cls(**values)


class Chosen(Settings):
    """Base of the settings types of a registry.

    Attributes
    ----------
    name : str
        Name in the registry.
    """

    name: ClassVar[str]


def leaves(kind: type[Settings]) -> dict[str, list[Leaf]]:
    """Return every plain value below a settings type by flat name.

    A name has one entry for each choice that has it. A choice itself is an entry too, annotated with a Literal of the
    existing names.
    """
    by_name: dict[str, list[Leaf]] = {}
    for leaf in _leaves(kind, ()):
        by_name.setdefault(leaf.name, []).append(leaf)
    return by_name


def _leaves(kind: type[Settings], path: tuple[str, ...]) -> Iterator[Leaf]:
    kinds, texts = hints(kind), described(kind)
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        at = (*path, field.name)
        if "choice" in field.metadata:
            registry = field.metadata["choice"]
            names = tuple(registry.names())
            lines = [f"{name}: {lowered(summary(registry.get(name)))}" for name in names]
            text = f"{texts[field.name]} {'; '.join(lines)}."
            yield Leaf(field.name, at, Literal[names], field.metadata["default"], field.metadata, text, kind)
            for name in names:
                yield from (
                    dataclasses.replace(leaf, choice=field.name, chosen=name)
                    for leaf in _leaves(registry.get(name), at)
                )
        elif "block" in field.metadata:
            names_of = _names(field)
            values = field.metadata.get("values", {})
            for number, leaf in enumerate(_leaves(field.metadata["block"], at)):
                # An optional block exists only with its first value.
                absent = number == 0 and field.metadata.get("optional")
                default = None if absent else values.get(leaf.name, leaf.default)
                yield dataclasses.replace(leaf, name=names_of.get(leaf.name, leaf.name), default=default)
        elif field.metadata.get("option", True):
            text, names_in = texts.get(field.name, ""), field.metadata.get("names")
            if names_in is not None:
                text += " Names: " + ", ".join(f"`{name}`" for name in names_in.names()) + "."
            yield Leaf(field.name, at, kinds[field.name], field.default, field.metadata, text, kind)


def described(kind: type) -> dict[str, str]:
    """Return the text of each entry in the Parameters section of a class and its bases."""
    text = inspect.cleandoc(kind.__doc__ or "")
    section = re.search(r"Parameters\n-+\n(.*?)(?:\n\n\w[^\n]*\n-+\n|\Z)", text, re.DOTALL)
    texts: dict[str, str] = {} if kind.__base__ is None else described(kind.__base__)
    names: list[str] = []
    for line in section[1].splitlines() if section else []:
        head = re.match(r"([\w, ]+) : ", line)
        if head:
            names = [n.strip() for n in head[1].split(",")]
            texts |= dict.fromkeys(names, "")
        else:
            texts |= {n: f"{texts[n]} {line.strip()}".strip() for n in names}
    return texts


def summary(kind: type) -> str:
    """Return the first line of a class's docstring, without its full stop."""
    return inspect.cleandoc(kind.__doc__ or "").partition("\n")[0].removesuffix(".")


def lowered(text: str) -> str:
    """Return a text for the middle of a sentence. A text with two initial capitals is a name."""
    return text if text[1:2].isupper() else text[:1].lower() + text[1:]


def parse_text(annotation: Any, text: str) -> Any:
    """Read a plain value from the text of an option or an override.

    Raises
    ------
    ValueError
        The text does not give a value of this type.
    """
    members = [a for a in typing.get_args(annotation) if a is not type(None)]
    allowed = choices_of(annotation)
    if allowed and not (None in allowed and text in ("none", "null")):
        return next((v for v in allowed if str(v) == text), None) or parse_text(type(allowed[0]), text)
    if is_union(annotation):
        if type(None) in typing.get_args(annotation) and text in ("none", "null"):
            return None
        return parse_text(members[0], text)
    if typing.get_origin(annotation) is tuple:
        return tuple(parse_text(members[0], part.strip()) for part in text.split(","))
    if annotation is bool:
        if text not in ("true", "false"):
            raise ValueError(f"{text!r}: give true or false")
        return text == "true"
    if annotation is int and not re.fullmatch(r"[+-]?[0-9]{1,18}", text):
        raise ValueError(f"{text!r}: give a whole number")
    if annotation is float and not re.fullmatch(_NUMBER, text, re.ASCII):
        raise ValueError(f"{text!r}: give a number")
    return annotation(text)


def read_value(leaf: Leaf, text: str) -> Any:
    """Read the value of a setting from the text of ``--set``.

    Raises
    ------
    ConfigError
        The setting does not allow the value. The message names both.
    """
    parse = leaf.metadata.get("parse")
    try:
        value = parse(text) if parse else parse_text(leaf.annotation, text)
    except ValueError as cause:
        raise ConfigError(f"{leaf.name}: {cause}") from cause
    check(leaf.name, value, leaf.annotation, leaf.metadata)
    return value


def _fields(value: Any) -> Iterator[tuple[Any, Any]]:
    for field in dataclasses.fields(value):
        yield field, getattr(value, field.name)


def _names(field: Any) -> dict[str, str]:
    """Map names inside a block to flat names. The map is empty for a block without prefix."""
    prefix = field.metadata["prefix"]
    if not prefix:
        return {}
    inner = [f.name for f in dataclasses.fields(field.metadata["block"])]
    return {name: prefix if number == 0 else f"{prefix}_{name}" for number, name in enumerate(inner)}


def _within(
    value: Settings, changes: dict[str, Any], names: Mapping[str, str]
) -> tuple[Settings, dict[str, Any]]:
    """Change a block. An error names its fields by their flat names."""
    try:
        return value._changed(changes)
    except ConfigError as error:
        first, _, rest = str(error).partition(" ")
        raise type(error)(f"{names.get(first, first)} {rest}") from error


def _opened(field: Any, value: Settings | None, in_block: dict[str, Any]) -> Settings | None:
    """Return an optional block for new values. The first of them creates or removes it."""
    names = _names(field)
    first = next(iter(names))
    if first in in_block and in_block[first] is None:
        value = in_block.pop(first)
    elif first in in_block and value is None:
        value = field.metadata["block"]()
    if value is None and in_block:
        raise ConfigError(f"{names[next(iter(in_block))]} goes with {names[first]}")
    return value


def _chosen(field: Any, value: Any, rest: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    if field.name in rest:
        asked = rest.pop(field.name)
        if asked != value.name:
            unset = type(value)().flat()
            kept = {k: v for k, v in value.flat().items() if v != unset[k]}
            value = field.metadata["choice"].get(asked)()
            value, _ = value._changed(kept)
    chosen, left = value._changed(dict(rest))
    return chosen, left


def _unread(settings: Settings, name: str) -> str:
    everything = leaves(type(settings))
    if name not in everything:
        return (
            f"unknown setting {name}{did_you_mean(name, everything)}; known: {', '.join(sorted(everything))}"
        )
    readers = " or ".join(leaf.chosen for leaf in everything[name])
    field = everything[name][0].choice
    return f"{name} goes with {field} {readers}; {field} {settings.flat()[field]} would not read it"


def check(name: str, value: Any, annotation: Any, metadata: Mapping[str, Any]) -> None:
    """Refuse a value that a setting does not allow.

    Raises
    ------
    ConfigError
        The message starts with the name and says what is allowed.
    """
    allowed = choices_of(annotation)
    fit = fits(value, annotation)
    if allowed is not None and not fit:
        if "choice" in metadata and isinstance(value, str) and value in metadata["choice"].rooms:
            # Says which room brings it.
            metadata["choice"].get(value)
        hint = did_you_mean(str(value), map(str, allowed))
        named = ", ".join("none" if v is None else str(v) for v in allowed)
        raise ConfigError(f"{name} must be one of {named}; got {value!r}{hint}")
    if allowed is not None:
        return
    if not fit:
        raise ConfigError(f"{name} must be {words(annotation)}; got {value!r}")
    numbers = value if isinstance(value, tuple) else (value,)
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int | float):
            continue
        low, high = metadata.get("at_least"), metadata.get("at_most")
        if (low is not None and not number >= low) or (high is not None and not number <= high):
            ends = [f"{end:g}" if isinstance(end, float) else str(end) for end in (low, high)]
            span = f"at least {ends[0]}" if high is None else f"between {ends[0]} and {ends[1]}"
            raise ConfigError(f"{name} must be {span}; got {number!r}")


def _plain(value: Any) -> Any:
    return value.to_json() if hasattr(value, "to_json") else value


def _from_plain(value: Any, annotation: Any) -> Any:
    if typing.get_origin(annotation) is tuple and isinstance(value, list):
        member = typing.get_args(annotation)[0]
        return tuple(member.from_json(v) if hasattr(member, "from_json") else v for v in value)
    return value
