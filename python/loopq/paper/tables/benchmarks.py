"""Li, Tables 8 and 9: tasks from the data folder under rounding, one-step and trajectory calibration."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

import numpy as np

from loopq.evaluation.metric import Metric
from loopq.models.load import LoadedModel
from loopq.models.replace import Replaced
from loopq.paper.bench import ROTATION, Bench
from loopq.paper.compared import (
    ALL,
    ANY,
    CALIBRATION,
    FULL,
    ONE,
    RTN,
    SAME_RATIO,
    paired_shares,
    span,
    three,
    unresolved,
)
from loopq.paper.items import Item, read_items
from loopq.paper.shown import MIN_UNITS, TABLES, Claim, Found, PaperTable, Shown, ShownTable
from loopq.paper.tables.components import TURNED
from loopq.paper.tasks import score
from loopq.quantizers.config import Override
from loopq.run.source import Layers
from loopq.runtime.requests import longest_input
from loopq.storage.schema import Object

TITLE = "Tasks: ARC, HellaSwag, LAMBADA, WikiText-2"
PROBLEMS = "Problems of GSM8K behind eight solved ones"
#: The metric that stands for each task.
METRICS = {
    "arc_easy": "acc_norm",
    "arc_challenge": "acc_norm",
    "hellaswag": "acc_norm",
    "lambada": "acc",
    "wikitext": "word_perplexity",
    "gsm8k_8": "exact_match,strict-match",
}
WIKITEXT, GSM8K = "wikitext", "gsm8k_8"
TASKS = tuple(task for task in METRICS if task != GSM8K)
# An article has hundreds of windows, so this task gets a tenth as many items as a choice task.
ARTICLES = 10
# Share of right answers below which a model cannot do a task, so that no loss of it can be seen.
CAN = 0.05
# Word perplexity above which a model cannot do words, as one of bytes. Table 11 has its bits per byte.
MOST_PERPLEXITY = 1000.0
# About the tokens of eight solved problems and one more.
N_PROBLEM = 1024


def measure(bench: Bench, tasks: Sequence[str] = TASKS) -> Object:
    """Score every variant on the same items of every task. Each variant's scores are saved at once."""
    data, n = bench.source.data, bench.settings.n_evaluation
    assert data is not None
    limits = {task: max(MIN_UNITS, n // ARTICLES) if task == WIKITEXT else n for task in tasks}
    items = {task: read_items(task, data, limit) for task, limit in limits.items()}
    variants: dict[str, Layers] = {FULL: {}} | {name: bench.solve(c) for name, c in three(bench).items()}
    if bench.adapters:
        turned = tuple(Override(n, {"rotation": ROTATION}) for n in bench.adapters)
        variants[TURNED] = bench.solve(bench.gptq("all", *turned))
    out: Object = {}
    for number, (name, layers) in enumerate(variants.items()):
        with Replaced(bench.system, {k: q.in_model_orientation() for k, q in layers.items()}) as other:
            loaded = dataclasses.replace(bench.source.loaded, model=other.model, system=other)
            for task, chosen in items.items():
                scored = partial(_score, bench, loaded, task, chosen)
                part = f"{bench.source.name} {task} {number}"
                out.setdefault(name, {})[task] = bench.once(part, scored)
    return bench.head() | {"variants": out}


def measure_problems(bench: Bench) -> Object:
    """Score every variant on the same problems."""
    return measure(bench, (GSM8K,))


def _score(bench: Bench, loaded: LoadedModel, task: str, chosen: Sequence[Item]) -> Object:
    scores = score(loaded, task, chosen, bench.execution, n_steps=bench.n_steps)
    metric = scores[METRICS[task]]
    sizes = None if metric.sizes is None else metric.sizes.tolist()
    return {"values": metric.values.tolist(), "sizes": sizes}


def refuses(bench: Bench) -> str | None:
    """Tasks need files and are scored by likelihood."""
    if bench.system.output != "logits":
        return "the model has no logits, so no likelihood of an answer"
    return None if bench.source.data else "tasks need a data folder: give --data DIR or set LOOPQ_DATA"


def _refuses_problems(bench: Bench) -> str | None:
    reads = longest_input(bench.source.loaded)
    if reads < N_PROBLEM:
        return f"eight solved problems have about {N_PROBLEM} tokens, and the model reads {reads}"
    return refuses(bench)


def _metric(result: Found, variant: str, task: str) -> Metric:
    entry = result["variants"][variant][task]
    sizes = None if entry["sizes"] is None else np.array(entry["sizes"])
    return Metric(METRICS[task], np.array(entry["values"]), sizes)


def _tasks(result: Found) -> list[str]:
    return list(result["variants"][FULL])


def _claims(result: Found) -> list[Claim]:
    claims = []
    for other in (RTN, ONE):
        for task in _tasks(result):
            x, y = (_metric(result, name, task) for name in (ALL, other))
            change, p = x.change(y)
            text = f"{task}: {ALL} is better than {other}"
            if p is not None:
                if _metric(result, FULL, task).value > CAN:
                    claims.append(paired_shares(result["model"], text, change, p, CALIBRATION))
                continue
            numbers = f"word perplexity {x.value:.4g} against {y.value:.4g}, ratio {span(change, 3)}"
            if _metric(result, FULL, task).value > MOST_PERPLEXITY:
                continue
            low, middle, high = (float(np.log(end)) for end in (change.low, change.estimate, change.high))
            why = unresolved(dataclasses.replace(change, low=low, estimate=middle, high=high))
            alike = ANY if why else SAME_RATIO
            claims.append(Claim(result["model"], text, numbers, change, 1.0, True, why, CALIBRATION, alike))
    return claims


def _cell(metric: Metric) -> str:
    i = metric.interval()
    if metric.sizes is not None:
        return f"{metric.value:.4g}"
    return f"{100 * i.estimate:.1f} % [{100 * i.low:.0f}, {100 * i.high:.0f}]"


def show(results: Sequence[Found]) -> Shown:
    """Accuracy with Wilson intervals, and word perplexity."""
    tasks = _tasks(results[0])
    rows = [
        (result["model"], name, *(_cell(_metric(result, name, task)) for task in tasks))
        for result in results
        for name in result["variants"]
    ]
    text = (
        "Prompts and scores of lm-evaluation-harness: ARC and HellaSwag by the likelihood per character (acc_norm), "
        "LAMBADA by the greedy last word; word perplexity of WikiText-2 by article; "
        "GSM8K by the number behind ####. 95 %: Wilson intervals."
    )
    title = PROBLEMS if tasks == [GSM8K] else TITLE
    header = ("model", "variant", *tasks)
    return Shown([ShownTable(title, text, header, tuple(rows))], [c for f in results for c in _claims(f)])


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
TABLES.register("gsm8k")(
    PaperTable(
        ("Section 6.1",),
        PROBLEMS,
        "GSM8K strict, 1,319 problems, eight shots: Huginn 34.9, 27.9, 26.9, 35.0 %, R-Llama 50.2, 39.5, 40.3, 45.3 % "
        "for full precision, rounding, one step, trajectory.",
        measure_problems,
        show,
        _refuses_problems,
    )
)
