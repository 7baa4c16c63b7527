"""Measures of the house rules in Rust: arguments of functions, and files of a crate that name each other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: The crates that know nothing of Python. Cargo allows no circle: the first names nothing of the second.
CRATES = ("loopq-core", "loopq-cpu")

_FUNCTION = re.compile(r"\bfn\s+(\w+)\s*(?:<[^(]*?>)?\s*\(")


def arguments(text: str) -> Iterator[tuple[str, int]]:
    """Name and number of arguments of every function, without `self`."""
    for match in _FUNCTION.finditer(text):
        depth, parts, part = 1, [], ""
        for c in text[match.end() : match.end() + 4000]:
            depth += (c in "([{<") - (c in ")]}") - (c == ">" and not part.endswith("-"))
            if depth == 0:
                break
            if c == "," and depth == 1:
                parts.append(part)
                part = ""
            else:
                part += c
        names = [p.strip() for p in (*parts, part) if p.strip()]
        yield match[1], len([n for n in names if not re.fullmatch(r"(?:&(?:'\w+ )?)?(?:mut )?self", n)])


@cache
def too_many_arguments(most: int) -> dict[str, int]:
    """Functions of the core and the binding with more than `most` arguments, without the one that is `py`."""
    return {
        f"{path.relative_to(ROOT / 'rust')}:{name}": n
        for path in sorted((ROOT / "rust").rglob("*.rs"))
        for name, n in arguments(path.read_text("utf-8"))
        if n > most
    }


def paths(text: str) -> Iterator[list[str]]:
    """Paths from `crate` or `super` that a file names: of `use`, with each name of a group, and inside expressions."""

    def opened(path: str) -> Iterator[str]:
        head, brace, rest = path.partition("{")
        if not brace:
            yield path.split(" as ")[0].strip()
            return
        depth, part = 0, ""
        for c in rest.rpartition("}")[0] + ",":
            depth += (c == "{") - (c == "}")
            if c == "," and depth == 0:
                yield from opened(head.strip() + part.strip())
                part = ""
            else:
                part += c

    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    uses = re.findall(r"\buse\s+((?:crate|super)::[^;]+);", text)
    inline = re.findall(r"\b(?:crate|super)(?:::\w+)+", re.sub(r"\buse\s[^;]+;", "", text))
    for path in (*(one for use in uses for one in opened(use)), *inline):
        yield [part for part in path.split("::") if part and part != "self"]


@cache
def file_graph(crate: str) -> dict[str, set[str]]:
    """Files of a crate that each file names: `mod.rs` of a folder stands for what its siblings share."""
    source = ROOT / "rust" / crate / "src"
    names = {str(path.relative_to(source).with_suffix("")): path for path in source.rglob("*.rs")}
    graph: dict[str, set[str]] = {}
    for name, path in names.items():
        graph[name] = set()
        for parts in paths(path.read_text("utf-8")):
            # A file's own name, or a folder for its `mod.rs`; each `super` goes up by one.
            where = [p for p in name.split("/") if p != "mod"] if parts[0] == "super" else []
            while parts and parts[0] in ("super", "crate"):
                where = where[:-1] if parts[0] == "super" else []
                parts = parts[1:]
            whole = where + parts
            while whole and "/".join(whole) not in names:
                whole.pop()
            graph[name] |= {"/".join(whole)} - {"", name}
    return graph
