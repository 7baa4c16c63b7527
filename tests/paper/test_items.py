"""Items of tasks: what is read of each file, as the harness puts it together, and what is refused."""

from __future__ import annotations

import json
import lzma
import random
from pathlib import Path
from typing import Any

import pytest

from loopq.errors import ConfigError
from loopq.paper.items import TASKS, Item, read_items


def write(data: Path, task: str, *records: Any) -> Path:
    """Write a task's file with a record per line, and return it; bytes are written unchanged."""
    path = data / TASKS[task].files[0]
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"\n".join(r if isinstance(r, bytes) else json.dumps(r).encode() for r in records))
    return path


def test_prompts_are_those_of_the_harness(tmp_path: Path) -> None:
    write(tmp_path, "lambada", {"text": "One two. Three four"}, {"text": "a b"})
    assert read_items("lambada", tmp_path, 1) == [Item("One two. Three", ("four",))]
    assert len(read_items("lambada", tmp_path)) == 2
    arc = {"question": "Two?", "choices": {"text": ["one", "two"], "label": ["1", "2"]}, "answerKey": "2"}
    same = {"query": "Question: Two?", "choices": ["one", "two"], "gold": 1}
    write(tmp_path, "arc_easy", arc, same)
    assert read_items("arc_easy", tmp_path) == [Item("Question: Two?\nAnswer:", ("one", "two"), 1)] * 2
    swag = {"activity_label": "Home", "ctx_a": "[header] How to [title] x", "ctx_b": "the Man [step] go", "label": "1",
            "endings": ["a [title] b.", "c  d"], "ind": 4}  # fmt: skip
    write(
        tmp_path,
        "hellaswag",
        swag,
        {**swag, "label": 0},
        {"query": "He", "choices": ["runs", "is"], "gold": 1},
    )
    assert read_items("hellaswag", tmp_path) == [
        Item("Home: How to. x The man go", ("a. b.", "c d"), 1),
        Item("Home: How to. x The man go", ("a. b.", "c d"), 0),
        Item("He", ("runs", "is"), 1),
    ]


def test_wikitext_is_cut_in_articles_and_its_blanks_are_undone(tmp_path: Path) -> None:
    lines = (
        " ",
        " = A B = ",
        " ",
        ' It \'s 3 @.@ 5 " long " , ( yes ) . ',
        " = = C = = ",
        " more ",
        " = D = ",
        "",
    )
    write(tmp_path, "wikitext", *(line.encode() for line in lines))
    first, second = read_items("wikitext", tmp_path)
    assert first.choices == (' = A B =\n\nIt\'s 3.5 "long", (yes).\n== C ==\nmore ',)
    # Words of the stored page, with the empty ones at both its ends.
    assert (first.n_words, first.context) == (4 + 13 + 5 + 1 + 2, "")
    assert second.choices == (" = D =\n",)


def test_each_problem_follows_solved_ones_drawn_for_it(tmp_path: Path) -> None:
    solved = [{"question": f"Q{n}?", "answer": f"So.\n#### {n}"} for n in range(9)]
    write(
        tmp_path,
        "gsm8k",
        {"question": "One?", "answer": "1\n#### 1"},
        {"question": "Two?", "answer": "#### 2"},
    )
    (tmp_path / TASKS["gsm8k"].files[1]).write_text("\n".join(map(json.dumps, solved)))
    for task, n_shots in (("gsm8k_8", 8), ("gsm8k", 5)):
        draw = random.Random(1234)
        expected = []
        for question, answer in (("One?", "1\n#### 1"), ("Two?", "#### 2")):
            drawn = draw.sample(range(9), n_shots)
            shots = "".join(f"Question: Q{n}?\nAnswer: So.\n#### {n}\n\n" for n in drawn)
            expected.append(Item(f"{shots}Question: {question}\nAnswer:", (answer,)))
        assert read_items(task, tmp_path) == expected
        assert read_items(task, tmp_path, 1) == expected[:1]
    (tmp_path / TASKS["gsm8k"].files[1]).write_text(json.dumps(solved[0]))
    with pytest.raises(ConfigError, match=r"train\.jsonl: 1 solved problems; a prompt has 5"):
        read_items("gsm8k", tmp_path)
    (tmp_path / TASKS["gsm8k"].files[1]).write_text(json.dumps({"question": "Q?", "answer": "5"}))
    with pytest.raises(ConfigError, match=r"train\.jsonl, line 1: answer: '5'; allowed: text with \"#### \""):
        read_items("gsm8k", tmp_path)


def test_a_packed_file_is_read_in_place_of_a_plain_one(tmp_path: Path) -> None:
    path = write(tmp_path, "lambada", {"text": "a b"}, b"", {"text": "c d"})
    with lzma.open(f"{path}.xz", "wb") as packed:
        packed.write(path.read_bytes())
    path.unlink()
    assert [item.choices for item in read_items("lambada", tmp_path)] == [("b",), ("d",)]


GOOD = {"query": "q", "choices": ["a", "b"], "gold": 0}


@pytest.mark.parametrize(
    ("task", "records", "match"),
    [
        ("lambada", [{"text": "a b"}, b"{]"], r"lambada_test\.jsonl, line 2: not valid JSON"),
        ("lambada", [{"text": "a b"}, b'{"text": "a \xff"}'], "line 2: not valid JSON .*utf-8"),
        ("lambada", [b"", {"body": "a b"}], "line 2: 'text' is missing; known: text"),
        ("lambada", [{"text": 5}], "line 1: text: 5; allowed: text"),
        ("lambada", [{"text": "word"}], "line 1: text: 'word'; allowed: at least two words"),
        ("lambada", [["a b"]], "line 1: the whole: .*allowed: an object of text"),
        ("lambada", [b""], r"lambada_test\.jsonl: holds no items of lambada"),
        ("arc_easy", [GOOD, {"query": "q", "gold": 0}], "line 2: 'choices' is missing"),
        ("arc_easy", [{**GOOD, "gold": 2}], "line 1: gold: 2; allowed: the place of one of at least 2 choices"),
        ("arc_easy", [{**GOOD, "choices": ["a", ""]}], "allowed: text that is not empty"),
        (
            "arc_easy",
            [{"question": "q", "choices": {"text": ["a"], "label": ["A"]}, "answerKey": "B"}],
            "line 1: answerKey: 'B'; allowed: one label of each choice",
        ),
        (
            "hellaswag",
            [{"activity_label": "", "ctx_a": "", "ctx_b": "", "endings": ["a", "b"], "label": "2"}],
            "line 1: label: 2; allowed: the place of one of at least 2 endings",
        ),
        (
            "hellaswag",
            [{"activity_label": "", "ctx_a": "", "ctx_b": "", "endings": ["a", "b"], "label": ""}],
            "label: ''; allowed: a whole number from 0",
        ),
        ("wikitext", [b" = A = ", b"x \xff"], r"wiki\.test\.raw, line 2: not UTF-8 text \(byte 10 of the file"),
        ("wikitext", [b" \n "], "holds no items of wikitext"),
    ],
)  # fmt: skip
def test_what_is_no_item_is_refused_with_file_and_line(
    tmp_path: Path, task: str, records: list[Any], match: str
) -> None:
    write(tmp_path, task, *records)
    with pytest.raises(ConfigError, match=match) as error:
        read_items(task, tmp_path)
    assert "\n" not in str(error.value)


def test_a_truncated_packed_file_is_refused_with_file_and_line(tmp_path: Path) -> None:
    path = write(tmp_path, "lambada")
    lines = "\n".join(json.dumps({"text": f"{number} {number * 7919}"}) for number in range(5000))
    packed = lzma.compress(lines.encode())
    path.unlink()
    for cut, line in ((len(packed) - 8, r"\d+"), (4, "1")):
        Path(f"{path}.xz").write_bytes(packed[:cut])
        with pytest.raises(ConfigError, match=rf"lambada_test\.jsonl\.xz, line {line}: cannot be read \("):
            read_items("lambada", tmp_path)
    Path(f"{path}.xz").write_bytes(b"no archive")
    with pytest.raises(ConfigError, match=r"line 1: cannot be read \(Input format not supported"):
        read_items("lambada", tmp_path)


def test_a_task_and_a_folder_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"task arc_challenge: no file .*arc_challenge_test\.jsonl, packed"):
        read_items("arc_challenge", tmp_path)
    with pytest.raises(ConfigError, match="no task 'gsm9k'; known: lambada, arc_easy"):
        read_items("gsm9k", tmp_path)
