"""Ranks, spectra and proxies, on the page."""

from __future__ import annotations

import pytest

from tests.support.pages import check_figure


@pytest.mark.parametrize("name", ["ranks", "spectra", "proxy"])
def test_its_figures_have_units(diagnosis, name):
    check_figure(diagnosis, name, "ranks")
