"""Tables are made model by model: what a model cannot have, and one that fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loopq.errors import ConfigError
from loopq.paper import run
from loopq.paper.bench import Bench
from loopq.terminal.progress import Silent
from tests.support.paper import bench, save


@pytest.mark.parametrize("kind", ["ouro", "mamba", "coconut", "control"])
def test_a_model_has_the_tables_that_it_can_have(kind: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"coconut": {"vocab_size": 259}}.get(kind, {})
    one = bench(save(tmp_path / kind, kind, **changes))
    names = ("rank", "depth-curve", "components", "mamba", "horizon", "algorithm")
    made = {name: run.make(name, [one], None, Silent()) for name in names}
    refused = {name for name, m in made.items() if m.refused}
    # One step is no evidence about loops: of such a model there is the scan alone.
    expected = {"components", "mamba"} if kind in ("ouro", "coconut") else set(names)
    assert refused == expected - ({"mamba"} if kind == "mamba" else set())
    for m in made.values():
        assert len(m.found) + len(m.refused) == 1


def test_one_model_that_fails_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = (bench(save(tmp_path / n, "ouro", n_layers=1, total_ut_steps=2)) for n in ("good", "bad"))
    plain: Callable[..., Any] = Bench.measure

    def measure(self: Bench, variants: Any) -> Any:
        if self is bad:
            raise ConfigError("no")
        return plain(self, variants)

    monkeypatch.setattr(Bench, "measure", measure)
    made = run.make("bits-per-byte", [bad, good], None, Silent())
    assert made.refused == {"bad": "no"}
    assert [f["model"] for f in made.found] == ["good"]
