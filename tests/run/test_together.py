"""Teams: who may be one, and a rank that comes late. Whole runs are in test_result.py and tests/soak."""

from __future__ import annotations

import pytest

import loopq
from loopq.errors import CheckpointError, ConfigError, LoopqError
from loopq.run.config import QuantConfig
from loopq.run.ranks import Ranks
from loopq.run.together import Team
from tests.support.runs import run_of

CONFIG = QuantConfig.of(method="rtn", group_size=8)


class Late:
    """A source that lost its work folder to the others."""

    def __init__(self, source, out, meanwhile):
        self._source, self._out, self._meanwhile = source, out, meanwhile

    def facts(self):
        return self._source.facts()

    def divisible(self, plan, folder, ranks):
        self._meanwhile(self._out)
        raise LoopqError(f"{folder}: cannot be written (No such file or directory)")


def test_a_rank_that_is_late_takes_what_the_others_wrote(tiny, tokens, tmp_path):
    plan, source = run_of(tiny, tokens, CONFIG)

    def write(out):
        loopq.quantize(tiny, tokens, CONFIG, out=out, threads=1)

    out = tmp_path / "Q"
    (tmp_path / ".Q.lock").touch()
    checkpoint = Team(out, ranks=Ranks(1, 2)).divide(plan, Late(source, out, write), pytest.fail)
    assert sorted(checkpoint.layers) == [t.name for t in sorted(plan.tasks, key=lambda t: t.name)]
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".lock") == ["Q"]
    other = tmp_path / "other"
    with pytest.raises(LoopqError, match="cannot be written"):
        Team(other, ranks=Ranks(1, 2)).divide(plan, Late(source, other, lambda out: None), pytest.fail)
    three = run_of(tiny, tokens, QuantConfig.of(method="rtn", group_size=8, bits=3)).plan
    with pytest.raises(CheckpointError, match="other settings or another dump"):
        Team(out, ranks=Ranks(1, 2)).divide(three, Late(source, out, lambda out: None), pytest.fail)


def test_ranks_refuse_what_needs_the_model_between_layers(tmp_path):
    ranks, out = Ranks(0, 2), tmp_path / "Q"
    with pytest.raises(ConfigError, match="inputs 'asymmetric' run the model between layers, which several"):
        Team.of_ranks(ranks, QuantConfig.of(preset="best"), out, own_format=True)
    for place, native in ((out, False), (None, True)):
        with pytest.raises(ConfigError, match="`export` it afterwards"):
            Team.of_ranks(ranks, QuantConfig(), place, own_format=native)
    assert Team.of_ranks(ranks, QuantConfig(), str(out), own_format=True) == Team(out, ranks=ranks)
    out.mkdir()
    (out / "there").touch()
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        Team.of_ranks(ranks, QuantConfig(), out, own_format=True)


@pytest.mark.parametrize("shard", [(0, 2), (3, 2)])
def test_a_shard_is_one_of_so_many(tmp_path, shard):
    with pytest.raises(ConfigError, match=f"shard must be K of N, K from 1 to N; got {shard[0]} of 2"):
        Team(tmp_path, shard)
