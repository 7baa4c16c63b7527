"""The whole page in a real browser: light, dark, printed, and as wide as a phone.

Screenshots differ with every version of fonts, so none are compared. The tests check properties instead: text
is readable, nothing is cut off, shades follow the numbers, and keys reach every cell.
"""

from __future__ import annotations

import base64
import io
import itertools

import pytest

from loopq.analysis.report import page
from tests.support.browser import CUT, FAINT, SMALL, WIDE, check, needs_browser, opened

pytestmark = needs_browser

LOOKS = {
    "light": {},
    "dark": {"scheme": "dark"},
    "phone": {"width": 390},
    "dark phone": {"width": 390, "scheme": "dark"},
    "print": {"media": "print", "width": 794},
    "print from a dark screen": {"media": "print", "scheme": "dark", "width": 794},
}
HIDDEN = '[...document.querySelectorAll("a.save, nav, .readout, .action")].filter((e) => e.checkVisibility()).length'


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with opened(tmp_path_factory.mktemp("profile")) as opened_browser:
        yield opened_browser


@pytest.fixture(scope="module")
def path(everything, tmp_path_factory):
    return page.write_page(tmp_path_factory.mktemp("page") / "page.html", **everything)


def pixels(browser):
    """The window as an array of shape (height, width, 3), 0 to 255."""
    image = pytest.importorskip("PIL.Image")
    import numpy as np

    data = base64.b64decode(browser("Page.captureScreenshot")["data"])
    return np.asarray(image.open(io.BytesIO(data)).convert("RGB")).astype(float)


@pytest.mark.parametrize("look", LOOKS)
def test_everything_can_be_read_and_nothing_is_cut_off(browser, path, look):
    browser.said.clear()
    browser.show(path, **LOOKS[look])
    assert browser.ask(FAINT) == []
    assert browser.ask(WIDE) == []
    assert browser.ask("document.documentElement.scrollWidth - innerWidth") <= 0
    assert browser.said == []
    corner = pixels(browser)[2, 2].mean()
    assert (corner < 40) if look.startswith("dark") else (corner == 255)
    n_hidden = browser.ask(HIDDEN)
    assert (n_hidden == 0) if look.startswith("print") else (n_hidden > 4)


@pytest.mark.parametrize("width", [1280, 1100])
def test_on_a_desk_no_letter_is_small_and_no_figure_is_cut(browser, path, width):
    browser.show(path, width=width)
    assert browser.ask(SMALL) == []
    assert browser.ask(CUT) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_shade_of_a_cell_on_the_screen_follows_its_number(browser, path, scheme):
    browser.show(path, scheme=scheme)
    browser.ask('document.querySelector("table.heat").scrollIntoView({behavior: "instant"})')
    cells = browser.ask(
        '[...document.querySelectorAll("table.heat")[0].querySelectorAll("td")].map((c) => '
        "[Number(c.textContent), c.getBoundingClientRect().x, c.getBoundingClientRect().y])"
    )
    screen = pixels(browser)
    # Three pixels in from a corner: beside the number and the round edge.
    light = [screen[int(y) + 3, int(x) + 3].mean() for _, x, y in sorted(cells)]
    assert len(light) == 8
    steps = [(b - a) * (1 if scheme == "dark" else -1) for a, b in itertools.pairwise(light[:7])]
    assert min(steps) > 8
    assert light[6] == light[7]


def test_keys_reach_each_cell_of_a_heat_map_and_it_is_named(browser, path):
    browser.show(path)
    stops = browser.ask("document.querySelectorAll(\"table.heat td[tabindex='0']\").length")
    assert stops == browser.ask('document.querySelectorAll("table.heat").length') == 2
    assert browser.ask('document.querySelector("table.heat").getAttribute("role")') == "grid"
    browser.ask('document.querySelector("table.heat td").focus()')
    heard = []
    for move in (
        "ArrowRight",
        "ArrowRight",
        "ArrowRight",
        "ArrowRight",
        "ArrowDown",
        "ArrowLeft",
        "Home",
        "ArrowDown",
        "",
    ):
        heard.append(browser.ask('document.querySelector(".readout").textContent'))
        if move:
            browser.press(move)
    assert heard == [
        "attn, step 0: 2.0 %", "attn, step 1: 2.6 %", "attn, step 2: 3.3 %", "attn, step 3: 4.2 %",
        # No cell to the right of the last.
        "attn, step 3: 4.2 %", "mlp, step 3: 11 %", "mlp, step 2: 9.0 %", "mlp, step 0: 5.4 %", "mlp, step 0: 5.4 %",
    ]  # fmt: skip
    # One stop of the Tab key, where the arrows left it.
    assert browser.ask("document.querySelector(\"table.heat td[tabindex='0']\").textContent") == "5.4"


def test_what_is_heard(browser, path):
    browser.show(path)
    for script in (
        # Tables and scrolling boxes have names; cells have a head in their row and column; figures have a text.
        '[...document.querySelectorAll(".scroll")].filter((e) => !e.ariaLabel || e.tabIndex !== 0)',
        '[...document.querySelectorAll("tbody tr")].filter((r) => r.cells[0].scope !== "row")',
        '[...document.querySelectorAll("thead th")].filter((h) => h.scope !== "col" || !h.textContent)',
        '[...document.querySelectorAll("svg")].filter((s) => s.role !== "img" || !s.ariaLabel)',
        '[...document.querySelectorAll("nav a")].filter((a) => !document.querySelector(a.getAttribute("href")))',
    ):
        assert browser.ask(f"{script}.length") == 0, script
    assert browser.ask('document.querySelectorAll("h1").length') == 1
    order = browser.ask('[...document.querySelectorAll("h1, h2, h3")].map((h) => Number(h.tagName[1]))')
    assert all(b <= a + 1 for a, b in itertools.pairwise(order))


def test_tables_are_sorted_by_a_click_and_the_data_can_be_saved(browser, path):
    check(browser, path, n_figures=8)
    first = 'document.querySelector("#layers tbody").rows[0].cells[0].textContent'
    click = 'document.querySelectorAll("#layers thead button")[3].click()'
    order = [browser.ask(f"{click}; {first}") for _ in range(2)]
    assert order[0] != order[1]
    # A head over two columns, number and bar, sorts by the number.
    names = 'document.querySelector("#quantized tbody").rows[0].cells[0].textContent'
    browser.ask('document.querySelectorAll("#quantized thead button")[5].click()')
    assert browser.ask(names) == "attn"
    browser.ask('document.querySelectorAll("#quantized thead button")[5].click()')
    assert browser.ask(names) == "mlp"
    browser.ask('document.querySelectorAll("#quantized thead button")[6].click()')
    assert browser.ask('document.querySelector("#quantized th[aria-sort]").textContent') == "bytes"
    saved = 'fetch(document.querySelector("a.save").href).then((r) => r.json()).then((d) => d.measured.model)'
    assert browser.ask(saved) == "toy"
