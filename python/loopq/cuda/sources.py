"""The CUDA sources: from the source checkout if there is one, else embedded in the compiled extension."""

from __future__ import annotations

import importlib
import re
from functools import cache
from pathlib import Path

from loopq.errors import ConfigError

__all__ = ["embedded_sources", "kernel_sources", "translation_unit"]

_INCLUDE = re.compile(r'^#include "([^"]+)"$', re.MULTILINE)


@cache
def kernel_sources() -> dict[str, str]:
    """File name to text of every file of `kernels/` that the compiler reads.

    A source checkout's own files come first, so that an extension built earlier cannot hide an edit.

    Raises
    ------
    ConfigError
        If neither a source checkout nor the extension holds them.
    """
    root = Path(__file__).resolve().parents[3]
    if (root / "Cargo.toml").exists():
        found = {
            path.name: path.read_text(encoding="utf-8") for path in sorted((root / "kernels").glob("*.cu*"))
        }
    else:
        found = embedded_sources()
    if not found:
        raise ConfigError(
            f"the CUDA sources are neither in {root / 'kernels'} nor in the compiled extension: "
            "reinstall loopq from a wheel"
        )
    return found


def embedded_sources() -> dict[str, str]:
    """What the compiled extension carries; empty if it was built without sources, or is not built."""
    try:
        native = importlib.import_module("loopq._native")
    except ImportError:
        return {}
    sources = getattr(native, "kernel_sources", None)
    return {} if sources is None else dict(sources())


def translation_unit(name: str) -> str:
    """One kernel file with its own includes put in place, line numbers kept for the compiler's messages.

    Raises
    ------
    ConfigError
        If there is no such file; the message lists those there are.
    """
    sources = kernel_sources()
    if name not in sources:
        raise ConfigError(f"no kernel source {name!r}; there are {', '.join(sorted(sources))}")

    def expand(match: re.Match[str]) -> str:
        line = sources[name].count("\n", 0, match.start()) + 2
        return f'#line 1 "kernels/{match[1]}"\n{sources[match[1]]}\n#line {line} "kernels/{name}"'

    return f'#line 1 "kernels/{name}"\n{_INCLUDE.sub(expand, sources[name])}'
