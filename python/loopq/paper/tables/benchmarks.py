"""Li, Tables 8 and 9: tasks from the data folder under rounding, one-step and trajectory calibration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from loopq.evaluate.items import read_items
from loopq.evaluate.tasks import Metric, score
from loopq.models.replace import replaced
from loopq.paper.bench import ROTATION, Bench
from loopq.paper.compared import ALL, FULL, ONE, RTN, paired_shares, span, three
from loopq.paper.shown import TABLES, Claim, Found, PaperTable, Shown, Table
from loopq.paper.tables.components import TURNED
from loopq.quantizers.config import Override

TITLE = "Tasks: ARC-C, HellaSwag, LAMBADA, WikiText-2"
#: Tasks of choices and of a last word, and the metric that stands for each.
METRICS = {
    "arc_challenge": "acc_norm",
    "hellaswag": "acc_norm",
    "lambada": "acc",
    "wikitext": "word_perplexity",
}
WIKITEXT = "wikitext"
CHOICES = tuple(task for task in METRICS if task != WIKITEXT)
# An article has hundreds of windows: a tenth of the items of a task of choices.
ARTICLES = 10


def measure(bench: Bench) -> dict[str, Any]:
    """Score every variant on the same items of every task."""
    data, n = bench.source.data, bench.settings.n_evaluation
    assert data is not None
    limits = {task: max(1, n // ARTICLES) if task == WIKITEXT else n for task in METRICS}
    items = {task: read_items(task, data, limit) for task, limit in limits.items()}
    variants: dict[str, Any] = {FULL: {}} | {name: bench.solve(c) for name, c in three(bench).items()}
    if bench.adapters:
        turned = tuple(Override(n, {"rotation": ROTATION}) for n in bench.adapters)
        variants[TURNED] = bench.solve(bench.gptq("all", *turned))
    out: dict[str, Any] = {}
    for name, layers in variants.items():
        weights = {k: q.in_model_orientation() for k, q in layers.items()}
        with replaced(bench.system, weights):
            for task, chosen in items.items():
                made = score(bench.source.loaded, task, chosen, bench.execution, n_steps=bench.n_steps)
                metric = made[METRICS[task]]
                sizes = None if metric.sizes is None else metric.sizes.tolist()
                out.setdefault(name, {})[task] = {"values": metric.values.tolist(), "sizes": sizes}
    return bench.head() | {"variants": out}


def refuses(bench: Bench) -> str | None:
    """Tasks are files, and are scored by likelihood."""
    if bench.system.output != "logits":
        return "the model has no logits, so no likelihood of an answer"
    return None if bench.source.data else "tasks need a data folder: give --data DIR or set LOOPQ_DATA"


def _metric(found: Found, variant: str, task: str) -> Metric:
    made = found["variants"][variant][task]
    sizes = None if made["sizes"] is None else np.array(made["sizes"])
    return Metric(METRICS[task], np.array(made["values"]), sizes)


def _claims(found: Found) -> list[Claim]:
    made = []
    for other in (RTN, ONE):
        a, b = (_metric(found, name, WIKITEXT) for name in (ALL, other))
        ratio, _ = a.change(b)
        numbers = f"word perplexity {a.value:.4g} against {b.value:.4g}, ratio {span(ratio, 3)}"
        text = f"WikiText-2: {ALL} is better than {other}"
        made.append(Claim(found["model"], text, numbers, ratio, 1.0, below=True))
        for task in CHOICES:
            x, y = (_metric(found, name, task) for name in (ALL, other))
            gain, p = x.change(y)
            assert p is not None
            made.append(paired_shares(found["model"], f"{task}: {ALL} is better than {other}", gain, p))
    return made


def show(founds: Sequence[Found]) -> Shown:
    """Accuracy with Wilson intervals, and word perplexity."""
    rows = []
    for found in founds:
        for name in found["variants"]:
            ends = [_metric(found, name, task).interval() for task in CHOICES]
            cells = [f"{100 * i.estimate:.1f} % [{100 * i.low:.0f}, {100 * i.high:.0f}]" for i in ends]
            rows.append((found["model"], name, *cells, f"{_metric(found, name, WIKITEXT).value:.4g}"))
    text = (
        "Zero-shot, prompts and scores of lm-evaluation-harness: ARC-C and HellaSwag by the likelihood per character "
        "(acc_norm), LAMBADA by the greedy last word; word perplexity of WikiText-2 by article, windows as long as the "
        "model reads. 95 %: Wilson intervals. Li, Table 9 also has GSM8K: `loopq evaluate --tasks gsm8k`."
    )
    header = ("model", "variant", *CHOICES, "WikiText-2")
    return Shown([Table(TITLE, text, header, tuple(rows))], [c for f in founds for c in _claims(f)])


TABLES.register("benchmarks")(
    PaperTable(
        ("Table 8", "Table 9"),
        TITLE,
        "Huginn, full precision against trajectory with rotation: ARC-C 37.4 and 37.0 %, HellaSwag 66.6 and 65.3 %, "
        "WikiText-2 14.02 and 14.54. Parcae 1.3B, LAMBADA: full precision 0.458, rounding 0.312, one step 0.341, "
        "trajectory 0.416. Ouro 2.6B, GSM8K strict: 78.8, 72.6, 79.8 %.",
        measure,
        show,
        refuses,
    )
)
