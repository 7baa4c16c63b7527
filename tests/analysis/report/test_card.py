"""Model cards: what was made and measured, the licence, what they replace."""

from __future__ import annotations

import json
import shlex
import shutil

import pytest

import benches.zoo.chains  # noqa: F401  registers the letter task
from loopq.analysis.report import card as card_module
from loopq.analysis.report import style
from loopq.analysis.report.card import write_card
from loopq.errors import ConfigError
from loopq.formats.convert import read_any
from loopq.formats.native import NATIVE
from loopq.storage.files import MAX_SIZE
from tests.support.checkpoints import checkpoint, layer
from tests.support.evaluated import FEW


@pytest.mark.parametrize("form", ["native", "compressed-tensors"])
def test_a_model_card_says_what_was_made_and_measured(saved_model, quantized, tmp_path, command, form):
    folder = tmp_path / "q"
    assert command("export", quantized, "--out", folder, "--format", form)[0] == 0
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    code, text, _ = command("card", folder, saved_model, *FEW)
    assert code == 0
    assert f"model card: {folder / 'README.md'}" in text
    card = (folder / "README.md").read_text()
    library = "loopq" if form == "native" else "transformers"
    assert card.startswith(
        "---\nbase_model: tiny-model\nbase_model_relation: quantized\nlicense: unknown\n"
        f"library_name: {library}\npipeline_tag: text-generation\n"
        "tags:\n- loopq\n- looped-transformer\n- 4-bit\n---\n\n# tiny-model, quantized by loopq"
    )
    assert "* 9 weights: INT4, groups of 16, float16 scales" in card
    assert "4 prompts, 96 tokens of embedded evaluation text, at 3 steps" in card
    asked = ("evaluate", saved_model, folder, *FEW, "--llama-cpp-style", "--json")
    data = json.loads(command(*asked)[1])[1]
    assert f"| quantized | {data['kl']:.3g} [" in card
    assert f"| {data['tokens']['quantiles'][50]:.3g} | {data['tokens']['quantiles'][99]:.3g} |" in card
    assert "](card.png)" in card
    assert (folder / "card.png").read_bytes().startswith(b"\x89PNG")
    assert f"loopq quantize {saved_model} --like {folder.name} " in card
    # The card is no part of the checkpoint: what it is written from stays as it was.
    assert command("export", folder, "--out", tmp_path / "again", "--format", form)[0] == 0
    assert {p.name: p.read_bytes() for p in (tmp_path / "again").iterdir()} == before


def test_the_command_of_a_card_makes_the_same_codes(saved_model, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my text.txt").write_text("one two three four five six seven. " * 60)
    for name, text in (("a", ()), ("b", ("--calibration", "my text.txt"))):
        options = ("--preset", "fast", "--group-size", 16, "--n-prompts", 3, "--seq-len", 24, "--n-steps", 2)
        assert command("quantize", saved_model, "--out", name, *options, *text)[0] == 0
        assert command("card", name, saved_model, "--system", "huginn", *FEW)[0] == 0
        (line,) = [s for s in (tmp_path / name / "README.md").read_text().splitlines() if s[:5] == "loopq"]
        assert " --system huginn " in line
        assert command(*shlex.split(line)[1:])[0] == 0
        assert read_any(tmp_path / "NEW").digest() == read_any(tmp_path / name).digest()
        shutil.rmtree(tmp_path / "NEW")


@pytest.mark.parametrize(
    "text",
    [
        "My notes.\n",
        "---\ntags:\n- loopq\n---\n\n# A model, made by hand\n",
        "# A model, quantized by loopq\n",
    ],
)
def test_a_card_replaces_its_own_kind_and_nothing_else(quantized, tmp_path, command, text):
    shutil.copytree(quantized, tmp_path / "q")
    card, measure = tmp_path / "q" / "README.md", ("card", tmp_path / "q")
    card.write_text(text)
    code, out, err = command(*measure)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"{card}: not a card that loopq wrote; move it away" in err
    assert card.read_text() == text
    card.unlink()
    assert command(*measure)[0] == 0
    first = card.read_text()
    card.write_text(first.replace("A looped transformer", "Measured before: a looped transformer"))
    assert command(*measure)[0] == 0
    assert card.read_text() == first


def test_a_card_needs_no_model_and_names_each_grid(saved_model, tmp_path, command):
    grids = {"nvfp4": "NVFP4", "uneven": "3 bits, uneven levels", "mxfp4": "MXFP4"}
    for levels, shown in grids.items():
        out, group = tmp_path / levels, 32 if levels == "mxfp4" else 16
        bits = ("--bits", 3) if levels == "uneven" else ()
        asked = ("--method", "rtn", "--levels", levels, "--group-size", group, *bits)
        assert command("quantize", saved_model, "--out", out, *asked)[0] == 0
        assert command("card", out)[0] == 0
        card = (out / "README.md").read_text()
        assert f"weights: {shown}, groups of {group}, " in card
        assert "| KL" not in card
        assert shown in command("inspect", out)[1]


TEXT = {"packing": "windows", "n_prompts": 3, "n_tokens": 96, "source": "a text", "n_steps": 4, "n_seeds": 2}


def summary(name, **more):
    """A measurement."""
    return {
        "name": name, "output": "logits", "kl": 0.01234, "agreement": 0.9876, "perplexity": 3.0, "n_bytes": 2000,
    } | more  # fmt: skip


def card(tmp_path, *measured, model=None, base=None, text=TEXT):
    """Lines of the card of a checkpoint with two grids."""
    folder = tmp_path / "q"
    if not folder.exists():
        layers = (
            layer(8, 64),
            layer(8, 64, name="c.weight"),
            layer(8, 64, bits=2, group_size=-1, name="d.weight"),
        )
        stored = checkpoint(*layers)
        stored.settings["calibration"]["sha256"] = "0123456789abcdef" * 4
        NATIVE.write(folder, stored)
    return write_card(folder, model, base, measured, text).read_text().splitlines()


def test_each_grid_is_counted_with_its_scales(tmp_path):
    lines = card(tmp_path)
    front = ["license: unknown", "library_name: loopq", "pipeline_tag: text-generation"]
    tags = ["- loopq", "- looped-transformer", "- 2-bit", "- 4-bit"]
    assert lines[:10] == ["---", *front, "tags:", *tags, "---"]
    assert "# q, quantized by loopq" in lines
    assert "* 2 weights: INT4, groups of 32, float16 scales" in lines
    assert "* 1 weights: INT2, one scale a row, float16 scales" in lines
    (first,) = [line for line in lines if line.startswith("A looped transformer")]
    assert first.startswith("A looped transformer of system `made`: 3 weights of the loop quantized (720 B)")
    assert first.endswith("Format: native.")
    assert not [line for line in lines if line.startswith("|")]
    (line,) = [line for line in lines if line.startswith("loopq quantize")]
    assert line.startswith("loopq quantize MODEL --like q ")


def test_a_row_for_each_measurement_with_the_interval_if_known(tmp_path):
    lines = card(tmp_path, summary("full"), summary("Q", kl_95=[0.01, 0.02]), model="x/y", base=None)
    table = [line for line in lines if line.startswith("|")]
    assert table == [
        "| weights | KL (nats) | agreement | perplexity | bytes |",
        "| --- | --- | --- | --- | --- |",
        "| full | 0.0123 | 98.76 % | 3.0000 | 2.00 kB |",
        "| Q | 0.0123 [0.01, 0.02] | 98.76 % | 3.0000 | 2.00 kB |",
    ]
    (origin,) = [line for line in lines if line.startswith("Measured by")]
    for words in ("3 prompts, 96 tokens of a text", "at 4 steps, 2 initial states"):
        assert words in origin
    assert "Chunks" not in origin
    assert not (tmp_path / "q" / "card.png").exists()
    assert "# y, quantized by loopq" in lines
    assert lines[1:4] == ["base_model: y", "base_model_relation: quantized", "license: unknown"]


def test_hidden_states_have_a_cosine_and_no_perplexity(tmp_path):
    hidden = {"output": "hidden"}
    lines = card(tmp_path, summary("full", **hidden), summary("Q", **hidden))
    table = [line for line in lines if line.startswith("|")]
    assert table[0] == "| weights | squared relative error | cosine | bytes |"
    assert table[3] == "| Q | 0.0123 | 0.98760 | 2.00 kB |"


def test_chunks_have_quantiles_and_a_picture(tmp_path):
    quantiles = [i / 1000 for i in range(101)]
    tokens = {"tokens": {"quantiles": quantiles, "kl": 0.05}}
    lines = card(
        tmp_path, summary("full", **tokens), summary("Q", **tokens), text=TEXT | {"packing": "chunks"}
    )
    table = [line for line in lines if line.startswith("|")]
    assert table[0].endswith("| perplexity | median KL | 99 % KL | bytes |")
    assert table[3].endswith("| 3.0000 | 0.05 | 0.099 | 2.00 kB |")
    (origin,) = [line for line in lines if line.startswith("Measured by")]
    assert "Chunks as of llama.cpp" in origin
    assert (tmp_path / "q" / "card.png").read_bytes().startswith(b"\x89PNG")
    assert "![KL by token](card.png)" in lines


def test_a_hub_id_is_named_with_the_licence_of_its_card(tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    (base / "README.md").write_text("---\nlicense: mit\n---\nText\n")
    lines = card(tmp_path, model="some/model", base=base)
    assert lines[1:4] == ["base_model: some/model", "base_model_relation: quantized", "license: mit"]
    assert "# some/model, quantized by loopq" in lines
    (base / "README.md").write_text("license: mit\n")
    assert "license: unknown" in card(tmp_path, model="some/model", base=base)
    (base / "README.md").write_text('---\nlicense:\n- "mit"\ntags:\n- x\n---\n')
    assert "license: mit" in card(tmp_path, model="some/model", base=base)
    (base / "README.md").write_text("---\nlicense:\nlanguage: en\n---\n")
    assert "license: unknown" in card(tmp_path, model="some/model", base=base)
    (base / "README.md").write_text("---\nlicense: other\nlicense_name: own\nlicense_link: LICENSE\n---\n")
    lines = card(tmp_path, model="some/model", base=base)
    assert lines[3:6] == ["license: other", "license_name: own", "license_link: LICENSE"]


def test_a_loop_of_a_hub_model_is_listed_under_that_model(tmp_path):
    spec = "looped:some/model[8:20]x2"
    lines = card(tmp_path, model=spec, base=tmp_path)
    assert lines[1] == "base_model: some/model"
    assert "# some/model[8:20]x2, quantized by loopq" in lines
    (line,) = [line for line in lines if line.startswith("loopq quantize")]
    assert shlex.split(line)[2] == spec


def test_a_folder_of_the_hubs_cache_is_its_repository(tmp_path):
    base = tmp_path / "models--some--my-model.v2" / "snapshots" / "0123"
    base.mkdir(parents=True)
    for spec in (str(base), f"looped:{base}[1:3]x3"):
        assert card(tmp_path, model=spec, base=base)[1] == "base_model: some/my-model.v2"


@pytest.mark.parametrize("stated", ["some/model", "/tmp/m", "a b/c", 3, "x"])
def test_a_config_may_name_the_hub_id(tmp_path, stated):
    base = tmp_path / "my: model"
    base.mkdir()
    (base / "config.json").write_text(json.dumps({"_name_or_path": stated}))
    expected = stated if stated == "some/model" else '"my: model"'
    assert card(tmp_path, model=str(base), base=base)[1] == f"base_model: {expected}"


@pytest.mark.parametrize(
    ("name", "output", "kind"),
    [
        ("LoopedLlamaForCausalLM", "logits", "text-generation"),
        ("AlbertForMaskedLM", "logits", "fill-mask"),
        ("AlbertModel", "logits", "feature-extraction"),
        (None, "hidden", "feature-extraction"),
        (None, "logits", "text-generation"),
    ],
)
def test_the_task_follows_from_the_architecture(tmp_path, name, output, kind):
    stored = checkpoint(layer(8, 64))
    stored.side_files["config.json"] = json.dumps({} if name is None else {"architectures": [name]}).encode()
    NATIVE.write(tmp_path / "q", stored)
    measured = (summary("full", output=output), summary("Q", output=output))
    assert f"pipeline_tag: {kind}" in card(tmp_path, *measured, model="m")


def test_a_warning_of_the_measurement_is_in_the_card(tmp_path):
    lines = card(tmp_path, summary("full"), summary("Q", warning="these prompts were seen"), model="m")
    assert "**Warning:** these prompts were seen." in lines


def test_the_picture_of_a_card_shows_the_tail_of_the_tokens(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        card_module, "canvas", lambda *size: drawn.append((size, style.canvas(*size))) or drawn[-1][1]
    )
    quantiles = [0.0, *(i / 1000 for i in range(1, 101))]
    card_module._picture(tmp_path / "card.png", {"quantiles": quantiles, "kl": 0.05})
    ((_, (_, axes)),) = drawn
    curve, median, tail, mean = axes.get_lines()
    assert curve.get_xydata()[[0, 1, 50, 100]].tolist() == [[1e-7, 100], [0.001, 99], [0.05, 50], [0.1, 0]]
    assert [x.get_xydata().tolist() for x in (median, tail)] == [[[0.05, 50]], [[0.099, 1]]]
    assert list(mean.get_xdata()) == [0.05, 0.05]
    assert [(t.get_text(), t.xy) for t in axes.texts] == [
        ("median: 0.05", (0.05, 50)),
        ("99 %: 0.099", (0.099, 1)),
    ]
    assert axes.get_xscale() == "log"
    assert axes.get_ylabel() == "tokens with a larger KL [%]"
    assert (tmp_path / "card.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("place", ["q", "base"])
def test_a_card_of_any_size_is_refused_unread(tmp_path, place):
    card(tmp_path)
    (tmp_path / "base").mkdir()
    # A sparse file has any size and takes no space.
    with (tmp_path / place / "README.md").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ConfigError, match=rf"{place}/README\.md: 1099511627776 bytes; allowed: {MAX_SIZE}"):
        card(tmp_path, base=tmp_path / "base")
