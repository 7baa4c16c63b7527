"""Progress on a terminal, in a log, and in the library."""

from __future__ import annotations

import io
import re
from types import SimpleNamespace

import pytest

from loopq.terminal import progress
from loopq.terminal.progress import Line, Silent


class Terminal(io.StringIO):
    """A stream that a person watches."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch):
    """Seconds that a test sets."""
    now = [100.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_progress_in_a_log_shows_itself_now_and_then():
    log = io.StringIO()
    line = Line(log, log_every=0.0)
    line.start("collect", 3, "prompts")
    for _ in range(3):
        line.advance()
    line.stop()
    shown = log.getvalue().splitlines()
    assert [part.split("] ")[1].split(",")[0] for part in shown] == [
        "1/3 prompts",
        "2/3 prompts",
        "3/3 prompts",
    ]
    log = io.StringIO()
    line = Line(log)
    line.start("collect", 3, "prompts")
    line.advance(3)
    line.stop()
    assert len(log.getvalue().splitlines()) == 1


def test_a_bar_is_as_long_as_the_share_and_says_what_is_left(clock):
    terminal = Terminal()
    line = Line(terminal)
    line.start("solve", 4, "layers")
    assert terminal.getvalue() == f"\r\x1b[Ksolve      [{'.' * 24}] 0/4 layers, 0 s, 0 s left"
    clock[0] += 20
    line.advance()
    bar = "#" * 6 + "." * 18
    assert terminal.getvalue().endswith(f"\r\x1b[Ksolve      [{bar}] 1/4 layers, 20 s, 60 s left")
    clock[0] += 10
    line.advance(3)
    line.stop()
    assert terminal.getvalue().endswith(f"\r\x1b[Ksolve      [{'#' * 24}] 4/4 layers, 30.0 s\n")


def test_a_terminal_redraws_in_tenths_and_a_log_each_minute(clock):
    for stream, seconds in ((Terminal(), 0.1), (io.StringIO(), 60)):
        line = Line(stream)
        line.start("solve", 100, "layers")
        begun = stream.getvalue()
        clock[0] += 0.9 * seconds
        line.advance()
        assert stream.getvalue() == begun
        clock[0] += 0.2 * seconds
        line.advance()
        assert "2/100 layers" in stream.getvalue()
        once = stream.getvalue()
        clock[0] += 0.9 * seconds
        line.advance()
        assert stream.getvalue() == once


def test_a_stage_begins_at_zero_again_and_may_be_empty(clock):
    terminal = Terminal()
    line = Line(terminal)
    line.start("a", 2, "x")
    clock[0] += 5
    line.advance(2)
    line.start("b", 0, "y")
    assert terminal.getvalue().endswith(f"b          [{'#' * 24}] 0/0 y, 0.0 s")


def test_notes_and_warnings_stand_on_their_own_line():
    terminal, log = Terminal(), io.StringIO()
    Line(terminal).note("one")
    Line(terminal).warn("two")
    Line(log).note("three")
    assert terminal.getvalue() == "\r\x1b[Kone\n\r\x1b[Ktwo\n"
    assert log.getvalue() == "three\n"


def test_a_terminal_gets_its_line_back_at_the_end():
    terminal, log = Terminal(), io.StringIO()
    with Line(terminal), Line(log):
        pass
    assert (terminal.getvalue(), log.getvalue()) == ("\n", "")


def test_errors_go_to_stderr_and_the_library_is_silent(capsys):
    Line().note("seen")
    quiet = Silent()
    quiet.start("a", 1, "x")
    quiet.advance()
    quiet.note("unseen")
    quiet.stop()
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "seen\n")
    with pytest.warns(UserWarning, match=re.escape("not as usual")) as caught:
        quiet.warn("not as usual")
    assert len(caught) == 1
