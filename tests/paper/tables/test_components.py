"""Table 12: components left out one by one."""

from __future__ import annotations

from pathlib import Path

import pytest

from loopq.paper.bench import Bench
from loopq.paper.compared import ALL, RTN
from loopq.paper.tables import components
from loopq.run.config import QuantConfig
from tests.support.paper import measured_shown_and_resumed


def test_it_is_measured_shown_and_resumed(huginn: Bench, tmp_path: Path) -> None:
    measured_shown_and_resumed("components", huginn, tmp_path)


def test_each_row_is_the_variant_that_it_names(huginn: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, QuantConfig] = {}
    monkeypatch.setattr(Bench, "measure", lambda self, variants: given.update(variants) or {})
    components.measure(huginn)
    (adapter,) = huginn.adapters
    every = tuple(range(huginn.depth))

    def treated(config: QuantConfig) -> dict[str, set[tuple[object, ...]]]:
        """Method, steps and rotation of the adapter, and of the others, as the plan of a run has them."""
        treatments: dict[str, set[tuple[object, ...]]] = {"adapter": set(), "core": set()}
        for task in huginn.collected.plan(config).tasks:
            place = "adapter" if task.parameter.name == adapter else "core"
            method, turned = task.config.method.name, task.config.rotation != plain
            treatments[place].add(
                (method, tuple(task.steps), turned) if method == "gptq" else (method, turned)
            )
        return treatments

    plain = huginn.rtn().layer.rotation
    one, all_ = ("gptq", (0,), False), ("gptq", every, False)
    assert {name: treated(config) for name, config in given.items()} == {
        RTN: {"adapter": {("rtn", False)}, "core": {("rtn", False)}},
        components.TURNED_ONE: {"adapter": {("gptq", (0,), True)}, "core": {one}},
        components.KEPT: {"adapter": set(), "core": {("rtn", False)}},
        components.MIXED: {"adapter": {("gptq", every, True)}, "core": {one}},
        ALL: {"adapter": {all_}, "core": {all_}},
        components.TURNED: {"adapter": {("gptq", every, True)}, "core": {all_}},
    }
    # The label says how the adapter is treated.
    for name, config in given.items():
        assert (config.for_layer(adapter).rotation != plain) == ("rotated" in name), name
