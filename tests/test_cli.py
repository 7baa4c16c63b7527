"""The whole command line: usage, help, interrupts, and errors of the system."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from loopq import cli
from loopq.cli import main
from loopq.errors import CheckpointError, ConfigError
from tests.support.marks import slow_unless
from tests.support.programs import replaced


def test_interrupt_has_its_own_code(monkeypatch, command):
    def stop(args):
        raise KeyboardInterrupt

    replaced(monkeypatch, "inspect", stop)
    code, _, err = command("inspect", "x")
    assert code == 130
    assert "nothing is saved" in err


def test_an_error_of_the_system_is_one_line_too(monkeypatch, command):
    def fail(args):
        raise PermissionError(13, "Permission denied", "/some/file")

    replaced(monkeypatch, "inspect", fail)
    assert command("inspect", "x") == (1, "", "loopq: error: /some/file: Permission denied\n")


@pytest.mark.parametrize(
    "args",
    [["quantize", "nowhere", "--out"], ["merge", "a", "b", "--out"], ["diagnose", "nowhere", "--html"]],
)
def test_a_place_that_cannot_be_written_is_said_before_any_work(args, tmp_path, command, monkeypatch):
    """As on a read-only file system; the user of the tests may be allowed to write everywhere."""
    monkeypatch.setattr("os.access", lambda path, mode: False)
    code, _, err = command(*args, tmp_path / "new" / "o")
    assert code in (1, 2)
    assert str(tmp_path) in err
    assert "name another" in err
    assert not (tmp_path / "new").exists()


def test_a_file_in_the_place_of_a_folder_is_said_before_any_work(tmp_path, command):
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    code, out, err = command("demo", "--html", empty / "o")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "no folder that can be written to" in err
    assert list(tmp_path.iterdir()) == [empty]


@pytest.mark.parametrize(
    "args",
    [
        ["--threads", "-1"],
        ["--fit", "many"],
        ["--set", "fit_bits=3,x"],
        ["--layer", "bits=8"],
        ["--bits", "x"],
    ],
)
def test_wrong_usage_is_one_line_that_names_the_option(args, command):
    code, _, err = command("quantize", "m", "--out", "o", *args)
    assert code == 2
    assert err.count("\n") == 1
    assert f"argument {args[0]}" in err
    assert "`loopq quantize --help` lists the options" in err


def test_a_value_of_any_length_is_quoted_in_part(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["run", "none", "x", "--n-tokens", "x" * 5000])
    err = capsys.readouterr().err
    assert stop.value.code == 2
    assert "argument --n-tokens: 'xxx" in err
    assert "xxx': give a whole number (`loopq run --help` lists the options)" in err
    assert len(err.splitlines()[-1]) < 1000


def test_wrong_usage_stops_the_program():
    with pytest.raises(SystemExit) as stop:
        main(["quantize", "m", "--out", "o", "--bits", "x"])
    assert stop.value.code == 2


@pytest.mark.parametrize(
    ("args", "match"),
    [
        (
            ["quantize", "m", "--out", "o", "--random-token", "3"],
            "unknown argument --random-token (did you mean --set random_tokens",
        ),
        (
            ["quantize", "m", "--out", "o", "--group", "3"],
            "unknown argument --group (did you mean --group-size",
        ),
        (["evaluate", "m", "d", "--bits", "4"], "loopq evaluate: error: unknown argument --bits"),
        (["quantize", "m", "more", "--out", "o"], "loopq quantize: error: unknown argument more"),
        (["quantize", "m"], "one of the arguments --out --dry-run --table is required"),
        (["quantize", "m", "--out", "o", "--html", ""], "--html: an empty name"),
        (["evaluate", "m", "q", "--html", ""], "--html: an empty name"),
        (["diagnose", "m", "--json", ""], "--json: an empty name"),
        (["demo", "--html", ""], "--html: an empty name"),
        ([], "the following arguments are required: COMMAND"),
        (["quantise"], "argument COMMAND: unknown 'quantise' (did you mean quantize?); known: "),
        (["systems"], "there is no systems any more: `loopq check` lists the systems"),
        (["export", "q", "--out", "o", "--format", "marlin"], "there is no marlin any more: write gptq"),
        (
            ["quantize", "m", "--out", "o", "--format", "ggfu"],
            "unknown 'ggfu' (did you mean gguf?); known: native,",
        ),
        (
            ["quantize", "m", "--out", "o", "--preset", "bset"],
            "argument --preset: unknown 'bset' (did you mean best?)",
        ),
    ],
)
def test_unknown_arguments_are_reported_with_similar_ones(args, match, command):
    code, out, err = command(*args)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert match in err


@pytest.mark.parametrize(
    ("set_to", "seen"), slow_unless(lambda c: c[0] is None, [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
)
def test_threads_wait_without_spinning_by_default(set_to, seen):
    """torch reads the waiting policy of its threads from the environment when it is loaded, so this is not
    set earlier."""
    code = (
        "import os, sys\n"
        "from loopq.cli import main\n"
        "assert 'torch' not in sys.modules\n"
        "main(['inspect', 'nothing'])\n"
        "print(os.environ['OMP_WAIT_POLICY'])\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    if set_to:
        environment["OMP_WAIT_POLICY"] = set_to
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == seen


def test_closed_streams(tmp_path):
    out = tmp_path / "o"
    text = f"{sys.executable} -m loopq inspect {tmp_path} >&- 2>&-; echo $? > {out}"
    subprocess.run(text, shell=True, check=True)
    assert out.read_text() == "1\n"
    assert [p.name for p in tmp_path.iterdir()] == ["o"]


@pytest.mark.parametrize(
    "error", [MemoryError("unable to allocate 7 PiB"), RuntimeError("can't allocate memory: x")]
)
def test_want_of_memory_is_one_line(monkeypatch, command, error):
    def fail(args):
        raise error

    replaced(monkeypatch, "inspect", fail)
    code, _, err = command("inspect", "x")
    assert (code, err.count("\n")) == (1, 1)
    assert f"out of memory: {error}; take fewer prompts" in err


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full")
def test_output_for_which_there_is_no_room_is_one_line(quantized):
    text = f"{sys.executable} -m loopq inspect {quantized} > /dev/full"
    done = subprocess.run(text, shell=True, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "loopq: error: No space left on device\n")


def test_names_outside_the_outputs_encoding_are_printed(tmp_path, saved_model):
    folder = tmp_path / "caf\u00e9"
    shutil.copytree(saved_model, folder)
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    argv = [sys.executable, "-m", "loopq", "check", folder]
    done = subprocess.run(argv, capture_output=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr


def shown():
    """A parser with a common and a rare option."""
    parser = cli._Parser(prog="p", usage="p X [options]", description="what it does", epilog="the end")
    parser.add_argument("x", help="the first argument")
    parser.add_argument("--kind", choices=("a", "b"), default="a", help="the kind. More of it (default a)")
    parser.add_argument("--deep", help="rarely needed. Really").rare = True
    parser.add_help_options()
    return parser


def test_help_shows_common_options_and_counts_the_others(capsys):
    for flag in ("-h", "--help"):
        with pytest.raises(SystemExit) as stop:
            shown().parse_args([flag])
        assert not stop.value.code
        text = capsys.readouterr().out
        assert "--deep" not in text
        assert "--kind a|b" in text
        assert re.search(r"the kind\s+\(default a\)", text)
        assert "More of it" not in text
        assert (
            text.index("what it does")
            < text.index("arguments:")
            < text.index("options:")
            < text.index("the end")
        )
        assert text.index("arguments:") < text.index("the first argument") < text.index("options:")
        assert text.endswith("`p --help-all` explains these options and 1 more\n")
    with pytest.raises(SystemExit):
        shown().parse_args(["--help-all"])
    text = capsys.readouterr().out
    assert "rarely needed. Really" in text
    assert re.search(r"the kind\. More of it\s+\(default a\)", text)
    plain = cli._Parser(prog="p")
    plain.add_help_options()
    assert "--help-all" not in plain.common_help()


@pytest.mark.parametrize(
    ("given", "short"),
    [
        ("one", "one"),
        ("one. Two", "one"),
        ("one. Two (default 3)", "one (default 3)"),
        ("one (default 3)", "one (default 3)"),
        (None, ""),
    ],
)
def test_the_first_sentence_of_an_option_is_shown(given, short):
    action = argparse.Action(["-x"], "x", help=given)
    assert cli._shortened(action).help == short
    assert action.help == given


def test_file_names_are_not_empty_and_options_not_abbreviated(capsys):
    parser = cli._Parser(prog="p")
    parser.add_argument("--page", metavar="FILE")
    parser.add_argument("--word")
    assert parser.parse_args(["--word", ""]).word == ""
    for bad, match in ((["--page", ""], "an empty name"), (["--wor", "x"], "--wor")):
        with pytest.raises(SystemExit):
            parser.parse_args(bad)
        assert match in capsys.readouterr().err


def test_long_messages_lose_their_middle(capsys):
    for n, whole in ((800, True), (801, False)):
        with pytest.raises(SystemExit):
            cli._Parser(prog="p").error("a" * 400 + "b" * (n - 800) + "c" * 400)
        err = capsys.readouterr().err
        assert ("a" * 400 + " ... " + "c" * 400 in err) != whole
        assert err.startswith("p: error: a")
    for n, whole in ((1599, True), (1600, False)):
        cli._say("first\n" + "a" * n)
        err = capsys.readouterr().err
        assert err.startswith("loopq: error: first\n")
        assert (" ... " in err) != whole


@pytest.mark.parametrize(("error", "code"), [(ConfigError("x: no"), 2), (CheckpointError("x: no"), 1)])
def test_errors_of_the_user_have_another_code(monkeypatch, command, error, code):
    def fail(args):
        raise error

    replaced(monkeypatch, "inspect", fail)
    assert command("inspect", "x") == (code, "", "loopq: error: x: no\n")


def test_other_errors_are_not_hidden(monkeypatch, command):
    def fail(args):
        raise RuntimeError("a mistake")

    replaced(monkeypatch, "inspect", fail)
    with pytest.raises(RuntimeError, match="a mistake"):
        command("inspect", "x")

    def bare(args):
        raise OSError("odd")

    replaced(monkeypatch, "inspect", bare)
    assert command("inspect", "x") == (1, "", "loopq: error: odd\n")


def test_a_command_for_one_process_refuses_several(monkeypatch, command):
    replaced(monkeypatch, "inspect", lambda args: 7)
    assert command("inspect", "x")[0] == 7
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "0")
    code, _, err = command("inspect", "x")
    assert (code, "3 processes were started (WORLD_SIZE)" in err) == (2, True)


def test_settings_in_a_message_become_options():
    parser = cli._Parser(prog="p")
    parser.add_argument("--group-size", dest="group_size", default=argparse.SUPPRESS)
    parser.add_argument("--also", dest="group_size", default=argparse.SUPPRESS)
    parser.add_argument("--damping", default=argparse.SUPPRESS)
    parser.add_argument("--given", default=None)
    args = SimpleNamespace(parser=parser)

    def told(message):
        return cli._as_options(args, message)

    assert told("group_size must be 3") == "--group-size must be 3"
    assert (
        told("group_size goes with damping and group_size")
        == "--group-size goes with --damping and group_size"
    )
    assert told("given must be 3") == "given must be 3"
    assert told("the group_size") == "the group_size"


def test_files_are_run_before_the_command(monkeypatch, command, tmp_path):
    (tmp_path / "beside.py").write_text("VALUE = 3\n")
    (tmp_path / "own.py").write_text("import os, beside\nos.environ['LOOPQ_SEEN'] = str(beside.VALUE)\n")
    monkeypatch.setenv("LOOPQ_SEEN", "")
    monkeypatch.setattr(sys, "path", list(sys.path))
    replaced(monkeypatch, "inspect", lambda args: int(os.environ["LOOPQ_SEEN"]))
    assert command("--register", tmp_path / "own.py", "inspect", "x")[0] == 3
    code, _, err = command("--register", tmp_path / "none.py", "inspect", "x")
    assert (code, "none.py: no such file; give the path of a Python file" in err) == (2, True)


@pytest.mark.parametrize(
    ("place", "match"), [("there", "resumes from there"), ("none", "starts anew"), (None, "anew")]
)
def test_an_interrupted_command_says_what_is_saved(tmp_path, place, match):
    (tmp_path / "there").mkdir()
    keeps = lambda args: None if place is None else Path(tmp_path / place)  # noqa: E731
    assert match in cli._left_behind(SimpleNamespace(command=SimpleNamespace(keeps=keeps)))
