"""Open pages in headless Chromium as light, dark, narrow and printed ones, and read their content."""

import contextlib
import json
import os
import shutil
import subprocess
import time

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(
    CHROMIUM is None or os.name == "nt",
    reason="NO BROWSER CHECK: chromium is not installed (apt-get install chromium)",
)


class Browser:
    """Chromium over the two pipes of its DevTools protocol: messages are JSON, ended by a zero byte.

    `said` collects what pages write to the console, errors among it.
    """

    def __init__(self, folder):
        # Not on Windows, where no test has a browser.
        import fcntl

        (down, self._write), (self._read, up) = os.pipe(), os.pipe()
        # Copies of high numbers: what lies on 3 or 4 already would be lost when the ends are put there.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in (down, up)]
        os.close(down), os.close(up)
        self._process = subprocess.Popen(
            [
                CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                "--remote-debugging-pipe", f"--user-data-dir={folder}", "about:blank",
            ],
            # The browser reads from 3 and writes to 4.
            preexec_fn=lambda: (os.dup2(ends[0], 3), os.dup2(ends[1], 4)), close_fds=False,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for end in ends:
            os.close(end)
        self.said, self._buffer, self._number, self._session = [], b"", 0, {}
        pages = [t for t in self("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        attached = self("Target.attachToTarget", targetId=pages[0]["targetId"], flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self(f"{domain}.enable")
        # Without it no element of a window that nobody looks at has the focus.
        self("Emulation.setFocusEmulationEnabled", enabled=True)

    def __call__(self, method, **parameters):
        """Send a command and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters} | self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _next(self):
        while b"\0" not in self._buffer:
            part = os.read(self._read, 1 << 16)
            assert part, "the browser ended"
            self._buffer += part
        text, self._buffer = self._buffer.split(b"\0", 1)
        message = json.loads(text)
        if message.get("method") in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            self.said.append(message["params"])
        return message

    def show(self, path, width=1280, scheme="light", media="screen"):
        """Open a page and wait until it is loaded."""
        self(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self("Emulation.setEmulatedMedia", media=media, features=features)
        self("Page.navigate", url=path.as_uri())
        end = time.monotonic() + 20
        while self.ask("document.readyState + location") != f"complete{path.as_uri()}":
            assert time.monotonic() < end, "the page does not load"
            time.sleep(0.02)

    def ask(self, script):
        """Value of a JavaScript expression on the page."""
        answer = self("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, key):
        """Press a key."""
        for kind in ("keyDown", "keyUp"):
            self("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def close(self):
        """End the browser."""
        with contextlib.suppress(OSError):
            self("Browser.close")
        self._process.kill()
        self._process.wait()
        os.close(self._write), os.close(self._read)


@contextlib.contextmanager
def opened(folder):
    """A browser for a while."""
    browser = Browser(folder)
    try:
        yield browser
    finally:
        browser.close()


#: Text that is shown, with the contrast of its ink on the first ground behind it that is not transparent (WCAG 2.2).
#: Text in a figure is measured where it has the page's ink; on a coloured cell of a figure the ground is not known.
FAINT = """
(() => {
  const light = (rgb) => {
    const [r, g, b] = rgb.match(/[\\d.]+/g).map((v) => v / 255).map(
      (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const faint = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || !element.checkVisibility()) continue;
    if (element.closest("script, style")) continue;
    const svg = element.closest("svg");
    const style = getComputedStyle(element);
    if (svg?.closest(".plot") && style.fill !== getComputedStyle(svg).color) continue;
    let ground = element;
    const clear = (e) => getComputedStyle(e).backgroundColor === "rgba(0, 0, 0, 0)";
    while (ground.parentElement && clear(ground)) ground = ground.parentElement;
    const paper = clear(ground) ? "rgb(255, 255, 255)" : getComputedStyle(ground).backgroundColor;
    const [a, b] = [light(svg ? style.fill : style.color), light(paper)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) faint.push([walker.currentNode.textContent.trim(), ratio]);
  }
  return faint;
})()
"""
#: Elements wider than the window that neither scroll nor lie in a box that does.
WIDE = """
[...document.querySelectorAll("body *")].filter((e) => {
  const box = e.getBoundingClientRect();
  return box.width && box.right > innerWidth + 1 && !e.parentElement.closest(".scroll, .plot, pre, svg");
}).map((e) => e.tagName + "." + e.className)
"""
#: Letters of figures and tables that are shown smaller than 9 pixels.
SMALL = """
[...document.querySelectorAll("svg text, td, th, figcaption, caption, li")].map((e) => {
  const svg = e.closest("svg"), box = svg?.viewBox.baseVal;
  const scale = box?.width ? svg.getBoundingClientRect().width / box.width : 1;
  return [e.textContent.trim(), parseFloat(getComputedStyle(e).fontSize) * scale];
}).filter(([text, size]) => text && size < 9)
"""
#: Figures and maps that have to be scrolled to be seen, and letters of a figure that its frame cuts.
CUT = """
[...document.querySelectorAll("figure .scroll, .plot")].filter((e) => e.scrollWidth > e.clientWidth + 1)
  .map((e) => e.ariaLabel || e.className).concat([...document.querySelectorAll("svg text")].filter((t) => {
  const inner = t.getBoundingClientRect(), outer = t.closest("svg").getBoundingClientRect();
  return inner.left < outer.left - 1 || inner.right > outer.right + 1 || inner.top < outer.top - 1
    || inner.bottom > outer.bottom + 1;
}).map((t) => t.textContent))
"""
FIGURES = """
[...document.querySelectorAll("figure[id]")].map((f) => {
  const box = f.querySelector("svg").getBoundingClientRect();
  return {id: f.id, width: box.width, height: box.height, right: box.right,
    units: [...f.querySelectorAll("svg text")].filter((t) => /\\[[^\\]]+\\]/.test(t.textContent)).length};
})
"""


def check(browser, path, n_figures):
    """A page without errors, with readable text and figures that fit the window and have axes with units."""
    browser.show(path)
    figures = browser.ask(FIGURES)
    assert len(figures) == n_figures
    for figure in figures:
        assert figure["units"] >= 2, figure
        assert figure["width"] > 300, figure
        assert figure["height"] > 120, figure
        assert figure["right"] <= 1281, figure
    assert browser.ask(WIDE) == []
    assert browser.ask(FAINT) == []
    assert browser.said == []
