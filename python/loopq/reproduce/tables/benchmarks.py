"""Li, Tables 8 and 9: tasks from the data folder under rounding, one-step and trajectory calibration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from loopq.evaluate.tasks import read_items, score
from loopq.quantizers.config import Override
from loopq.reproduce.bench import Bench
from loopq.reproduce.compared import ALL, FULL, N_RESAMPLES, ONE, RTN, three
from loopq.reproduce.shown import TABLES, Claim, Found, PaperTable, Shown, Table
from loopq.reproduce.tables.components import ROTATION, TURNED
from loopq.stats import bootstrap, mcnemar_exact, wilson
from loopq.systems.replace import replaced

TITLE = "Tasks: ARC-C, HellaSwag, LAMBADA, WikiText-2"
CHOICES = ("arc-challenge", "hellaswag", "lambada")
WIKITEXT = "wikitext2"
# An article has hundreds of windows: a tenth of the items of a task of choices.
ARTICLES = 10


def measure(bench: Bench) -> dict[str, Any]:
    """Score every variant on the same items of every task."""
    data, n = bench.source.data, bench.settings.n_evaluation
    assert data is not None
    items = {task: read_items(task, data, n) for task in CHOICES}
    items[WIKITEXT] = read_items(WIKITEXT, data, max(1, n // ARTICLES))
    variants: dict[str, Any] = {FULL: {}} | {name: bench.solve(c) for name, c in three(bench).items()}
    if bench.adapters:
        turned = tuple(Override(n, {"rotation": ROTATION}) for n in bench.adapters)
        variants[TURNED] = bench.solve(bench.gptq("all", *turned))
    out: dict[str, Any] = {}
    for name, layers in variants.items():
        weights = {k: q.in_model_orientation() for k, q in layers.items()}
        with replaced(bench.system, weights):
            for task, chosen in items.items():
                how = bench.execution
                found = score(
                    bench.source.loaded,
                    chosen,
                    n_steps=bench.n_steps,
                    seed=how.seed,
                    batch_size=how.batch_size,
                    progress=how.progress,
                )
                out.setdefault(name, {})[task] = {
                    "correct": found.correct.tolist(),
                    "nll": found.nll.tolist(),
                    "n_words": found.n_words.tolist(),
                    "word_perplexity": found.word_perplexity,
                }
    return bench.head() | {"variants": out}


def refuses(bench: Bench) -> str | None:
    """Tasks are files, and are scored by likelihood."""
    if bench.system.output != "logits":
        return "the model has no logits, so no likelihood of an answer"
    return None if bench.source.data else "tasks need a data folder: give --data DIR or set LOOPQ_DATA"


def _claims(found: Found) -> list[Claim]:
    variants, made = found["variants"], []
    for other in (RTN, ONE):
        a, b = (variants[name][WIKITEXT] for name in (ALL, other))
        gain = bootstrap(
            [a["nll"], b["nll"], a["n_words"]],
            lambda x, y, n, axis: (y.sum(axis) - x.sum(axis)) / n.sum(axis),
            n_resamples=N_RESAMPLES,
        )
        holds = True if gain.low > 0 else False if gain.high < 0 else None
        ours, theirs = (v["word_perplexity"] for v in (a, b))
        numbers = f"word perplexity {ours:.4g} against {theirs:.4g}, {len(a['nll'])} articles"
        made.append(Claim(found["model"], f"WikiText-2: {ALL} is better than {other}", holds, numbers))
        for task in CHOICES:
            x, y = (np.array(variants[name][task]["correct"]) > 0 for name in (ALL, other))
            p = mcnemar_exact(int((x & ~y).sum()), int((y & ~x).sum()))
            numbers = f"{100 * x.mean():.1f} against {100 * y.mean():.1f} %, exact McNemar p = {p:.3g}"
            better = None if p >= 0.05 else bool(x.mean() > y.mean())
            made.append(Claim(found["model"], f"{task}: {ALL} is better than {other}", better, numbers))
    return made


def show(founds: Sequence[Found]) -> Shown:
    """Accuracy with Wilson intervals, and word perplexity."""
    rows = []
    for found in founds:
        for name, tasks in found["variants"].items():
            cells = []
            for task in CHOICES:
                right = tasks[task]["correct"]
                i = wilson(int(sum(right)), len(right))
                cells.append(f"{100 * i.estimate:.1f} % [{100 * i.low:.0f}, {100 * i.high:.0f}]")
            rows.append((found["model"], name, *cells, f"{tasks[WIKITEXT]['word_perplexity']:.4g}"))
    text = (
        "Zero-shot, scored by likelihood: ARC-C and HellaSwag per byte of the answer, LAMBADA by the greedy last word; "
        "word perplexity of WikiText-2 by article, windows as long as the model reads. 95 %: Wilson intervals. Li, "
        "Table 9 also has GSM8K, which needs generation and is left out."
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
