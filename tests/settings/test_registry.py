"""A registry is filled by the modules of its package, and of the packages of that name in the rooms beside it."""

from __future__ import annotations

import sys
from typing import ClassVar

import pytest

from loopq.errors import ConfigError, UnknownNameError
from loopq.settings.registry import Registry


@pytest.fixture
def house(tmp_path, monkeypatch):
    """A package with tools, and a room with one more."""
    registry = (
        "from loopq.settings.registry import Registry\nTOOLS = Registry('tool', 'madeup_house.tools')\n"
    )
    files = {
        "tools/__init__": registry,
        "tools/pen": "from madeup_house.tools import TOOLS\nTOOLS.register('pen')('a pen')\n",
        "room/__init__": "",
        "room/tools/__init__": "",
        "room/tools/brush": "from madeup_house.tools import TOOLS\nTOOLS.register('brush')('a brush')\n",
        "other/__init__": "raise RuntimeError('a room without tools is imported')\n",
        "__init__": "",
    }
    for name, text in files.items():
        path = tmp_path / "madeup_house" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "madeup_house"
    for name in [n for n in sys.modules if n.partition(".")[0] == "madeup_house"]:
        del sys.modules[name]


def tools():
    from madeup_house.tools import TOOLS

    return TOOLS


def test_a_room_adds_its_entries(house):
    assert tools().names() == ["brush", "pen"]
    assert tools().get("brush") == "a brush"


def test_a_room_that_is_taken_out_takes_its_entries_along(house):
    (house / "room" / "tools" / "brush.py").unlink()
    (house / "room" / "tools" / "__init__.py").unlink()
    assert tools().names() == ["pen"]


def test_a_name_of_a_room_that_is_taken_out_is_refused_with_the_room(house):
    from madeup_house.tools import TOOLS

    TOOLS.rooms = {"brush": "room"}
    (house / "room" / "tools" / "brush.py").unlink()
    with pytest.raises(
        UnknownNameError, match=r"tool 'brush' needs the folder loopq/room, which .*; known: pen"
    ):
        tools().get("brush")


def test_a_name_registers_once_and_an_unknown_one_gets_hints():
    registry: Registry[str] = Registry("tool", "loopq.terminal")
    registry.register("hammer")("a hammer")
    with pytest.raises(ConfigError, match="tool 'hammer' is registered twice"):
        registry.register("hammer")("another")
    with pytest.raises(ConfigError, match=r"unknown tool 'hamer' \(did you mean hammer\?\); known: hammer"):
        registry.get("hamer")


def test_a_removed_name_says_what_to_do_instead():
    registry: Registry[str] = Registry("tool", "loopq.terminal", removed={"axe": "take the saw"})
    with pytest.raises(ConfigError, match="there is no tool axe any more: take the saw"):
        registry.get("axe")


def test_a_class_gets_its_name():
    registry: Registry[type] = Registry("tool", "loopq.terminal")

    @registry.register("saw")
    class Saw:
        name: ClassVar[str]

    assert Saw.name == "saw"
