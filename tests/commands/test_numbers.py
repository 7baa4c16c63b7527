"""Numbers of nested data as tables."""

from __future__ import annotations

from loopq.commands.numbers import tables

INTERVAL = {"estimate": 0.5, "low": 0.25, "high": 0.75, "method": "bootstrap"}
FOUND = {
    "measure": "changed",
    "layers": {
        "a.weight": {"kl": 0.12345678, "ratio": INTERVAL, "by_step": [1.0, 2.5], "no": None},
        "b.weight": {"kl": 2, "ratio": INTERVAL, "by_step": [3.0, 4.0], "spectra": {"all": {"rank": 7}}},
    },
    "rows": [{"radius": 1.5}, {"radius": 2.5}],
    "traces": {"a.weight": 8.0, "b.weight": 9.0},
    "long": list(range(100)),
}


def test_values_of_one_name_stand_in_one_column():
    printed = [[line.split() for line in table.splitlines()] for table in tables(FOUND)]
    words, layers, radii, traces, steps = printed
    assert [words[0], words[2]] == [["measure"], ["changed"]]
    assert layers[0] == ["kl", "ratio"]
    assert layers[2] == ["layers.a.weight", "0.1235", "0.5", "[0.25,", "0.75]"]
    assert layers[3][:2] == ["layers.b.weight", "2"]
    assert radii[2:] == [["rows.0", "1.5"], ["rows.1", "2.5"]]
    assert traces[2:] == [["traces.a.weight", "8"], ["traces.b.weight", "9"]]
    assert steps[2:] == [["layers.a.weight.by_step", "1", "2.5"], ["layers.b.weight.by_step", "3", "4"]]


def test_spectra_and_long_lists_are_left_out():
    text = "\n".join(tables(FOUND))
    assert "99" not in text
    assert "rank" not in text
