"""Progress as it is shown in a log."""

from __future__ import annotations

import io

from loopq.terminal.progress import Line


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
