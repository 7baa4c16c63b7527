"""The page of several depths: a row for each, also of models that give no logits and generate no text."""

from __future__ import annotations

import pytest

from loopq.report.depths import write_depths


@pytest.mark.parametrize(("output", "head"), [("logits", "same token [%]"), ("hidden", "cosine")])
def test_a_row_for_each_depth_and_one_picture(tmp_path, output, head):
    rows = [
        {"name": name, "n_steps": depth, "output": output, "kl": kl * depth, "agreement": 0.75,
         "tokens_per_second": None if output == "hidden" else 10.0 / depth}
        for depth in (1, 4)
        for name, kl in (("full precision", 0.0), ("Q", 0.125))
    ]  # fmt: skip
    said = {"n_prompts": 2, "n_tokens": 9, "source": "a text"}
    page = write_depths(tmp_path / "d.html", "toy", rows, said).read_text()
    assert (page.count("<svg"), page.count("<tr>")) == (1, 5)
    assert f">{head}<" in page
    assert ">0.50000<" in page
    assert (">2.5<" in page) == (output == "logits")
