"""The solvers of other tools on loopq's sums, in an environment of the tool: `python peer.py TOOL BITS GROUP FOLDER
THREADS`.

FOLDER holds `NAME.w.npy`, float32 (outputs, inputs), and `NAME.h.npy`, H = X^T X summed over all calls: what
llm-compressor's pipeline "basic" sums up by itself. `NAME.q.npy` is written beside them, the dequantized weight, and
the seconds of all solves are printed.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Matrix = np.ndarray


def llmcompressor(
    bits: int, group: int, observer: str, order: str | None
) -> Callable[[Matrix, Matrix], Matrix]:
    """GPTQ of llm-compressor with an observer of its own for the scales; its default order is "static"."""
    import torch
    from compressed_tensors.quantization import QuantizationArgs
    from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight
    from llmcompressor.observers import Observer

    args = QuantizationArgs(
        num_bits=bits, group_size=group, strategy="group", symmetric=True, actorder=order, observer=observer
    )

    def solve(w: Matrix, h: Matrix) -> Matrix:
        layer = torch.nn.Linear(w.shape[1], w.shape[0], bias=False)
        layer.weight.data = torch.from_numpy(w.copy())
        seen: Any = Observer.load_from_registry(observer, base_name="weight", args=args, module=layer)
        scale, zero = seen(layer.weight.data)[:2]
        hessian = torch.from_numpy(h.astype(np.float32))
        got = quantize_weight(
            layer.weight.data[None],
            hessian[None],
            scale[None],
            zero[None],
            None,
            args,
            blocksize=128,
            percdamp=0.01,
        )
        return got[0][0].detach().float().numpy()

    return solve


def gptqmodel(bits: int, group: int) -> Callable[[Matrix, Matrix], Matrix]:
    """GPTQ of GPTQModel at its defaults, given sums that it would not collect by itself."""
    import torch
    from gptqmodel.quantization import QuantizeConfig
    from gptqmodel.quantization.gptq import GPTQ

    config = QuantizeConfig(bits=bits, group_size=group)

    def solve(w: Matrix, h: Matrix) -> Matrix:
        layer = torch.nn.Linear(w.shape[1], w.shape[0], bias=False)
        layer.weight.data = torch.from_numpy(w.copy())
        task = GPTQ(layer, config)
        task.quantizer.configure(perchannel=True)
        task.nsamples, task.fallback = 1 << 20, None
        task.H = torch.from_numpy(h.astype(np.float32))
        task.finalize_hessian = lambda **_: task.H
        return task.quantize(blocksize=128)[0].float().numpy()

    return solve


def hqq(bits: int, group: int) -> Callable[[Matrix, Matrix], Matrix]:
    """HQQ, which sees no activations and stores zero points besides: 16 / group more bits a weight."""
    import torch
    from hqq.core.quantize import Quantizer

    def solve(w: Matrix, h: Matrix) -> Matrix:
        weight = torch.from_numpy(w.copy())
        codes, meta = Quantizer.quantize(
            weight,
            nbits=bits,
            group_size=group,
            axis=1,
            optimize=True,
            device="cpu",
            compute_dtype=torch.float32,
        )
        return Quantizer.dequantize(codes, meta).float().numpy().reshape(w.shape)

    return solve


TOOLS: dict[str, Callable[[int, int], Callable[[Matrix, Matrix], Matrix]]] = {
    "llm-compressor": lambda b, g: llmcompressor(b, g, "minmax", "static"),
    "llm-compressor, mse": lambda b, g: llmcompressor(b, g, "mse", "static"),
    "llm-compressor, natural order": lambda b, g: llmcompressor(b, g, "minmax", None),
    "GPTQModel": gptqmodel,
    "HQQ": hqq,
}


def main() -> None:
    """Solve every layer of a folder."""
    tool, bits, group, folder, threads = sys.argv[1:6]
    import torch

    torch.set_num_threads(int(threads))
    answers, sys.stdout = sys.stdout, sys.stderr  # what the libraries print is no answer
    solve = TOOLS[tool](int(bits), int(group))
    seconds = 0.0
    for path in sorted(Path(folder).glob("*.w.npy")):
        w, h = np.load(path), np.load(path.with_name(path.name.replace(".w.npy", ".h.npy")))
        began = time.perf_counter()
        found = solve(w, h)
        seconds += time.perf_counter() - began
        np.save(path.with_name(path.name.replace(".w.npy", ".q.npy")), found.astype(np.float32))
    print(json.dumps({"seconds": seconds}), file=answers, flush=True)


if __name__ == "__main__":
    main()
