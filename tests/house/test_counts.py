"""The ruler measures what it says."""

from __future__ import annotations

import ast

from tests.house import counts, process, rust


def test_units_are_what_the_registries_find():
    units = counts.units()
    one_of_each = {
        "layers.grids.integer": "GRIDS",
        "formats.gguf.ouro": "ARCHITECTURES",
        "commands.quantize": "COMMANDS",
        "paper.commands.reproduce": "COMMANDS",
        "paper.tables.main": "TABLES",
        "paper.diagnosis.sections.bypass": "SECTIONS",
        "quantizers.gptq": "QUANTIZERS",
    }
    assert {name: units.get(name) for name in one_of_each} == one_of_each
    # Code shared by units, and a package of a registry, stay in the frame.
    assert not {"layers.grids", "systems.base", "quantizers.base", "commands.options"} & set(units)


def test_imports_and_circles_are_found():
    texts = {
        "a.one": "import loopq.b.two\ndef f():\n    from loopq.a import three\n",
        "a.three": "",
        "b.two": "",
    }
    texts["b.two"] = "from loopq.a.one import f"
    modules = [counts.Module(name, text, ast.parse(text)) for name, text in texts.items()]
    graph = counts.graph_of("loopq", modules)
    assert graph["a.one"] == {"b.two", "a.three"}
    assert counts.circles(graph) == [["a.one", "b.two"]]


def test_arguments_are_counted_without_self():
    text = "class A:\n    def f(self, a, /, b, *args, c=1, **more): ...\n"
    (function,) = counts.Module("x", text, ast.parse(text)).functions()
    assert counts.n_arguments(function) == 3
    text = "impl A { pub fn f<T: Into<u8>>(&mut self, a: Vec<(u8, T)>, b: fn(u8) -> u8) {} }\nfn g() {}\n"
    assert list(rust.arguments(text)) == [("f", 2), ("g", 0)]


def test_a_replaced_attribute_of_the_process_is_found():
    for text in (
        "import torch\ntorch.nn.init.normal_ = print",
        "from torch import nn\nnn.Module.forward = print",
        "import sys\nsetattr(sys, 'argv', [])",
        "import torch\ntorch.set_default_dtype(torch.half)",
    ):
        assert process.replaced(ast.parse(text))
