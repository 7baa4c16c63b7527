"""Options derived from settings: each reads what its setting allows and refuses all else at once."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest

from loopq.annotations import choices_of
from loopq.cli import parser
from loopq.commands import options
from loopq.commands.options import OWN, depths, given
from loopq.commands.settable import flag_of, shown
from loopq.errors import ConfigError
from loopq.quantizers.config import Override
from loopq.run.config import PRESETS, QuantConfig
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
        value = not leaf.default
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
    args = [f"--set={name}={shown(value)}"]
    assert given(PARSER.parse_args([*BASE, *args]), QuantConfig) == {name: value}
    if name in OWN:
        both = [*BASE, flag_of(leaf), shown(value)]
        assert given(PARSER.parse_args(both), QuantConfig) == {name: value}
        assert given(PARSER.parse_args([*both, *args]), QuantConfig) == {name: value}


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize(
    "text", ["١٢", "²", "1_000", "1e999", "9" * 400, "", " ", "nan", "inf", "0x10", "many"]
)
def test_what_is_no_number_is_refused_at_once(name, text, capsys):
    err = refused(capsys, f"--set={name}={text}")
    assert f"argument --set: {name}" in err
    if name in OWN:
        flag = flag_of(LEAVES[name])
        err += refused(capsys, flag, text)
        assert f"argument {flag}: " in err
    assert err.count("\n") == 1 + (name in OWN)


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
    fit = given(PARSER.parse_args([*BASE, "--fit", text]), QuantConfig)["fit"]
    assert (fit, type(fit)) == (budget, type(budget))


def test_one_depth_is_a_number_and_several_are_taken_one_by_one():
    assert (depths("4"), depths("1,2,4")) == (4, (1, 2, 4))
    for bad in ("1,1", "0", "1,", "a", "2,x"):
        with pytest.raises(argparse.ArgumentTypeError):
            depths(bad)


def read(*args):
    return options.quant_config(PARSER.parse_args([*BASE, *args]))


def test_patterns_and_presets_change_the_settings():
    config = read("--layer", "*a*=>bits=8", "--include", "*b*", "--exclude", "*c*", "--exclude", "d")
    assert config.overrides == (Override("*a*", {"bits": 8}),)
    assert (config.include, config.exclude) == (("*b*",), ("*c*", "d"))
    assert read("--preset", "fast") == QuantConfig().changed(**PRESETS["fast"])
    # An option is stronger than the preset.
    assert read("--preset", "paper", "--set", "scale_search=mse") == QuantConfig().changed(
        method="gptq", scale_search="mse", levels="even"
    )
    base = QuantConfig().changed(bits=3, exclude=("x",), include=("y",))
    args = PARSER.parse_args([*BASE, "--exclude", "z", "--include", "w"])
    changed = options.quant_config(args, base)
    assert changed == QuantConfig().changed(bits=3, exclude=("x", "z"), include=("y", "w"))


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_dump_takes_of_a_preset_what_needs_no_model(preset):
    args = PARSER.parse_args(["solve", "d", "--out", "o", "--preset", preset])
    config = options.quant_config(args, model=False)
    needs = ("inputs", "alpha", "sweeps", "fit", "outside", "metric", "passes")
    kept = {k: v for k, v in PRESETS[preset].items() if not k.startswith(needs)}
    if PRESETS[preset].get("metric") == "inputs":
        kept["metric"] = "inputs"
    assert config == QuantConfig().changed(**kept)


def test_depth_and_seed_of_another_checkpoint_are_taken(monkeypatch):
    stored = {
        "n_steps": 3, "seed": 5, "quantization": QuantConfig().changed(bits=3).to_json(),
        "calibration": {"random_tokens": 0.125},
    }  # fmt: skip
    monkeypatch.setattr(options, "settings_of", lambda path: stored)

    def adopted(*words):
        return options.adopt_like(PARSER.parse_args([*BASE, *words]))

    assert adopted()[1] is None
    args, config = adopted("--like", "q")
    assert config == QuantConfig().changed(bits=3)
    assert (args.n_steps, args.seed, args.random_tokens) == (3, 5, 0.125)
    args, config = adopted("--like", "q", "--n-steps", "2", "--seed", "7", "--set", "random_tokens=0.5")
    assert config == QuantConfig().changed(bits=3)
    assert (args.n_steps, args.seed, args.random_tokens) == (2, 7, 0.5)
    stored |= {"depths": [1, 4], "calibration": {}}
    args, _ = adopted("--like", "q")
    assert args.n_steps == (1, 4)
    assert getattr(args, "random_tokens", 0.0) == 0.0
    del stored["quantization"]
    with pytest.raises(ConfigError, match="--like q: no settings of a run in it"):
        adopted("--like", "q")


def test_a_preset_may_set_the_prompts():
    def take(*args):
        return options.calibration_take(PARSER.parse_args([*BASE, *args]))

    default = take()
    assert default.random_tokens is None
    assert take("--preset", "paper").random_tokens == 0
    assert take("--preset", "paper", "--set", "random_tokens=0.5").random_tokens == 0.5
    assert take("--preset", "fast") == default
    assert take("--n-prompts", "7").n_prompts == 7


def test_options_of_a_format_and_of_its_gate():
    args = PARSER.parse_args(["export", "q", "--out", "o", "--format", "gguf"])
    assert options.gate_options(args) == {"engine": None, "force": False, "verify": True}
    options_of_format = options.format_options(args)
    assert {"ragged", "remote_code", "steps"} <= set(options_of_format)
    assert set(options_of_format.values()) == {None}
    more = ("--remote-code", "--ragged", "split", "--force", "--verify", "no", "--for", "vllm")
    args = PARSER.parse_args(["export", "q", "--out", "o", "--format", "gptq", *more])
    assert options.gate_options(args) == {"engine": "vllm", "force": True, "verify": False}
    assert (options.format_options(args)["remote_code"], options.format_options(args)["ragged"]) == (
        True,
        "split",
    )


def test_a_file_needs_a_place_that_can_be_written(tmp_path):
    options.check_place(tmp_path / "new" / "deeper" / "a.html", b"")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file is no folder that can be written to"):
        options.check_place(tmp_path / "file" / "a.html", b"")
    for name, target in (("dangling", "nowhere"), ("itself", "itself")):
        (tmp_path / name).symlink_to(target)
        with pytest.raises(ConfigError, match=f"{name} is no folder that can be written to"):
            options.check_place(tmp_path / name / "deeper" / "a.html", b"")
    if os.getuid():
        (tmp_path / "closed").mkdir(mode=0o500)
        with pytest.raises(ConfigError, match="closed is no folder that can be written to"):
            options.check_place(Path(tmp_path / "closed" / "a.html"), b"")


@pytest.mark.parametrize(("rank", "prints"), [("0", True), ("1", False)])
def test_one_process_of_several_shows_its_progress(monkeypatch, rank, prints):
    ranks, shown = options.ranks_of_environment()
    assert ranks is None
    assert isinstance(shown, options.Line)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", rank)
    ranks, shown = options.ranks_of_environment()
    assert (ranks.rank, ranks.world) == (int(rank), 2)
    assert isinstance(shown, options.Line) == prints
