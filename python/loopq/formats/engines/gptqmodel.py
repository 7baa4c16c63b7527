"""GPTQModel, with its plain torch kernel."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from loopq.errors import require
from loopq.formats.engines import ENGINES
from loopq.formats.engines.base import Engine, Way, begun


class GPTQModel(Engine):
    """`GPTQModel.load` on the CPU, in float16."""

    name: ClassVar[str] = "gptqmodel"
    # It has no shorter last group, so that groups are cut where they do not divide the inputs.
    ways: ClassVar[tuple[Way, ...]] = tuple(
        Way(
            "gptq", f'GPTQModel.load("OUT"{", trust_remote_code=True" * ("remote_code" in options)})', options
        )
        for options in (
            {},
            {"ragged": "split"},
            {"remote_code": True},
            {"remote_code": True, "ragged": "split"},
        )
    )
    needs: ClassVar[Mapping[str, tuple[str, ...]]] = dict.fromkeys(("gptq", "gptq_v2"), ("gptqmodel",))

    def unasked(self, path: Path) -> str:
        """It loads no model without a tokenizer."""
        return "" if any(path.glob("tokenizer*")) else "the folder has no tokenizer"

    def logits(
        self, path: Path, ids: NDArray[np.int64], trust_remote_code: bool, states: NDArray[np.float32] | None
    ) -> tuple[NDArray[Any], Sequence[int], str]:
        """Run the model in float16."""
        # It measures its threads at import, and compiles its reference kernel unless told not to.
        os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        torch, package = require("torch"), require("gptqmodel", "hf")
        loaded = package.GPTQModel.load(
            str(path), device="cpu", dtype=torch.float16, backend=package.BACKEND.GPTQ_TORCH,
            trust_remote_code=trust_remote_code,
        )  # fmt: skip
        with torch.no_grad():
            values = loaded.model.eval()(torch.from_numpy(ids), **begun(states)).logits
        return values.float().numpy(), range(ids.shape[1]), "float16"


ENGINES.register(GPTQModel.name)(GPTQModel())
