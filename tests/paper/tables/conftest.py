"""Which tables are measured, shown and resumed by the quick tests."""

from __future__ import annotations

import pytest

#: Three studies that most tables share: of whole models, of single steps, and of a grid.
QUICK = ("test_main", "test_loop", "test_int3")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the others slow."""
    for item in items:
        if item.name == "test_it_is_measured_shown_and_resumed" and item.path.stem not in QUICK:
            item.add_marker(pytest.mark.slow)
