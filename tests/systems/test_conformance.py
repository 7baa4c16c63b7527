"""Every system is tested for what all must show: in the file of its name; here the control, which is of no adapter."""

from __future__ import annotations

from pathlib import Path

from loopq.systems import SYSTEMS
from tests.support.conformance import Conformance
from tests.support.systems import CASES


def test_every_registered_system_has_a_model_and_a_test() -> None:
    assert {case.system for case in CASES.values() if not case.variant} | {"control"} == set(SYSTEMS.names())
    texts = "\n".join(
        path.read_text("utf-8") for path in Path(__file__).parents[1].rglob("systems/test_*.py")
    )
    assert [name for name in SYSTEMS.names() if f'    system = "{name}"\n' not in texts] == []


class TestControl(Conformance):
    system = "control"
