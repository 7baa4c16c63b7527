"""Tables that compare variants of a model with full precision: rows, paired intervals, claims and bars."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from loopq.analysis.report.style import SERIES, Picture, label, line, panels, styled, whole_numbers
from loopq.evaluation.stats import (
    Interval,
    bootstrap,
    geometric_mean_ratio,
    mcnemar_exact,
    mean_interval,
    paired_proportion_difference,
    wilson,
)
from loopq.paper.shown import Claim, Found, Shown, ShownTable
from loopq.paper.stats import gap_closed
from loopq.terminal.table import short

if TYPE_CHECKING:
    from loopq.paper.bench import Bench
    from loopq.run.config import QuantConfig

Values = Sequence[float] | NDArray[np.float64]
N_RESAMPLES = 10_000
#: Two mean errors that are closer than this, in nats, change nothing that a reader of text or scores can see.
RESOLUTION = 1e-4
#: Ratios of two errors, and differences of two shares in points, that make no difference.
SAME_RATIO, SAME_POINTS, ANY = (1 / 1.05, 1.05), (-1.0, 1.0), (-float("inf"), float("inf"))
#: What differs where the two of a pair are calibrated on other steps, or one is rounded.
CALIBRATION = "calibration"
#: What differs between a cure and the plain variant, by a part of its name.
CURES = {"groups": "group size", "rotated": "rotation of the planted layers", "alpha": CALIBRATION}
FULL = "full precision"
RTN, ONE, ALL = "RTN", "GPTQ, one step", "GPTQ, all steps"
TEXT = (
    "KL to full precision in nats, mean over held-out prompts, 95 %: bootstrap over prompts; agreement: same top-1 "
    "token; last token right: prompts whose last token, or of a task whole answer, is predicted, which stands in for "
    "the paper's task scores. Models without logits have the squared relative error of their output for KL and its "
    "cosine for agreement."
)
HEADER = ("model", "variant", "KL", "95 %", "agreement", "last token right", "bits per byte", "kB")


def without_logits(bench: Bench) -> str | None:
    """Without logits there are no predictions, and texts or answers have no likelihood."""
    return None if bench.system.output == "logits" else "the model has no logits, so it predicts no token"


def without_exposed(bench: Bench) -> str | None:
    """A comparison with the core needs an exposed layer. Its predictions need logits."""
    exposed = any(p.exposed for p in bench.system.shared_parameters(bench.depth))
    why = None if exposed else "no layer is feedback-exposed: each has an identity path around it"
    return without_logits(bench) or why


def three(bench: Bench, **grid: int) -> dict[str, QuantConfig]:
    """Return the variants of Li, Table 2: rounding, GPTQ on step 0 and GPTQ on the trajectory."""
    return {RTN: bench.rtn(**grid), ONE: bench.gptq("first", **grid), ALL: bench.gptq("all", **grid)}


def ratio(top: Values, bottom: Values) -> Interval:
    """Ratio of two means over the same units, with its paired bootstrap."""
    return bootstrap([top, bottom], lambda x, y, axis: x.mean(axis) / y.mean(axis), n_resamples=N_RESAMPLES)


def unresolved(difference: Interval) -> str:
    """Why a difference of two mean errors decides nothing. Empty where it can decide.

    The whole interval has to lie within the resolution: two means can be equal by chance.
    """
    within = difference.low > -RESOLUTION and difference.high < RESOLUTION
    return f"they differ by less than {RESOLUTION:g}" if within else ""


def closer(
    model: str, text: str, better: Values, worse: Values, differs: str, words: str = "KL ratio"
) -> Claim:
    """Claim that the first of two errors is smaller. Both are given by prompt: KL, or a squared relative error."""
    interval = ratio(better, worse)
    difference = np.asarray(better) - np.asarray(worse)
    why = unresolved(mean_interval(difference, n_resamples=N_RESAMPLES))
    numbers, alike = f"{words} {span(interval, 3)}", ANY if why else SAME_RATIO
    return Claim(model, text, numbers, interval, 1.0, True, why, differs, alike)


def higher(
    model: str, text: str, more: Values, less: Values, differs: str, what: str = "points of agreement"
) -> Claim:
    """Claim that the first of two shares is higher. Both are given by prompt."""
    gain = mean_interval(100 * (np.asarray(more) - np.asarray(less)), n_resamples=N_RESAMPLES)
    numbers = f"{gain.estimate:+.1f} {what} [{gain.low:+.1f}, {gain.high:+.1f}]"
    return Claim(model, text, numbers, gain, differs=differs, alike=SAME_POINTS)


def most(
    model: str, text: str, wins: Sequence[bool], differs: str, of: str = "layers", given: str = ""
) -> Claim:
    """Claim that something holds in most layers. Wilson's interval of their share has to exclude a half."""
    share = wilson(sum(wins), len(wins))
    found = f"{sum(wins)} of {len(wins)} {of}"
    return Claim(model, text, found, share, 0.5, differs=differs, given=given)


def grown(model: str, text: str, after: Values, before: Values, differs: str, bound: float = 1.0) -> Claim:
    """Claim that a count grows by more than a factor, in the geometric mean over the layers' inputs."""
    interval = geometric_mean_ratio(after, before, n_resamples=N_RESAMPLES)
    numbers = f"{span(interval, 2)} times over {interval.n} inputs"
    return Claim(model, text, numbers, interval, bound, differs=differs, alike=SAME_RATIO)


def span(interval: Interval, digits: int) -> str:
    """Write an interval as text: "0.500 [0.400, 0.600]"."""
    low, high = (f"{end:.{digits}f}" for end in (interval.low, interval.high))
    return f"{interval.estimate:.{digits}f} [{low}, {high}]"


def below(
    result: Found, better: str, worse: str, text: str | None = None, differs: str = CALIBRATION
) -> Claim:
    """Claim that one variant is closer to full precision than another, tested by the interval of the KL ratio."""
    a, b = (result["variants"][name]["kl"] for name in (better, worse))
    claim = closer(result["model"], text or f"{better} is closer than {worse}", a, b, differs)
    return replace(claim, pair=(better, worse))


def cured(result: Found, harmed: str, kind: str) -> list[Claim]:
    """Claims that remedies for a planted column or channel help. Only for planted models."""
    names = [n for n in result["variants"] if n in result.get("cures", ()) and n.startswith(kind)]
    differs = {n: next(what for part, what in CURES.items() if part in n) for n in names}
    return [below(result, name, harmed, None, differs[name]) for name in names]


def answers(result: Found, better: str, worse: str, differs: str = CALIBRATION) -> list[Claim]:
    """Claim that one variant gets more last tokens right. There is none without tokens."""
    a, b = (result["variants"][name]["answered"] for name in (better, worse))
    if a is None:
        return []
    x, y = np.array(a) > 0, np.array(b) > 0
    only_a, only_b = int((x & ~y).sum()), int((y & ~x).sum())
    gain = paired_proportion_difference(only_a, only_b, len(x), n_resamples=N_RESAMPLES)
    text = f"{better} gets more last tokens right than {worse}"
    claim = paired_shares(result["model"], text, gain, mcnemar_exact(only_a, only_b), differs)
    return [replace(claim, pair=(better, worse))]


def paired_shares(model: str, text: str, gain: Interval, p: float, differs: str) -> Claim:
    """Claim that one share of the same answers is larger.

    The bootstrap and McNemar's test have to exclude 0: of few discordant answers the bootstrap is too narrow.
    """
    numbers = f"{100 * gain.estimate:+.1f} points [{100 * gain.low:+.1f}, {100 * gain.high:+.1f}]"
    alike = (SAME_POINTS[0] / 100, SAME_POINTS[1] / 100)
    return Claim(
        model, text, f"{numbers}, exact McNemar p = {p:.3g}", gain, differs=differs, alike=alike, p=p
    )


def bits_per_byte(result: Found, name: str) -> list[float] | None:
    """Bits per byte of each prompt under a variant. None without logits or if bytes are unknown."""
    nll, width = result["variants"][name]["nll"], result["bytes_per_token"]
    return None if nll is None or width is None else [v / width / float(np.log(2.0)) for v in nll]


def closed(result: Found, name: str) -> float:
    """Share of rounding's KL that a variant removes (Li, Table 2)."""
    kl, rtn = (float(np.mean(result["variants"][n]["kl"])) for n in (name, RTN))
    return gap_closed(kl, rtn, 0.0)


def row(result: Found, name: str) -> tuple[str | None, ...]:
    """Cells of one variant, under `HEADER`."""
    v = result["variants"][name]
    interval = mean_interval(v["kl"], n_resamples=N_RESAMPLES)
    bits = bits_per_byte(result, name)
    right = None
    if v["answered"] is not None:
        hits = wilson(int(sum(v["answered"])), len(v["answered"]))
        right = f"{100 * hits.estimate:.0f} % [{100 * hits.low:.0f}, {100 * hits.high:.0f}]"
    return (
        result["model"],
        name,
        None if name == FULL else short(interval.estimate),
        None if name == FULL else f"[{interval.low:.3g}, {interval.high:.3g}]",
        None if name == FULL else f"{100 * float(np.mean(v['agreement'])):.1f} %",
        right,
        None if bits is None else f"{float(np.mean(bits)):.3f}",
        None if v["n_bytes"] is None else f"{v['n_bytes'] / 1e3:.1f}",
    )


def table(results: Sequence[Found], title: str, text: str = TEXT) -> ShownTable:
    """Return the table of all variants of all models."""
    rows = tuple(row(result, name) for result in results for name in result["variants"])
    return ShownTable(title, text, HEADER, rows)


def bars(results: Sequence[Found], name: str, title: str, caption: str) -> Picture:
    """Draw the KL of every variant with its interval, one panel per model."""
    with styled(name):
        longest = max(len(f["variants"]) for f in results)
        figure, many = panels(len(results), 6.0, 1.2 + 0.34 * longest, across=2)
        for axes, result in zip(many, results, strict=True):
            names = [n for n in result["variants"] if n != FULL][::-1]
            spans = [mean_interval(result["variants"][n]["kl"], n_resamples=N_RESAMPLES) for n in names]
            middle = np.array([s.estimate for s in spans])
            reach = np.array([[s.estimate - s.low for s in spans], [s.high - s.estimate for s in spans]])
            axes.errorbar(middle, range(len(names)), xerr=reach, fmt="o", color=SERIES[0][0], capsize=3)
            axes.set_yticks(range(len(names)), names)
            axes.margins(y=0.1)
            what = "KL to full precision [nats]" if result["output"] == "logits" else "squared error [ratio]"
            label(axes, what, "", result["model"])
    return Picture(name, title, caption, figure)


def curves(
    models: Sequence[tuple[str, Mapping[str, tuple[Any, Any]]]],
    name: str,
    title: str,
    caption: str,
    axes_labels: tuple[str, str],
    log: bool = False,
) -> Picture:
    """Draw named series of (x, y), one panel per model."""
    with styled(name):
        figure, many = panels(len(models))
        for axes, (heading, series) in zip(many, models, strict=True):
            for index, (text, (x, y)) in enumerate(series.items()):
                line(axes, index, x, y, text, markevery=0.1 if len(x) > 40 else None)
            if log:
                axes.set_xscale("log")
                axes.set_yscale("log")
            elif all(float(x).is_integer() for xs, _ in series.values() for x in xs):
                whole_numbers(axes.xaxis)
            label(axes, *axes_labels, heading)
        # One common legend if no panel has all curves.
        handles = {
            text: drawn
            for axes in many
            for drawn, text in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        if len(handles) > 1:
            figure.legend(handles.values(), handles, loc="outside lower center", ncols=min(len(many), 2))
    return Picture(name, title, caption, figure)


def show_variants(
    name: str,
    title: str,
    caption: str,
    claims: Callable[[Found], Sequence[Claim]],
) -> Callable[[Sequence[Found]], Shown]:
    """Show the variants of all models as a table, claims and bars."""

    def show(results: Sequence[Found]) -> Shown:
        tested = [c for result in results for c in claims(result)]
        return Shown([table(results, title)], tested, lambda: [bars(results, name, title, caption)])

    return show
