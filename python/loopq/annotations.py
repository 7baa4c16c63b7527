"""Checks of values against annotations, and names of types in messages. Settings and files use them."""

from __future__ import annotations

import math
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_HINTS: dict[type, dict[str, Any]] = {}
_WORDS = {
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
    str: "text",
    type(None): "None",
}


def hints(kind: type) -> dict[str, Any]:
    """Return the annotations of a class's fields, including the extras of `Annotated`."""
    if kind not in _HINTS:
        _HINTS[kind] = get_type_hints(kind, include_extras=True)
    return _HINTS[kind]


def is_union(annotation: Any) -> bool:
    """Whether an annotation is `X | Y` or `Optional[X]`."""
    return get_origin(annotation) in (Union, types.UnionType)


def choices_of(annotation: Any) -> tuple[Any, ...] | None:
    """Return the values of a Literal, with None if it may be absent. Return None for other annotations."""
    members = get_args(annotation)
    if get_origin(annotation) is Literal:
        return members
    inner = choices_of(members[0]) if len(members) == 2 and members[1] is type(None) else None
    return None if inner is None else (*inner, None)


def fits(value: Any, annotation: Any) -> bool:
    """Whether a value has the type of an annotation.

    A bool is not a number, a whole number is a float as well, and a float is finite. Whole numbers have 64 bits, signed
    or not. A choice must equal a member in type too: 1 is neither True nor "1".
    """
    origin, members = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return any(type(value) is type(member) and value == member for member in members)
    if is_union(annotation):
        return any(fits(value, member) for member in members)
    if origin is tuple:
        return isinstance(value, tuple) and all(fits(v, members[0]) for v in value)
    if annotation is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool) and -(1 << 63) <= value < 1 << 64
    # Protocols cannot be checked.
    return annotation is Any or getattr(annotation, "_is_protocol", False) or isinstance(value, annotation)


def words(annotation: Any) -> str:
    """Return the allowed values of an annotation, for a message."""
    if get_origin(annotation) is Literal:
        return ", ".join(map(repr, get_args(annotation)))
    if is_union(annotation):
        return " or ".join(words(member) for member in get_args(annotation))
    name = annotation.__name__ if isinstance(annotation, type) else str(annotation).removeprefix("typing.")
    return _WORDS.get(annotation, name)
