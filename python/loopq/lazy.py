"""Optional dependencies: the one place that imports them, with an error that names the extra to install."""

from __future__ import annotations

import importlib
from typing import Any

from loopq.errors import MissingExtraError

_EXTRA = {
    "torch": "torch",
    "transformers": "hf",
    "huggingface_hub": "hf",
    "lm_eval": "eval",
    "matplotlib": "report",
    "scipy": "stats",
    "threadpoolctl": "torch",
}


def require(module: str) -> Any:
    """Import an optional module.

    Raises
    ------
    MissingExtraError
        The module is not installed; the message gives the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as cause:
        extra = _EXTRA[module.split(".")[0]]
        raise MissingExtraError(
            f"this needs {module.split('.')[0]}, which is not installed; run: pip install 'loopq[{extra}]'"
        ) from cause
