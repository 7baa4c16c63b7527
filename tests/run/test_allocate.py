"""Bits under a byte budget: against all combinations, and from the costs of a model to the file."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import numpy as np
import pytest

import loopq
import loopq.formats.native
from loopq.errors import ConfigError
from loopq.evaluation.compare import compare
from loopq.models.load import load_model
from loopq.quantizers.config import Override
from loopq.quantizers.gptq_cd import GPTQCD
from loopq.run import allocate
from loopq.run.budget import Fit
from loopq.run.config import QuantConfig
from loopq.terminal.progress import Silent
from tests.golden.quantized import ExactLoop, ids
from tests.support.kills import Kill, Killer, counting
from tests.support.runs import digest, tensors_of

FULL = QuantConfig.of(method="gptq-cd", metric="inputs", bits=3, group_size=16, rank_threshold=None)


#: The same with one kind of levels, for half the candidates.
EVEN = FULL.changed(levels="even")


@pytest.fixture(autouse=True)
def few_scored(monkeypatch):
    """Candidates are compared on few prompts."""
    monkeypatch.setattr(allocate, "SCORED", 2)


@pytest.mark.slow
def test_mixed_bits_reach_the_file_and_come_back(tiny_folder, tiny, tokens, tmp_path):
    asked = Fit(13.3, bits=(2, 3, 4, 8), group_sizes=(16, 32))
    result = loopq.quantize(tiny_folder, tokens, FULL, fit=asked, out=tmp_path / "q", threads=1)
    facts = result.settings["allocation"]
    n_weights = sum(x.codes.size for x in result.layers.values())
    n_weights += sum(math.prod(t.shape) for t in result.dense.values())
    size = (tmp_path / "q" / "model.safetensors").stat().st_size
    assert facts["budget_bytes"] == int(13.3 * n_weights / 8)
    assert 0.99 * facts["budget_bytes"] < size < 1.01 * facts["budget_bytes"]
    assert size == pytest.approx(facts["n_bytes"], rel=5e-3)
    assert facts["bits_a_weight"] == pytest.approx(8 * facts["n_bytes"] / n_weights)
    assert len({x.grid.bits for x in result.layers.values()}) > 1
    again = loopq.formats.native.read(tmp_path / "q")
    config = QuantConfig.from_json(again.settings["quantization"])
    for name, layer in result.layers.items():
        grid = config.for_layer(name).grid
        assert facts["layers"][name] == {k: getattr(grid, k) for k in ("bits", "group_size", "levels")}
        assert (grid.bits, grid.group_size) == (layer.grid.bits, layer.grid.group_size)
        assert config.for_layer(f"{name}.more") == FULL.layer.decided()
        assert again.layers[name].same_as(layer)
    loaded = loopq.load(tmp_path / "q")
    name = "transformer.adapter.weight"
    np.testing.assert_array_equal(
        loaded.model.get_parameter(name).detach().numpy(), result.layers[name].in_model_orientation()
    )
    assert loopq.evaluate(tiny_folder, [tmp_path / "q"], tokens)[1].kl.mean() > 0


def test_what_an_override_fixes_stays_as_it_is(tiny, tokens):
    name = "transformer.adapter.weight"
    fixed = dataclasses.replace(EVEN, overrides=(Override(name, {"bits": 8, "group_size": 8}),))
    asked = Fit(13.95, bits=(2, 3), group_sizes=(16, 32))
    result = loopq.quantize(tiny, tokens, fixed, fit=asked, threads=1)
    layer = result.layers[name]
    assert (layer.grid.bits, layer.grid.group_size) == (8, 8)
    facts = result.settings["allocation"]
    assert facts["layers"][name] == {"bits": 8, "group_size": 8, "levels": "even"}
    assert sum(c["n_bytes"] for c in facts["chosen"]) == sum(x.n_bytes for x in result.layers.values())
    assert {x.grid.bits for n, x in result.layers.items() if n != name} <= {2, 3}


def test_grids_and_trials_are_counted(tiny, tokens):
    class Told(Silent):
        lines: ClassVar[list[str]] = []
        stages: ClassVar[dict[str, list[int]]] = {}

        def start(self, label, total, unit):
            self.now = self.stages.setdefault(f"{label}, {unit}", [total, 0])

        def advance(self, n=1):
            self.now[1] += n

        def note(self, text):
            self.lines.append(text)

    asked = Fit(13.95, bits=(2, 3), group_sizes=(16,))
    result = loopq.quantize(tiny, tokens, EVEN, fit=asked, threads=1, progress=Told())
    grids = [line for line in Told.lines if line.startswith("fit: grid")]
    assert [line[: len("fit: grid 1 of 2")] for line in grids] == ["fit: grid 1 of 2", "fit: grid 2 of 2"]
    assert Told.stages["ablation, trials"] == [2 * len(result.layers)] * 2


def test_levels_are_those_of_the_run(tiny):
    asked = Fit(4.0, bits=(3, 8), group_sizes=(16,))
    levels = {name: [g["levels"] for g in asked.grids(FULL.changed(**c).layer.grid)] for name, c in {
        "auto": {}, "even": {"levels": "even"}, "uneven": {"levels": "uneven"}, "zero points": {"symmetric": False},
    }.items()}  # fmt: skip
    assert levels == {
        "auto": ["even", "uneven", "even"],
        "even": ["even", "even"],
        "uneven": ["uneven"],
        "zero points": ["even", "even"],
    }


def test_a_method_chooses_from_the_grids_it_has(tiny, tokens):
    config = FULL.changed(method="trellis", metric="inputs", state_bits=6)
    asked = Fit(13.5, bits=(2, 4, 8), group_sizes=(16,))
    found = loopq.quantize(tiny, tokens, config, fit=asked, threads=1)
    assert {x.grid.bits for x in found.layers.values()} == {2, 4}
    with pytest.raises(ConfigError, match="method trellis has none of the grids"):
        loopq.quantize(tiny, tokens, config, fit=dataclasses.replace(asked, bits=(8,)), threads=1)


@pytest.mark.slow
def test_scored_bits_beat_the_reversed_choice_at_equal_bytes(tiny, tokens, monkeypatch):
    """The layers that got two bits get four here, as far as the bytes reach."""
    monkeypatch.setattr(allocate, "SCORED", 10)
    asked = Fit(13.26, bits=(2, 4), group_sizes=(16,))
    result = loopq.quantize(tiny, tokens, EVEN, fit=asked, threads=1)
    bits = {n: x.grid.bits for n, x in result.layers.items()}
    assert set(bits.values()) == {2, 4}
    budget = sum(x.n_bytes for x in result.layers.values())
    two = loopq.quantize(tiny, tokens, FULL, bits=2, threads=1).layers
    four = loopq.quantize(tiny, tokens, FULL, bits=4, threads=1).layers
    other, used = dict(two), sum(x.n_bytes for x in two.values())
    for n in bits:
        more = four[n].n_bytes - two[n].n_bytes
        if used + more <= budget and bits[n] == 2:
            other[n], used = four[n], used + more
    assert used > sum(x.n_bytes for x in two.values())
    variants = {"scored": tensors_of(result.layers), "other": tensors_of(other)}
    _, scored, reverse = compare(tiny.system, variants, tokens)
    assert scored.kl.mean() < reverse.kl.mean()


@pytest.mark.slow
def test_layers_of_one_input_get_one_grid():
    """Engines put q, k and v into one matrix; what an override fixes is fixed all the same."""
    asked = Fit(7211, bits=(2, 3, 4, 8), group_sizes=(8, 24))
    take = {"method": "gptq", "levels": "even", "fit": asked, "rank_threshold": None, "threads": 1}

    def grids(**settings):
        layers = loopq.quantize(ExactLoop(), ids(), **take, **settings).layers
        return {name: (layer.grid.bits, layer.grid.group_size) for name, layer in layers.items()}

    chosen = grids()
    assert chosen["q.weight"] == chosen["k.weight"] == chosen["v.weight"]
    assert len(set(chosen.values())) > 1
    fixed = grids(overrides=(Override("v.weight", {"bits": 8}),))
    assert fixed["q.weight"] == fixed["k.weight"]
    assert fixed["v.weight"] == (8, fixed["q.weight"][1])


def test_budget_in_bytes_and_settings_that_cannot_be(tiny, tokens):
    least = Fit(10, bits=(2,), group_sizes=(16,))
    with pytest.raises(ConfigError, match="the file is to have 10 bytes; its smallest"):
        loopq.quantize(tiny, tokens, FULL, fit=least, threads=1)
    for bad, match in [
        ({"budget": 0.0}, "budget must be above 0"),
        ({"bits": (5,)}, "bits must be of 2, 3, 4, 8; got 5"),
        ({"bits": ()}, "one or more"),
        ({"group_sizes": ()}, "one or more"),
    ]:
        with pytest.raises(ConfigError, match=match):
            Fit(**({"budget": 3.0} | bad))


def test_a_killed_allocation_goes_on(tiny_folder, tokens, tmp_path, monkeypatch):
    """Finished collecting, solving and scoring is not repeated."""
    asked = Fit(13.3, bits=(2, 4), group_sizes=(16,))
    whole = loopq.quantize(tiny_folder, tokens, EVEN, fit=asked, out=tmp_path / "whole", threads=1)
    out = tmp_path / "q"
    with pytest.raises(Kill):
        loopq.quantize(tiny_folder, tokens, EVEN, fit=asked, out=out, threads=1, progress=Killer(38))
    solved = []
    monkeypatch.setattr(GPTQCD, "quantize", counting(GPTQCD.quantize, solved))
    again = loopq.quantize(tiny_folder, tokens, EVEN, fit=asked, out=out, threads=1)
    assert len(solved) <= 9
    assert again.settings == whole.settings
    assert digest(out) == digest(tmp_path / "whole")
    assert not (tmp_path / ".q.work").exists()


def test_what_is_outside_the_loop_is_chosen_with_it(tokens):
    """A small file rounds the tables too; a large one leaves them as they are."""
    loaded = load_model("huginn_small")
    few = {"bits": (3, 4), "group_sizes": (128,)}
    take = {"method": "rtn", "levels": "even", "n_prompts": 2, "seq_len": 16, "n_steps": 2, "threads": 1}
    sizes = {}
    for budget, outside in ((3.7, 4), (5.2, 8), (6.5, None)):
        result = loopq.quantize(loaded, fit=Fit(budget, **few), **take)
        assert result.settings["quantization"]["outside"] == outside
        assert ("transformer.wte.weight" in result.layers) == (outside is not None)
        sizes[outside] = result.settings["allocation"]["n_bytes"]
        assert result.n_bytes == pytest.approx(sizes[outside], rel=0.02)
    assert sizes[4] < sizes[8] < sizes[None]
    fixed = loopq.quantize(loaded, fit=Fit(5.2, **few), outside=4, **take)
    assert fixed.layers["transformer.wte.weight"].grid.bits == 4
