"""Builds the two texts that ship with loopq for models with a tokenizer: calibration and evaluation, of six kinds each.

python -m benches.quality.texts --sources FOLDER [--data ../shared/data] [--out python/loopq/zoo/data]

FOLDER holds clones of the repositories in `COMMITS`. Kinds take turns, so that the first passages are a balanced mix.
The two texts share no author, no book and no file.
"""

from __future__ import annotations

import argparse
import html
import itertools
import json
import lzma
import os
import random
import re
import subprocess
import unicodedata
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from pathlib import Path

from benches.quality import written_texts

ROOT = Path(__file__).parents[2]
#: The last commits of the textbooks under CC BY 4.0; `loopq` is this repository.
COMMITS = {
    "ELTeC-deu": "d1eed488bd579ee95151b1a291a0056a90c36fa4",
    "ELTeC-fra": "83f0a43fdb967cd1db646027a1a237307e4924a1",
    "ELTeC-gre": "cdcf83f52ede512f355774c244466c085fe131ba",
    "ELTeC-ukr": "a8c3d71301cdba767e33551ff0099da1dc51681a",
    "osbooks-prealgebra-bundle": "751be9772758a6345b0bf1bf36617ca648619749^",
    "osbooks-introductory-statistics-bundle": "592cff1f07c4fda4800180503d540158f7f48638^",
    "udhr": "d3d38276c91668df9ac4e33e5dac7cd3a14c12b2",
    "loopq": "c3c853edd05b001b9991933537b6d5b2e2b0e373",
}
#: Bytes of each kind.
SIZES = {"calibration": 170_000, "evaluation": 80_000}
PASSAGE, SHORT = 2400, 1000
#: Texts of each use: textbooks, a book of mathematics, languages, and files of loopq.
BOOKS = {
    "calibration": ("Introduction to Anthropology", "Principles of Economics 3e"),
    "evaluation": ("Life, Liberty, and the Pursuit of Happiness", "College Success"),
}
MATHEMATICS = {
    "calibration": ("osbooks-prealgebra-bundle", "prealgebra-2e"),
    "evaluation": ("osbooks-introductory-statistics-bundle", "introductory-statistics-2e"),
}
LANGUAGES = {"calibration": ("ELTeC-deu", "ELTeC-ukr"), "evaluation": ("ELTeC-fra", "ELTeC-gre")}
DECLARATIONS = ("arb", "cmn_hans")
#: Folders or files of each programming language.
CODE = {
    "calibration": (
        r"python/.*\.py",
        r"rust/.*/src/.*\.rs",
        r"kernels/.*\.cuh?",
        r"docs/.*\.md|Makefile|.*\.toml",
    ),
    "evaluation": (
        r"tests/.*\.py",
        r"rust/.*/(tests|benches)/.*\.rs",
        r"benches/.*\.py",
        r".*\.(sh|ya?ml|css)",
    ),
}
Passages = Iterator[tuple[str, str]]


def build(use: str, data: Path, sources: Path) -> list[dict[str, str]]:
    """Return the records of one text. Every call gives the same result."""
    rng = random.Random(f"loopq {use}")
    novels = _novels(data, use)
    textbook = _records(
        data / "corpus_openstax" / "openstax_ccby.jsonl.xz", lambda r: r["book"] in BOOKS[use]
    )
    sections = [(f"OpenStax {r['book']}", r["text"]) for r in textbook]
    spoken, problems = written_texts.dialogues(rng), written_texts.problems(rng)
    kinds: dict[str, Passages] = {
        "prose": _drawn(novels, rng, PASSAGE, lambda passage: not _is_dialogue(passage)),
        "textbook": _drawn(sections, rng, PASSAGE),
        "mathematics": _turns(_drawn(_mathematics(sources, *MATHEMATICS[use]), rng, PASSAGE), problems),
        "code": _turns(*(_drawn(_code(sources, pattern), rng, PASSAGE) for pattern in CODE[use])),
        "dialogue": _turns(_drawn(novels, rng, PASSAGE, _is_dialogue), spoken),
        "languages": _turns(
            *(_drawn(_tei(sources, name), rng, SHORT) for name in LANGUAGES[use]),
            *(_declaration(sources, code, use) for code in DECLARATIONS),
        ),
    }
    columns = [list(_limited(kind, passages, SIZES[use])) for kind, passages in kinds.items()]
    return [record for row in itertools.zip_longest(*columns) for record in row if record is not None]


def _limited(kind: str, passages: Passages, size: int) -> Iterator[dict[str, str]]:
    n_bytes = 0
    for source, text in passages:
        plain = unicodedata.normalize("NFC", text).strip()
        yield {"kind": kind, "source": source, "text": plain}
        n_bytes += len(plain.encode())
        if n_bytes > size:
            return
    raise ValueError(f"{kind}: the sources have {n_bytes} bytes, and {size} are needed")


def _turns(*columns: Passages) -> Passages:
    """One passage of each in turn, as long as any has one."""
    for row in itertools.zip_longest(*columns):
        yield from (passage for passage in row if passage is not None)


def _drawn(
    documents: list[tuple[str, str]], rng: random.Random, size: int, fits: Callable[[str], bool] | None = None
) -> Passages:
    """Passages of neighbouring paragraphs from a random place of each document in turn; none stands twice."""
    cut = [(name, [p for p in _passages(text, size) if fits is None or fits(p)]) for name, text in documents]
    for _, passages in cut:
        rng.shuffle(passages)
    rng.shuffle(cut)
    while any(passages for _, passages in cut):
        yield from ((name, passages.pop()) for name, passages in cut if passages)


def _passages(text: str, size: int) -> Iterator[str]:
    lines: list[str] = []
    n_bytes = 0
    for line in text.split("\n"):
        lines.append(line.rstrip())
        n_bytes += len(line.encode()) + 1
        if n_bytes >= size:
            # A paragraph longer than a passage would outweigh the others.
            if n_bytes < 2 * size:
                yield "\n".join(lines)
            lines, n_bytes = [], 0


def _is_dialogue(passage: str) -> bool:
    lines = [line for line in passage.split("\n") if line]
    return len(lines) > 5 and sum(line[0] in "\"“‘'" for line in lines) > 0.7 * len(lines)


def _records(path: Path, chosen: Callable[[dict[str, str]], bool]) -> list[dict[str, str]]:
    with lzma.open(path, "rt", encoding="utf-8") as file:
        return [record for record in map(json.loads, file) if chosen(record)]


def _novels(data: Path, use: str) -> list[tuple[str, str]]:
    """Novels of two thirds of the authors for calibration, of the others for evaluation."""
    novels = _records(data / "corpus_eltec_eng" / "eltec_eng.jsonl.xz", lambda r: True)
    authors = sorted({r["author"] for r in novels})
    random.Random("authors").shuffle(authors)
    n_first = 2 * len(authors) // 3
    chosen = set(authors[:n_first] if use == "calibration" else authors[n_first:])
    # The first pages are titles and prefaces.
    return [(f"ELTeC-eng {r['id']}", r["text"][5000:]) for r in novels if r["author"] in chosen]


def _git(sources: Path, name: str, *words: str) -> str:
    folder = ROOT if name == "loopq" else sources / name
    return subprocess.run(["git", "-C", folder, *words], check=True, capture_output=True, text=True).stdout


def _files(sources: Path, name: str, pattern: str, each: int = 1) -> list[tuple[str, str]]:
    """Path and text of the files of a repository with a matching path, or of every second, third, ... of
    them."""
    listed = _git(sources, name, "ls-tree", "-r", "--name-only", COMMITS[name]).split("\n")
    chosen = [path for path in listed if re.fullmatch(pattern, path)][::each]
    return [(path, _git(sources, name, "show", f"{COMMITS[name]}:{path}")) for path in chosen]


def _code(sources: Path, pattern: str) -> list[tuple[str, str]]:
    return [(f"loopq {path}", text) for path, text in _files(sources, "loopq", pattern)]


def _tei(sources: Path, name: str) -> list[tuple[str, str]]:
    """Paragraphs of the novels of a collection, one a line."""
    texts = []
    for path, text in _files(sources, name, r"level1/.*\.xml", each=2):
        body = next(e for e in ET.fromstring(text.encode()).iter() if e.tag.endswith("}body"))
        paragraphs = [" ".join("".join(e.itertext()).split()) for e in body.iter() if e.tag.endswith("}p")]
        texts.append((f"{name} {Path(path).stem}", "\n".join(paragraphs)))
    return texts


def _declaration(sources: Path, code: str, use: str) -> Passages:
    """Articles of the declaration, the first half for calibration, the second for evaluation."""
    text = _git(sources, "udhr", "show", f"{COMMITS['udhr']}:declaration/{code}.html")
    paragraphs = [html.unescape(p) for p in re.findall(r"<(?:p|h2|li)>(.*?)</", text, re.DOTALL)]
    half = len(paragraphs) // 2
    chosen = paragraphs[:half] if use == "calibration" else paragraphs[half:]
    return ((f"UDHR {code}", passage) for passage in _passages("\n".join(chosen), SHORT))


def _mathematics(sources: Path, name: str, book: str) -> list[tuple[str, str]]:
    collection = _git(sources, name, "show", f"{COMMITS[name]}:collections/{book}.collection.xml")
    if "creativecommons.org/licenses/by/4.0" not in collection:
        raise ValueError(f"{book}: not under CC BY 4.0 at {COMMITS[name]}")
    texts = []
    for module in re.findall(r'document="(\w+)"', collection):
        text = _git(sources, name, "show", f"{COMMITS[name]}:modules/{module}/index.cnxml")
        content = next(e for e in ET.fromstring(text.encode()).iter() if e.tag.endswith("}content"))
        lines = (" ".join(line.split()) for line in _plain(content).split("\n"))
        texts.append((f"OpenStax {book}", "\n".join(line for line in lines if line)))
    return texts


#: Elements that start a line of their own, and that hold no text to read.
_LINES = {"para", "title", "item", "row", "equation", "problem", "solution", "mtr", "entry"}
_SILENT = {"media", "figure", "label", "metadata"}
_FORMS = {
    "mfrac": "{}/{}",
    "msup": "{}^{}",
    "msub": "{}_{}",
    "msubsup": "{}_{}^{}",
    "munder": "{}_{}",
    "mover": "{}",
}


def _plain(element: ET.Element) -> str:
    """Text of a section, its formulas on one line."""
    tag = element.tag.rpartition("}")[2]
    if tag in _SILENT:
        return ""
    if tag in _FORMS:
        parts = [_plain(child).strip() for child in element]
        wrapped = [f"({part})" if re.search(r"[\s+−*/-]", part) else part for part in parts]
        return _FORMS[tag].format(*wrapped, "", "")
    if tag == "mo":
        return f" {element.text} " if (element.text or "") in "=+−-×÷·<>≤≥≠≈" else element.text or ""
    inner = (element.text or "") + "".join(_plain(child) + (child.tail or "") for child in element)
    if tag == "msqrt":
        return f"√({inner.strip()})"
    return f"\n{inner}\n" if tag in _LINES else inner


def main() -> None:
    """Write both texts and print what they hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sources", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("LOOPQ_DATA", "../shared/data")))
    parser.add_argument("--out", type=Path, default=ROOT / "python" / "loopq" / "zoo" / "data")
    args = parser.parse_args()
    for use in SIZES:
        records = build(use, args.data, args.sources)
        lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        packed = lzma.compress(lines.encode(), preset=9 | lzma.PRESET_EXTREME)
        path = args.out / f"{use}.jsonl.xz"
        path.write_bytes(packed)
        print(f"{path.name}: {len(records)} passages, {len(lines.encode()):,} bytes, {len(packed):,} packed")


if __name__ == "__main__":
    main()
