"""The CUDA sources: embedded in the extension, or read from the checkout when the extension has none."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from loopq.errors import ConfigError

__all__ = ["kernel_sources", "translation_unit"]

_INCLUDE = re.compile(r'^#include "([^"]+)"$', re.MULTILINE)


@cache
def kernel_sources() -> dict[str, str]:
    """File name to text of every file of `kernels/` that the compiler reads.

    Raises
    ------
    ConfigError
        If neither the extension nor a source checkout holds them.
    """
    try:
        from loopq import _native

        embedded: dict[str, str] = dict(_native.kernel_sources())
    except (ImportError, AttributeError):
        embedded = {}
    if embedded:
        return embedded
    folder = Path(__file__).resolve().parents[3] / "kernels"
    found = {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.cu*"))}
    if not found:
        raise ConfigError(
            f"the CUDA sources are neither in the compiled extension nor in {folder}: "
            "reinstall loopq from a wheel"
        )
    return found


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
