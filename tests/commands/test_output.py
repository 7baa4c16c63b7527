"""Tables that commands print."""

from __future__ import annotations

import re

import pytest

import benches.zoo.chains  # noqa: F401  registers the letter task
import loopq
from loopq.commands import output
from loopq.commands.output import extras, layer_table, measurement_table, spans, spread_table, whole
from loopq.errors import CheckpointError
from tests.support.checkpoints import checkpoint, layer


def test_small_divergences_are_not_shown_as_none():
    rows = [{"name": n, "output": "logits", "kl": kl, "agreement": 1.0, "perplexity": 2.0, "bits_per_byte": None}
            for n, kl in (("full precision", 0.0), ("small", 1.234e-6), ("usual", 0.01234))]  # fmt: skip
    lines = measurement_table(rows).splitlines()[2:]
    assert [line.split()[-5 if "full" not in line else 2] for line in lines] == [
        "0.00000",
        "1.23e-06",
        "0.01234",
    ]


@pytest.mark.parametrize(
    ("steps", "text"),
    [([], "-"), ([0], "0"), ([0, 1, 2], "0-2"), ([1, 3, 4, 7], "1,3-4,7"), ([0, 2, 3], "0,2-3")],
)
def test_spans(steps, text):
    assert spans(steps) == text


def report(name="a.weight", **more):
    """A layer's report."""
    return {"layer": name, "shape": [8, 16], "bits": 4, "group_size": 32, "n_bytes": 1500} | more


def rows(text):
    """Cells of a table by head; two spaces or more are between them."""
    heads, rule, *lines = text.splitlines()
    places = [m.span() for m in re.finditer("-+", rule)]
    return [{heads[a:b].strip(): line[a:b].strip() for a, b in places} for line in lines]


def test_a_layer_is_a_line_with_losses_relative_to_the_weights():
    full = report(
        method_asked="gptq-cd", method_done="rtn", damping=0.0123456, n_rows=64, steps=[0, 1, 3], proxy=0.5,
        proxy_rtn=2.0, proxy_total=8.0, group_size=-1, grid="NVFP4", unknown=1,
    )  # fmt: skip
    first, second = rows(layer_table([full, report("b.weight", proxy=3.0)]))
    assert first == {
        "layer": "a.weight", "shape": "8x16", "asked": "gptq-cd", "done": "rtn", "grid": "NVFP4", "group": "row",
        "damping": "0.0123", "rows": "64", "steps": "0-1,3", "loss RTN": "0.25", "loss": "0.0625", "bytes": "1.50 kB",
    }  # fmt: skip
    assert (second["grid"], second["group"], second["steps"]) == ("INT4", "32", "-")
    assert (second["asked"], second["loss"], second["loss RTN"]) == ("-", "-", "-")


def test_metric_and_rank_have_a_column_where_a_layer_has_them():
    first, second = rows(layer_table([report(metric="loss", rank=0), report()]))
    assert (first["metric"], first["rank"]) == ("loss", "0")
    assert (second["metric"], second["rank"]) == ("inputs", "-")


def test_experts_are_counted_by_step_and_said():
    text = layer_table(
        [
            report("none.weight", step_rows=[0, 0, 0]),
            report("few.weight", step_rows=[3, 9, 3]),
            report("many.weight", step_rows=[4, 8, 4]),
            report("plain.weight", n_rows=7),
        ]
    )
    table, _, said = text.partition("rows of an expert")
    assert [r["rows"] for r in rows(table.strip())] == ["0 (0, 0)", "15 (3, 3)", "16 (4, 4)", "7"]
    none, few = said.splitlines()[1:]
    assert none.startswith("1 weights of experts got no row")
    assert none.endswith(": none.weight")
    assert few.startswith("1 weights of experts got fewer rows")
    assert few.endswith(": few.weight")
    assert "of an expert" not in layer_table([report()])
    said = layer_table(
        [report("a", step_rows=[20], metric="loss"), report("b", step_rows=[20]), report("c", step_rows=[0])]
    )
    assert [line for line in said.splitlines() if "no gradient" in line] == [
        "1 weights of experts got rows and no gradient: solved with metric inputs: b"
    ]


def test_small_scales_are_said_with_twelve_names_at_most():
    lines = layer_table([report(f"x{i}", n_zeroed_groups=2) for i in range(12)]).splitlines()
    assert lines[-1].endswith("x10 (2), x11 (2)")
    lines = layer_table([report(f"x{i}", n_subnormal_scales=3) for i in range(14)]).splitlines()
    assert "x11 (3) and 2 more; --set scale_dtype=bfloat16" in lines[-1]
    assert "x12" not in lines[-1]


def summary(**more):
    """A measurement."""
    return {
        "name": "Q", "output": "logits", "kl": 0.25, "agreement": 0.98765, "perplexity": 2.0, "bits_per_byte": 1.5,
    } | more  # fmt: skip


def test_measurements_have_the_columns_that_one_of_them_has():
    (plain,) = rows(measurement_table([summary()]))
    assert plain == {
        "weights": "Q", "KL (nats)": "0.25000", "agreement": "98.77 %", "perplexity": "2.0000", "bits/byte": "1.5000",
    }  # fmt: skip
    more = {
        "n_steps": 8,
        "kl_sd": 1e-4,
        "kl_95": [0.2, 0.3],
        "tokens_per_second": 12.34,
        "n_bytes": 2_000_000,
    }
    first, second = rows(measurement_table([summary(**more), summary(n_steps=4, tokens_per_second=None)]))
    assert first | plain == first
    assert (first["steps"], first["sd"], first["95 %"]) == ("8", "1.00e-04", "[0.20000, 0.30000]")
    assert (first["tokens/s"], first["bytes"]) == ("12.3", "2.00 MB")
    assert [second[name] for name in ("steps", "sd", "95 %", "tokens/s", "bytes")] == [
        "4",
        "-",
        "-",
        "-",
        "-",
    ]
    steps = [{"mean": 4.5, "least": 4, "most": 5}, {"mean": 6.0, "least": 6, "most": 6}]
    halting = rows(measurement_table([summary(steps=s) for s in steps]))
    assert [row["steps run"] for row in halting] == ["4.50 (4-5)", "6.00 (6-6)"]
    assert "steps run" not in rows(measurement_table([summary(steps=steps[1])] * 2))[0]
    (hidden,) = rows(measurement_table([summary(output="hidden")]))
    assert hidden == {"weights": "Q", "squared relative error": "0.25000", "cosine": "0.98765"}


@pytest.mark.parametrize(
    ("kl", "text"), [(0.0, "0.00000"), (5e-4, "0.00050"), (4.9e-4, "4.90e-04"), (1.0, "1.00000")]
)
def test_a_divergence_has_five_digits_or_three_significant_ones(kl, text):
    assert rows(measurement_table([summary(kl=kl)]))[0]["KL (nats)"] == text


def test_spreads_are_quantiles_over_tokens():
    tokens = {
        "quantiles": [i / 100 for i in range(101)], "same_top": 0.9, "same_top_error": 0.01, "kl": 0.5,
        "kl_error": 0.02, "perplexity": 3.0,
    }  # fmt: skip
    (row,) = rows(spread_table([{"name": "Q", "tokens": tokens}]))
    assert row == {
        "weights": "Q", "mean KLD": "0.500000 ± 0.020000", "median": "0.50000", "90 %": "0.90000", "99 %": "0.99000",
        "maximum": "1.00000", "same top p": "90.000 ± 1.000 %", "perplexity": "3.0000",
    }  # fmt: skip


def chosen(cost, *layers, **more):
    """A set of layers of an allocation."""
    return {
        "layers": layers,
        "n_bytes": 1000,
        "cost": cost,
        "bits": 4,
        "levels": "even",
        "group_size": 32,
    } | more


def test_a_budget_lists_what_it_chose_the_costliest_first():
    allocation = {
        "n_bytes": 900, "budget_bytes": 1000, "bits_a_weight": 3.5, "predicted_cost": 0.4,
        "chosen": [
            chosen(0.1, "a", "b", "c"), chosen(0.3, "d", bits=2),
            chosen(0.0, "e", "f", outside=8), chosen(0.0, "g", outside=None),
        ],
    }  # fmt: skip
    line, table = extras({"allocation": allocation})
    for words in ("fit: 900 B of a budget of 1.00 kB, 3.500 bits", "of the model; predicted KL 0.40000"):
        assert words in line
    listed = [(r["layers"], r["chosen"], r["share"]) for r in rows(table)]
    assert listed == [
        ("d", "2 bits, even levels, groups of 32", "75.0 %"),
        ("a and 2 more", "4 bits, even levels, groups of 32", "25.0 %"),
        ("e and 1 more", "outside the loop: 8 bits", "0.0 %"),
        ("g", "outside the loop: as it was", "0.0 %"),
    ]
    assert extras({}) == []
    nothing = extras({"allocation": allocation | {"predicted_cost": 0.0, "chosen": [chosen(0.0, "a")]}})
    assert rows(nothing[1])[0]["share"] == "0.0 %"


def test_a_checkpoint_is_shown_with_its_bits_a_weight(capsys):
    stored = checkpoint(layer(32, 64))
    output.print_checkpoint(stored, "folder")
    lines = capsys.readouterr().out.splitlines()
    packed = 32 * 64 // 2 + 32 * 2 * 2
    rest = stored.n_bytes - packed
    assert (
        f"1 layers, 2048 weights in 1.15 kB: {8 * packed / 2048:.3f} bits a weight; the rest of the model: {rest} B"
        in lines
    )
    assert lines[-1] == "written to folder, read back and compared"
    stored.settings["allocation"] = {}
    with pytest.raises(CheckpointError, match="settings: damaged"):
        output.print_checkpoint(stored, None)


def test_bytes_of_all_files_and_what_saves_some_are_told(tmp_path):
    sizes = {}
    for outside in (None, 8):
        out = tmp_path / str(outside)
        done = loopq.quantize(
            "huginn_small", out=out, method="rtn", group_size=32, n_steps=1, outside=outside
        )
        line = whole(out, done, rounds_outside=outside is None)
        sizes[outside] = sum(file.stat().st_size for file in out.iterdir())
        assert f"({sizes[outside]:,} bytes)" in line
        if outside is None:
            match = re.search(r"--outside 8 saves about ([\d.]+) (kB|MB)", line)
            saved = float(match[1]) * {"kB": 1e3, "MB": 1e6}[match[2]]
        else:
            assert "--outside" not in line
    assert sizes[None] - sizes[8] == pytest.approx(saved, rel=0.1)
