"""Open a page in headless Chromium and measure what it shows."""

import json
import re
import shutil
import subprocess

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="NO BROWSER CHECK: chromium is not installed (apt-get install chromium)"
)

PROBE = """
<script>
window.addEventListener("error", (e) => { document.title = "ERROR " + e.message; });
window.addEventListener("load", () => {
  const figures = [...document.querySelectorAll("figure")].map((f) => {
    const box = f.querySelector("svg").getBoundingClientRect();
    return {id: f.id, width: box.width, height: box.height, right: box.right,
      units: [...f.querySelectorAll("svg text")].filter((t) => /\\[[^\\]]+\\]/.test(t.textContent)).length};
  });
  const table = document.getElementById("layers");
  const first = () => table.tBodies[0].rows[0].cells[0].textContent;
  const button = table.tHead.rows[0].cells[3].querySelector("button");
  const order = [first()]; button.click(); order.push(first()); button.click(); order.push(first());
  const saved = document.querySelector("a.save").href.startsWith("blob:");
  const out = document.createElement("pre");
  out.id = "probe";
  out.textContent = JSON.stringify({figures, order, saved, title: document.title,
    overflow: document.documentElement.scrollWidth - window.innerWidth});
  document.body.append(out);
});
</script>
"""


def look(text, folder):
    """Console lines of a page, and what the probe found on it."""
    place = folder / "page.html"
    # The probe stands before the page's own script: it hears its errors.
    place.write_text(text.replace("</title>", "</title>" + PROBE, 1), "utf-8")
    run = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0",
            "--window-size=1280,2000", f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=4000",
            "--dump-dom", place.as_uri(),
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    console = [line for line in run.stderr.splitlines() if ":CONSOLE" in line]
    found = re.search(r'<pre id="probe">(.*?)</pre>', run.stdout, re.DOTALL)[1]
    return console, json.loads(found.replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">"))


def check(text, folder, n_figures):
    """A page without errors, whose figures have axes with units and fit the window."""
    console, found = look(text, folder)
    assert console == []
    assert not found["title"].startswith("ERROR")
    assert len(found["figures"]) == n_figures
    for figure in found["figures"]:
        assert figure["units"] >= 2, figure
        assert figure["width"] > 300, figure
        assert figure["height"] > 120, figure
        assert figure["right"] <= 1281, figure
    assert found["overflow"] <= 0
    assert found["saved"]
    # Sorted by rank at step 0, rising then falling: the first row changes.
    assert found["order"][1] != found["order"][2]
