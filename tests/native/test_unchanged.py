"""Codes, scales and sums of every method have the bits that were recorded: a change of the core must not change one.

The inputs are whole numbers from a congruential generator, so that no random number generator and no BLAS takes part.
``python -m tests.native.test_unchanged`` writes the record anew; do that only with a change of numerics, and say so in
the changelog.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loopq import _native as native
from tests.support import core

RECORD = Path(__file__).parents[1] / "golden" / "unchanged.json"
ROWS, DIM = 37, 200
#: As the record names it: 0 stands for one scale per row, and "bfloat16:5" keeps five significant bits.
GRID = {"bits": 4, "group_size": 32, "symmetric": True, "scale_dtype": "float32"}
CD = {"signed": True, "beam": 1, "sweeps": 30, "rounds": 4, "refit": True}

Case = Callable[[], dict[str, Any]]


def whole(n: int, seed: int, top: int) -> np.ndarray:
    """Give `n` whole numbers in ``-top..top``."""
    state = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    state ^= state >> np.uint64(30)
    state *= np.uint64(0xBF58476D1CE4E5B9)
    state ^= state >> np.uint64(27)
    state *= np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    return (state % np.uint64(2 * top + 1)).astype(np.int64) - top


def weight(rows: int = ROWS, dim: int = DIM, seed: int = 1) -> np.ndarray:
    """Weights of whole 64ths; a row of zeros and a group of zeros among them."""
    w = (whole(rows * dim, seed, 120).reshape(rows, dim) / 64).astype(np.float32)
    w[rows // 2] = 0
    w[0, :32] = 0
    return w


def inputs(n: int, dim: int, seed: int = 2) -> np.ndarray:
    """Rows of small whole numbers with neighbouring columns correlated; one column is always zero."""
    x = whole(n * dim, seed, 4).reshape(n, dim)
    x[:, 1:] += x[:, :-1]
    x[:, dim // 3] = 0
    return x.astype(np.float32)


def hessian(dim: int = DIM, seed: int = 2) -> np.ndarray:
    """``X^T X`` in whole numbers, so exactly."""
    x = inputs(2 * dim, dim, seed).astype(np.int64)
    return (x.T @ x).astype(np.float64)


def factor(
    h: np.ndarray, order: Any = "conditional", *, damping: float = 0.01, precision: Any = "float64"
) -> Any:
    """Factor a Hessian with a fraction of its mean diagonal, summed in order, as damping."""
    mu = np.full(len(h), damping * float(np.cumsum(np.diag(h), dtype=np.float64)[-1] / len(h)))
    return native.DampedFactor(h, mu, order=order, precision=precision, threads=2)


def grid(options: dict[str, Any]) -> dict[str, Any]:
    """The fields of a grid that the record names in its own way."""
    kind, _, bits = options.get("scale_dtype", "float32").partition(":")
    return options | {
        "group_size": options["group_size"] or -1,
        "scale_dtype": kind,
        "scale_bits": int(bits) if bits else None,
    }


def gptq(
    w: np.ndarray,
    h: np.ndarray,
    *,
    damping: float = 0.01,
    precision: str = "float64",
    act_order: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Solve by GPTQ."""
    factored = factor(h, "diagonal" if act_order else "natural", damping=damping, precision=precision)
    return core.gptq(w, factored, threads=2, **grid(options))


def gptq_cd(w: np.ndarray, h: np.ndarray, *, order: str = "conditional", **options: Any) -> dict[str, Any]:
    """Solve by coordinate descent."""
    return native.gptq_cd(w, factor(h, order), core.cd_settings(**grid(GRID | CD | options)), threads=2)


def coupled(w: np.ndarray, h: np.ndarray, sizes: list[int], passes: int) -> dict[str, Any]:
    """Solve under metrics between outputs."""
    left = [native.DampedFactor(hessian(n, 5 + n), np.full(n, 7.0), order="conditional") for n in sizes]
    settings = core.cd_settings(**GRID | CD | {"bits": 2})
    return native.coupled(w, factor(h), left, settings, passes=passes, threads=2)


def trellis(bits: int, state_bits: int, sizes: list[int]) -> dict[str, Any]:
    """Code on a trellis under metrics between outputs."""
    left = [native.DampedFactor(hessian(n, 5 + n), np.full(n, 7.0), order="natural") for n in sizes]
    return core.trellis(
        weight(), factor(hessian()), left, bits=bits, group_size=32, scale_dtype="float16",
        state_bits=state_bits, threads=2,
    )  # fmt: skip


def only_codes(result: dict[str, Any]) -> dict[str, Any]:
    """The part of a solver's result that must not change."""
    return {name: result[name] for name in ("codes", "scales", "zeros")}


def rtn_cases() -> Iterator[tuple[str, Case]]:
    """Rounding to nearest on every grid."""
    axes = itertools.product((2, 3, 4, 8), (0, 20, 32), (True, False), ("max", "mse"))
    for bits, group, symmetric, search in axes:
        options = {"bits": bits, "group_size": group, "symmetric": symmetric, "scale_search": search}
        yield f"rtn {options}", lambda o=options: core.rtn(weight(), threads=2, **grid(o))
    for scale in ("float16", "bfloat16", "bfloat16:5"):
        options = {"bits": 3, "group_size": 50, "scale_dtype": scale, "scale_search": "mse"}
        yield f"rtn {options}", lambda o=options: core.rtn(weight(), threads=2, **grid(o))


def gptq_cases() -> Iterator[tuple[str, Case]]:
    """GPTQ with each option on its own, and those that act together."""
    changes: list[dict[str, Any]] = [{"bits": b} for b in (2, 3, 4, 8)]
    changes += [{"group_size": g} for g in (0, 7, 128)]
    changes += [{"scale_dtype": s} for s in ("float16", "bfloat16", "float16:5")]
    changes += [{"block_size": b} for b in (1, 24, 1000)] + [{"damping": d} for d in (1e-6, 0.3)]
    changes += [{"symmetric": False, "bits": b, "scale_search": s} for b in (2, 4) for s in ("max", "mse")]
    for scales, precision, search in itertools.product(
        ("group", "static"), ("float64", "float32"), ("max", "mse")
    ):
        changes.append({"scales": scales, "precision": precision, "scale_search": search, "bits": 3})
    for precision, search in itertools.product(("float64", "float32"), ("max", "mse")):
        changes.append(
            {"act_order": True, "scales": "static", "precision": precision, "scale_search": search}
        )
    for change in changes:
        yield f"gptq {change}", lambda c=change: gptq(weight(), hessian(), **GRID | c)
    wide = (weight(250, 431, 3), hessian(431, 4))
    for precision in ("float64", "float32"):
        yield f"gptq wide {precision}", lambda p=precision: gptq(*wide, **GRID, precision=p)
    yield "gptq float32 H", lambda: gptq(weight(), hessian().astype(np.float32), **GRID)


def gptq_cd_cases() -> Iterator[tuple[str, Case]]:
    """The solver with descent and refit, each option on its own; the same coupled; shifted targets."""
    changes: list[dict[str, Any]] = [{"bits": b} for b in (2, 3, 4, 8)]
    changes += [{"group_size": g} for g in (0, 24)] + [{"scale_dtype": s} for s in ("float16", "bfloat16:5")]
    changes += [{"order": o, "bits": 3} for o in ("diagonal", "natural")]
    changes += [
        {"signed": False, "bits": 2},
        {"symmetric": False, "bits": 2},
        {"symmetric": False, "bits": 3},
    ]
    changes += [{"sweeps": 0}, {"rounds": 0}, {"rounds": 1, "refit": False}, {"refit": False, "bits": 2}]
    changes += [
        {"beam": 2},
        {"beam": 16},
        {"beam": 16, "bits": 2, "symmetric": False},
        {"beam": 64, "rounds": 0},
    ]
    for change in changes:
        yield f"gptq-cd {change}", lambda c=change: gptq_cd(weight(), hessian(), **c)
    for beam in (1, 8):
        yield (
            "gptq-cd wide" + f" {beam} paths" * (beam > 1),
            lambda k=beam: gptq_cd(weight(20, 431, 3), hessian(431, 4), group_size=64, beam=k),
        )
    for sizes, passes in (([37], 0), ([37], 2), ([16, 21], 1)):
        yield f"coupled {sizes} {passes}", lambda s=sizes, p=passes: coupled(weight(), hessian(), s, p)
    for bits, state_bits, sizes in ((2, 10, [37]), (3, 8, [16, 21]), (4, 6, [36, 1])):
        yield (
            f"trellis {bits} {state_bits} {sizes}",
            lambda b=bits, t=state_bits, s=sizes: trellis(b, t, s),
        )
    cross = whole(DIM * DIM, 9, 60).reshape(DIM, DIM).astype(np.float64)
    for order, alpha in (("natural", 1.0), ("natural", 0.3), ("conditional", 1.0)):
        yield (
            f"shift {order} {alpha}",
            lambda o=order, a=alpha: {"shifted": factor(hessian(), o).shift(weight(), cross, a, threads=2)},
        )


def sum_cases() -> Iterator[tuple[str, Case]]:
    """Hessian sums: row types, widths, chunks, steps apart or together, merged, weighted, restored."""
    for dim, kind, per_step in itertools.product((5, 48, 200, 500), ("F32", "F16", "BF16"), (True, False)):
        yield f"sums {dim} {kind} {per_step}", lambda d=dim, k=kind, p=per_step: sums(d, k, p)
    for dim in (63, 97):
        # Products that round within a block: float32 rows have the same bits on every instruction set.
        yield f"sums of fractions {dim}", lambda d=dim: fractions(d)


def stored(rows: np.ndarray, kind: str) -> np.ndarray:
    """Give rows of small whole numbers in another type."""
    if kind == "BF16":
        return (rows.view(np.uint32) >> 16).astype(np.uint16)
    return rows.astype({"F32": np.float32, "F16": np.float16}[kind])


def sums(dim: int, kind: str, per_step: bool) -> dict[str, Any]:
    """Add rows in uneven chunks to three steps, merge with another sum, read everything."""
    parts = []
    for seed in (3, 4):
        x = inputs(1500, dim, seed)
        x, more = stored(x, kind), stored(inputs(2 * dim, dim, 7), kind)
        total = native.HessianAccumulator(dim, [0, 2, 3], per_step=per_step, threads=2)
        for step, chunk in ((0, 700), (2, 512), (3, 33)):
            for start in range(0, len(x), chunk):
                total.update(step, x[start : start + chunk])
        total.update(2, more)
        total.finish()
        parts.append(total)
    parts[0].merge(parts[1])
    again = native.HessianAccumulator.from_state(parts[0].state())
    state: dict[str, Any] = dict(again.state())
    weighted = {"weighted": again.matrix(weights=[0.5, 1.0, 0.25])} if per_step else {}
    limbs = {f"{limb} {i}": v for limb in ("hi", "lo") for i, v in enumerate(state[limb])}
    return limbs | weighted | {"matrix": again.matrix(), "diagonal": again.diagonal()}


def fractions(dim: int) -> dict[str, Any]:
    """Sum rows of hundredths."""
    total = native.HessianAccumulator(dim, [0], per_step=True, threads=2)
    total.update(0, inputs(1100, dim, 6) / np.float32(100))
    total.finish()
    state: dict[str, Any] = dict(total.state())
    return {"hi": state["hi"][0], "lo": state["lo"][0]}


def digest(arrays: dict[str, Any]) -> str:
    """Hash names, types, shapes and bytes."""
    sha256 = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        sha256.update(f"{name} {None if array is None else (array.dtype.str, array.shape)}".encode())
        sha256.update(b"" if array is None else np.ascontiguousarray(array).tobytes())
    return sha256.hexdigest()[:16]


def cases() -> dict[str, Case]:
    """All cases by name."""
    solved = [(n, lambda c=c: only_codes(c())) for n, c in itertools.chain(rtn_cases(), gptq_cases())]
    rest = [(n, c if n.startswith("shift") else lambda c=c: only_codes(c())) for n, c in gptq_cd_cases()]
    return dict(itertools.chain(solved, rest, sum_cases()))


CASES = cases()


@pytest.mark.parametrize("name", CASES)
def test_bits_are_those_of_the_record(name: str) -> None:
    assert digest(CASES[name]()) == json.loads(RECORD.read_text())[name]


if __name__ == "__main__":
    found = {name: digest(case()) for name, case in CASES.items()}
    RECORD.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
