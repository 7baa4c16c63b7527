"""A checkpoint in memory: parts that fit each other and the model."""

from __future__ import annotations

import pytest
import torch

import benches.zoo.models  # noqa: F401  registers the classes
import loopq
from loopq.errors import CheckpointError
from loopq.formats.convert import write_as
from loopq.formats.record import RECORD
from loopq.run.destination import export
from loopq.storage.files import RawTensor, read_tensors, write_tensors
from tests.support.exports import logits

from ..support.checkpoints import checkpoint, layer


def test_unfit_parts_of_a_checkpoint_are_refused_before_writing(tmp_path):
    for change, match in [
        (
            lambda c: c.dense.update({"a.b.weight": c.dense["norm.weight"]}),
            "is stored twice, or tied and stored",
        ),
        (
            lambda c: c.dense.update({"z.weight_packed": c.dense["norm.weight"]}),
            "holds packed codes of no layer",
        ),
        (
            lambda c: c.ties.update({"lm_head.weight": "nothing.weight"}),
            "is tied to nothing.weight, which is not stored",
        ),
        (lambda c: c.settings.pop("system"), "settings: 'system' is missing"),
        (lambda c: c.side_files.update({"model.safetensors": b""}), "among the config and tokenizer files"),
    ]:
        whole = checkpoint(layer(8, 32))
        change(whole)
        with pytest.raises(CheckpointError, match=match):
            write_as(tmp_path / "q", whole, "native")
    whole = checkpoint(layer(8, 32))
    whole.side_files["loopq_export.json"] = b"{}"
    with pytest.raises(CheckpointError, match=r"brings a file loopq_export\.json, which gptq uses itself"):
        write_as(tmp_path / "q", whole, "gptq")
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_is_shown_in_one_line_and_a_table():
    whole = checkpoint(layer(8, 32), layer(8, 48, group_size=-1, name="<b>.weight"))
    whole.settings["system"] = "a\n\x1b[31m" * 99
    assert len(repr(whole).splitlines()) == 1
    assert len(repr(whole)) < 500
    assert repr(whole).isprintable()
    page = whole._repr_html_()
    assert page.count("<tr>") == 3
    assert "&lt;b&gt;.weight" in page
    assert "<b>" not in page
    many = checkpoint(*(layer(1, 8, name=f"{i}.weight") for i in range(210)))
    assert many._repr_html_().count("<tr>") == 201
    assert "10 more layers" in many._repr_html_()
    assert repr(checkpoint())


def test_load_takes_every_format(solved, tmp_path):
    expected = logits(loopq.load(solved))
    for form in ("compressed-tensors", "gptq"):
        export(solved, tmp_path / form, form)
        assert torch.equal(logits(loopq.load(tmp_path / form)), expected)
        # As another tool would have written it: no record, the tied head left to the model.
        (tmp_path / form / RECORD).unlink()
        assert torch.equal(logits(loopq.load(tmp_path / form)), expected)


def test_load_refuses_tensors_that_the_model_lacks(solved, tmp_path):
    export(solved, tmp_path / "g", "gptq")
    (tmp_path / "g" / RECORD).unlink()
    path = tmp_path / "g" / "model.safetensors"
    tensors = read_tensors(path)
    kept = {n: t for n, t in tensors.items() if n != "transformer.ln_f.weight"}
    write_tensors(path, kept)
    with pytest.raises(CheckpointError, match=r"missing \['transformer\.ln_f\.weight'\]"):
        loopq.load(tmp_path / "g")
    write_tensors(path, tensors | {"more.weight": tensors["transformer.ln_f.weight"]})
    with pytest.raises(CheckpointError, match=r"unexpected \['more\.weight'\]"):
        loopq.load(tmp_path / "g")
    other = tensors["transformer.ln_f.weight"].array()[:-1]
    write_tensors(path, tensors | {"transformer.ln_f.weight": RawTensor.of(other)})
    with pytest.raises(
        CheckpointError, match=r"'transformer\.ln_f\.weight': shape \[31\], the model has \[32\]"
    ):
        loopq.load(tmp_path / "g")
