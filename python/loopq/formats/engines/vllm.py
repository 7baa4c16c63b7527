"""vLLM."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from loopq.errors import require
from loopq.formats.engines import ENGINES
from loopq.formats.engines.base import Engine, Way
from loopq.formats.native import NATIVE


class VLLM(Engine):
    """vLLM with the plugins that are installed. It gives log-probabilities of the tokens of a prompt."""

    name: ClassVar[str] = "vllm"
    ways: ClassVar[tuple[Way, ...]] = (
        Way("compressed-tensors", "vllm serve OUT"),
        Way("compressed-tensors", "vllm serve OUT", {"names": "published"}),
        Way(NATIVE.name, "vllm serve OUT, with loopq in the same environment"),
    )
    needs: ClassVar[Mapping[str, tuple[str, ...]]] = dict.fromkeys(
        ("compressed-tensors", "gptq", "modelopt"), ("vllm",)
    )

    def logits(
        self, path: Path, ids: NDArray[np.int64], trust_remote_code: bool, states: NDArray[np.float32] | None
    ) -> tuple[NDArray[Any], Sequence[int], str]:
        """Run the prompts at once, in bfloat16. loopq's plugin draws the states itself, those of prompt 0."""
        # On a processor it would take nearly all memory for its caches.
        for name, value in ("ENABLE_V1_MULTIPROCESSING", "0"), ("CPU_KVCACHE_SPACE", "1"):
            os.environ.setdefault(f"VLLM_{name}", value)
        vllm = require("vllm", "hf")
        model = vllm.LLM(
            model=str(path), skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True,
            max_model_len=ids.shape[1] + 2, max_logprobs=-1, trust_remote_code=trust_remote_code,
        )  # fmt: skip
        asked = vllm.SamplingParams(
            max_tokens=1, logprobs=-1, temperature=0, detokenize=False, ignore_eos=True
        )
        positions = sorted({0, ids.shape[1] // 2, ids.shape[1] - 1})
        prompts = [{"prompt_token_ids": row[: n + 1].tolist()} for row in ids for n in positions]
        said = [each.outputs[0].logprobs[0] for each in model.generate(prompts, asked)]
        values = [[entry[k].logprob for k in sorted(entry)] for entry in said]
        return np.array(values, np.float32).reshape(len(ids), len(positions), -1), positions, "bfloat16"


ENGINES.register(VLLM.name)(VLLM())
