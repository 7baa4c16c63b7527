"""llama.cpp, through the package xllamacpp."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from loopq.errors import require
from loopq.formats.engines import ENGINES
from loopq.formats.engines.base import Engine, Way
from loopq.formats.gguf.file import contents, open_gguf


class LlamaCpp(Engine):
    """llama.cpp's server on the CPU. It gives log-probabilities of the token after a prompt."""

    name: ClassVar[str] = "llama.cpp"
    # Types of a size, the one with the least KL first: docs/formats/gguf.md. K-quants need rows of whole blocks of 256.
    ways: ClassVar[tuple[Way, ...]] = tuple(
        Way("gguf", "llama-cli -m OUT", settings={"levels": levels}, bits=bits)
        for bits, levels in ((4, "iq4_nl"), (3, "q3_k"), (2, "q2_k"), (2, "q2_0"), (8, "q8_0"))
    )
    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {"gguf": ("xllamacpp", "gguf")}

    def unasked(self, path: Path) -> str:
        """It loads no model without a tokenizer."""
        tokens = contents(path, open_gguf(path), "tokenizer.ggml.tokens")
        return "the file has no tokenizer" if tokens is None else ""

    def logits(
        self, path: Path, ids: NDArray[np.int64], trust_remote_code: bool, states: NDArray[np.float32] | None
    ) -> tuple[NDArray[Any], Sequence[int], str]:
        """Run a few beginnings of each prompt. llama.cpp rounds activations to 8 bits."""
        reader = open_gguf(path)
        tokens = contents(path, reader, "tokenizer.ggml.tokens")
        xllamacpp = require("xllamacpp", "gguf")
        settings = xllamacpp.CommonParams()
        settings.model.path, settings.n_ctx, settings.n_parallel = str(path), max(64, 2 * ids.shape[1]), 1
        settings.warmup = False
        settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
        server = xllamacpp.Server(settings)
        asked = {"n_predict": 1, "temperature": 0, "n_probs": len(tokens), "cache_prompt": False}
        positions = sorted({0, ids.shape[1] // 2, ids.shape[1] - 1})
        values = [[_after(server, row[: n + 1], asked) for n in positions] for row in ids]
        return np.array(values, np.float32), positions, "int8"


def _after(server: Any, ids: NDArray[np.int64], asked: Mapping[str, Any]) -> list[float]:
    said = server.handle_completions({"prompt": ids.tolist(), **asked})
    (token,) = said["choices"][0]["logprobs"]["content"]
    return [p["logprob"] for p in sorted(token["top_logprobs"], key=lambda p: p["id"])]


ENGINES.register(LlamaCpp.name)(LlamaCpp())
