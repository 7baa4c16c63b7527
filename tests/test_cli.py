"""The command line as a whole: usage, help, interrupts, and errors of the system."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from loopq.cli import main, parser
from loopq.commands import COMMANDS, Command
from loopq.errors import MissingExtraError


def subparsers():
    """The parser of every command by its name."""
    return parser()._subparsers._group_actions[0].choices


def replaced(monkeypatch, name, run):
    """Put a function in the place of what a command does."""
    found = COMMANDS.get(name)
    monkeypatch.setitem(COMMANDS._entries, name, Command(found.help, found.add, run, found.order))


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
    """As on a read-only file system; whoever runs the tests may be allowed to write everywhere."""
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
        ["--allocate", "many"],
        ["--allocate-bits", "3,x"],
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
            "unknown argument --random-token (did you mean --random-tokens",
        ),
        (
            ["quantize", "m", "--out", "o", "--group", "3"],
            "unknown argument --group (did you mean --group-size",
        ),
        (["evaluate", "m", "d", "--bits", "4"], "loopq evaluate: error: unknown argument --bits"),
        (["quantize", "m", "more", "--out", "o"], "loopq quantize: error: unknown argument more"),
        (["quantize", "m"], "the following arguments are required: --out"),
        ([], "the following arguments are required: COMMAND"),
        (["quantise"], "invalid choice: 'quantise'"),
    ],
)
def test_arguments_that_a_command_does_not_have_are_told_with_those_like_them(args, match, command):
    code, out, err = command(*args)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert match in err


def test_the_usage_of_every_command_is_what_it_cannot_do_without():
    usages = {name: " ".join(sub.format_usage().split()) for name, sub in subparsers().items()}
    assert usages["quantize"] == "usage: loopq quantize MODEL --out DIR [options]"
    assert usages["evaluate"] == "usage: loopq evaluate MODEL [DIR ...] [options]"
    assert usages["systems"] == "usage: loopq systems [MODEL ...]"
    assert list(usages).index("merge") == list(usages).index("collect") + 1


def test_help_shows_the_options_that_most_runs_need_with_their_defaults(command):
    code, text, _ = command("quantize", "--help")
    assert code == 0
    words = " ".join(text.split())
    assert "input columns that share a scale; -1: one scale per output row (default 128)" in words
    assert "all | first | 0:8 | 31 | 1:" in words
    assert "--act-order" not in text
    assert "`loopq quantize --help-all` explains these options and" in text
    shown = [line.split()[0] for line in text.splitlines() if line.startswith("  --")]
    assert 12 <= len(shown) <= 15
    assert shown[:2] == ["--out", "--preset"]


def test_help_all_shows_every_option_once_in_its_group(command):
    code, text, _ = command("quantize", "--help-all")
    assert code == 0
    shown = [line.split()[0] for line in text.splitlines() if line.startswith("  --")]
    options = [a.option_strings[0] for a in subparsers()["quantize"]._actions if a.option_strings]
    assert sorted(shown) == sorted(o for o in options if o != "-h")
    words = " ".join(text.split())
    assert "(default 128)" in words
    assert "method gptq, gptq-cd, trellis: --damping X" in words
    assert "how bits are divided between layers: --allocate BUDGET" in words
    # What is off, or the model's own, has no default to show.
    assert "default None" not in text
    assert "default none)" in text.partition("--rotation KIND")[2]
    assert text.count("default none") == 1


@pytest.mark.parametrize("name", [name for name, _ in COMMANDS])
def test_every_option_of_every_command_is_explained_in_one_way(name):
    for action in subparsers()[name]._actions:
        text = action.help
        assert text, action
        assert not text.endswith("."), text
        assert "`" not in text or text.count("`") % 2 == 0, text
        assert text[0].islower() or text[1].isupper(), text


def test_the_list_of_commands_has_one_line_each(command):
    code, text, _ = command("--help")
    assert code == 0
    listed = text.partition("commands:\n")[2].partition("\n\n")[0].splitlines()
    assert [line.split()[0] for line in listed] == list(subparsers())
    assert text.startswith("usage: loopq COMMAND [options]")
    assert command("--version")[1].startswith("loopq ")


@pytest.mark.parametrize(("set_to", "seen"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_wait_without_spinning_unless_the_user_says_otherwise(set_to, seen):
    """What torch's threads do while they wait is read from the environment when torch is loaded, so not before."""
    code = (
        "import os, sys\n"
        "from loopq.cli import main\n"
        "assert 'torch' not in sys.modules\n"
        "main(['systems'])\n"
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


def in_a_program(*args, **streams):
    """Run the program as a shell does."""
    return subprocess.Popen([sys.executable, "-m", "loopq", *map(str, args)], **streams)


def test_an_interrupt_that_a_library_takes_for_something_else_is_one_all_the_same(monkeypatch, command):
    def swallowed(args):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt as cause:
            raise MissingExtraError("this needs numpy, which is not installed") from cause

    replaced(monkeypatch, "inspect", swallowed)
    before = signal.getsignal(signal.SIGINT)
    code, _, err = command("inspect", "x")
    assert code == 130
    assert err.splitlines()[-1].startswith("loopq: interrupted; ")
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_while_the_program_imports_leaves_no_traceback():
    for wait in (0.02, 0.1, 0.3):
        program = in_a_program(
            "inspect", "nowhere", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        time.sleep(wait)
        program.send_signal(signal.SIGINT)
        _, err = program.communicate()
        # Python itself may not have come to loopq yet, or only just.
        assert "loopq" not in err or "import signal" in err or "Traceback" not in err, err


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("way", ["a call that nothing interrupts", "a library that carries on"])
def test_ctrl_c_ends_the_program_whatever_it_is_doing(way, tmp_path):
    """Without a traceback, in one line, `loopq.__main__.PATIENCE` later at most."""
    # A read that the system itself takes up again after a signal: Python's handler never gets its turn.
    call = "signal.siginterrupt(signal.SIGINT, False); ctypes.CDLL(None).read(os.pipe()[0], bytes(1), 1)"
    file = tmp_path / "register.py"
    file.write_text(
        "import ctypes, os, signal, time\nprint('ready', flush=True)\nwhile True:\n    try:\n"
        f"        {call if 'call' in way else 'time.sleep(60)'}\n    except BaseException:\n        pass\n"
    )
    program = in_a_program(
        "--register", str(file), "inspect", "x", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert program.stdout.readline() == "ready\n"
    program.send_signal(signal.SIGINT)
    _, err = program.communicate(timeout=60)
    assert program.returncode == 130
    assert err == "loopq: interrupted; nothing is saved: the same command starts anew\n"


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
