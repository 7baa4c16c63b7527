"""One declaration of a setting gives its checks, flat name, JSON, option and help."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import pytest

from loopq.calibrate.prompts import CalibrationTake
from loopq.cli import parser
from loopq.commands.options import OWN, override, quant_config
from loopq.commands.settable import Set
from loopq.errors import ConfigError
from loopq.layers.grids import LEVELS
from loopq.quantizers import QUANTIZERS
from loopq.quantizers.config import LayerConfig, Override
from loopq.run import INPUTS
from loopq.run.budget import Fit
from loopq.run.config import PRESETS, QuantConfig
from loopq.settings.declare import (
    Chosen,
    Settings,
    block,
    choice,
    described,
    leaves,
    optional,
    parse_text,
    setting,
    summary,
)
from loopq.settings.execution import Execution
from loopq.settings.registry import Registry


@dataclass(frozen=True)
class Ink(Settings):
    """Ink of a pen.

    Parameters
    ----------
    colour : {"blue", "black"}
        Its colour.
    share : float
        Share of it
        that is left.
    """

    colour: Literal["blue", "black"] = setting("blue", common=True)
    share: float = setting(1.0, at_least=0, at_most=1)


TOOLS: Registry[type[Chosen]] = Registry("tool", "loopq.settings")


@TOOLS.register("pen")
@dataclass(frozen=True)
class Pen(Chosen):
    """A pen."""

    name: ClassVar[str] = "pen"
    width: int = setting(2, at_least=1)
    ink: Ink = block(Ink, "ink")


@TOOLS.register("chalk")
@dataclass(frozen=True)
class Chalk(Chosen):
    """A piece of chalk."""

    name: ClassVar[str] = "chalk"
    width: int = setting(9, at_least=1)
    wet: bool = setting(False)


@dataclass(frozen=True)
class Ruler(Settings):
    """A ruler.

    Parameters
    ----------
    length : float
        Its length.
    marks : tuple of int
        Its marks.
    """

    length: float = setting(30.0, at_least=1)
    marks: tuple[int, ...] = setting((1, 5))


@dataclass(frozen=True)
class Paper(Settings):
    """Paper without a name."""

    size: str = setting("A4")
    lines: int | None = setting(None, at_least=1)


@dataclass(frozen=True)
class Desk(Settings):
    """All that lies on a desk.

    Parameters
    ----------
    paper : Paper
        What is written on.
    tool : Tool
        What is written with.
    ruler : Ruler, optional
        What is measured with.
    tidy : bool
        Whether it is tidy.
    """

    paper: Paper = block(Paper)
    tool: Chosen = choice(TOOLS, "pen")
    ruler: Ruler | None = optional(Ruler, "ruler")
    tidy: bool = setting(True)
    place: Path | None = setting(None, option=False)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"size": 4}, "size must be text; got 4"),
        ({"lines": 2.0}, "lines must be a whole number or None; got 2.0"),
        ({"lines": True}, "lines must be a whole number or None; got True"),
        ({"lines": 0}, "lines must be at least 1; got 0"),
        ({"lines": 1 << 70}, "lines must be a whole number or None"),
        ({"width": "2"}, "width must be a whole number; got '2'"),
        ({"ink": "red"}, "ink must be one of blue, black; got 'red'"),
        ({"ink_share": 1.5}, "ink_share must be between 0 and 1; got 1.5"),
        ({"ink_share": float("nan")}, "ink_share must be a finite number; got nan"),
        ({"ink_share": float("inf")}, "ink_share must be a finite number; got inf"),
        ({"ink_share": False}, "ink_share must be a finite number; got False"),
        ({"tidy": 1}, "tidy must be true or false; got 1"),
        ({"place": "here"}, "place must be Path or None; got 'here'"),
        ({"ruler": -1.0}, "ruler must be at least 1; got -1.0"),
        (
            {"ruler": 3.0, "ruler_marks": ["1"]},
            r"ruler_marks must be a list with a whole number in every place; got",
        ),
        (
            {"ruler": 3.0, "ruler_marks": (1, 2.5)},
            r"ruler_marks must be a list with a whole number in every place; got \(1, 2.5\)",
        ),
    ],
)
def test_values_fit_their_annotation_and_errors_use_flat_names(changes, match):
    with pytest.raises(ConfigError, match=f"^{match}"):
        Desk().changed(**changes)


def test_parts_are_checked_too():
    assert Desk(tool=Chalk()).tool.width == 9
    for bad, match in [
        ({"paper": "A4"}, "paper must be Paper; got 'A4'"),
        ({"tool": "chalk"}, "tool must be Chosen; got 'chalk'"),
        ({"ruler": Paper()}, r"ruler must be Ruler or None; got Paper\("),
        ({"paper": None}, "paper must be Paper; got None"),
    ]:
        with pytest.raises(ConfigError, match=match):
            Desk(**bad)
    with pytest.raises(ConfigError, match="method must be Method; got 'gptq'"):
        LayerConfig(method="gptq")


def test_whole_numbers_and_numbers_of_their_range_are_taken():
    assert Desk().changed(ruler=3, ink_share=0, lines=None).flat() == {
        "size": "A4",
        "lines": None,
        "tool": "pen",
        "width": 2,
        "ink": "blue",
        "ink_share": 0,
        "ruler": 3,
        "ruler_marks": (1, 5),
        "tidy": True,
        "place": None,
    }


def test_flat_names_are_those_of_the_prefix_or_the_field():
    assert set(leaves(Desk)) == {
        *("size", "lines", "tool", "width", "ink", "ink_share", "wet", "ruler", "ruler_marks", "tidy")
    }
    (share,) = leaves(Desk)["ink_share"]
    assert (share.path, share.owner, share.choice, share.chosen) == (
        ("tool", "ink", "share"),
        Ink,
        "tool",
        "pen",
    )
    assert (share.default, share.annotation, share.help) == (1.0, float, "Share of it that is left.")
    assert [(e.chosen, e.default) for e in leaves(Desk)["width"]] == [("chalk", 9), ("pen", 2)]
    assert leaves(Desk)["tool"][0].annotation == Literal["chalk", "pen"]
    assert (summary(Ink), described(Ink)["colour"]) == ("Ink of a pen", "Its colour.")


def test_changes_reach_their_place_and_leave_the_rest():
    desk = Desk().changed(size="A3", ink="black", width=5, tidy=False)
    assert desk == Desk(paper=Paper("A3"), tool=Pen(5, Ink("black")), tidy=False)
    assert desk.changed() == desk
    assert desk.changed(paper=Paper("A5")).paper.size == "A5"
    assert desk.changed(tool=Chalk(4), wet=True).tool == Chalk(4, True)


def test_another_choice_keeps_what_both_have():
    chalk = Desk().changed(width=5, ink="black").changed(tool="chalk")
    assert chalk.tool == Chalk(width=5)
    assert chalk.changed(tool="pen").tool == Pen(width=5)
    assert Desk().changed(tool="chalk", width=3).tool == Chalk(width=3)
    config = LayerConfig.of(method="gptq", damping=0.2, damping_kind="tail", bits=3).changed(method="gptq-cd")
    assert (config.method.damping.fraction, config.method.damping.kind, config.grid.bits) == (0.2, "tail", 3)
    assert config.changed(method="gptq").method.damping.fraction == 0.2
    with pytest.raises(ConfigError, match=r"unknown tool 'pencil'.*known: chalk, pen"):
        Desk().changed(tool="pencil")


def test_unknown_names_and_what_would_not_be_read_are_refused():
    for settings, changes, match in [
        (Desk(), {"colour": 1}, "unknown setting colour; known: ink, ink_share, lines"),
        (Desk(), {"wet": True}, "wet goes with tool chalk; tool pen would not read it"),
        (Desk(), {"tool": "chalk", "ink": "blue"}, "ink goes with tool pen; tool chalk would not read it"),
        (
            LayerConfig.of(method="gptq"),
            {"metric": "loop"},
            "metric goes with method gptq-cd or trellis; method gptq would not read it",
        ),
        (
            QuantConfig(),
            {"method": "rtn", "damping": 0.1},
            "damping goes with method gptq or gptq-cd or trellis; method rtn would not read it",
        ),
        (QuantConfig(), {"alpha": 0.5}, "alpha goes with inputs asymmetric; inputs open would not read it"),
    ]:
        with pytest.raises(ConfigError, match=f"^{match}"):
            settings.changed(**changes)
    config = QuantConfig(overrides=(Override("a*", {"method": "rtn", "damping": 0.1}),))
    with pytest.raises(
        ConfigError, match=r"override 'a\*', layer abc: damping goes with .*; method rtn would not read it"
    ):
        config.for_layer("abc")


def test_an_optional_part_exists_if_its_first_value_is_given():
    assert Desk().ruler is None
    assert Desk().changed(ruler=12.0).ruler == Ruler(12.0)
    both = Desk().changed(ruler=12.0, ruler_marks=(3,))
    assert both.ruler == Ruler(12.0, (3,))
    assert both.changed(ruler_marks=(4,)).ruler == Ruler(12.0, (4,))
    assert both.changed(ruler=None) == Desk().changed(ruler=None) == Desk()
    assert Desk().changed(ruler=Ruler(2.0)).ruler == Ruler(2.0)
    assert both.changed(ruler=Ruler(2.0), ruler_marks=()).ruler == Ruler(2.0, ())
    for settings, changes in ((Desk(), {"ruler_marks": (1,)}), (both, {"ruler": None, "ruler_marks": (1,)})):
        with pytest.raises(ConfigError, match="ruler_marks goes with ruler"):
            settings.changed(**changes)


EVERY = [
    *(QuantConfig.of(method=name, bits=3, steps="1:") for name in QUANTIZERS.names()),
    *(QuantConfig.of(inputs=name, exclude=("a*",), include=("b",)) for name in INPUTS.names()),
    QuantConfig.of(inputs="asymmetric", alpha=0.25, sweeps=3, preset="best", metric_draws=2),
    QuantConfig.of(method="gptq", damping=0.1, damping_kind="tail", scales="static", act_order=True),
    QuantConfig.of(fit=Fit(3.25, (2, 4), (16,))),
    QuantConfig.of(fit=Fit(900), rank_threshold=None, rotation="random:16", rotation_seed=3),
    QuantConfig.of(Override("a*", {"bits": 8}), Override("re:b$", {"method": "rtn", "steps": "first"})),
]


@pytest.mark.parametrize("config", EVERY)
def test_plain_data_gives_the_settings_back(config):
    again = QuantConfig.from_json(json.loads(json.dumps(config.to_json())))
    assert again == config
    assert again.to_json() == config.to_json()
    assert {k: type(v) for k, v in again.flat().items()} == {k: type(v) for k, v in config.flat().items()}
    assert QuantConfig().changed(**config.flat()) == config


@pytest.mark.parametrize(
    ("annotation", "text", "value"),
    [
        (int, "-12", -12), (float, "1e-3", 1e-3), (str, "none", "none"), (bool, "true", True), (bool, "false", False),
        (int | None, "none", None), (int | None, "null", None), (int | None, "3", 3),
        (tuple[int, ...], "2, 4", (2, 4)),
        (Literal[2, 3], "3", 3),
        (Literal["a", "b"], "b", "b"),
        (Literal["a", "b"], "c", "c"),
    ],
)  # fmt: skip
def test_values_are_read_from_text(annotation, text, value):
    parsed = parse_text(annotation, text)
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("annotation", "text"),
    [(int, "1.5"), (int, "1_000"), (int, "9" * 19), (int, ""), (float, "x"), (bool, "1"), (tuple[int, ...], "2,")],
)  # fmt: skip
def test_other_texts_are_no_such_value(annotation, text):
    with pytest.raises(ValueError):
        parse_text(annotation, text)


def subparser(command):
    (commands,) = (a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    return commands.choices[command]


def options_of(command):
    """Actions of a command by the flat name that they set; of several the first."""
    actions = reversed(subparser(command)._actions)
    return {a.dest: a for a in actions if a.dest is not argparse.SUPPRESS}


def test_every_flat_name_has_an_option_with_its_default_in_help():
    actions = options_of("quantize")
    by_set = Set.of(subparser("quantize"))
    for kind in (QuantConfig, Execution, CalibrationTake):
        for name, entries in leaves(kind).items():
            default = entries[0].default
            assert {e.help for e in entries} == {entries[0].help}, f"{name}: one meaning for all who read it"
            assert entries[0].help, f"{name} is not described"
            assert by_set.settings[name] == entries[0]
            if kind is not Execution and name not in OWN:
                assert name not in actions
                assert f" {name}" in by_set.help
                continue
            action = actions[name]
            # Nothing is set that was not given: defaults live in the dataclass alone.
            assert action.default is argparse.SUPPRESS
            text = action.help % vars(action)
            shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
            assert default is None or text.endswith(f"(default {shown})"), text
            assert action.option_strings == [f"--{name.replace('_', '-')}"]


def test_defaults_of_the_leaves_are_those_of_the_settings():
    for kind in (QuantConfig, Execution, CalibrationTake):
        flat, names = kind().flat(), leaves(kind)
        for name in set(flat) & set(names):
            defaults = [e.default for e in names[name] if not e.choice or e.chosen == flat[e.choice]]
            assert defaults[:1] == [flat[name]], name
        # The others belong to a choice or a part that is not there by default.
        for name in set(names) - set(flat):
            assert names[name][0].choice or len(names[name][0].path) > 1, name
    for name in QUANTIZERS.names():
        for leaf, value in QUANTIZERS.get(name)().flat().items():
            assert {e.default for e in leaves(QuantConfig)[leaf] if e.chosen == name} == {value}


def test_a_flat_name_is_one_setting():
    """It may be read by several entries of one choice; beyond that no two settings share it."""
    every = leaves(QuantConfig)
    for name, entries in every.items():
        assert len({(e.choice, e.chosen) for e in entries}) == len(entries), name
        assert len({e.choice for e in entries}) == 1, name
        assert len({str(e.annotation) for e in entries}) == 1, name
    assert not set(every) & set(leaves(Execution))
    assert not set(every) & set(leaves(CalibrationTake))


def test_options_reach_the_settings():
    arguments = ["quantize", "model", "--out", "q", "--preset", "best", "--bits", "3", "--inputs", "asymmetric",
                 *(f"--set={s}" for s in ("symmetric=false", "damping=0", "scale_bits=none", "signed_scales=false",
                                          "refit=false", "alpha=0.5", "fit_bits=2,4", "bits=3", "levels=even")),
                 "--fit", "900K",
                 "--layer", "a*=>bits=8,metric=inputs", "--exclude", "x", "--exclude", "y"]  # fmt: skip
    config = quant_config(parser().parse_args(arguments))
    expected = QuantConfig.of(
        Override("a*", {"bits": 8, "metric": "inputs"}),
        preset="best",
        bits=3,
        symmetric=False,
        levels="even",
        damping=0.0,
        scale_bits=None,
        signed_scales=False,
        refit=False,
        inputs="asymmetric",
        alpha=0.5,
        fit=Fit(900 * 1024, bits=(2, 4)),
        exclude=("x", "y"),
    )
    assert config == expected
    assert quant_config(parser().parse_args(["quantize", "model", "--out", "q"])) == QuantConfig()
    text = subparser("quantize").format_help()
    assert all(re.search(rf"(?<![\w-])({k}|--{k})(?![\w-])", text) for k in PRESETS["best"])


def test_unused_settings_are_refused_in_options_and_overrides():
    base = ["quantize", "model", "--out", "q"]
    with pytest.raises(
        ConfigError, match="metric goes with method gptq-cd or trellis; method gptq would not read it"
    ):
        quant_config(parser().parse_args([*base, "--method", "gptq", "--metric", "loop"]))
    config = quant_config(parser().parse_args([*base, "--method", "rtn", "--layer", "a*=>damping=0.1"]))
    with pytest.raises(ConfigError, match=r"override 'a\*', layer abc: damping goes with method gptq"):
        config.for_layer("abc")


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("a=>bits=8", {"bits": 8}),
        ("a=> bits=3, steps=first", {"bits": 3, "steps": "first"}),
        (
            "a=>method=rtn,scale_search=mse,symmetric=false",
            {"method": "rtn", "scale_search": "mse", "symmetric": False},
        ),
        ("a=>scale_bits=none,damping=1e-2", {"scale_bits": None, "damping": 0.01}),
    ],
)
def test_overrides_are_read_from_text(text, changes):
    assert override(text) == Override("a", changes)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("a", "write PATTERN=>bits=8,group_size=64"),
        ("a=>bits", "'bits' is not NAME=VALUE"),
        ("a=>colour=3", "unknown setting colour"),
        ("a=>group_size=x", "group_size: 'x': give a whole number"),
        ("a=>symmetric=yes", "give true or false"),
    ],
)
def test_overrides_that_cannot_be_read(text, match):
    with pytest.raises(argparse.ArgumentTypeError, match=match):
        override(text)


def test_settings_are_values():
    assert Desk() == Desk()
    assert hash(Desk()) == hash(Desk())
    with pytest.raises(dataclasses.FrozenInstanceError):
        Desk().tidy = False


def test_a_setting_lists_the_names_of_its_registry():
    text = leaves(LayerConfig)["levels"][0].help
    assert {f"`{name}`" for name in LEVELS.names()} <= set(text.replace(",", " ").replace(".", " ").split())
