"""Which layers of a decoder run several times, as a config says it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from loopq.errors import ConfigError
from loopq.formats.gguf.shape import Shape
from loopq.layers.loop_spec import LOOPED_TYPE, without_type
from loopq.models.load import load_model
from tests.support.looped import save_dense


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_dense(tmp_path_factory.mktemp("dense"))


@pytest.mark.parametrize("loop", [[1, 2], "abc", [3, 1, 2], [True, 3, 2], [1, 9, 2], [1, 3, 10**9], {"a": 1}])
def test_a_damaged_loop_in_a_config_is_refused_by_every_reader(
    folder: Path, tmp_path: Path, loop: object
) -> None:
    shutil.copytree(folder, tmp_path / "bad")
    config = json.loads((folder / "config.json").read_text()) | {"looped_layers": loop}
    (tmp_path / "bad" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"looped_layers .* of a model with 5 layers"):
        load_model(tmp_path / "bad")
    with pytest.raises(ConfigError, match=r"looped_layers .* of a model with 5 layers"):
        assert Shape.of(config).order


def test_a_looped_type_without_its_parts_is_refused():
    with pytest.raises(ConfigError, match="needs"):
        without_type({"model_type": LOOPED_TYPE})
