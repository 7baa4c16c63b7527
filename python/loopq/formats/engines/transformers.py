"""transformers, with compressed-tensors or with optimum and GPTQModel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from loopq.errors import require
from loopq.formats.engines import ENGINES
from loopq.formats.engines.base import Engine, Way, begun
from loopq.formats.native import NATIVE

_LOADS = 'AutoModelForCausalLM.from_pretrained("OUT")'
_GPTQ = ("transformers", "optimum", "gptqmodel")


class Transformers(Engine):
    """`from_pretrained` of the class that the folder names."""

    name: ClassVar[str] = "transformers"
    ways: ClassVar[tuple[Way, ...]] = (
        Way("compressed-tensors", _LOADS),
        Way("compressed-tensors", _LOADS.replace(")", ", trust_remote_code=True)"), {"remote_code": True}),
        Way(NATIVE.name, f"import loopq.runtime.transformers, then {_LOADS}"),
    )
    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "compressed-tensors": ("transformers", "compressed_tensors"),
        "gptq": _GPTQ,
        "gptq_v2": _GPTQ,
    }

    def logits(
        self, path: Path, ids: NDArray[np.int64], trust_remote_code: bool, states: NDArray[np.float32] | None
    ) -> tuple[NDArray[Any], Sequence[int], str]:
        """Run the model in the type of its file."""
        torch, transformers = require("torch"), require("transformers")
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        # Classes without a causal head are loaded by the name in the file.
        cls = getattr(transformers, (config.architectures or [""])[0], None)
        loader = (
            cls if cls is not None and not hasattr(config, "auto_map") else transformers.AutoModelForCausalLM
        )
        quantization = getattr(config, "quantization_config", {})
        # compressed-tensors multiplies by floats of 4 bits in bfloat16 alone. Inkling-2 loads stacks of them itself.
        groups = [*quantization.get("config_groups", {}).values()]
        floats = any(
            str(g.get("format", "")).startswith(("nvfp4", "mxfp4"))
            for g in groups
            if not all(".experts." in name for name in g["targets"])
        )
        model = loader.from_pretrained(
            path, dtype=torch.bfloat16 if floats else "auto", trust_remote_code=trust_remote_code
        ).eval()
        with torch.no_grad():
            out = model(torch.from_numpy(ids), **begun(states))
        values = out.logits if hasattr(out, "logits") else out[0]
        kind = "bfloat16" if floats else str(values.dtype).removeprefix("torch.")
        # optimum's products and stacks of dequantized experts have the type of the scales.
        stacks = any(p.ndim == 3 and "experts" in name for name, p in model.named_parameters())
        rounded = stacks or quantization.get("quant_method") == "gptq"
        return (
            values.float().numpy(),
            range(ids.shape[1]),
            "float16" if rounded and kind == "float32" else kind,
        )


ENGINES.register("transformers")(Transformers())
