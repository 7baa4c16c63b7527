"""llama.cpp, through the package xllamacpp."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from loopq.errors import require
from loopq.formats.engines import ENGINES
from loopq.formats.engines.base import Engine, Way
from loopq.formats.gguf.file import contents, open_gguf

#: Positions of a prompt that are compared.
_N_POSITIONS = 3
#: A line of its log about an error, after the time.
_ERROR = re.compile(r"^[0-9.]+ E (.+)$", re.MULTILINE)


class LlamaCpp(Engine):
    """llama.cpp's server on the CPU. It gives log-probabilities of the token after a prompt."""

    name: ClassVar[str] = "llama.cpp"
    # Types by the bits of their codes (docs/formats/gguf.md). K-quants need rows of whole blocks of 256.
    ways: ClassVar[tuple[Way, ...]] = tuple(
        Way("gguf", "llama-cli -m OUT", settings={"levels": levels}, bits=bits)
        for bits, levels in ((4, "iq4_nl"), (3, "q3_k"), (2, "q2_k"), (2, "q2_0"), (8, "q8_0"))
    )
    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {"gguf": ("xllamacpp", "gguf")}

    def unasked(self, path: Path) -> str:
        """It loads no model without a tokenizer."""
        tokens = contents(path, open_gguf(path), "tokenizer.ggml.tokens")
        return "the file has no tokenizer" if tokens is None else ""

    def cause(self, said: str) -> str:
        """Its exception says that it failed, and the first error in its log says why."""
        found = _ERROR.search(said)
        return " ".join(found[1].split()) if found else ""

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
        last = ids.shape[1] - 1
        found: dict[int, list[list[float]]] = {}
        for n in dict.fromkeys((0, ids.shape[1] // 2, last, *range(last))):
            values = [_after(server, row[: n + 1], asked) for row in ids]
            # There are none after a part of a character, which is a matter of the text and not of the file.
            found |= {n: values} if all(values) else {}
            if len(found) == _N_POSITIONS:
                break
        if not found:
            raise RuntimeError(
                "it gave no probabilities at any position: each next token is a part of a character"
            )
        positions = sorted(found)
        return np.array([found[n] for n in positions], np.float32).swapaxes(0, 1), positions, "int8"


def _after(server: Any, ids: NDArray[np.int64], asked: Mapping[str, Any]) -> list[float]:
    """Return the log-probabilities of the next token; empty if the engine gives none."""
    said = server.handle_completions({"prompt": ids.tolist(), **asked})
    given = said["choices"][0].get("logprobs") or {}
    tokens = given.get("content") or [{"top_logprobs": ()}]
    return [p["logprob"] for p in sorted(tokens[0]["top_logprobs"], key=lambda p: p["id"])]


ENGINES.register(LlamaCpp.name)(LlamaCpp())
