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
    "gguf": "gguf",
    "matplotlib": "report",
    "pyarrow": "parquet",
    "scipy": "stats",
    "threadpoolctl": "torch",
}


def require(module: str, extra: str | None = None) -> Any:
    """Import an optional module.

    Parameters
    ----------
    module : str
        Its name.
    extra : str or None
        The extra that installs it, where that is not the same for everyone.

    Raises
    ------
    MissingExtraError
        The module is not installed; the message gives the command that installs it. Or it cannot be loaded.
    """
    try:
        return importlib.import_module(module)
    except ImportError as cause:
        package = module.split(".")[0]
        if not isinstance(cause, ModuleNotFoundError):
            reason = next(iter(str(cause).strip().splitlines()), "")
            raise MissingExtraError(f"this needs {package}, which cannot be loaded: {reason:.300}") from cause
        raise MissingExtraError(
            f"this needs {package}, which is not installed; run: pip install 'loopq[{extra or _EXTRA[package]}]'"
        ) from cause
