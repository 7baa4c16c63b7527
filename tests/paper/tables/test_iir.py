"""Table 20: stability of recursive filters, and what another realisation of the same poles does."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from loopq.errors import ConfigError
from loopq.paper.tables import iir

ORIGINAL = {"Butterworth 4": 0.915, "Chebyshev I, 4": 0.962, "Chebyshev I, 6": 0.984, "Elliptic 4": 0.970}
STABLE_FROM = {"Butterworth 4": 12, "Chebyshev I, 4": 12, "Chebyshev I, 6": 17, "Elliptic 4": 12}


@pytest.mark.parametrize("name", iir.PAPER)
@pytest.mark.parametrize("bits", iir.BITS)
def test_every_row_of_the_paper_to_three_decimals(name: str, bits: int) -> None:
    row = iir.row(name, bits)
    assert round(row["original"], 3) == ORIGINAL[name]
    assert round(row["a_quantized"], 3) == iir.PAPER[name][iir.BITS.index(bits)]
    assert row["stable"] == (bits >= STABLE_FROM[name])
    # The poles do not depend on B, C and D: equal to machine precision, here exactly.
    assert row["bcd_quantized"] == row["original"]


def test_pole_counts_are_twice_the_prototype_order() -> None:
    assert [iir.row(name, 16)["n_states"] for name in iir.DESIGNS] == [8, 8, 12, 8]


def transfer(form: iir.Realisation, angles: NDArray[np.float64]) -> NDArray[np.complex128]:
    """Frequency response C (zI - A)^-1 B + D at z = exp(i angle)."""
    eye = np.eye(len(form.A))
    points = [form.C @ np.linalg.solve(np.exp(1j * w) * eye - form.A, form.B) + form.D for w in angles]
    return np.array([p[0, 0] for p in points])


@pytest.mark.parametrize("name", iir.PAPER)
def test_modal_form_is_the_same_filter(name: str) -> None:
    companion = iir.design(name)
    modal = iir.modal(companion)
    angles = np.linspace(0.05, 3.0, 40)
    np.testing.assert_allclose(transfer(modal, angles), transfer(companion, angles), rtol=1e-5, atol=1e-8)
    assert iir.radius(modal.A) == pytest.approx(iir.radius(companion.A), abs=1e-6)


def test_modal_form_survives_where_the_companion_form_does_not() -> None:
    stable = {(r["filter"], r["bits"]): r["stable"] for r in iir.table(forms=("modal",))}
    whole = [name for name in iir.DESIGNS if all(stable[name, b] for b in iir.BITS)]
    assert len(whole) == 3
    (rest,) = set(iir.DESIGNS) - set(whole)
    assert [stable[rest, b] for b in iir.BITS] == [False, True, True, True, True, True]


def test_table_has_all_rows() -> None:
    assert len(iir.table()) == 2 * len(iir.table(forms=("companion",))) == 48


def test_unknown_names_list_the_known() -> None:
    with pytest.raises(ConfigError, match="Butterworth 4"):
        iir.design("Bessel")
    with pytest.raises(ConfigError, match="companion"):
        iir.row("Butterworth 4", 8, form="jordan")


def test_the_modal_form_is_the_same_filter_in_blocks_of_poles() -> None:
    rng = np.random.default_rng(0)
    # Poles 0.5 and 0.6 +- 0.3j.
    poles = np.array([[0.5, 0, 0], [0, 0.6, 0.3], [0, -0.3, 0.6]])
    turn = rng.normal(size=(3, 3))
    form = iir.Realisation(
        turn @ poles @ np.linalg.inv(turn), rng.normal(size=(3, 1)), rng.normal(size=(1, 3)), np.eye(1)
    )
    modal_form = iir.modal(form)
    assert sorted(np.abs(np.linalg.eigvals(modal_form.A))) == pytest.approx(
        sorted([0.5, 0.45**0.5, 0.45**0.5])
    )
    assert np.count_nonzero(np.abs(modal_form.A) > 1e-12) == 5
    for k in range(4):
        one, other = (f.C @ np.linalg.matrix_power(f.A, k) @ f.B for f in (form, modal_form))
        np.testing.assert_allclose(one, other, rtol=1e-9)
    assert iir.radius(form.A) == pytest.approx(0.45**0.5)
    with pytest.raises(ConfigError, match="repeated poles"):
        iir.modal(
            iir.Realisation(np.array([[0.5, 1.0], [0.0, 0.5]]), np.ones((2, 1)), np.ones((1, 2)), np.eye(1))
        )


def test_the_papers_rows_come_out() -> None:
    shown = iir.show([])
    rows = shown.tables[0].rows
    assert shown.lines[0] == "Of the paper's rows 24 of 24 come out to three decimals."
    companion = {(r[0], r[2]): (r[4], r[6]) for r in rows if r[1] == "companion"}
    assert companion["Butterworth 4", "12"] == ("0.934", "yes")
    assert companion["Chebyshev I, 6", "16"] == ("1.012", "no")
    assert shown.lines[1] == f"Rounding B, C and D moves the largest pole in 0 of {len(rows)} rows."
    (picture,) = shown.pictures()
    lines = {x.get_label(): x.get_xydata() for x in picture.figure.axes[0].get_lines()}
    assert lines["Elliptic 4"][:, 0].tolist() == [4, 6, 8, 10, 12, 16]
    assert lines["Elliptic 4"][:, 1] == pytest.approx([4.569, 1.439, 1.14, 1.002, 0.995, 0.967], abs=6e-4)
