"""The whole command line: usage, help, interrupts, and errors of the system."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from loopq.cli import main
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
        ["--fit-bits", "3,x"],
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
        (["quantize", "m"], "one of the arguments --out --dry-run --table is required"),
        (["quantize", "m", "--out", "o", "--html", ""], "--html: an empty name"),
        (["evaluate", "m", "q", "--html", ""], "--html: an empty name"),
        (["diagnose", "m", "--json", ""], "--json: an empty name"),
        (["demo", "--html", ""], "--html: an empty name"),
        ([], "the following arguments are required: COMMAND"),
        (["quantise"], "invalid choice: 'quantise'"),
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
