"""Perturbations other than rounding, on the page."""

from __future__ import annotations

import re

from loopq.paper.report.sections.perturbation import perturbations
from tests.support.pages import check_table


def test_its_table_is_on_the_page(diagnosis):
    check_table(diagnosis, "perturbation", "perturbation")


def test_draws_of_a_kind_and_place_are_averaged():
    def row(kind, place, agreement, norm):
        return {
            "perturbation": kind,
            "location": place,
            "agreement": agreement,
            "output_error": 1 - agreement,
            "norm": norm,
        }

    rows = [
        row("noise", "exposed", 0.5, 1.0),
        row("noise", "core", 0.25, 2.0),
        row("noise", "exposed", 0.75, 3.0),
    ]
    for output, shares in (("logits", ["25.0", "62.5"]), ("hidden", ["75.0", "37.5"])):
        text = perturbations({"sections": {"perturbation": {"rows": rows}}, "model": {"output": output}})
        cells = [
            re.findall(r">([^<>]*)</t[hd]>", line) for line in text.split("<tbody>")[1].split("</tr>")[:2]
        ]
        assert cells == [["noise", "core", "2", "1", shares[0]], ["noise", "exposed", "2", "2", shares[1]]]
        assert ("agreement, last step" in text) == (output == "logits")
