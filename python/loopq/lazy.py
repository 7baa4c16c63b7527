"""Optional dependencies are imported only here. An error names the extra to install."""

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
    "tokenizers": "gguf",
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
        Name of the module.
    extra : str or None
        Extra that installs it, if it depends on the caller.

    Raises
    ------
    MissingExtraError
        The module is not installed, and the message gives the command that installs it. Or it cannot be loaded.
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
