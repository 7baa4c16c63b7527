"""The record as a page: methods by models, with what each is worth beside preset best at equal bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

N_RESAMPLES = 2000
#: Models from which on a bar on the geometric mean says something.
ENOUGH = 4
BEST = "best"
#: The most that a method may have of best's KL on the geometric mean over models, by bits: 20 and 30 % less for
#: corrections, 35 % less for codes on another grid, 25 and 40 % less for codes by gradient, 30 % less for mixed bits.
_CORRECTION, _CODE = {4: 0.8, 3: 0.7}, {3: 0.65, 2: 0.65}
BARS = {
    **dict.fromkeys(("trellis", "trellis, 8 bits", "trellis, 12 bits", "E8 table", "D4 table"), _CODE),
    "codes by gradient": {3: 0.75, 2: 0.6},
    "mixed bits": {3: 0.7},
    **dict.fromkeys(("state bias, closed form", "state, closed form", "state, gradient"), _CORRECTION),
    **dict.fromkeys(("one layer, gradient", "low rank, gradient", "every layer, no step"), _CORRECTION),
}

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Ratio:
    """KL over that of best for one model: the estimate, its resamples, draws of calibration text, bytes over best's."""

    estimate: float
    resampled: NDArray[np.float64]
    n_draws: int
    n_bytes: float

    def __str__(self) -> str:
        low, high = np.quantile(self.resampled, [0.025, 0.975])
        draws = f", {self.n_draws} draws" if self.n_draws > 1 else ""
        return f"{self.estimate:.3f} [{low:.3f}, {high:.3f}]{draws}"


def report(found: Rows) -> str:
    """The record: what was asked, ratios, then KL, bytes and seconds of every result."""
    if not found:
        return "nothing is saved"
    sizes = found[0]["sizes"]
    lines = [
        "# Past the uniform grid",
        "",
        "`python -m benches.next`; scales of 128 columns in float16. "
        f"Calibration: {sizes['n_calibration']} prompts of {sizes['seq_len']} tokens; measured on "
        f"{sizes['n_evaluation']} prompts of another author, from two initial states where the state is random.",
        "",
        tables(found),
    ]
    for bits in _bits(found):
        lines += ["", f"## {bits} bits", "", *values([r for r in found if r["bits"] == bits])]
    return "\n".join(lines)


def tables(found: Rows) -> str:
    """The ratios, for each number of bits: what the page in docs shows."""
    lines = [
        "KL to full precision over that of `--preset best`, same draws of calibration prompts, same held-out prompts; "
        "in brackets 95 %, paired bootstrap over prompts; bytes relative to best's, all that is stored. GSM8K: the "
        "geometric mean on problems of GSM8K, text of another kind than was calibrated on.",
    ]
    for bits in _bits(found):
        rows = [r for r in found if r["bits"] == bits]
        models = list(dict.fromkeys(r["model"] for r in rows))
        lines += [
            "",
            f"| {bits} bits | bytes | geometric mean, models | bar | GSM8K | {' | '.join(models)} |",
            "|" + "---|" * (5 + len(models)),
        ]
        for method in dict.fromkeys(r["method"] for r in rows if r["method"] != BEST):
            lines += line(rows, method, models, BARS.get(method, {}).get(bits))
    return "\n".join(lines)


def line(rows: Rows, method: str, models: list[str], bar: float | None) -> list[str]:
    """One method: bytes, geometric mean over models with its interval, the bar, text of another kind, each model."""
    ratios = {m: paired([r for r in rows if r["model"] == m], method) for m in models}
    there = [r for r in ratios.values() if r is not None]
    if not there:
        return []
    mean = geometric_mean(there)
    others = [paired([r for r in rows if r["model"] == m], method, "kl_by_prompt_other") for m in models]
    on_other = [r for r in others if r is not None]
    other = f"{geometric_mean(on_other)}, {len(on_other)}" if on_other else ""
    verdict = "" if bar is None else f"{bar} {'cleared' if mean.estimate <= bar else 'missed'}"
    if bar is not None and len(there) < ENOUGH:
        verdict += f" on {len(there)}"
    cells = ["" if r is None else str(r) for r in ratios.values()]
    start = f"| {method} | {100 * (mean.n_bytes - 1):+.2f} % | {mean}, {len(there)} | {verdict} | {other} |"
    return [f"{start} {' | '.join(cells)} |"]


def geometric_mean(ratios: list[Ratio]) -> Ratio:
    """Over models, with the interval of their prompts."""
    return Ratio(
        float(np.exp(np.mean([np.log(r.estimate) for r in ratios]))),
        np.exp(np.mean([np.log(r.resampled) for r in ratios], axis=0)),
        1,
        float(np.mean([r.n_bytes for r in ratios])),
    )


def paired(rows: Rows, method: str, by_prompt: str = "kl_by_prompt") -> Ratio | None:
    """A method beside best over all draws that have both, the same prompts in both."""
    own = {r["draw"]: r for r in rows if r["method"] == method and by_prompt in r}
    base = {r["draw"]: r for r in rows if r["method"] == BEST and by_prompt in r}
    draws = sorted(own.keys() & base.keys())
    if not draws:
        return None
    a, b = (np.mean([side[d][by_prompt] for d in draws], axis=0) for side in (own, base))
    chosen = np.random.default_rng(0).integers(0, a.size, (N_RESAMPLES, a.size))
    size = float(np.mean([own[d]["n_bytes"] / base[d]["n_bytes"] for d in draws]))
    return Ratio(
        float(a.mean() / b.mean()), a[chosen].mean(axis=1) / b[chosen].mean(axis=1), len(draws), size
    )


def values(rows: Rows) -> list[str]:
    """One line a model and method: bytes, KL by draw, agreement, seconds."""
    lines = [
        "| model | method | bytes | bits a weight | KL, by draw | agreement | CPU s |",
        "|---|---|---|---|---|---|---|",
    ]
    for model in dict.fromkeys(r["model"] for r in rows):
        for method in dict.fromkeys(r["method"] for r in rows):
            mine = [r for r in rows if (r["model"], r["method"]) == (model, method)]
            if not mine:
                continue
            size = float(np.mean([r["n_bytes"] for r in mine]))
            kl = ", ".join(f"{r['kl']:.5f}" for r in sorted(mine, key=lambda r: int(r["draw"])))
            agreement, seconds = (float(np.mean([r[k] for r in mine])) for k in ("agreement", "seconds"))
            lines.append(
                f"| {model} | {method} | {size:,.0f} | {8 * size / mine[0]['n_weights']:.3f} | {kl} | "
                f"{agreement:.4f} | {seconds:.0f} |"
            )
    return lines


def _bits(found: Rows) -> list[int]:
    return sorted({int(r["bits"]) for r in found}, reverse=True)
