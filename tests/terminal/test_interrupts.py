"""Ctrl-C and similar signals end the program at any point."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from loopq.errors import MissingExtraError
from tests.support.programs import replaced


def in_a_program(*args, **streams):
    """Run the program as a shell does."""
    return subprocess.Popen([sys.executable, "-m", "loopq", *map(str, args)], **streams)


def test_an_interrupt_masked_by_a_library_still_ends_the_program(monkeypatch, command):
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
        # Python may not have reached loopq yet, or only just.
        assert "loopq" not in err or "import signal" in err or "Traceback" not in err, err


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_an_import_that_aborts_on_exceptions_ends_quietly(tmp_path):
    (tmp_path / "aborts.py").write_text(
        "import os, signal\ntry:\n    signal.raise_signal(signal.SIGINT)\nexcept BaseException:\n    os.abort()\n"
    )
    file = tmp_path / "register.py"
    file.write_text(f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport aborts\n")
    program = in_a_program("--register", str(file), "inspect", "x", stderr=subprocess.PIPE, text=True)
    _, err = program.communicate(timeout=60)
    assert program.returncode == 130
    assert err == "loopq: interrupted; nothing is saved: the same command starts anew\n"


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize(
    "way", ["a call that nothing interrupts", "a library that carries on", "a destructor"]
)
def test_ctrl_c_ends_the_program_whatever_it_is_doing(way, tmp_path):
    """Without a traceback, in one line, `loopq.__main__.PATIENCE` later at most."""
    # A read that the system itself takes up again after a signal: Python's handler never gets its turn.
    call = {
        "a call that nothing interrupts": "signal.siginterrupt(signal.SIGINT, False); "
        "ctypes.CDLL(None).read(os.pipe()[0], bytes(1), 1)",
        "a library that carries on": "time.sleep(60)",
        "a destructor": "type('Slow', (), {'__del__': lambda self: time.sleep(60)})()",
    }[way]
    file = tmp_path / "register.py"
    file.write_text(
        "import ctypes, os, signal, time\nprint('ready', flush=True)\nwhile True:\n    try:\n"
        f"        {call}\n    except BaseException:\n        pass\n"
    )
    program = in_a_program(
        "--register", str(file), "inspect", "x", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert program.stdout.readline() == "ready\n"
    program.send_signal(signal.SIGINT)
    _, err = program.communicate(timeout=60)
    assert program.returncode == 130
    assert err == "loopq: interrupted; nothing is saved: the same command starts anew\n"
