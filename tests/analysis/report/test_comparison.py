"""The demo as a page: every number, and nothing that is fetched."""

from __future__ import annotations

import html
import re

from loopq.analysis.report.comparison import write_comparison


def test_every_row_is_on_a_page_that_is_complete_by_itself(small_demo, tmp_path):
    page = write_comparison(small_demo, tmp_path / "demo.html")
    shown = page.read_text("utf-8")
    for variant in small_demo["grids"][0]["variants"]:
        assert (
            f'{html.escape(variant["name"])}</th><td class=number data-sort="{variant["kl"]!r}">{variant["kl"]:.5f}<'
            in shown
        )
    # It fetches nothing and runs nothing.
    assert not re.search(r"https?:|<script|<link(?! rel=\"icon\" href=\"data:)|\$\w", shown)
