"""`--set NAME=VALUE`: as strong as own options, never against them, with errors that name the setting."""

from __future__ import annotations

import argparse

import pytest

from loopq.cli import parser
from loopq.commands.options import add_settings, given, quant_config
from loopq.commands.settable import Set, instead, renamed, shown
from loopq.quantizers.config import LayerConfig, Override
from loopq.run.config import PRESETS, QuantConfig
from loopq.settings.declare import leaves
from loopq.settings.execution import Execution

BASE = ("quantize", "m", "--out", "o")


def config(*args):
    return quant_config(parser().parse_args([*BASE, *args]))


def subparser(command):
    return parser()._subparsers._group_actions[0].choices[command]


def test_set_is_an_own_option_and_an_override_of_every_layer():
    by_set = config("--set", "beam=64", "--set=refit=false", "--set", "damping_kind=tail")
    assert by_set == QuantConfig().changed(beam=64, refit=False, damping_kind="tail")
    everywhere = config("--layer", "*=>beam=64,refit=false,damping_kind=tail")
    assert everywhere.for_layer("a") == by_set.for_layer("a")
    assert config("--set", "bits=3", "--set", "fit=3.25") == config("--bits", "3", "--fit", "3.25")
    # A value may have commas.
    assert config("--set", "steps=0:2,5").layer.calibration.steps == "0:2,5"
    # Spaces around a name and a value, as in --layer.
    assert config("--set", " beam = 64 ") == config("--set", "beam=64")


def test_set_is_stronger_than_a_preset_and_weaker_than_a_layers_settings():
    asked = config("--preset", "best", "--set", "beam=4", "--layer", "*a*=>beam=2")
    assert asked == QuantConfig.of(Override("*a*", {"beam": 2})).changed(**{**PRESETS["best"], "beam": 4})
    assert [asked.for_layer(name).method.beam for name in ("a.weight", "b.weight")] == [2, 4]
    base = QuantConfig().changed(beam=3, rounds=2)
    args = parser().parse_args([*BASE, "--set", "beam=5"])
    assert quant_config(args, base) == base.changed(beam=5)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--set", "bits=4", "--bits", "3"), "argument --bits: 3 contradicts --set bits=4: give one of them"),
        (("--bits", "3", "--set", "bits=4"), "argument --set: bits=4 contradicts --bits 3: give one of them"),
        (("--seed", "3", "--set", "seed=4"), "argument --set: seed=4 contradicts --seed 3"),
        (("--set", "beam"), "argument --set: 'beam' is not NAME=VALUE"),
        (
            ("--set", "beem=3"),
            "argument --set: unknown setting 'beem' (did you mean beam?); known: act_order,",
        ),
        (("--set", "group-size=3"), "unknown setting 'group-size' (did you mean group_size"),
        (("--set", "beam=0"), "argument --set: beam must be between 1 and 4096; got 0"),
        (("--set", "beam=x"), "argument --set: beam: 'x': give a whole number"),
        (("--set", "refit=no"), "argument --set: refit: 'no': give true or false"),
        (
            ("--set", "scales=groups"),
            "scales must be one of group, static; got 'groups' (did you mean group?)",
        ),
        (("--set", "memory=much"), "argument --set: memory: 'much': give bytes with a unit"),
        (("--set", "fit=much"), "argument --set: fit: 'much': give a number"),
    ],
)
def test_wrong_names_values_and_contradictions_are_refused(args, said, capsys):
    with pytest.raises(SystemExit) as stop:
        parser().parse_args([*BASE, *args])
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_the_last_of_one_spelling_counts_and_equal_values_agree():
    assert config("--bits", "8", "--bits", "3", "--set", "bits=3").layer.grid.bits == 3
    assert config("--set", "beam=8", "--set", "beam=4").layer.method.beam == 4


def test_a_command_takes_its_own_settings_alone(capsys):
    by_command = {name: Set.of(subparser(name)) for name in ("solve", "collect", "evaluate", "run", "merge")}
    assert set(leaves(LayerConfig)) - {"metric", "metric_draws", "metric_prompts", "passes"} <= set(
        by_command["solve"].settings
    )
    assert "fit" not in by_command["solve"].settings
    assert {"steps", "metric_draws", "random_tokens", "seed"} <= set(by_command["collect"].settings)
    assert "beam" not in by_command["collect"].settings
    assert {"field", "template", "n_prompts"} <= set(by_command["evaluate"].settings)
    assert by_command["run"] is by_command["merge"] is None


def test_options_that_were_added_before_are_taken_too():
    one = argparse.ArgumentParser()
    add_settings(one, Execution, only=("threads",))
    assert Set.of(one) is None
    add_settings(one, LayerConfig, only=("beam",), own=())
    assert set(Set.of(one).settings) == {"threads", "beam"}
    args = one.parse_args(["--set", "threads=2", "--set", "beam=3"])
    assert (given(args, Execution), given(args, LayerConfig)) == ({"threads": 2}, {"beam": 3})


def test_values_are_shown_as_options_spell_them():
    assert [shown(v) for v in (True, None, (2, 4), 0.5, "a")] == ["true", "none", "2,4", "0.5", "a"]


@pytest.mark.parametrize(
    ("command", "args", "said"),
    [
        ("quantize", "--beam 64", "there is no --beam any more: write --set beam=64"),
        ("quantize", "--beam=64", "write --set beam=64"),
        ("quantize", "--damping-kind tail --bits 3", "write --set damping_kind=tail"),
        ("quantize", "--no-refit --bits 3", "write --set refit=false"),
        ("quantize", "--asymmetric", "write --set symmetric=false"),
        ("quantize", "--act-order", "write --set act_order=true"),
        ("quantize", "--template", "write --set template=true"),
        ("quantize", "--beam", "write --set beam=VALUE"),
        ("quantize", "--bits-per-weight 3.2", "write --fit 3.2"),
        (
            "quantize",
            "--fit-score fisher",
            "leave it out, since the cost of a grid is always the measured KL",
        ),
        ("quantize", "--fit-levels even", "write --levels even"),
        ("quantize", "--requantize", "requantize=True"),
        ("solve", "--steps 1:", "write --set steps=1:"),
        ("collect", "--metric-draws 2", "write --set metric_draws=2"),
        ("evaluate", "--field answer", "write --set field=answer"),
        ("evaluate", "--beam 3", "unknown argument --beam"),
        ("export", "--fit-levels even", "unknown argument --fit-levels"),
        ("quantize", "--beem 3", "unknown argument --beem (did you mean --set beam"),
    ],
)
def test_options_of_the_last_release_name_their_successors(command, args, said, capsys):
    from loopq.cli import parse

    place = {"evaluate": ["m", "q"], "export": ["q", "--out", "o", "--format", "gptq"]}
    with pytest.raises(SystemExit) as stop:
        parse([command, *place.get(command, ["m", "--out", "o"]), *args.split()])
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_every_setting_that_lost_its_option_is_found_by_its_old_name():
    sub = subparser("quantize")
    old = renamed(sub)
    by_set = Set.of(sub)
    folded = set(by_set.settings) - set(by_set.own)
    assert {new.removeprefix("--set ") for new in old.values()} == folded
    assert not set(old) & set(sub._option_string_actions)
    assert instead(sub, "--nothing", ["3"]) is None
