"""The ruler measures what it says."""

from __future__ import annotations

import ast

from tests.house import counts, rust


def module(name: str, text: str) -> counts.Module:
    """A module of that source."""
    return counts.Module(name, text, ast.parse(text))


def test_units_are_what_the_registries_find():
    units = set(counts.units())
    one_of_each = {
        "layers.grids.integer",
        "systems.huginn",
        "formats.marlin",
        "formats.gguf.model",
        "formats.gguf.ouro",
        "quantizers.gptq",
        "commands.quantize",
        "diagnosis.sections.ranks",
        "report.sections.ranks",
        "paper.tables.main",
        "paper.commands.reproduce",
        "run.open_loop",
    }
    assert one_of_each <= units
    # Code shared by units, and a package of a registry, stay in the frame.
    assert not {"layers.grids", "systems.base", "quantizers.base", "commands.options"} & units
    assert len(units) > 80


def test_frame_and_units_are_the_product():
    lines = {m.name: m.n_lines for m in counts.modules() if m.folder != "paper"}
    frame = {m.name: m.n_lines for m in counts.frame()}
    units = {name: m.n_lines for name, m in counts.units().items() if name in lines}
    assert frame | units == lines
    assert sum(frame.values()) > 20_000


def test_circles_are_sets_that_reach_each_other():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}
    assert counts.circles(graph) == [["a", "b", "c"]]


def test_floors_begin_with_what_imports_nothing():
    floors = counts.floors(counts.rooms(counts.import_graph()))
    assert "errors" in floors[0]
    assert floors[-1] == ["__main__"]


def test_a_seam_is_thin_where_one_import_holds_it():
    graph = {"low.x": set(), "mid.a": {"low.x"}, "mid.b": {"low.x"}, "top.a": {"mid.a"}}
    assert counts.thin_seams(graph) == ["top > mid"]


def test_imports_are_found_in_functions_and_in_both_forms():
    one = module("a.one", "import loopq.b.two\ndef f():\n    from loopq.a import three\n")
    others = [module("b.two", ""), module("a.three", ""), module("a", "")]
    assert counts.graph_of("loopq", [one, *others])["a.one"] == {"b.two", "a.three"}
    assert counts.hidden_imports([one]) == ["a.one:3 from loopq.a import three"]
    assert counts.hidden_imports([module("x", "def f():\n    import torch\nimport json\n")]) == []


def test_arguments_are_counted_without_self():
    text = "class A:\n    def f(self, a, /, b, *args, c=1, **more): ...\n"
    (function,) = module("x", text).functions()
    assert counts.n_arguments(function) == 3
    assert counts.lengths([module("x", text)]) == {"x.f": 1}


def test_vague_names_are_found_in_functions():
    text = "found = 1\n\n\ndef f(own, x):\n    return [made for made in x if own.found]\n"
    assert counts.vague_names([module("a", text)]) == {"a:4", "a:5"}


def test_rust_arguments_are_counted_without_self():
    text = "impl A { pub fn f<T: Into<u8>>(&mut self, a: Vec<(u8, T)>, b: fn(u8) -> u8) {} }\nfn g() {}\n"
    assert list(rust.arguments(text)) == [("f", 2), ("g", 0)]


def test_rust_paths_of_groups_and_inside_expressions():
    text = """
        use crate::grid::{codes::Codes, search::{self, best as other}};
        // use crate::comment::Only;
        use super::tile;
        fn f() -> super::settle::Kept { crate::error::Error::new(super::super::team::N) }
    """
    assert list(rust.paths(text)) == [
        ["crate", "grid", "codes", "Codes"],
        ["crate", "grid", "search"],
        ["crate", "grid", "search", "best"],
        ["super", "tile"],
        ["super", "settle", "Kept"],
        ["crate", "error", "Error", "new"],
        ["super", "super", "team", "N"],
    ]


def test_files_of_a_crate_are_found_by_such_paths():
    graph = rust.file_graph("loopq-core")
    assert sum(map(len, graph.values())) > 50
    assert {"gptq/column", "weight"} <= graph["gptq/batch"]
