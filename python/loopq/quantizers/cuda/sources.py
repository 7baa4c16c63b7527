"""The CUDA sources, from the source checkout if present, else from the compiled extension."""

from __future__ import annotations

import importlib
import re
from functools import cache
from pathlib import Path

from loopq.errors import ConfigError

_INCLUDE = re.compile(r'^#include "([^"]+)"$', re.MULTILINE)


@cache
def kernel_sources() -> dict[str, str]:
    """Map the name of every file of `kernels/` that the compiler reads to its text.

    Files of a source checkout come first, so an older extension cannot hide an edit.

    Raises
    ------
    ConfigError
        If neither a source checkout nor the extension has them.
    """
    root = Path(__file__).resolve().parents[4]
    if (root / "Cargo.toml").exists():
        sources = {
            path.name: path.read_text(encoding="utf-8") for path in sorted((root / "kernels").glob("*.cu*"))
        }
    else:
        sources = embedded_sources()
    if not sources:
        raise ConfigError(
            f"the CUDA sources are neither in {root / 'kernels'} nor in the compiled extension: "
            "reinstall loopq from a wheel"
        )
    return sources


def embedded_sources() -> dict[str, str]:
    """Sources in the compiled extension. Empty if it was built without sources, or is not built."""
    try:
        native = importlib.import_module("loopq._native")
    except ImportError:
        return {}
    sources = getattr(native, "kernel_sources", None)
    return {} if sources is None else dict(sources())


def translation_unit(name: str) -> str:
    """One kernel file with its own includes inserted. Line numbers stay valid for the compiler's messages.

    Raises
    ------
    ConfigError
        If the file does not exist. The message lists the existing ones.
    """
    sources = kernel_sources()
    if name not in sources:
        raise ConfigError(f"no kernel source {name!r}; there are {', '.join(sorted(sources))}")

    def expand(match: re.Match[str]) -> str:
        line = sources[name].count("\n", 0, match.start()) + 2
        return f'#line 1 "kernels/{match[1]}"\n{sources[match[1]]}\n#line {line} "kernels/{name}"'

    return f'#line 1 "kernels/{name}"\n{_INCLUDE.sub(expand, sources[name])}'
