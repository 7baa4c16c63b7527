"""Declarations of weights, and the parameters that they name."""

from __future__ import annotations

import pytest
from torch import nn

from loopq.errors import SystemContractError
from loopq.systems.declare import declare, find_prefix, is_embedding, owners_of_parameters, parameter_of


class Tied(nn.Module):
    """A head that is the embedding, and a layer with two owners."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.core = nn.Embedding(16, 8), nn.Linear(8, 4, bias=False)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.again = self.core
        self.norm = nn.LayerNorm(8)


def test_a_tied_weight_is_declared_once_with_all_owners() -> None:
    model = Tied()
    core, head = declare(model, [(n, {"role": "mlp"}) for n in ("core", "again", "head", "embed")], 3)
    assert (core.name, core.owners, core.invocations) == ("core.weight", ("core", "again"), 3)
    assert (core.out_features, core.in_features, core.orientation) == (4, 8, "out_in")
    assert (head.owners, head.orientation) == (("head", "embed"), "table")
    assert parameter_of(model, core) is model.core.weight
    assert parameter_of(model, "embed.weight") is model.embed.weight


@pytest.mark.parametrize(
    ("name", "match"), [("nothing", "no module 'nothing'"), ("norm", "no weight matrix")]
)
def test_modules_without_a_matrix_are_refused(name: str, match: str) -> None:
    with pytest.raises(SystemContractError, match=match):
        declare(Tied(), [(name, {"role": "mlp"})], 1)


def test_owners_and_embeddings_are_found_by_object() -> None:
    model = Tied()
    assert owners_of_parameters(model)[id(model.embed.weight)] == ["embed", "head"]
    assert is_embedding(model, "head")
    assert not is_embedding(model, "core")


def test_a_prefix_is_that_of_a_wrapper() -> None:
    model = nn.ModuleDict({"gpt": Tied()})
    assert find_prefix(model, "core") == "gpt."
    assert find_prefix(model["gpt"], "core") == ""
    assert find_prefix(model, "ore") is None
