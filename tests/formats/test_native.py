"""Native checkpoints that were damaged."""

from __future__ import annotations

import pytest

from loopq.errors import CheckpointError
from loopq.formats import native as store
from tests.support.checkpoints import reseal
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
