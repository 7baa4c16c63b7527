"""Figures and tables of a diagnosis, one file per section. Subpackages such as `loopq.paper` add theirs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from loopq.analysis.report.style import Picture
from loopq.errors import require
from loopq.settings.registry import Registry

Diagnosis = Mapping[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Part(Generic[T]):
    """A figure or a table at a place of the page, made from a diagnosis if that has the data."""

    of: Callable[[Diagnosis], T]
    order: int


FIGURES: Registry[Part[Picture | None]] = Registry("figure", "loopq.analysis.report.sections")
#: As HTML; empty where there is no data.
TABLES: Registry[Part[str]] = Registry("table", "loopq.analysis.report.sections")


def all_figures(d: Diagnosis) -> list[Picture]:
    """Every figure with data in the diagnosis."""
    require("matplotlib")
    parts = sorted((part for _, part in FIGURES), key=lambda part: part.order)
    return [picture for part in parts if (picture := part.of(d)) is not None]


def all_tables(d: Diagnosis) -> list[str]:
    """Every table with data in the diagnosis."""
    parts = sorted((part for _, part in TABLES), key=lambda part: part.order)
    return [text for part in parts if (text := part.of(d))]


def in_legend_order(table: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Sort entries in the order of the legend, regardless of their order in the file."""
    first = ("per channel", "all columns")
    return sorted(table.items(), key=lambda item: (item[0] not in first, item[0]))


__all__ = ["FIGURES", "TABLES", "Diagnosis", "Part", "all_figures", "all_tables", "in_legend_order"]
