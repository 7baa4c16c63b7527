"""One solver in a process of its own, for `bench_peers.py`: ``python peer.py NAME W.npy H.npy THREADS [FOLDER]``.

It loads ``W`` (m, dim) and ``H`` (dim, dim), prints ``ready``, and for every line that it reads solves once, 4 bits,
groups of 128, symmetric, damping 0.01, natural order of columns, and prints ``{"seconds": ..., "proxy": ...}``; the
proxy is ``tr(D H D^T)``. Each peer needs its own environment, since their pins clash.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

BITS, GROUP, DAMPING = 4, 128, 0.01
Solver = Callable[[], tuple[float, np.ndarray]]


def loopq(w: np.ndarray, h: np.ndarray, threads: int, precision: str) -> Solver:
    """Give loopq's solver; the factor is part of the time."""
    from loopq import _native

    grid = _native.Grid(bits=BITS, group_size=GROUP)

    def solve() -> tuple[float, np.ndarray]:
        start = time.perf_counter()
        mu = np.full(len(h), DAMPING * float(np.diag(h).mean()))
        factor = _native.DampedFactor(h, mu, precision=precision, threads=threads)  # type: ignore[arg-type]
        got = _native.gptq(w, factor, grid, threads=threads)
        took = time.perf_counter() - start
        return took, _native.dequantize(got["codes"], got["scales"], got["zeros"], grid)

    return solve


def linear(w: np.ndarray) -> Any:
    """Give a torch linear layer that holds the weight."""
    import torch

    layer = torch.nn.Linear(w.shape[1], w.shape[0], bias=False)
    layer.weight.data = torch.from_numpy(w.copy())
    return layer


def ist(w: np.ndarray, h: np.ndarray, folder: str) -> Solver:
    """Give the solver of the repository IST-DASLab/gptq, whose checkout is `folder`."""
    import torch

    sys.path.insert(0, folder)
    torch.cuda.synchronize = lambda *_: None  # it waits for a device that is not there
    from gptq import GPTQ
    from quant import Quantizer

    def solve() -> tuple[float, np.ndarray]:
        layer = linear(w)
        task = GPTQ(layer)
        task.quantizer = Quantizer()
        task.quantizer.configure(BITS, perchannel=True, sym=True, mse=False)
        task.H = torch.from_numpy(h.copy())
        start = time.perf_counter()
        task.fasterquant(blocksize=128, percdamp=DAMPING, groupsize=GROUP)
        return time.perf_counter() - start, layer.weight.data.numpy()

    return solve


def gptqmodel(w: np.ndarray, h: np.ndarray) -> Solver:
    """Give the solver inside GPTQModel."""
    import torch
    from gptqmodel.quantization import QuantizeConfig
    from gptqmodel.quantization.gptq import GPTQ

    config = QuantizeConfig(
        bits=BITS, group_size=GROUP, desc_act=False, act_group_aware=False, damp_percent=DAMPING
    )

    def solve() -> tuple[float, np.ndarray]:
        task = GPTQ(linear(w), config)
        task.quantizer.configure(perchannel=True)
        task.nsamples, task.fallback = 1 << 20, None
        task.H = torch.from_numpy(h.copy())
        task.finalize_hessian = lambda **_: task.H
        start = time.perf_counter()
        got = task.quantize(blocksize=128)[0]
        return time.perf_counter() - start, got.float().numpy()

    return solve


def llmcompressor(w: np.ndarray, h: np.ndarray) -> Solver:
    """Give the solver inside llm-compressor; scales come from the original weight and are part of the time."""
    import torch
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.utils import calculate_qparams
    from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight

    args = QuantizationArgs(num_bits=BITS, group_size=GROUP, strategy="group", symmetric=True, actorder=None)

    def solve() -> tuple[float, np.ndarray]:
        weight, hessian = torch.from_numpy(w.copy()), torch.from_numpy(h.copy())
        start = time.perf_counter()
        groups = weight.unflatten(1, (-1, GROUP))
        scale, zero = calculate_qparams(groups.amin(2), groups.amax(2), args)
        got = quantize_weight(
            weight[None], hessian[None], scale[None], zero[None], None, args, blocksize=128, percdamp=DAMPING
        )
        return time.perf_counter() - start, got[0][0].numpy()

    return solve


def main() -> None:
    """Serve one solver."""
    name, w_path, h_path, threads = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
    w, h = np.load(w_path), np.load(h_path)
    replies, sys.stdout = sys.stdout, sys.stderr  # what the libraries print is not an answer
    if name.startswith("loopq"):
        solve = loopq(w, h, threads, name.removeprefix("loopq-"))
    else:
        import torch

        torch.set_num_threads(threads)
        solve = {
            "ist": lambda: ist(w, h, sys.argv[5]),
            "gptqmodel": lambda: gptqmodel(w, h),
            "llmcompressor": lambda: llmcompressor(w, h),
        }[name]()
    solve()  # what is made on first use is not timed
    print("ready", file=replies, flush=True)
    for _ in sys.stdin:
        took, got = solve()
        error = (w - got).astype(np.float64)
        proxy = float(np.einsum("ij,ij->", error @ h.astype(np.float64), error))
        print(json.dumps({"seconds": took, "proxy": proxy}), file=replies, flush=True)


if __name__ == "__main__":
    main()
