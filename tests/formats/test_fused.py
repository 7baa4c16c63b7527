"""Published names: modules that hold several of the model's, by rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loopq
from loopq.errors import CheckpointError, ConfigError
from loopq.formats.convert import read_any, write_as
from loopq.formats.fused import cut
from loopq.formats.quantized_folder import FolderOptions
from loopq.formats.rules import check_engine
from loopq.models.load import load_model
from loopq.quantizers.config import Override
from loopq.run.config import QuantConfig
from loopq.run.export import refuse_early
from loopq.storage.files import RawTensor, map_tensors
from tests.support.interop import models
from tests.support.runs import digest

SETTINGS: dict[str, Any] = {"method": "rtn", "group_size": 16}
#: Parts of a layer in vLLM's class of HRM-Text.
OWN = {"attn.gqkv_proj", "attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"}


def quantized(folder: Path, out: Path | None = None, **settings: Any) -> loopq.Checkpoint:
    """HRM-Text from the folder that transformers saves."""
    model, _ = models.tiny_hrm()
    model.save_pretrained(folder)
    return loopq.quantize(folder, models.prompts().numpy(), out=out, **SETTINGS, **settings)


@pytest.mark.parametrize("settings", [{}, {"symmetric": False}, {"levels": "nvfp4"}])
def test_published_names_have_the_same_rows_and_come_back(settings: dict[str, Any], tmp_path: Path) -> None:
    result = quantized(tmp_path / "m", tmp_path / "q", exclude="*H_module*", **settings)
    written = loopq.export(tmp_path / "q", tmp_path / "c", "compressed-tensors", names="published")
    assert written.difference == 0.0
    stored = map_tensors(tmp_path / "c" / "model.safetensors")
    codes = {name.rpartition(".")[0] for name in stored if name.endswith("weight_packed")}
    assert codes == {f"model.L_module.layers.{i}.{part}" for i in range(2) for part in OWN}
    # The high stack is dense.
    assert {f"model.H_module.layers.0.{part}.weight" for part in OWN} <= set(stored)
    packed = stored["model.L_module.layers.1.mlp.gate_up_proj.weight_packed"].array()
    parts = [result.layers[f"model.L_module.layers.1.mlp.{n}_proj.weight"].tensors() for n in ("gate", "up")]
    rows = [t.array() for tensors in parts for name, t in tensors.items() if name.endswith("weight_packed")]
    assert np.array_equal(packed, np.concatenate(rows))
    write_as(tmp_path / "again", read_any(tmp_path / "c"), "native")
    assert digest(tmp_path / "again") == digest(tmp_path / "q")


def test_an_engine_takes_its_own_names_alone(tmp_path: Path) -> None:
    layers = quantized(tmp_path / "m").layers
    for engine, names, other in (("vllm", "published", None), ("transformers", None, "published")):
        check_engine(engine, "compressed-tensors", layers, "hrm_text", None, FolderOptions(names=names))
        with pytest.raises(CheckpointError, match="names"):
            check_engine(engine, "compressed-tensors", layers, "hrm_text", None, FolderOptions(names=other))


def test_parts_of_unlike_grids_or_dense_ones_are_refused(tmp_path: Path) -> None:
    unlike = {"overrides": (Override("*.q_proj.weight", {"bits": 8}),)}
    for settings, match in (
        (unlike, "their grids differ"),
        ({"exclude": "*.k_proj.weight"}, "k_proj is dense"),
    ):
        result = quantized(tmp_path / "m", **settings)
        with pytest.raises(CheckpointError, match=match):
            write_as(tmp_path / "c", result, "compressed-tensors", names="published")
    # Before the run, too.
    with pytest.raises(CheckpointError, match="k_proj is dense"):
        config = QuantConfig.of(levels="even", exclude=("*.k_proj.weight",))
        options = FolderOptions(names="published")
        refuse_early(load_model(tmp_path / "m"), config, "compressed-tensors", options=options)


def test_other_models_and_uneven_rows_are_refused(tiny_folder: Path, tmp_path: Path) -> None:
    result = loopq.quantize(tiny_folder, method="rtn", group_size=16)
    with pytest.raises(ConfigError, match="'published' is for hrm_text"):
        write_as(tmp_path / "c", result, "compressed-tensors", names="published")
    with pytest.raises(CheckpointError, match="3 rows are no 2 parts"):
        cut(RawTensor.of(np.zeros((3, 2), np.float32)), ["a", "b"])
