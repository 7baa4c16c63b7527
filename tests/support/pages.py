"""What the tests of pages share."""

from __future__ import annotations

import json
import re


def saved(text):
    """The data that a page offers for download."""
    return json.loads(
        re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1]
    )
