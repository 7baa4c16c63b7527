"""Table 11: bits per byte of text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from loopq.paper.bench import Bench
from loopq.paper.compared import ALL, FULL, ONE, RTN
from loopq.paper.tables.bits_per_byte import show
from tests.support.paper import measured_shown_and_resumed


def test_it_is_measured_shown_and_resumed(huginn: Bench, tmp_path: Path) -> None:
    measured_shown_and_resumed("bits-per-byte", huginn, tmp_path)


def test_a_loop_meets_models_of_one_step_in_as_many_bytes() -> None:
    def model(name: str, n_steps: int, nll: float, n_bytes: int = 100, text: str = "t") -> dict[str, Any]:
        row = {"kl": [0.1] * 6, "nll": [nll] * 6, "n_bytes": n_bytes}
        head = {"model": name, "n_steps": n_steps, "bytes_per_token": 1.0, "text": text}
        return head | {"variants": dict.fromkeys((FULL, RTN, ONE, ALL), row)}

    others = [model("c", 1, 1.5), model("big", 1, 0.5, 106), model("elsewhere", 1, 0.5, text="u")]
    claims = [c for c in show([model("loop", 8, 1.0), *others]).claims if "in as many bytes" in c.text]
    assert [(c.model, c.holds) for c in claims] == [("loop", True)]
    assert "+0.7213 bits per byte" in claims[0].found
    (near,) = [
        c for c in show([model("loop", 8, 1.5 - 5e-5), others[0]]).claims if "of c, in as many" in c.text
    ]
    assert (near.holds, near.undecided) == (None, "they differ by less than 0.0001")
    worse = [model("loop", 8, 2.0), others[0]]
    assert [c.holds for c in show(worse).claims if "of c, in as many" in c.text] == [False]
