"""`loopq demo`: what it prints, and its pages."""

from __future__ import annotations

from loopq.cli import main
from loopq.commands import variants


def test_demo_command(capsys, monkeypatch, small_demo, tmp_path):
    monkeypatch.setattr(variants, "run", lambda **kwargs: small_demo)
    page = tmp_path / "out" / "demo.html"
    assert main(["demo", "--page", str(page)]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[-1].endswith(str(page))
    assert page.is_file()
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
