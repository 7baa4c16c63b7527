"""The single check of JSON from outside. A dataclass defines the contents of a file, and everything else is refused.

Annotations are the allowed types: plain ones, `Literal`, `X | None`, `tuple`, `dict` and further dataclasses.
`Annotated[X, Allowed(...)]` adds a rule to a type. A field with a default may be missing. A field with `others` in its
metadata receives the remaining keys, for another reader to check.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, get_args, get_origin

from loopq.annotations import fits, hints, is_union, words
from loopq.errors import CheckpointError, LoopqError

T = TypeVar("T")
#: Version of `loopq.json`, `manifest.json` and `loopq_export.json`.
VERSION = 2
MAX_DEPTH = 64
MAX_DIGITS = 40
MAX_SHOWN = 120
#: Bytes of a file name. With a suffix and the parts of a temporary name it stays below the 255 of file systems.
MAX_NAME = 200
#: The only folder among a model's files, for chat templates besides the first.
TEMPLATES = "additional_chat_templates"
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = MAX_SHOWN


def shown(value: Any) -> str:
    """Return a value for a message: one line of limited length."""
    text = _SHORT.repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def plain_name(name: str) -> bool:
    """Whether a name can only refer to a file inside its folder."""
    plain = name.isprintable() and not set(name) & set("/\\:") and not name.startswith(".")
    return plain and 0 < len(name.encode()) <= MAX_NAME


def plain_place(name: str) -> bool:
    """Whether a name is plain, or that of a further chat template in the folder where transformers keeps them."""
    return plain_name(name.removeprefix(f"{TEMPLATES}/"))


@dataclass(frozen=True)
class Allowed:
    """An additional rule for a value, with its text for messages."""

    text: str
    test: Callable[[Any], object]


def between(low: int, high: int) -> Allowed:
    """Allow whole numbers from `low` to `high`."""
    return Allowed(f"{low} to {high}", lambda n: low <= n <= high)


Object = dict[str, Any]
Count = Annotated[int, between(0, 2**62)]
Positive = Annotated[int, between(1, 2**31 - 1)]
#: Loop steps. No model is deeper, and lists of steps have this length.
Depth = Annotated[int, between(1, 2**20)]
Seed = Annotated[int, between(-(2**63), 2**64 - 1)]
Sha256 = Annotated[str, Allowed("64 hexadecimal digits", re.compile("[0-9a-f]{64}").fullmatch)]
Place = Annotated[
    str,
    Allowed(f"a plain name, no path but {TEMPLATES}/, no leading dot, at most {MAX_NAME} bytes", plain_place),
]
Name = Annotated[str, Allowed("a plain name, no path, no leading dot, at most 200 bytes", plain_name)]


class _Refused(ValueError):
    def __init__(self, key: str, value: Any, allowed: str) -> None:
        super().__init__(f"{key.removeprefix('.') or 'the whole'}: {shown(value)}; allowed: {allowed}")


def checked(
    kind: type[T],
    data: Any,
    where: object,
    error: type[LoopqError] = CheckpointError,
    *,
    others: bool = False,
) -> T:
    """Convert plain data of `parse_json` to a dataclass (or another annotation), with a check of every value.

    `where` is the file, for the message. `others` accepts keys that the schema does not name: those of other tools.

    Raises
    ------
    LoopqError
        Error of the given class. It names the file, the key, the value and what is allowed.
    """
    try:
        value: T = _value(kind, data, "", others)
    except (LoopqError, ValueError) as cause:
        raise error(f"{where}: {cause}") from None
    return value


def _value(kind: Any, value: Any, key: str, others: bool) -> Any:
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind):
        return _object(kind, value, key, others)
    if origin is Annotated:
        result = _value(args[0], value, key, others)
        if not args[1].test(result):
            raise _Refused(key, value, args[1].text)
        return result
    if is_union(kind):
        return None if value is None else _value(args[0], value, key, others)
    if origin is tuple:
        if not isinstance(value, list) or (args[-1] is not Ellipsis and len(value) != len(args)):
            raise _Refused(key, value, "a list" if args[-1] is Ellipsis else f"a list of {len(args)}")
        kinds = args[:1] * len(value) if args[-1] is Ellipsis else args
        return tuple(
            _value(k, v, f"{key}[{i}]", others) for i, (k, v) in enumerate(zip(kinds, value, strict=True))
        )
    if origin is dict:
        if not isinstance(value, dict):
            raise _Refused(key, value, "an object")
        inner = {k: f"{key}.{shown(k)[1:-1]}" for k in value}
        return {_key(args[0], k, inner[k]): _value(args[1], v, inner[k], others) for k, v in value.items()}
    if not fits(value, kind):
        raise _Refused(key, value, words(kind))
    return value


def _key(kind: Any, key: str, at: str) -> Any:
    if kind is not int:
        return _value(kind, key, at, False)
    if not re.fullmatch("0|[1-9][0-9]{0,8}", key):
        raise _Refused(at, key, "a whole number as key")
    return int(key)


def _object(kind: Any, value: Any, key: str, others: bool) -> Any:
    fields = {f.name: f for f in dataclasses.fields(kind)}
    rest = next((fields.pop(n) for n, f in list(fields.items()) if f.metadata.get("others")), None)
    if not isinstance(value, dict):
        raise _Refused(key, value, f"an object of {', '.join(fields)}")
    needed = {n for n, f in fields.items() if f.default is f.default_factory is dataclasses.MISSING}
    missing, unknown = (
        sorted(needed - set(value)),
        sorted(set() if others or rest else set(value) - set(fields)),
    )
    if missing or unknown:
        what = f"{(missing or unknown)[0]!r:.100} is {'missing' if missing else 'unknown'}"
        raise ValueError(f"{key.removeprefix('.') + ': ' if key else ''}{what}; known: {', '.join(fields)}")
    known = {n: _value(hints(kind)[n], v, f"{key}.{n}", others) for n, v in value.items() if n in fields}
    if rest is not None:
        known[rest.name] = {n: v for n, v in value.items() if n not in fields}
    try:
        return kind(**known)
    except LoopqError as cause:
        raise ValueError(f"{key.removeprefix('.') + ': ' if key else ''}{cause}") from None


def parse_json(
    data: bytes | str, where: object, error: type[LoopqError] = CheckpointError, *, finite: bool = True
) -> Any:
    """Read JSON in UTF-8, with limits that all files of loopq and of other tools meet.

    `where` is the file, for the message. NaN and infinity are not JSON. `finite=False` accepts them, because config
    files of transformers contain infinities.

    Raises
    ------
    LoopqError
        Error of the given class: invalid JSON, a duplicate key in an object, or half a surrogate pair. More than 64
        levels and whole numbers of more than 40 digits are errors too.
    """

    def number(text: str) -> float:
        if finite and not math.isfinite(float(text)):
            raise ValueError(f"{text:.40} is not a finite number")
        return float(text)

    def whole(text: str) -> int:
        if len(text) > MAX_DIGITS:
            raise ValueError(f"a whole number of {len(text)} digits")
        return int(text)

    def pairs(items: list[tuple[str, Any]]) -> Object:
        entries: Object = {}
        for name, value in items:
            if name in entries:
                raise ValueError(f"{shown(name)} stands twice in an object")
            entries[name] = value
        return entries

    try:
        text = data.decode() if isinstance(data, bytes) else data
        parsed = json.loads(
            text, parse_float=number, parse_constant=number, parse_int=whole, object_pairs_hook=pairs
        )
        _limit(parsed)
    except RecursionError:
        raise error(f"{where}: not valid JSON (more than {MAX_DEPTH} levels)") from None
    except ValueError as cause:
        raise error(f"{where}: not valid JSON ({cause})") from cause
    return parsed


def _limit(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        if not level:
            return
        inner: list[Any] = []
        for item in level:
            if isinstance(item, str):
                item.encode()  # half a surrogate pair has no bytes
            elif isinstance(item, dict):
                inner += [*item, *item.values()]
            elif isinstance(item, list):
                inner += item
        level = inner
    raise ValueError(f"more than {MAX_DEPTH} levels")


def _digest(data: Any) -> str:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def sealed(format_name: str, data: Mapping[str, Any]) -> Object:
    """Return the content of a self-protecting file: format, version and the SHA-256 of all of it.

    The sum is over JSON with sorted keys, without spaces, with escapes for non-ASCII, and without the key `sha256`.
    """
    body = {"format": format_name, "version": VERSION, **data}
    plain: Object = json.loads(json.dumps(body, default=dataclasses.asdict, allow_nan=False))
    return {**plain, "sha256": _digest(plain)}


def unsealed(data: Any, format_name: str, where: object, error: type[LoopqError] = CheckpointError) -> Object:
    """Return the content from a result of `sealed`.

    Raises
    ------
    LoopqError
        Error of the given class: another format or version, or altered content.
    """
    if not isinstance(data, dict) or data.get("format") != format_name:
        raise error(f"{where}: its format is not {format_name!r}")
    version = data.get("version")
    if type(version) is not int or version != VERSION:
        raise error(f"{where}: version {shown(version)}; this loopq reads version {VERSION}")
    if data.pop("sha256", None) != _digest(data):
        raise error(f"{where}: altered: its sha256 is not that of its content; copy it again")
    return {k: v for k, v in data.items() if k not in ("format", "version")}
