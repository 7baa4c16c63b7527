"""Text from others: what a terminal gets is shown and not obeyed."""

from __future__ import annotations

import re

from loopq.terminal.text import say, visible
from tests.soak.files import EVIL

#: What no terminal may get.
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def test_text_is_shown_and_not_obeyed(capsys):
    assert visible("naïve 数\n\ta") == "naïve 数\n\ta"
    assert visible("\x1b[2J\x9b\r\u202e\udcff") == r"\x1b[2J\x9b\r\u202e\udcff"
    assert visible("a\nb\tc", one_line=True) == r"a\nb\tc"
    say(EVIL)
    assert not OBEYED.search(capsys.readouterr().out)
