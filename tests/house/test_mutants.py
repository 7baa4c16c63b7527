"""Mutants by lot: which changes are made, that they are one at a time, and that results are kept."""

from __future__ import annotations

import ast

from benches.mutants import KILLED, Mutant, Results, changed_text, changes


def changed(text):
    """Every changed form of the first expression or statement that has one, by operator."""
    for node in ast.walk(ast.parse(text)):
        if forms := list(changes(node)):
            return [(operator, ast.unparse(new)) for operator, new in forms]
    return []


#: Each source with its changed forms, by operator.
FORMS = {
    "a == b": [("comparison", "a != b")],
    "a < b": [("comparison", "a >= b"), ("boundary", "a <= b")],
    "a is not b": [("comparison", "a is b")],
    "a < b < c": [],
    "a + b": [("arithmetic", "a - b")],
    "a @ b": [],
    "a and b": [("boolean", "a or b")],
    "not a": [("boolean", "a")],
    "x = True": [("boolean", "False")],
    "x = 3": [("constant", "4")],
    "x = 0.5": [("constant", "1.0")],
    "x = 0.0": [("constant", "1.0")],
    "x = 'text'": [],
    "f()": [("removed statement", "pass")],
    "a.b = c": [("removed statement", "pass")],
    "a += b": [("removed statement", "pass")],
    "raise a": [("removed statement", "pass")],
    "x = f(a, b, c)": [("swapped argument", "f(b, a, c)")],
    "x = f(a, a)": [],
    "x = f(*a, b)": [],
    "x = max(a, b)": [],
}


def test_changes_of_a_place():
    assert {text: changed(text) for text in FORMS} == FORMS


def test_one_place_is_changed():
    text = "a = 1\nb = 1\n"
    places = [n for n, node in enumerate(ast.walk(ast.parse(text))) if list(changes(node))]
    texts = [changed_text(text, Mutant("m", n, 0, "constant", 1)) for n in places]
    assert sorted(texts) == ["a = 1\nb = 2", "a = 2\nb = 1"]


def test_a_result_is_known_until_a_text_changes(tmp_path):
    (tmp_path / "m.py").write_text("a")
    (tmp_path / "t.py").write_text("b")
    texts = (tmp_path / "m.py", tmp_path / "t.py")
    Results(tmp_path / "r").add(Results.key("name", *texts), KILLED)
    again = Results(tmp_path / "r")
    assert again.known[Results.key("name", *texts)] == KILLED
    texts[1].write_text("c")
    assert Results.key("name", *texts) not in again.known
