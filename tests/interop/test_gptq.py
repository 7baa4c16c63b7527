"""GPTQModel, and optimum with transformers, load what loopq writes; loopq reads what GPTQModel writes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from loopq.formats.convert import read_any, write_as
from tests.support.interop import models
from tests.support.interop.environments import run


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, a grid, a format, and the library that loads it."""

    kind: str
    form: str
    bits: int
    group_size: int = 32
    symmetric: bool = True
    ragged: str | None = None
    tool: str = "gptqmodel"

    @property
    def name(self):
        asym = "" if self.symmetric else "-asym"
        ragged = f"-{self.ragged}" if self.ragged else ""
        return f"{self.kind}-{self.form}{asym}-{self.bits}bit-g{self.group_size}{ragged}-{self.tool}"


MORE = ("hrm", "loop", "zoo")
GRIDS = [("gptq", True), ("gptq_v2", True), ("gptq_v2", False)]
CASES = [
    *(Case("llama", form, bits, 32, symmetric) for form, symmetric in GRIDS for bits in (2, 3, 4, 8)),
    *(Case("llama", form, bits, -1, symmetric) for form, symmetric in GRIDS[::2] for bits in (3, 4)),
    *(Case("llama", form, bits, 32, symm, tool="transformers") for form, symm in GRIDS for bits in (2, 3, 4, 8)),
    Case("llama", "gptq", 4, 64, ragged="keep"),
    Case("llama", "gptq", 4, 64, ragged="split"),
    Case("llama", "gptq", 4, 64, ragged="split", tool="transformers"),
    *(Case(kind, form, 4, 32, symm, tool="transformers") for kind in MORE for form, symm in GRIDS[::2]),
    *(Case(kind, form, 4, 32, symm) for kind in ("hrm", "core") for form, symm in GRIDS[::2]),
    Case("mixed", "gptq", 4),
]  # fmt: skip
# Cases that GPTQModel cannot load, with a word of its error: docs/formats/gptq.md. Of the looped model it
# finds the blocks and leaves the quantized adapter before them an empty nn.Linear; "core" is the same model
# with a dense adapter.
LIMITS = [
    (Case("loop", "gptq", 4), "no attribute 'dequantize_weight'"),
    (Case("zoo", "gptq", 4), "module tree"),
]
ALL = [*CASES, *(case for case, _ in LIMITS)]


def build(case):
    """Model, checkpoint and side files of a case."""
    files = {}
    if case.kind in ("llama", "mixed"):
        model, config = models.tiny_llama("float16")
    elif case.kind == "hrm":
        model, config = models.tiny_hrm()
    else:
        model, config, files = models.wrapped_zoo() if case.kind == "zoo" else models.looped_code()
    leave = ("lm_head", "early_exit_gate", *(["adapter"] if case.kind == "core" else []))
    side = {**files, **models.tokenizer_files()}
    grid = {"group_size": case.group_size, "symmetric": case.symmetric}
    whole = models.checkpoint_of(model, config, leave=leave, side=side, bits=case.bits, **grid)
    if case.kind == "mixed":
        other = models.checkpoint_of(model, config, leave=leave, bits=8, **grid | {"group_size": 16})
        for name in whole.layers:
            if "down_proj" in name:
                whole.layers[name] = other.layers[name]
    return model, whole


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Every case: layers, logits in float32 and in float16 of the dequantized model, the library's result."""
    base = tmp_path_factory.mktemp("gptq")
    ids = models.prompts()
    np.save(base / "ids.npy", ids.numpy())
    jobs, expected = [], {}
    for case in ALL:
        model, whole = build(case)
        write_as(base / case.name, whole, case.form, ragged=case.ragged)
        single = models.logits_of(models.put_in(model.float(), whole), ids)
        half = models.logits_of(model.half(), ids)
        expected[case.name] = (whole, single, half)
        jobs.append(
            {
                "tool": case.tool,
                "folder": str(base / case.name),
                "ids": str(base / "ids.npy"),
                "out": str(base / f"{case.name}.npy"),
                "dtype": "float16",
                "modules": [layer.module for layer in whole.layers.values()],
            }
        )
    results = run("gptq", jobs, base)
    return {
        c.name: (*expected[c.name], base / f"{c.name}.npy", results[str(base / f"{c.name}.npy")]) for c in ALL
    }


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_logits_agree_to_float16(loaded, case):
    _, single, half, path, result = loaded[case.name]
    assert "error" not in result, result
    # The bound is the effect of float16 alone on this model, dequantized.
    level = np.abs(half - single).max()
    got = np.load(path)
    assert np.abs(got - single).max() <= 3 * level
    assert np.abs(got - half).max() <= 3 * level
    assert 3 * level < 0.05 * np.abs(single).max()
    assert all("Linear" in kind and kind != "Linear" for kind in result["modules"].values()), result[
        "modules"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in CASES if c.tool == "gptqmodel"], ids=lambda c: c.name)
def test_modules_dequantize_to_the_very_weights(loaded, case):
    whole, _, _, path, result = loaded[case.name]
    assert "error" not in result, result
    weights = np.load(f"{path}.weights.npz")
    for layer in whole.layers.values():
        # The kernel multiplies in float16: code times scale, rounded once.
        np.testing.assert_array_equal(
            weights[layer.module], layer.dequantize().astype(np.float16).astype(np.float32)
        )


@pytest.mark.slow
@pytest.mark.parametrize(("case", "word"), LIMITS, ids=[c.name for c, _ in LIMITS])
def test_what_gptqmodel_cannot_load(loaded, case, word):
    assert word in loaded[case.name][-1]["error"]


def test_the_export_names_layers_that_gptqmodel_leaves_empty(tmp_path):
    _, whole = build(LIMITS[0][0])
    (remark,) = write_as(tmp_path / "loop", whole, "gptq").remarks
    assert remark.startswith(
        "GPTQModel does not fill quantized layers outside numbered blocks (model.adapter)"
    )
    _, whole = build(Case("core", "gptq", 4))
    assert write_as(tmp_path / "core", whole, "gptq").remarks == ()


#: Whether a model that optimum loaded and saved again is the same model.
AGAIN = [
    *((Case("llama", form, bits, 32, symmetric), True) for form, symmetric in GRIDS[1:] for bits in (2, 3, 4, 8)),
    *((Case("llama", "gptq", bits), False) for bits in (2, 3, 4, 8)),
]  # fmt: skip


@pytest.fixture(scope="module")
def saved_again(tmp_path_factory):
    """Logits of each case before it was saved again, and after, by both libraries."""
    base, jobs = tmp_path_factory.mktemp("gptq-again"), []
    np.save(base / "ids.npy", models.prompts().numpy())
    for case, _ in AGAIN:
        write_as(base / case.name, build(case)[1], case.form)
        for place, tool in (("", "transformers"), ("-again", "transformers"), ("-again", "gptqmodel")):
            jobs.append({"tool": tool, "folder": str(base / f"{case.name}{place}"), "ids": str(base / "ids.npy"),
                         "out": str(base / f"{case.name}{place}-{tool}.npy"), "dtype": "float16", "modules": [],
                         "again": "" if place else str(base / f"{case.name}-again")})  # fmt: skip
    results = run("gptq", jobs, base)
    assert not any("error" in result for result in results.values()), results
    return {c.name: [np.load(j["out"]) for j in jobs[3 * i : 3 * i + 3]] for i, (c, _) in enumerate(AGAIN)}


@pytest.mark.slow
@pytest.mark.parametrize(("case", "kept"), AGAIN, ids=lambda c: getattr(c, "name", None))
def test_a_model_in_version_2_may_be_saved_again(saved_again, case, kept):
    before, *after = saved_again[case.name]
    for logits in after:
        assert (np.abs(logits - before).max() < 0.02 * np.abs(before).max()) == kept


WRITTEN = [{"bits": 4, "group_size": 32}, {"bits": 3, "group_size": 32}, {"bits": 8, "group_size": -1},
           {"bits": 4, "group_size": 32, "format": "gptq_v2", "sym": False}]  # fmt: skip


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """Folders that GPTQModel itself quantized and saved, and its own logits of them."""
    base = tmp_path_factory.mktemp("gptq-foreign")
    model, _ = models.tiny_llama("float16")
    model.save_pretrained(base / "dense")
    for name, data in models.tokenizer_files().items():
        (base / "dense" / name).write_bytes(data)
    ids = torch.cat([models.prompts(), models.prompts()]).repeat(1, 4)
    np.save(base / "calibration.npy", ids.numpy())
    np.save(base / "ids.npy", models.prompts().numpy())
    jobs = []
    for number, config in enumerate(WRITTEN):
        out = str(base / str(number))
        jobs.append({"tool": "gptq-quantize", "folder": str(base / "dense"), "ids": str(base / "calibration.npy"),
                     "out": out, "config": {"desc_act": False, "act_group_aware": False, **config}})  # fmt: skip
        jobs.append({"tool": "gptqmodel", "folder": f"{out}.folder", "ids": str(base / "ids.npy"),
                     "out": f"{out}.npy", "modules": models.linear_names(model)})  # fmt: skip
    return base, run("gptq", jobs, base)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(WRITTEN)))
def test_files_of_gptqmodel_are_read(foreign, number):
    base, results = foreign
    out = str(base / str(number))
    assert "error" not in results[out], results[out]
    assert "error" not in results[f"{out}.npy"], results[f"{out}.npy"]
    checkpoint = read_any(f"{out}.folder")
    weights = np.load(f"{out}.npy.weights.npz")
    assert len(checkpoint.layers) == 14
    for layer in checkpoint.layers.values():
        assert layer.grid.bits == WRITTEN[number]["bits"]
        np.testing.assert_array_equal(
            weights[layer.module], layer.dequantize().astype(np.float16).astype(np.float32)
        )
