"""The page of `loopq evaluate`: every set of weights, KL against bytes, the prompts that changed most."""

from __future__ import annotations

from loopq.report.evaluation import write_evaluation

REFERENCE = {"name": "full precision", "kl": 0.0, "agreement": 1.0, "n_bytes": 4000}
SAID = {"n_prompts": 3, "n_tokens": 24, "source": "a <text>", "n_steps": 8, "n_seeds": 1}


def weights(name, kl, n_bytes=1000):
    return {
        "name": name, "kl": kl, "agreement": 0.9, "n_bytes": n_bytes, "kl_95": [kl / 2, 2 * kl],
        "kl_by_prompt": [kl / 4, 2 * kl, 3 * kl / 4],
    }  # fmt: skip


def page(tmp_path, *found):
    texts = ["the first", "the\nsecond & more", "x" * 1000]
    return write_evaluation([REFERENCE, *found], SAID, texts, tmp_path / "page.html").read_text("utf-8")


def test_the_page_shows_weights_points_and_prompts(tmp_path):
    text = page(tmp_path, weights("Q <3>", 0.02, 1000), weights("Q4", 0.005, 2000))
    assert (
        "<th scope=row>Q &lt;3&gt;</th><td class=number>0.02000</td><td class=number>0.01000 to 0.04000</td>"
        in text
    )
    assert text.count("<circle") == 2
    assert "a &lt;text&gt;" in text
    # The prompt with the largest KL comes first, on one line and in part.
    worst = text[text.index("Prompts that changed most: Q4") :]
    assert worst.index("the second &amp; more") < worst.index("xxx") < worst.index("the first")
    assert "x" * 161 not in text


def test_one_point_is_no_plot(tmp_path):
    assert "<circle" not in page(tmp_path, weights("Q", 0.02))
    assert "<circle" not in page(tmp_path, weights("Q", 0.02), weights("unknown", 0.1, None))


def test_the_page_loads_nothing(tmp_path):
    text = page(tmp_path, weights("Q", 0.02), weights("Q4", 0.0, 2000))
    assert "http" not in text.replace("http://www.w3.org", "")
    assert "<script" not in text
