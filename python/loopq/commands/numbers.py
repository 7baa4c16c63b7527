"""Numbers of nested data as tables, for the sections of a diagnosis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from loopq.terminal.table import render, short

#: Keys above a number that are shown, and entries of a list. Spectra and maps over directions are longer.
_DEPTH, _LENGTH = 4, 16
#: Parts with a table of their own in the page.
_LEFT_OUT = ("spectra", "blocks", "prompts")


def tables(data: Mapping[str, Any]) -> list[str]:
    """Return tables of the numbers in nested data: one for each set of names, and one for each length of lists."""
    by_names: dict[tuple[str, ...], list[tuple[str, Mapping[str, Any]]]] = {}
    by_length: dict[int, list[tuple[str, list[Any]]]] = {}
    for place, values in _mappings("", data, 0):
        single = {k: v for k, v in values.items() if _shown(v) is not None}
        if any("." in name for name in single):
            # Names of layers: one line each.
            rows = [(f"{place}.{name}", {"value": value}) for name, value in single.items()]
            by_names.setdefault(("value",), []).extend(rows)
        elif single:
            by_names.setdefault(tuple(single), []).append((place, single))
        for key, entries in values.items():
            if isinstance(entries, list) and 0 < len(entries) <= _LENGTH and all(map(_is_number, entries)):
                by_length.setdefault(len(entries), []).append((f"{place}.{key}".lstrip("."), entries))
    rendered = [
        render(("", *names), [(place, *map(_shown, values.values())) for place, values in rows])
        for names, rows in by_names.items()
    ]
    rendered += [
        render(("", *map(str, range(length))), [(place, *map(_shown, values)) for place, values in rows])
        for length, rows in by_length.items()
    ]
    return rendered


def _mappings(place: str, data: Mapping[str, Any], depth: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each mapping with its place. Lists of mappings count as mappings from numbers."""
    yield place, data
    if depth == _DEPTH:
        return
    for key, value in data.items():
        if key in _LEFT_OUT or _shown(value) is not None:
            continue
        inner = value
        if isinstance(value, list) and value and all(isinstance(v, Mapping) for v in value):
            inner = {str(number): v for number, v in enumerate(value)}
        if isinstance(inner, Mapping):
            yield from _mappings(f"{place}.{key}".lstrip("."), inner, depth + 1)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _shown(value: Any) -> str | None:
    """Return a number, a word, or an interval as text. Other values have none."""
    if isinstance(value, Mapping) and {"estimate", "low", "high"} <= set(value):
        return f"{short(value['estimate'], 4)} [{short(value['low'], 4)}, {short(value['high'], 4)}]"
    if isinstance(value, str | bool):
        return str(value)
    return (str(value) if isinstance(value, int) else short(value, 4)) if _is_number(value) else None
