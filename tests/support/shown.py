"""Tiny folders of eight looped models, which examples/engines.md uses: `python -m tests.support.shown FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from tests.support import pairs

#: Models by the names of their folders.
MODELS = {
    "dory": "Dory", "inkling": "Inkling-2, padded head", "ouro": "Ouro", "nanbeige": "Nanbeige", "hrm-text": "HRM-Text",
    "llama": "looped Llama", "qwen3": "looped Qwen3", "olmoe": "looped OLMoE, code",
}  # fmt: skip


def main(place: Path) -> None:
    """Write the folders, prompts, and tokenizers of both sizes."""
    for name, model in MODELS.items():
        pairs.save(model, place / name)
    np.save(place / "prompts.npy", np.random.default_rng(0).integers(4, 60, (8, 16)))
    for rows in (64, 96):
        pairs.vocabulary(place / f"words-{rows}.gguf", rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
