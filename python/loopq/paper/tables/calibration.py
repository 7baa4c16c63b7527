"""Li, Table 25: calibration data and solver of each row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from loopq.paper.bench import Bench
from loopq.paper.shown import TABLES, Found, PaperTable, Shown, ShownTable
from loopq.storage.schema import Object

TITLE = "Calibration data and solver"
WIKITEXT = "WikiText-2 train, 128 x {} tokens"
COLUMNWISE = "column-wise GPTQ, damping 0.01"
PAPER = (
    (
        "Huginn, R-Llama",
        "first 50 GSM8K training questions",
        "1 or 32",
        "GPTQ, damping 0.01 core, 0.1 adapter",
    ),
    ("Ouro", WIKITEXT.format(2048), "1 or 4", COLUMNWISE),
    ("LoopFormer", WIKITEXT.format(1024), "1 or 8", COLUMNWISE),
    ("Parcae", WIKITEXT.format(1024), "1 or 8", COLUMNWISE),
    ("PonderPythia", WIKITEXT.format(2048), "1 or 4", COLUMNWISE),
    ("Nanbeige", WIKITEXT.format(2048), "1 or 2", COLUMNWISE),
)


def measure(bench: Bench) -> Object:
    """Read the settings that this model's layers get in the trajectory row."""
    tokens = bench.model.calibration
    tasks = bench.collected.plan(bench.gptq("all")).tasks
    ways = Counter(
        f"{t.config.method.name}"
        + (f", damping {d.fraction:g}" if (d := getattr(t.config.method, "damping", None)) else "")
        for t in tasks
    )
    data = f"{tokens.source}, {len(tokens.sequences)} prompts, {tokens.n_tokens} tokens"
    return bench.head() | {"data": data, "layers": len(tasks), "ways": dict(ways)}


def show(results: Sequence[Found]) -> Shown:
    """The paper's rows, and one per model."""
    rows = [(f"{name} (paper)", *cells) for name, *cells in PAPER]
    for f in results:
        ways = "; ".join(f"{n} layers {way}" for way, n in f["ways"].items())
        rows.append((f["model"], f["data"], f"1 or {f['n_steps']}", ways))
    text = "Symmetric grids of group 128, no reordering of columns; rows of the models are those of `main-table`."
    header = ("model", "calibration data", "steps", "solver")
    return Shown([ShownTable(TITLE, text, header, tuple((a, b, c, d) for a, b, c, d in rows))])


TABLES.register("calibration")(
    PaperTable(
        ("Table 25",),
        TITLE,
        "50 questions of GSM8K or 128 windows of WikiText-2; damping of 1 %, 10 % for the adapter; no act-order.",
        measure,
        show,
        one_step=True,
    )
)
