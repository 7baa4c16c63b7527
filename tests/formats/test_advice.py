"""Every refusal of a format or an engine names a true reason: what it advises is taken."""

from __future__ import annotations

import dataclasses
import itertools
import re
from dataclasses import dataclass

import numpy as np
import pytest

from loopq.errors import CheckpointError
from loopq.formats import FORMATS
from loopq.formats.gguf import blocks
from loopq.formats.quantized_folder import FolderOptions, QuantizedFolder
from loopq.formats.rules import check_engine
from loopq.formats.support import READS
from loopq.layers.grids.trellis import OnTrellis, Trellis
from loopq.layers.layer import QuantizedLayer
from loopq.layers.transforms import ChannelScale, Rotation
from tests.support.interop import models
from tests.support.marks import slow_unless

PLAIN = {"bits": 4, "group_size": 32, "symmetric": True, "scale_dtype": "float16", "levels": "even"}


@dataclass(frozen=True)
class Asked:
    """One odd layer beside a plain one, the format and the engine that it is for, and the option for short groups."""

    form: str
    engine: str | None
    name: str = "mlp.odd_proj.weight"
    orientation: str = "out_in"
    shape: tuple[int, int] = (64, 128)
    grid: tuple[tuple[str, object], ...] = ()
    beside: tuple[tuple[str, object], ...] | None = ()
    ragged: str | None = None
    transform: str | None = None

    def layer(self, name, shape, grid):
        """One layer. "trellis" is not a kind of levels, but excludes them."""
        grid = PLAIN | dict(grid)
        weight = np.random.default_rng(0).normal(size=shape)
        if grid["levels"] != "trellis":
            return models.rounded(name, weight, **grid)
        on = OnTrellis(2, grid["group_size"], "float16", Trellis(6, 8))
        scales = np.ones((shape[0], on.n_groups(shape[1])), np.float32)
        return QuantizedLayer(name, on, np.zeros(shape, np.int8), scales, None)

    def check(self):
        """Raise what `loopq export` does."""
        layers = {}
        if self.name:
            name = f"model.layers.0.{self.name}"
            layer = self.layer(name, self.shape, self.grid)
            layer = dataclasses.replace(layer, orientation=self.orientation)
            if self.transform == "rotation":
                layer = layer.with_transform(Rotation(self.shape[1], "random", 4))
            if self.transform == "awq":
                layer = layer.with_transform(ChannelScale(np.full(self.shape[1], 0.5, np.float32)))
            layers[name] = layer
        if self.beside is not None:
            name = "model.layers.0.mlp.down_proj.weight"
            layers[name] = self.layer(name, (64, 128), self.beside)
        target = FORMATS.get(self.form)
        options = FolderOptions(ragged=self.ragged) if isinstance(target, QuantizedFolder) else None
        if self.engine is not None:
            check_engine(self.engine, self.form, layers, None, None, options)
        if options is not None:
            target.stored(layers, options)
        elif self.form == "gguf":
            for layer in layers.values():
                blocks(layer)

    def on(self, **grid):
        """Both layers on another grid."""
        return dataclasses.replace(
            self,
            grid=tuple((dict(self.grid) | grid).items()),
            beside=tuple((dict(self.beside or ()) | grid).items()),
        )

    def but(self, **changes):
        return dataclasses.replace(self, **changes)


_SIZES = {"nvfp4": 16}
#: The advice of a message, and the action of a user who follows it.
ADVICE = (
    (r"--exclude", lambda a, m: a.but(name="")),
    (r"use the format '(\w+)'", lambda a, m: a.but(form=m[1])),
    (r"--format ([\w-]+)", lambda a, m: a.but(form=m[1])),
    (r"--ragged (\w+)", lambda a, m: a.but(ragged=m[1])),
    (r"scale_dtype='float16'|--set scale_dtype=float16", lambda a, m: a.on(scale_dtype="float16")),
    (r" reads ([\w-]+), .*not ", lambda a, m: a.but(form=m[1])),
    (r"--levels even", lambda a, m: a.on(levels="even", scale_dtype="float16", group_size=32)),
    (r"without --method trellis", lambda a, m: a.on(levels="even", group_size=32)),
    (r"without --outside", lambda a, m: a.but(name="")),
    (r"without rotation and without awq", lambda a, m: a.but(transform=None)),
    (r"with --levels (\w+)", lambda a, m: a.on(**PLAIN | {"levels": m[1], "group_size": _SIZES.get(m[1], 32)})),
    (r"--bits 4 or 8, symmetric", lambda a, m: a.on(bits=4, symmetric=True)),
    (r"a symmetric grid", lambda a, m: a.on(symmetric=True)),
    (r"or one symmetry", lambda a, m: a.on(symmetric=True)),
    (r"4 or 8 bits|4 bits for the layer", lambda a, m: a.on(bits=4)),
    (r"another group size|a group size of 16 or more|groups of a multiple of 32", lambda a, m: a.on(group_size=32)),
    (r"or one grid|one --layer setting", lambda a, m: a.but(beside=a.grid)),
    (r"the native checkpoint", lambda a, m: a.but(form="native")),
    (r"loopq's own format", lambda a, m: a.but(form="native", engine=None)),
    (r"integers by --layer", lambda a, m: a.on(levels="even", scale_dtype="float16")),
)  # fmt: skip

GRIDS = (
    {}, {"bits": 2}, {"bits": 3}, {"bits": 8}, {"symmetric": False}, {"group_size": 8}, {"group_size": -1},
    {"group_size": 48}, {"scale_dtype": "float32"}, {"scale_dtype": "bfloat16", "symmetric": False},
    {"levels": "uneven"},
    {"levels": "nvfp4", "group_size": 16}, {"levels": "mxfp4", "group_size": 32}, {"levels": "trellis"},
    {"levels": "q4_k"}, {"levels": "q8_0"},
)  # fmt: skip
KINDS = (
    {}, {"orientation": "in_out"}, {"orientation": "table", "name": "embed_tokens.weight"}, {"orientation": "conv"},
    {"orientation": "conv2x4"},
    {"name": "adapter"}, {"shape": (20, 128)}, {"beside": None}, {"name": "mlp.gate_proj.weight"},
    {"name": "mlp.experts.3.gate_proj.weight"}, {"shape": (64, 100)}, {"shape": (33, 36)}, {"transform": "rotation"},
    {"transform": "awq"}, {"transform": "awq", "shape": (64, 100)},
)  # fmt: skip


def reason(error):
    """The text of a refusal without the names and numbers of its case."""
    return re.sub(r"layer \S+|\d+", "", str(error).partition(";")[0])


def refused(asked):
    try:
        asked.check()
    except CheckpointError as error:
        return error
    return None


def settled(asked, seen=()):
    """Whether following advice leads to a file, in four steps at most, and never to the same refusal."""
    error = refused(asked)
    if error is None:
        return True
    advice = [(m, act) for pattern, act in ADVICE if (m := re.search(pattern, str(error)))]
    assert advice, f"{asked}: no advice that can be followed: {error}"
    if reason(error) in seen or len(seen) == 4:
        return False
    return any(settled(act(asked, m), (*seen, reason(error))) for m, act in advice)


FORMS = [name for name, target in FORMATS if isinstance(target, QuantizedFolder) or name == "gguf"]


@pytest.mark.parametrize("form", slow_unless(lambda form: form == "gguf", FORMS))
def test_whoever_follows_the_advice_of_a_refusal_gets_a_file(form):
    engines = [None, *(engine for engine, reads in READS.items() if form in reads)]
    n_refused = 0
    for engine, grid, kind in itertools.product(engines, GRIDS, KINDS):
        asked = Asked(form, engine, grid=tuple(grid.items()), **kind)
        n_refused += refused(asked) is not None
        assert settled(asked), f"{asked}: {refused(asked)}"
    assert n_refused > len(engines)


@pytest.mark.parametrize("form", FORMS)
def test_a_refusal_names_no_format_with_the_same_refusal(form):
    for grid, kind in itertools.product(GRIDS, KINDS):
        asked = Asked(form, None, grid=tuple(grid.items()), **kind)
        error = refused(asked)
        other = re.search(r"use the format '(\w+)'", str(error))
        if other:
            again = refused(asked.but(form=other[1]))
            assert again is None or "scale" in str(again) or "ragged" in str(again), f"{error}; then {again}"


@pytest.mark.parametrize("engine", [None, "vllm"])
def test_a_table_is_not_called_transposed(engine):
    for form in ("compressed-tensors", "gptq"):
        error = refused(Asked(form, engine, name="embed_tokens.weight", orientation="table"))
        assert "of an embedding table" in str(error)
        assert "Conv1D" not in str(error)
