"""Treatment of every tensor of a model: its storage and error, or the reason why it stayed unchanged."""

from __future__ import annotations

import html
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from loopq.analysis.report.markup import Cell, bar, listed, number, paragraph, table
from loopq.analysis.report.style import short_name, short_names
from loopq.formats.checkpoint import Checkpoint
from loopq.storage.schema import Object
from loopq.terminal.table import size

_FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
#: Names shown of weights that were left alone for one reason.
_N_NAMES = 12


def tensors(checkpoint: Checkpoint, reasons: Mapping[str, str]) -> list[Object]:
    """Return the treatment of each tensor of a checkpoint, quantized ones first.

    Parameters
    ----------
    checkpoint : Checkpoint
        Quantized model. The solver is known if its layers have reports.
    reasons : mapping of str to str
        Why a weight stays unchanged, by name. Weights without a reason are outside the loop, or no matrices.

    Returns
    -------
    list of dict
        All have "name", "shape" and "n_bytes". Quantized ones have "bits", "grid" and "group_size". They may have
        "method", "steps", "error" and "error_rtn". "error" is ||X (W^ - W)^T||_F / ||X W^T||_F over the calibration
        rows X. "error_rtn" is the error of rounding to nearest. Other tensors have "dtype" and "reason".
    """
    rows: list[Object] = []
    for layer in checkpoint.layers.values():
        row = {"name": layer.name, "shape": list(layer.shape), "n_bytes": layer.n_bytes, "bits": layer.grid.bits,
               "grid": layer.grid.label, "group_size": layer.grid.group_size}  # fmt: skip
        rows.append(row | _solved(layer.report))
    for name, tensor in checkpoint.dense.items():
        row = {"name": name, "shape": list(tensor.shape), "n_bytes": int(tensor.data.size)}
        reason = reasons.get(name) or _why_left(tensor.shape)
        rows.append(row | {"dtype": tensor.dtype, "reason": reason})
    return rows


def _solved(report: Mapping[str, Any]) -> Object:
    """Method, steps and errors from a layer's report. None for missing ones."""
    return {
        "method": report.get("method_done"),
        "steps": report.get("steps") or [],
        "error": _root(report.get("proxy"), report.get("proxy_total")),
        "error_rtn": _root(report.get("proxy_rtn"), report.get("proxy_total")),
    }


def _root(loss: float | None, total: float | None) -> float | None:
    return None if loss is None or not total else float((max(loss, 0.0) / total) ** 0.5)


def _why_left(shape: Sequence[int]) -> str:
    if len(shape) < 2:
        return "no matrix: scales of norms, biases and the like"
    return (
        "outside the loop: used once for each token, not at every step (--outside 8 rounds such weights too)"
    )


def done(weights: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return tables of all tensors of some checkpoints, starting with the weights that one of them quantizes."""
    sets = {name: {row["name"]: row for row in rows} for name, rows in weights.items()}
    names = {row["name"] for rows in weights.values() for row in rows if "bits" in row}
    said = [_sentence(name if len(sets) > 1 else "", list(rows.values())) for name, rows in sets.items()]
    return (listed(said) if len(said) > 1 else paragraph(*said)) + _quantized(sets) + _left(sets, names)


def _quantized(sets: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """Return the table of the weights that some checkpoint quantizes, from entries of `tensors`, by checkpoint."""
    names = list(dict.fromkeys(name for rows in sets.values() for name, row in rows.items() if "bits" in row))
    caption = (
        "Error: how far the weight's output is from full precision on the calibration text, over all steps: "
        "‖X(Ŵ−W)ᵀ‖ / ‖XWᵀ‖; if rounded: the same for plain rounding on the same grid."
    )
    heads, rows = (_alone if len(sets) == 1 else _beside)(sets, names)
    return table("Quantized weights", heads, rows, caption=caption, name="quantized")


def _sentence(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    quantized = [row for row in rows if "bits" in row]
    kinds: dict[str, int] = {}
    for row in quantized:
        kinds[_grid(row)] = kinds.get(_grid(row), 0) + 1
    packed = sum(row["n_bytes"] for row in quantized)
    rest = sum(row["n_bytes"] for row in rows) - packed
    what = "; ".join(f"{count} {kind}" if len(kinds) > 1 else kind for kind, count in kinds.items()) or "none"
    start = f"{name}: " if name else ""
    return (
        f"{start}{len(quantized)} of {len(rows)} tensors are quantized ({what}): {size(packed)}. The other "
        f"{len(rows) - len(quantized)} are as they were: {size(rest)}."
    )


def _grid(row: Mapping[str, Any]) -> str:
    group = "a scale for each row" if row["group_size"] == -1 else f"groups of {row['group_size']}"
    return f"{row['grid']}, {group}"


def _shape(row: Mapping[str, Any]) -> Cell:
    shown = " × ".join(f"{length:,}" for length in row["shape"])
    return Cell(shown, "number", str(math.prod(row["shape"])))


def _alone(
    sets: Mapping[str, Mapping[str, Any]], names: Sequence[str]
) -> tuple[list[str], list[list[Cell | str]]]:
    """All known facts of one checkpoint's weights."""
    (rows,) = sets.values()
    short = short_names(names)
    known = [row["error"] for row in map(rows.__getitem__, names) if row["error"] is not None]
    errors = ["error if rounded [%]", "error [%]", ""] if known else []
    table_rows: list[list[Cell | str]] = []
    for name in names:
        row, error = rows[name], rows[name]["error"]
        cells = [
            Cell(short[name], "name"),
            _shape(row),
            Cell(_grid(row), "short"),
            row["method"] or "not known",
        ]
        if known:
            shown = (None if row[key] is None else 100 * row[key] for key in ("error_rtn", "error"))
            cells += [number(value, ".2f") for value in shown]
            cells.append(bar(math.nan if error is None else error / (max(known) or 1.0)))
        table_rows.append([*cells, Cell(size(row["n_bytes"]), "number", str(row["n_bytes"]))])
    return ["weight", "shape", "stored as", "method", *errors, "bytes"], table_rows


def _beside(
    sets: Mapping[str, Mapping[str, Any]], names: Sequence[str]
) -> tuple[list[str], list[list[Cell | str]]]:
    """Two columns per checkpoint, for a weight's storage and its error."""
    short = short_names(names)
    heads = ["weight", "shape", *(f"{name}: {what}" for name in sets for what in ("stored as", "error [%]"))]
    table_rows: list[list[Cell | str]] = []
    for name in names:
        cells: list[Cell | str] = [
            Cell(short[name], "name"),
            _shape(next(r[name] for r in sets.values() if name in r)),
        ]
        for rows in sets.values():
            row = rows.get(name)
            if row is None or "bits" not in row:
                cells += ["as it was" if row else "not there", number(None)]
            else:
                error = row["error"]
                group = "row" if row["group_size"] == -1 else f"g{row['group_size']}"
                cells += [
                    Cell(f"{row['grid']} {group}", "short"),
                    number(None if error is None else 100 * error, ".2f"),
                ]
        table_rows.append(cells)
    return heads, table_rows


def _left(sets: Mapping[str, Mapping[str, Mapping[str, Any]]], quantized: Collection[str]) -> str:
    """Unchanged tensors, with those of the same reason in one row."""
    by_reason: dict[str, dict[str, list[str]]] = {}
    tensors = {name: row for rows in sets.values() for name, row in rows.items() if "bits" not in row}
    for checkpoint, rows in sets.items():
        for name, row in rows.items():
            if "bits" not in row:
                by_reason.setdefault(row["reason"], {}).setdefault(name, []).append(checkpoint)
    shown: list[list[Cell | str]] = []
    largest = sorted(by_reason.items(), key=lambda item: -sum(tensors[name]["n_bytes"] for name in item[1]))
    for reason, group in largest:
        names = [
            short_name(name) + (f" (in {', '.join(where)})" if name in quantized else "")
            for name, where in group.items()
        ]
        more = f" and {len(names) - _N_NAMES} more" if len(names) > _N_NAMES else ""
        types = sorted({_FLOATS.get(tensors[name]["dtype"], tensors[name]["dtype"]) for name in group})
        n_bytes = sum(tensors[name]["n_bytes"] for name in group)
        listing = Cell(html.escape(", ".join(names[:_N_NAMES]) + more), "names")
        total = Cell(size(n_bytes), "number", str(n_bytes))
        shown.append(
            [Cell(html.escape(reason), "reason"), listing, ", ".join(types), number(len(group), "d"), total]
        )
    title = "Left as they were"
    heads = ["reason", "tensors", "type", "number", "bytes"]
    return f"<h3>{title}</h3>" + table(title, heads, shown) if shown else ""
