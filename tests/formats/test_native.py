"""Native checkpoints: what is written is read again, and what was damaged is refused."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from loopq.errors import CheckpointError
from loopq.formats import native as store
from loopq.formats.native import NATIVE
from loopq.storage.files import read_json
from tests.support.checkpoints import checkpoint, layer, reseal
from tests.support.runs import damaged


def test_damaged_checkpoints_are_refused(checkpoint_folder, tmp_path):
    def cut(copy):
        path = copy / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1])

    def index(change):
        def apply(copy):
            reseal(copy / "loopq.json", change)

        return apply

    for change, match in [
        (cut, "truncated or altered"),
        (lambda c: (c / "loopq.json").unlink(), "not a loopq checkpoint"),
        (index(lambda d: d.update(version=7)), "version 7"),
        (index(lambda d: d.pop("layers")), "'layers' is missing"),
        (index(lambda d: d["layers"][0].update(bits=8)), r"transformer\.adapter\.weight_packed"),
        (
            index(lambda d: d["layers"][0].update(scale_dtype="float32")),
            r"transformer\.adapter\.weight_scale",
        ),
        (index(lambda d: d["layers"][0].update(shape=[1, 2])), "weight_shape"),
        (index(lambda d: d["layers"][0].update(name="nothing.weight")), "is missing"),
    ]:
        with pytest.raises(CheckpointError, match=match):
            store.read(damaged(checkpoint_folder, change, tmp_path / "copy"))


def made():
    """Two layers, one with zero points, one that a second name shares."""
    second = layer(6, 40, bits=3, group_size=16, symmetric=False, name="c.weight", seed=1)
    return checkpoint(layer(8, 64), second, ties={"d.weight": "embed.weight"})


@pytest.mark.parametrize("hold", [True, False, None])
def test_what_is_written_is_read_again(tmp_path, hold):
    asked = made()
    written = NATIVE.write(tmp_path / "q", asked)
    reread = store.read(tmp_path / "q", hold=hold)
    asked.compare(reread, "q")
    assert list(reread.layers) == ["a.b.weight", "c.weight"]
    assert len(reread.layers) == 2
    assert reread.layers["a.b.weight"].report == {"n": 1}
    assert isinstance(reread.layers, dict) == (hold is not False)
    assert set(reread.dense) == set(asked.dense)
    assert (written.checked, written.n_bytes) == (2, sum(x.n_bytes for x in asked.layers.values()))
    assert written.n_bytes == written.n_bytes_before
    assert reread.settings == NATIVE.read_settings(tmp_path / "q") == asked.settings
    assert NATIVE.holds(tmp_path / "q")
    assert not NATIVE.holds(tmp_path)
    facts = NATIVE.facts(tmp_path / "q")
    assert (facts["format"], len(facts["layers"])) == ("native", 2)
    assert NATIVE.describe(facts)[0].startswith("format native, 2 layers, ")


def test_equal_checkpoints_give_equal_bytes(tmp_path):
    for name in ("a", "b"):
        NATIVE.write(tmp_path / name, made())
    first, second = ({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("a", "b"))
    assert first == second
    assert set(first) == {
        "config.json", "loopq.json", "model.safetensors", "modeling_made.py", "report.jsonl", "tokenizer.json",
    }  # fmt: skip


def test_the_index_says_what_the_folder_holds(tmp_path):
    NATIVE.write(tmp_path / "q", made())
    index = store.read_index(tmp_path / "q")
    assert [entry.name for entry in index.layers] == ["a.b.weight", "c.weight"]
    assert index.ties == {"d.weight": "embed.weight"}
    assert {entry.file for entry in index.files} == {p.name for p in (tmp_path / "q").iterdir()} - {
        "loopq.json"
    }
    data = read_json(tmp_path / "q" / "loopq.json")
    assert data["format"] == "loopq-checkpoint"


def test_transformers_finds_the_layers_in_config_json(tmp_path):
    asked = made()
    config = json.dumps({"architectures": ["Made"], "hidden_size": 8}, indent=2).encode()
    asked.side_files["config.json"] = config
    NATIVE.write(tmp_path / "q", asked)
    quantization = read_json(tmp_path / "q" / "config.json")["quantization_config"]
    assert [group["layers"] for group in quantization["groups"]] == [["a.b.weight"], ["c.weight"]]
    # The checkpoint has the model's own file again.
    assert store.read(tmp_path / "q").side_files["config.json"] == config


def test_another_checkpoint_is_not_taken_for_it(tmp_path):
    NATIVE.write(tmp_path / "q", made())
    other = made()
    one = other.layers["c.weight"]
    codes = one.codes.copy()
    codes.flat[0] += 1
    layers = {**other.layers, "c.weight": dataclasses.replace(one, codes=codes)}
    with pytest.raises(CheckpointError, match=r"layer c\.weight: reads back differently"):
        NATIVE.verify(tmp_path / "q", dataclasses.replace(other, layers=layers))
    assert np.array_equal(NATIVE.verify(tmp_path / "q", made()).layers["c.weight"].codes, one.codes)


def test_reports_are_a_line_for_each_layer(tmp_path):
    path = tmp_path / "report.jsonl"
    assert store.read_report(path) == {}
    layers = [layer(4, 32, name="b"), layer(4, 32, name="a").with_report(seconds=2)]
    path.write_text(store.report_lines(layers))
    assert path.read_text() == '{"layer": "b", "n": 1}\n{"layer": "a", "n": 1, "seconds": 2}\n'
    assert store.read_report(path) == {"b": {"n": 1}, "a": {"n": 1, "seconds": 2}}
    for text, match in (
        ('{"layer": "a"}\n{"layer": "a"}\n', "line 2: layer 'a'; allowed: each layer's name, once"),
        ('{"n": 1}\n', "line 1: layer None"),
        ('{"layer": 3}\n', "line 1: layer 3"),
        ("[]\n", "line 1: the whole"),
        ('{"layer": "a"}\n\n', "line 2: not valid JSON"),
    ):
        path.write_text(text)
        with pytest.raises(CheckpointError, match=match):
            store.read_report(path)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda d: d["layers"].append(d["layers"][0]), "layers: a name stands twice"),
        (lambda d: d["files"].append(d["files"][0]), "files: a name stands twice"),
        (lambda d: d.update(files=[f for f in d["files"] if f["file"] != "report.jsonl"]), "must be among them"),
        (lambda d: d.update(files=[f for f in d["files"] if f["file"] != "model.safetensors"]), "must be among them"),
        (lambda d: d.update(format="other"), "its format is not 'loopq-checkpoint'"),
    ],
)  # fmt: skip
def test_an_index_that_contradicts_itself_is_refused(tmp_path, change, match):
    NATIVE.write(tmp_path / "q", made())
    reseal(tmp_path / "q" / "loopq.json", change)
    with pytest.raises(CheckpointError, match=match):
        store.read_index(tmp_path / "q")


def test_layers_of_one_grid_are_described_together():
    layers = [
        layer(8, 32, name="a.weight"),
        layer(8, 64, name="b.weight"),
        layer(8, 32, bits=2, name="c.weight"),
    ]
    description = store.describe_layers(layers, {"d.weight": "a.weight", "e.weight": "dense.weight"})
    assert (description["quant_method"], description["ties"]) == ("loopq", {"d.weight": "a.weight"})
    assert [(group["bits"], group["layers"]) for group in description["groups"]] == [
        (4, ["a.weight", "b.weight"]), (2, ["c.weight"])
    ]  # fmt: skip
    assert {"name", "shape"}.isdisjoint(description["groups"][0])


@pytest.mark.parametrize("end", [b"\n}", b"}", b"\n}\n"])
def test_a_config_grows_at_its_end_and_shrinks_again(end):
    config = b'{\n  "architectures": ["A"],\n  "n": {"a": 1}' + end
    grown = store.add_own(config, {"quant_method": "loopq", "groups": []})
    assert json.loads(grown)["quantization_config"] == {"quant_method": "loopq", "groups": []}
    assert grown.endswith(end)
    assert store.without_own(grown) == config
    with pytest.raises(CheckpointError, match="quantization_config of its source"):
        store.add_own(grown, {"quant_method": "loopq"})
    for other in (b'{"n": 1}', b"", b'"architectures"'):
        assert store.add_own(other, {"quant_method": "loopq"}) == other


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"ties": {"d.weight": "b.weight"}}, r"'d\.weight' is tied to 'b\.weight', which is no layer there"),
        ({"groups": [{"layers": ["a.weight"]}] * 2}, r"layer 'a\.weight' stands twice"),
        ({"groups": None}, "config.json: quantization_config"),
        ({"groups": [{}]}, "layers"),
    ],
)
def test_a_damaged_description_of_layers_is_refused(change, match):
    description = store.describe_layers([layer(8, 32, name="a.weight")], {"d.weight": "a.weight"})
    grids, ties = store.described(description)
    assert [*grids] == ["a.weight"]
    assert ties == {"d.weight": "a.weight"}
    with pytest.raises(CheckpointError, match=match):
        store.described({**description, **change})
