"""Screenshots of the page and of the site: `python -m docs.screenshots` after `make docs`, with Chromium."""

from __future__ import annotations

import base64
import io
import tempfile
from pathlib import Path

from PIL import Image

from loopq.cli import main
from tests.support.browser import opened

_OUT = Path(__file__).parent / "_static"
_SITE = Path(__file__).parents[1] / "target" / "html" / "why.html"


def write() -> None:
    """Quantize and evaluate the embedded model; write the top of its page and of one of the site, in both schemes."""
    with tempfile.TemporaryDirectory() as folder:
        q, page = Path(folder, "Q"), Path(folder, "page.html")
        main(["quantize", "huginn_small", "--out", str(q), "--group-size", "32", "--n-prompts", "32"])
        main(["evaluate", "huginn_small", str(q), "--html", str(page)])
        with opened(Path(folder, "profile")) as browser:
            for name, shown, height in (("page", page, 1780), ("site", _SITE, 1000)):
                for scheme in ("light", "dark"):
                    browser.show(shown, scheme=scheme)
                    clip = {"x": 0, "y": 0, "width": 1280, "height": height, "scale": 1}
                    shot = browser("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)["data"]
                    image = Image.open(io.BytesIO(base64.b64decode(shot))).convert("RGB")
                    # Few colours: a third of the bytes.
                    image.quantize(128).save(_OUT / f"{name}-{scheme}.png", optimize=True)


if __name__ == "__main__":
    write()
