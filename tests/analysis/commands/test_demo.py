"""`loopq demo`: what it prints, and its pages."""

from __future__ import annotations

import html
import re

from loopq.cli import main
from loopq.commands import variants


def test_demo_command(capsys, monkeypatch, small_demo, tmp_path):
    monkeypatch.setattr(variants, "run", lambda **kwargs: small_demo)
    page = tmp_path / "out" / "demo.html"
    assert main(["demo", "--page", str(page)]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[-1].endswith(str(page))
    shown = page.read_text("utf-8")
    for variant in small_demo["grids"][0]["variants"]:
        assert f'{html.escape(variant["name"])}</th><td class=number data-sort="{variant["kl"]!r}">' in shown
    # It fetches nothing.
    assert not re.search(r"https?:|<script|<link(?! rel=\"icon\" href=\"data:)|\$\w", shown)
    for word in (
        "full precision",
        "RTN",
        "GPTQ, one step",
        "GPTQ, trajectory",
        "GPTQ, llm-compressor's rules",
        "loopq",
        "loopq, even levels",
        "loopq, preset best",
        "KL (nats)",
        "bits/byte",
        "bytes",
    ):
        assert word in text
