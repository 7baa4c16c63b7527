"""Li, Table 20: recursive filters with a rounded transition matrix. It needs no model.

Quantizing the feedback matrix moves poles, quantizing the others does not (Li, App. M).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopq.analysis.report.style import Picture
from loopq.errors import ConfigError, require
from loopq.paper.compared import curves
from loopq.paper.controls.rounding import round_signed
from loopq.paper.shown import TABLES, Found, PaperTable, Shown, ShownTable
from loopq.storage.schema import Object

Floats = NDArray[np.float64]

TITLE = "Stability of recursive filters"
# Largest pole magnitude with A rounded, by filter and bits 4, 6, 8, 10, 12, 16 (Li, Table 20).
PAPER = {
    "Butterworth 4": (2.593, 1.287, 1.134, 1.011, 0.934, 0.916),
    "Chebyshev I, 4": (4.575, 1.441, 1.141, 1.062, 0.950, 0.965),
    "Chebyshev I, 6": (5.645, 1.922, 1.602, 1.202, 1.134, 1.012),
    "Elliptic 4": (4.569, 1.439, 1.140, 1.002, 0.995, 0.967),
}
BITS = (4, 6, 8, 10, 12, 16)
# Li, App. M gives the ripple of only one design. A scan over ripple and attenuation shows that exactly these values
# give Table 20 to three decimals. "Order" means the prototype's order: a band-pass filter has twice as many poles.
DESIGNS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "Butterworth 4": ("butter", (4, (0.2, 0.4))),
    "Chebyshev I, 4": ("cheby1", (4, 0.5, (0.2, 0.4))),
    "Chebyshev I, 6": ("cheby1", (6, 1.0, (0.3, 0.5))),
    "Elliptic 4": ("ellip", (4, 0.5, 40, (0.2, 0.4))),
}


@dataclass(frozen=True)
class Realisation:
    """State-space form x' = A x + B u, y = C x + D u of one filter."""

    A: Floats
    B: Floats
    C: Floats
    D: Floats


def design(name: str) -> Realisation:
    """Return the companion realisation of one of the filters of Li, Table 20.

    Raises
    ------
    ConfigError
        No such filter.
    MissingExtraError
        SciPy is not installed.
    """
    if name not in DESIGNS:
        raise ConfigError(f"unknown filter {name!r}; known: {', '.join(DESIGNS)}")
    signal = require("scipy.signal")
    function, arguments = DESIGNS[name]
    b, a = getattr(signal, function)(*arguments, "bandpass")
    return Realisation(*(np.atleast_2d(m) for m in signal.tf2ss(b, a)))


def modal(form: Realisation) -> Realisation:
    """Rewrite a filter in real block-diagonal form with the same poles and a 2x2 block per complex pair.

    Raises
    ------
    ConfigError
        If A has repeated poles. The form does not exist then.
    """
    values, vectors = np.linalg.eig(form.A)
    if np.linalg.cond(vectors) > 1e12:
        raise ConfigError("the filter has (nearly) repeated poles: no modal form in double precision")
    columns: list[Floats] = []
    blocks = np.zeros_like(form.A)
    for value, vector in zip(values, vectors.T, strict=True):
        at = len(columns)
        if value.imag == 0:
            columns.append(vector.real)
            blocks[at, at] = value.real
        elif value.imag > 0:
            columns.extend([vector.real, vector.imag])
            blocks[at : at + 2, at : at + 2] = [[value.real, value.imag], [-value.imag, value.real]]
    basis = np.stack(columns, axis=1)
    return Realisation(blocks, np.asarray(np.linalg.solve(basis, form.B), np.float64), form.C @ basis, form.D)


def radius(matrix: Floats) -> float:
    """Largest eigenvalue magnitude."""
    return float(np.abs(np.linalg.eigvals(matrix)).max())


def row(name: str, bits: int, form: str = "companion") -> Object:
    """Quantize one filter at one number of bits: A alone, and B, C and D together.

    Returns
    -------
    dict
        `filter`, `form` ("companion" is the controllable canonical form of Li, App. M, or "modal") and `bits`.
        `n_states` is the number of poles. `original`, `a_quantized` and `bcd_quantized` are the largest pole
        magnitudes: as designed, with A quantized, and with B, C and D quantized. `stable` is whether all poles with A
        quantized lie on or inside the unit circle.
    """
    if form not in ("companion", "modal"):
        raise ConfigError(f"form must be companion or modal; got {form!r}")
    filter_ = design(name) if form == "companion" else modal(design(name))
    quantized = Realisation(filter_.A, *(round_signed(m, bits) for m in (filter_.B, filter_.C, filter_.D)))
    after = radius(round_signed(filter_.A, bits))
    sizes = {"original": radius(filter_.A), "a_quantized": after, "bcd_quantized": radius(quantized.A)}
    head = {"filter": name, "form": form, "bits": bits, "n_states": len(filter_.A)}
    return head | sizes | {"stable": not after > 1.0}


def table(forms: tuple[str, ...] = ("companion", "modal")) -> list[Object]:
    """All filters at all numbers of bits. The companion rows are Li, Table 20.

    Notes
    -----
    The modal rows show that the companion form causes the failure as much as feedback. In block-diagonal form the same
    poles stay stable. The only exception is the Chebyshev filter of order 6 at 4 bits.
    """
    return [row(name, b, form) for form in forms for name in DESIGNS for b in BITS]


def show(results: Sequence[Found]) -> Shown:
    """Compute the 24 rows, and the same filters in modal form."""
    rows = table()
    cells = tuple(
        (
            r["filter"], r["form"], str(r["bits"]), f"{r['original']:.3f}", f"{r['a_quantized']:.3f}",
            f"{r['bcd_quantized']:.3f}", "yes" if r["stable"] else "no",
        )
        for r in rows
    )  # fmt: skip
    companion = {(r["filter"], r["bits"]): r["a_quantized"] for r in rows if r["form"] == "companion"}
    equal = sum(
        f"{companion[name, bits]:.3f}" == f"{value:.3f}"
        for name, values in PAPER.items()
        for bits, value in zip(BITS, values, strict=True)
    )
    moved = sum(abs(r["bcd_quantized"] - r["original"]) >= 1e-9 for r in rows)
    lines = [
        f"Of the paper's rows {equal} of 24 come out to three decimals.",
        f"Rounding B, C and D moves the largest pole in {moved} of {len(rows)} rows.",
    ]
    text = "Largest pole magnitude: as designed, with A rounded, with B, C and D rounded. Above 1 it is unstable."
    header = ("filter", "form", "bits", "designed", "A rounded", "B, C, D rounded", "stable")
    series = {n: (BITS, [companion[n, b] for b in BITS]) for n in DESIGNS}

    def pictures() -> list[Picture]:
        axes = ("bits [number]", "largest pole [magnitude]")
        return [curves([("companion form", series)], "iir", TITLE, text, axes)]

    return Shown([ShownTable(TITLE, text, header, cells)], (), pictures, lines)


TABLES.register("iir")(
    PaperTable(
        ("Table 20",),
        TITLE,
        "All four filters are unstable at 10 bits and less with A rounded, three are stable from 12, the Chebyshev "
        "filter of order 6 at no width; B, C and D never matter.",
        None,
        show,
    )
)
