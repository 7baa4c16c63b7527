"""Li, Sec. 3.1 and App. E: the rounded loop by the strength of its feedback, and each layer with a planted column."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from loopq.analysis.diagnosis.context import Context
from loopq.analysis.diagnosis.sections.feedback import FeedbackCurve, feedback_curve, split_weights
from loopq.analysis.diagnosis.weights import Weights, quantizable, weight_of
from loopq.analysis.report.style import short_names
from loopq.evaluation.stats import bootstrap, geometric_mean_ratio, mean_interval
from loopq.layers.grid import PER_CHANNEL
from loopq.layers.shared import SharedParameter
from loopq.paper.bench import Bench
from loopq.paper.compared import N_RESAMPLES, SAME_RATIO, curves, higher, span, without_logits
from loopq.paper.planted import FACTORS
from loopq.paper.shown import TABLES, Claim, Found, PaperTable, Shown, ShownTable
from loopq.storage.schema import Object
from loopq.systems.stepwise import steps_of

TITLE = "Damage by the strength of feedback"
ALONE = "Each layer alone, with and without a planted column"
STRONGER = "A column planted in every layer, by its strength"
WHOLE, PLAIN, PLANTED = "all columns", "plain", "planted"
#: Factors of a planted column. The layers with the column, and the control: the same in all others.
STRENGTHS = (1.0, 4.0, 8.0, 16.0, 64.0)
EXPOSED, OTHERS, EVERY = "exposed layers", "all other layers", "all layers"


def measure(bench: Bench) -> Object:
    """Feed a share lambda of the state's error back: 0 resets the state before each step, 1 is the rounded loop."""
    context = bench.context(seeds=tuple(range(bench.settings.n_seeds)))
    config, on = context.config, context.on(context.prompts)
    seeds = config.seeds if bench.system.state_is_random else config.seeds[:1]
    sizes = {"one scale per row": PER_CHANNEL, f"groups of {config.group_size}": config.group_size}

    def curve(weights: Weights, lambdas: Sequence[float]) -> Object:
        return _plain(feedback_curve(on, weights, lambdas=lambdas, seeds=seeds))

    parts = {
        name: {
            columns: curve(weights, config.lambdas)
            for columns, weights in split_weights(
                bench.system, bench.depth, config.layer(size), context.rounder
            ).items()
        }
        for name, size in sizes.items()
    }
    alone = {
        p.name: {kind: curve(weights, (0.0, 1.0)) for kind, weights in _alone(context, p)}
        for p in quantizable(context.parameters)
    }
    places = {
        f"{factor:g}": {
            place: curve(_planted(context, layers, factor), (0.0, 1.0))
            for place, layers in _places(context).items()
        }
        for factor in STRENGTHS
    }
    exposed = [p.name for p in context.exposed]
    return bench.head() | {"parts": parts, "alone": alone, "places": places, "exposed": exposed}


def _plain(curve: FeedbackCurve) -> Object:
    assert curve.agreement is not None
    return {
        "lambdas": list(curve.lambdas), "error": curve.error.tolist(), "agreement": curve.agreement.tolist(),
        "returned": None if curve.returned is None else curve.returned.tolist(),
    }  # fmt: skip


def _alone(context: Context, p: SharedParameter) -> Iterator[tuple[str, Weights]]:
    """One layer rounded per channel: as it is, and with a planted column."""
    yield PLAIN, _planted(context, [p], 1.0)
    yield PLANTED, _planted(context, [p], FACTORS["outlier"])


def _planted(context: Context, layers: Sequence[SharedParameter], factor: float) -> Weights:
    """Round layers per channel, each as if its largest column were larger and its input smaller by a factor."""
    config, weights = context.config.layer(PER_CHANNEL), {}
    for p in layers:
        weight = weight_of(context.system, p)
        column = int(np.linalg.norm(weight, axis=0).argmax())
        weight[:, column] *= factor
        weights[p.name] = context.rounder(weight, config).copy()
        weights[p.name][:, column] /= factor
    return weights


def _places(context: Context) -> dict[str, list[SharedParameter]]:
    """The exposed layers, all others, and both. Without an exposed layer, all alone."""
    layers = quantizable(context.parameters)
    exposed = [p for p in layers if p in context.exposed]
    others = [p for p in layers if p not in context.exposed]
    return {EXPOSED: exposed, OTHERS: others, EVERY: layers} if exposed and others else {EVERY: layers}


def refuses(bench: Bench) -> str | None:
    """Feedback is changed between single steps, and damage is counted in predictions."""
    steps = steps_of(bench.system)
    return without_logits(bench) if steps else "the model has no single-step function"


def _share(curve: Mapping[str, Any]) -> Any:
    """Share of the changed predictions that feedback causes: those that a reset of the state brings back."""
    reset, natural = (np.array(curve["agreement"][end]) for end in (0, -1))
    return bootstrap(
        [reset, natural],
        lambda x, y, axis: 1 - (1 - x.mean(axis)) / np.maximum(1 - y.mean(axis), 1e-12),
        n_resamples=N_RESAMPLES,
    )


def _row(curve: Mapping[str, Any]) -> tuple[str | None, ...]:
    same = [f"{100 * float(np.mean(values)):.1f} %" for values in curve["agreement"]]
    share = returned = times = None
    if np.mean(curve["agreement"][-1]) < 1:
        i = _share(curve)
        share = f"{100 * i.estimate:.0f} % [{100 * i.low:.0f}, {100 * i.high:.0f}]"
    if curve["returned"] is not None:
        returned = span(mean_interval(curve["returned"], n_resamples=N_RESAMPLES), 2)
    # A layer that the last step does not use leaves no error there.
    if np.min([curve["error"][0], curve["error"][-1]]) > 0:
        ratio = geometric_mean_ratio(curve["error"][-1], curve["error"][0], n_resamples=N_RESAMPLES)
        times = span(ratio, 2)
    return (*same, share, f"{float(np.mean(curve['error'][0])):.3g}", times, returned)


def _claims(result: Found) -> list[Claim]:
    claims, model = [], result["model"]
    for name, parts in result["parts"].items():
        whole = parts[WHOLE]
        reset, natural = (whole["agreement"][end] for end in (0, -1))
        text = f"{name}: fewer predictions change if the state is reset before each step"
        claims.append(higher(model, text, reset, natural, "feedback"))
        if np.mean(natural) < 1:
            share, text = _share(whole), f"{name}: feedback causes most of the changed predictions"
            claims.append(Claim(model, text, f"share {span(share, 2)}", share, 0.5, differs="feedback"))
        ratios = {k: np.array(c["error"][-1]) / np.array(c["error"][0]) for k, c in parts.items()}
        claims.append(_larger(model, f"{name}: feedback enlarges the final error", ratios[WHOLE], "feedback"))
        halves = [ratios[k] for k in ("embedding columns", "state columns") if k in ratios]
        if len(halves) == 2:
            text = f"{name}: it enlarges that of the embedding's columns more than that of the state's"
            claims.append(_larger(model, text, halves[0] / halves[1], "columns"))
    for factor, places in result["places"].items():
        if EXPOSED in places:
            others, exposed = (places[place]["agreement"][-1] for place in (OTHERS, EXPOSED))
            text = f"planted x {factor} everywhere: {EXPOSED} change more predictions than {OTHERS}"
            claims.append(higher(model, text, others, exposed, "place of the error"))
    short = short_names(result["alone"])
    for kind in (PLAIN, PLANTED):
        ends = {layer: kinds[kind]["agreement"][-1] for layer, kinds in result["alone"].items()}
        for layer in result["exposed"] if len(ends) > 1 else ():
            others = min(
                (n for n in ends if n not in result["exposed"]), key=lambda n: float(np.mean(ends[n]))
            )
            text = f"{kind}: {short[layer]} alone changes more predictions than any layer of the core"
            claims.append(
                higher(model, text, ends[others], ends[layer], "layer", f"points beyond {short[others]}")
            )
    return claims


def _larger(model: str, text: str, ratios: Any, differs: str) -> Claim:
    interval = geometric_mean_ratio(ratios, np.ones(len(ratios)), n_resamples=N_RESAMPLES)
    return Claim(model, text, f"{span(interval, 3)} times", interval, 1.0, differs=differs, alike=SAME_RATIO)


def show(results: Sequence[Found]) -> Shown:
    """Agreement and final error by lambda, the share that is feedback, each layer alone, and planted columns."""
    rows, alone, places, panels, lambdas = [], [], [], [], []
    for result in results:
        for name, parts in result["parts"].items():
            rows += [(result["model"], name, columns, *_row(curve)) for columns, curve in parts.items()]
        first = next(iter(result["parts"].values()))
        lambdas = first[WHOLE]["lambdas"]
        means = {k: [100 * float(np.mean(a)) for a in c["agreement"]] for k, c in first.items()}
        panels.append((result["model"], {k: (lambdas, mean) for k, mean in means.items()}))
        short = short_names(result["alone"])
        alone += [
            (result["model"], short[layer], kind, *_row(curve))
            for layer, kinds in result["alone"].items()
            for kind, curve in kinds.items()
        ]
        places += [
            (result["model"], f"x {factor}", place, *_row(curve))
            for factor, of in result["places"].items()
            for place, curve in of.items()
        ]
    text = (
        "Top-1 agreement with full precision after the last step, by lambda: each step starts from the state of full "
        "precision plus lambda times the error so far, so 0 resets the state and 1 is the rounded loop. Feedback: "
        "share of the changed predictions that the reset brings back. Error: of the final state, relative. Cosine: of "
        "a step's own error, after one more step, with that step's own."
    )
    planted = (
        f"One scale per row. Planted: the largest column is {FACTORS['outlier']:g} times larger and its input as much "
        "smaller, which changes the rounding alone."
    )
    every = "One scale per row. Each of these layers has a column so many times larger, and its input as much smaller."
    ends = ("feedback (95 %)", "error, lambda 0", "times at lambda 1", "cosine")
    header = ("model", "rounding", "of", *(f"lambda {x:g}" for x in lambdas), *ends)
    one = ("model", "layer", "column", "lambda 0", "lambda 1", *ends)

    def pictures() -> list[Any]:
        at = ("lambda [share]", "same top-1 prediction [%]")
        return [curves(panels, "feedback", TITLE, text, at)]

    where = ("model", "column", "of", *one[3:])
    shown = [
        ShownTable(TITLE, text, header, tuple(rows)),
        ShownTable(ALONE, planted, one, tuple(alone)),
        ShownTable(STRONGER, every, where, tuple(places)),
    ]
    return Shown(shown, [c for result in results for c in _claims(result)], pictures)


TABLES.register("feedback")(
    PaperTable(
        ("Section 3.1", "Appendix E"),
        TITLE,
        "Huginn's adapter: a reset before each step raises agreement from 10.4 to 69.2 %; the final error is 1.989 "
        "times larger with feedback than without per channel and 2.085 in groups of 128; of the embedding's columns "
        "2.010 and 2.264, of the state's 1.358 and 2.065.",
        measure,
        show,
        refuses,
    )
)
