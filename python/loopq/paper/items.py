"""Task items from local files, with the prompts of lm-evaluation-harness. docs/tasks.md describes the files."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

from loopq.calibrate.read import json_lines
from loopq.errors import ConfigError
from loopq.storage.files import MAX_SIZE, read_bytes
from loopq.storage.schema import Allowed, Count, checked

Text = Annotated[str, Allowed("text that is not empty", bool)]
#: The data sets of the hub have numbers of answers as text.
Label = Annotated[
    Any, Allowed("a whole number from 0", lambda n: type(n) in (int, str) and str(n).isdecimal())
]
#: Solved problems before one of GSM8K, and the seed that the harness draws them by.
_N_SHOTS = 5
_DRAW_SEED = 1234
#: Line that an article of WikiText begins with; those of its sections have two marks or more.
_TITLE = re.compile(r"\n(?= = [^=\n]*[^= \n][^=\n]* = $)", re.MULTILINE)

#: The harness's last replacements in an article, in this order.
_LAST = (
    ("= = = =", "===="), ("= = =", "==="), ("= =", "=="), (" \u00b0 ", "\u00b0"), (" \n", "\n"), ("\n ", "\n"),
    (" N ", " 1 "), (" 's", "'s"),
)  # fmt: skip


@dataclass(frozen=True)
class Item:
    """One question: a text, and answers to compare by likelihood, without the leading blank, or a single answer.

    `gold` is the right one. `n_words` counts the words of a whole text as the harness does.
    """

    context: str
    choices: tuple[str, ...]
    gold: int = 0
    n_words: int = 1


@dataclass(frozen=True)
class _Question:
    """A question with its prompt complete, its answers and the index of the right one."""

    query: Text
    choices: tuple[Text, ...]
    gold: Count

    def __post_init__(self) -> None:
        if not self.gold < len(self.choices) > 1:
            raise ConfigError(f"gold: {self.gold}; allowed: the place of one of at least 2 choices, from 0")


@dataclass(frozen=True)
class _Passage:
    """A record of LAMBADA."""

    text: Annotated[str, Allowed("at least two words", lambda text: all(text.rpartition(" ")))]


@dataclass(frozen=True)
class _Answers:
    """Answers of ARC and their labels."""

    text: tuple[Text, ...]
    label: tuple[str, ...]


@dataclass(frozen=True)
class _Arc:
    """A record of ARC as stored in its data set."""

    question: Text
    choices: _Answers
    answerKey: str

    def __post_init__(self) -> None:
        if self.answerKey not in self.choices.label or len(self.choices.label) != len(self.choices.text):
            raise ConfigError(f"answerKey: {self.answerKey!r:.20}; allowed: one label of each choice")


@dataclass(frozen=True)
class _HellaSwag:
    """A record of HellaSwag as stored in its data set."""

    activity_label: str
    ctx_a: str
    ctx_b: str
    endings: tuple[Text, ...]
    label: Label

    def __post_init__(self) -> None:
        if not int(self.label) < len(self.endings) > 1:
            raise ConfigError(f"label: {self.label}; allowed: the place of one of at least 2 endings, from 0")


@dataclass(frozen=True)
class _Problem:
    """A record of GSM8K."""

    question: Text
    answer: Annotated[
        str, Allowed('text with "#### " and a number', re.compile(r"(?s).*#### -?[\d,.]+").match)
    ]


def _records(path: Path, kinds: Mapping[str, type]) -> Iterator[Any]:
    """Yield each record of a file as the first kind with a matching key. The last kind is the default."""
    for place, record in json_lines(path, ConfigError):
        names = record if isinstance(record, dict) else ()
        kind = next((kind for key, kind in kinds.items() if key in names), list(kinds.values())[-1])
        yield checked(kind, record, place, ConfigError, others=True)


def _lambada(path: Path) -> Iterator[Item]:
    for passage in _records(path, {"text": _Passage}):
        context, _, word = passage.text.rpartition(" ")
        yield Item(context, (word,))


def _arc(path: Path) -> Iterator[Item]:
    for record in _records(path, {"answerKey": _Arc, "query": _Question}):
        if isinstance(record, _Arc):
            answers = record.choices
            question = f"Question: {record.question}\nAnswer:"
            yield Item(question, answers.text, answers.label.index(record.answerKey))
        else:
            yield Item(f"{record.query}\nAnswer:", record.choices, record.gold)


def _hellaswag(path: Path) -> Iterator[Item]:
    def clean(text: str) -> str:
        """Remove the markup of the how-to pages, as the harness does."""
        return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")

    for record in _records(path, {"ctx_a": _HellaSwag, "query": _Question}):
        if isinstance(record, _HellaSwag):
            query = f"{record.activity_label}: {record.ctx_a} {record.ctx_b.capitalize()}"
            endings = tuple(map(clean, record.endings))
            yield Item(clean(query), endings, int(record.label))
        else:
            yield Item(record.query, record.choices, record.gold)


def _gsm8k(test: Path, train: Path, n_shots: int = _N_SHOTS) -> Iterator[Item]:
    """Put solved problems before each problem. They are drawn problem by problem with the harness's seed."""
    solved = [f"Question: {p.question}\nAnswer: {p.answer}" for p in _records(train, {"question": _Problem})]
    if len(solved) < n_shots:
        raise ConfigError(f"{train}: {len(solved)} solved problems; a prompt has {n_shots}")
    draw = random.Random(_DRAW_SEED)
    for problem in _records(test, {"question": _Problem}):
        shots = draw.sample(solved, n_shots)
        yield Item("\n\n".join([*shots, f"Question: {problem.question}\nAnswer:"]), (problem.answer,))


def _wikitext(path: Path) -> Iterator[Item]:
    data = read_bytes(path, MAX_SIZE, ConfigError)
    try:
        text = data.decode()
    except UnicodeDecodeError as cause:
        line = data.count(b"\n", 0, cause.start) + 1
        raise ConfigError(f"{path}, line {line}: not UTF-8 text (byte {cause.start} of the file)") from cause
    for page in _TITLE.split(text):
        if page.strip():
            # Words of the stored page, including the empty ones at its ends.
            yield Item("", (_detokenized(page),), n_words=len(re.split(r"\s+", page)))


def _detokenized(page: str) -> str:
    """Undo the blanks that WikiText puts around punctuation, in the order of the harness's rules."""
    text = page.replace("s '", "s'")
    for mark in "-,.":
        text = text.replace(f" @{mark}@ ", mark)
    for mark in ":;.!?,":
        text = text.replace(f" {mark} ", f"{mark} ")
    for first, last in ("()", "[]", "{}", '""', "''"):
        inner = rf"{re.escape(first)}\s*([^{re.escape(last)}]*?)\s*{re.escape(last)}"
        text = re.sub(inner, rf"{first}\1{last}", text)
    for before, after in _LAST:
        text = text.replace(before, after)
    return text


@dataclass(frozen=True)
class HarnessTask:
    """One task.

    Parameters
    ----------
    harness : str
        Task and version of the harness that define the prompts and scores.
    kind : {"last word", "choices", "text", "number"}
        Scored quantity. "last word" tests whether the answer is the greedy continuation, "choices" finds the most
        likely answer. "text" measures the likelihood of the answer. "number" tests whether the generated text ends in
        the answer's number.
    files : tuple of str
        File names in the data folder, plain or packed (``.xz`` after the name). Items come from the first file.
    read : callable
        Reads the files and returns the items.
    """

    harness: str
    kind: Literal["last word", "choices", "text", "number"]
    files: tuple[str, ...]
    read: Callable[..., Iterator[Item]]


_GSM8K = ("gsm8k/test.jsonl", "gsm8k/train.jsonl")
TASKS: Mapping[str, HarnessTask] = {
    "lambada": HarnessTask("lambada_openai 1.0", "last word", ("lambada/lambada_test.jsonl",), _lambada),
    "arc_easy": HarnessTask("arc_easy 1.0", "choices", ("arc/arc_easy_test.jsonl",), _arc),
    "arc_challenge": HarnessTask("arc_challenge 1.0", "choices", ("arc/arc_challenge_test.jsonl",), _arc),
    "hellaswag": HarnessTask("hellaswag 1.0", "choices", ("hellaswag/hellaswag_val.jsonl",), _hellaswag),
    "gsm8k": HarnessTask("gsm8k 3.0", "number", _GSM8K, _gsm8k),
    # As in Li, App. Q; the solved problems contain the chain of thought.
    "gsm8k_8": HarnessTask("gsm8k 3.0, num_fewshot 8", "number", _GSM8K, partial(_gsm8k, n_shots=8)),
    "wikitext": HarnessTask("wikitext 2.0", "text", ("wikitext2/wiki.test.raw",), _wikitext),
}


def find_task(name: str) -> HarnessTask:
    """Return the task of that name. The error lists the known names."""
    if name not in TASKS:
        raise ConfigError(f"no task {name!r}; known: {', '.join(TASKS)}")
    return TASKS[name]


def read_items(name: str, data: Path, limit: int | None = None) -> list[Item]:
    """Read the items of a task from the data folder.

    Parameters
    ----------
    name : str
        One of `TASKS`.
    data : Path
        Folder of the task's files.
    limit : int, optional
        Number of items from the start. All when absent.

    Raises
    ------
    ConfigError
        If the task is unknown, the folder has no file of it, or a record is malformed. It names file and line.
    """
    task = find_task(name)
    paths = [_find(name, data, file) for file in task.files]
    items = list(islice(task.read(*paths), limit))
    if not items:
        raise ConfigError(f"{paths[0]}: holds no items of {name}; docs/tasks.md says what a line holds")
    return items


def _find(name: str, data: Path, file: str) -> Path:
    places = (data / file, data / f"{file}.xz")
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise ConfigError(f"task {name}: no file {places[0]}, packed as .xz or not; name another data folder")
    return path
