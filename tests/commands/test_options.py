"""Options derived from settings: each reads what its setting allows and refuses all else at once."""

from __future__ import annotations

import argparse

import pytest

from loopq.annotations import choices_of
from loopq.cli import parser
from loopq.commands.options import depths, each_depth, flag_of, given
from loopq.run.config import QuantConfig
from loopq.settings.declare import leaves

BASE = ["quantize", "m", "--out", "o"]
PARSER = parser()
LEAVES = {name: entries[0] for name, entries in leaves(QuantConfig).items()}
NUMBERS = [n for n, leaf in LEAVES.items() if any(word in str(leaf.annotation) for word in ("int", "float"))]


def refused(capsys, *args):
    """The message about a wrong option."""
    with pytest.raises(SystemExit) as stop:
        PARSER.parse_args([*BASE, *args])
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_nothing_is_given_that_was_not_asked_for():
    assert given(PARSER.parse_args(BASE), QuantConfig) == {}


@pytest.mark.parametrize("name", LEAVES)
def test_every_setting_has_its_option(name):
    leaf = LEAVES[name]
    if leaf.annotation is bool:
        args, value = [flag_of(leaf)], not leaf.default
    else:
        value = (choices_of(leaf.annotation) or [leaf.default])[-1]
        value = {
            "fit": 3.25,
            "beam": 8,
            "rounds": 3,
            "rank_threshold": 0.01,
            "scale_bits": 5,
            "state_bits": 12,
            "metric_prompts": 4,
            "outside": 8,
        }.get(name, value)
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        args = [flag_of(leaf), text]
    assert given(PARSER.parse_args([*BASE, *args]), QuantConfig) == {name: value}


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize(
    "text", ["١٢", "²", "1_000", "1e999", "9" * 400, "", " ", "nan", "inf", "0x10", "many"]
)
def test_what_is_no_number_is_refused_at_once(name, text, capsys):
    flag = flag_of(LEAVES[name])
    err = refused(capsys, flag, text)
    assert f"argument {flag}: " in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "flag", ["--n-steps", "--n-prompts", "--seq-len", "--batch-size", "--threads", "--seed"]
)
@pytest.mark.parametrize("text", ["-1", "1e20", "100000000000000000000", "٣"])
def test_absurd_numbers_are_refused_at_once(flag, text, capsys):
    assert f"argument {flag}: " in refused(capsys, flag, text)


def test_memory_and_overrides_are_read():
    args = PARSER.parse_args([*BASE, "--memory", "1.5G", "--layer", "*a*=>bits=8,steps=1:,method=rtn"])
    assert args.memory == 1.5 * 2**30
    assert args.layer[0].changes == {"bits": 8, "steps": "1:", "method": "rtn"}


@pytest.mark.parametrize(
    "args",
    [
        ["--memory", "much"],
        ["--layer", "bits=8"],
        ["--layer", "*=>bits"],
        ["--layer", "*=>colour=3"],
        ["--layer", "*=>bits=5"],
        ["--layer", "*=>damping=-1"],
        ["--layer", "*=>method=gptk"],
        ["--layer", "re:(=>bits=8"],
    ],
)
def test_wrong_memory_and_overrides_are_refused(args, capsys):
    assert f"argument {args[0]}: " in refused(capsys, *args)


@pytest.mark.parametrize(("text", "budget"), [("3.25", 3.25), ("4", 4.0), ("900K", 900 * 1024), ("1B", 1)])
def test_a_budget_is_bits_or_bytes(text, budget):
    found = given(PARSER.parse_args([*BASE, "--fit", text]), QuantConfig)["fit"]
    assert (found, type(found)) == (budget, type(budget))


def test_one_depth_is_a_number_and_several_are_taken_one_by_one():
    assert (depths("4"), depths("1,2,4")) == (4, (1, 2, 4))
    for bad in ("1,1", "0", "1,", "a", "2,x"):
        with pytest.raises(argparse.ArgumentTypeError):
            depths(bad)
    args = argparse.Namespace(n_steps=(1, 2), model="m")
    assert [(one.n_steps, one.model) for one in each_depth(args)] == [(1, "m"), (2, "m")]
    assert [one.n_steps for one in each_depth(argparse.Namespace(n_steps=None))] == [None]
