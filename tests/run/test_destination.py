"""An engine decides how a model is written, and every way is one that the engine takes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import loopq
from loopq.errors import CheckpointError, ConfigError
from loopq.formats import FORMATS
from loopq.formats.convert import read_any
from loopq.formats.engines import ENGINES
from loopq.formats.support import READS
from loopq.models.load import load_model
from loopq.run.config import QuantConfig
from loopq.run.destination import Wanted, destinations, last_lines, stored_way, ways
from loopq.run.gate import LOOPQ, Gate
from tests.support import pairs

PROMPTS = pairs.IDS.tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A looped Llama."""
    place = tmp_path_factory.mktemp("model") / "m"
    pairs.save("looped Llama", place)
    return place


@pytest.fixture(scope="module")
def loaded(folder):
    return load_model(folder)


@pytest.fixture(scope="module")
def stored(folder, tmp_path_factory):
    """It, written for loopq."""
    out = tmp_path_factory.mktemp("checkpoint") / "q"
    loopq.quantize(folder, PROMPTS, out=out, bits=4, group_size=32, threads=1)
    return out


def wanted(loaded, *given, options=None, **changes):
    return Wanted(loaded, QuantConfig.of(**changes), {*given, *changes}, options)


def test_every_way_is_a_format_that_its_engine_reads():
    assert destinations() == (LOOPQ, *ENGINES.names())
    assert set(ENGINES.names()) == set(READS)
    for name in ENGINES.names():
        for way in ways(name):
            target = FORMATS.get(way.format)
            assert way.format in READS[name]
            assert isinstance(target.taken(way.options), target.values)
            assert "OUT" in way.runs
            QuantConfig.of(**way.settings)
    with pytest.raises(ConfigError, match="unknown engine 'vlm'"):
        ways("vlm")


@pytest.mark.parametrize(
    ("engine", "form", "levels", "remote_code"),
    [
        ("loopq", "native", "auto", False),
        ("transformers", "compressed-tensors", "even", True),
        ("vllm", "compressed-tensors", "even", False),
        ("gptqmodel", "gptq", "even", True),
    ],
)
def test_the_engine_decides_format_levels_and_code(loaded, engine, form, levels, remote_code):
    choice = wanted(loaded, group_size=32).choose(engine)
    assert (choice.target.name, choice.options.remote_code) == (form, remote_code)
    assert choice.config.layer.grid.levels == levels
    assert choice.config.layer.decided().rotates == (engine == "loopq")
    line = choice.line()
    assert line.startswith(f"for {engine}: format {form}")
    assert ("rotated" in line) == (engine == "loopq")


def test_groups_that_do_not_divide_the_inputs_are_cut_where_an_engine_has_no_shorter_one(loaded):
    choice = wanted(loaded).choose("gptqmodel")
    assert choice.options.ragged == "split"
    assert wanted(loaded).choose("vllm").options.ragged is None


def test_what_the_user_gives_is_not_changed(loaded):
    with pytest.raises(CheckpointError, match=r"not for gptqmodel.*uneven levels.*written for loopq, "):
        wanted(loaded, group_size=32, levels="uneven").choose("gptqmodel")
    # vLLM's plugin runs loopq's own format.
    choice = wanted(loaded, group_size=32, levels="uneven").choose("vllm")
    assert choice.target.own
    with pytest.raises(CheckpointError, match="format compressed-tensors does not read vocabulary"):
        wanted(loaded, options={"vocabulary": "none"}).choose("transformers")


def test_llama_cpp_gets_the_type_of_the_bits(loaded):
    for bits, levels in ((4, "iq4_nl"), (8, "q8_0")):
        choice = wanted(loaded, bits=bits, options={"vocabulary": "none"}).choose("llama.cpp")
        assert (choice.target.name, choice.config.layer.grid.levels) == ("gguf", levels)
        assert choice.config.outside == {4: "q6_k", 8: "q8_0"}[bits]
    # K-quants need rows of whole blocks of 256.
    with pytest.raises(CheckpointError, match=r"not for llama.cpp: layer .*256"):
        wanted(loaded, bits=3, options={"vocabulary": "none"}).choose("llama.cpp")


def test_an_engine_that_does_not_run_the_model_names_those_that_do(loaded):
    with pytest.raises(CheckpointError, match=r"it runs every layer once.*loopq, .*transformers, vllm"):
        wanted(loaded, group_size=32).choose("sglang")
    others = wanted(loaded, group_size=32).others("loopq")
    assert {"transformers", "vllm", "gptqmodel"} <= set(others)
    assert "sglang" not in others


def test_the_last_lines_are_commands(loaded):
    choice = wanted(loaded, group_size=32).choose("transformers")
    lines = last_lines(choice, "Q", ["loopq", "vllm"], "MODEL")
    assert lines[0].endswith('from_pretrained("Q", trust_remote_code=True)')
    assert lines[1].endswith("loopq quantize MODEL --for loopq|vllm --out DIR")
    here = last_lines(wanted(loaded).choose("loopq"), "Q", [], "MODEL")
    assert here[0].endswith('loopq run Q "..."')
    assert len(here) == 2


def test_python_writes_for_an_engine(folder, tmp_path):
    given = {"group_size": 32, "method": "rtn", "threads": 1, "verify": False}
    loopq.quantize(folder, PROMPTS, out=tmp_path / "c", engine="transformers", **given)
    layers = read_any(tmp_path / "c").layers.values()
    assert (tmp_path / "c" / "config.json").read_text("utf-8").count("auto_map")
    assert all(layer.grid.portable and layer.transform is None for layer in layers)
    done = loopq.export(tmp_path / "c", tmp_path / "g", engine="gptqmodel", verify=False)
    assert done.written.format == "gptq"
    with pytest.raises(ConfigError, match="give a format"):
        loopq.export(tmp_path / "c", tmp_path / "n")


@pytest.mark.parametrize(
    ("engine", "form"),
    [("transformers", "compressed-tensors"), ("gptqmodel", "gptq"), ("vllm", "compressed-tensors")],
)
def test_a_checkpoint_with_even_levels_is_written_for_each_engine(folder, tmp_path, engine, form):
    given = {"group_size": 32, "levels": "even", "method": "rtn", "threads": 1}
    loopq.quantize(folder, PROMPTS, out=tmp_path / "q", **given)
    # None stands for an absent option, as the command line gives it.
    done = loopq.export(tmp_path / "q", tmp_path / "c", engine=engine, verify=False, remote_code=None)
    assert done.written.format == form


def test_a_file_for_loopq_ends_with_the_command_that_writes_it_for_another(stored, tmp_path):
    source = read_any(stored)
    with pytest.raises(
        CheckpointError,
        match=r"q cannot be written for gptqmodel: .*loopq quantize MODEL --for gptqmodel --bits 4 --group-size 32",
    ):
        loopq.export(stored, tmp_path / "g", engine="gptqmodel")
    with pytest.raises(CheckpointError, match="runs every layer once") as caught:
        stored_way(Gate(engine="sglang"), source, stored, {})
    assert "Quantize" not in str(caught.value)
    assert stored_way(Gate(engine="vllm"), source, stored, {}).format == "native"
    assert not list(tmp_path.iterdir())


def test_rotated_layers_are_refused_by_formats_of_others(stored):
    source = read_any(stored)
    turned = loopq.quantize(
        "huginn_small", n_prompts=2, seq_len=32, n_steps=2, rotation="hadamard", levels="even"
    )
    layers = dict(zip(source.layers, turned.layers.values(), strict=False))
    changed = dataclasses.replace(source, layers=layers)
    with pytest.raises(CheckpointError, match="for a transformed input"):
        stored_way(Gate(engine="gptqmodel"), changed, stored, {})
    assert np.all([layer.transform is not None for layer in layers.values()])


@pytest.mark.parametrize(
    ("form", "options", "whom", "absent"),
    [
        ("compressed-tensors", {}, "for vllm: vllm serve OUT, with loopq in the same", "; for transformers"),
        (
            "compressed-tensors",
            {"remote_code": True},
            'from_pretrained("OUT", trust_remote_code=True)',
            "not for",
        ),
        ("gptq", {}, "not for transformers and gptqmodel: that needs --remote-code", "for gptqmodel"),
        (
            "gptq",
            {"remote_code": True},
            'for gptqmodel: GPTQModel.load("OUT", trust_remote_code=True)',
            "not for",
        ),
        ("gguf", {}, "for llama.cpp: llama-cli -m OUT", "transformers"),
        ("native", {}, 'for loopq: loopq run OUT "..."', "vllm"),
    ],
)
def test_the_last_line_of_an_export_says_for_whom_it_is(folder, tmp_path, form, options, whom, absent):
    given = {"group_size": 32, "levels": "even", "method": "rtn", "threads": 1}
    result = loopq.quantize(folder, PROMPTS, **given)
    out = tmp_path / "c"
    if form == "gguf":
        options = {"vocabulary": pairs.vocabulary(tmp_path / "v.gguf", 64)}
    last = loopq.export(result, out, form, verify=False, **options).lines()[-1].replace(str(out), "OUT")
    assert whom in last
    assert absent not in last


def test_a_file_of_a_class_that_is_loopq_s_alone_says_so(tmp_path):
    result = loopq.quantize("huginn_small", PROMPTS, method="rtn", levels="even", group_size=32, threads=1)
    done = loopq.export(result, tmp_path / "c", "compressed-tensors", verify=False)
    assert done.lines()[-1].startswith("for loopq alone:")
