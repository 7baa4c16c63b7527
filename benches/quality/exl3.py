"""EXL3 by GPTQModel without a GPU: its own Python, and its own kernel compiled for the processor.

GPTQModel quantizes to EXL3 in Python, apart from two kernels. One finds the codes of a tile of 16 x 16 weights. It is
compiled here from the source that GPTQModel ships, over ``exl3_host.hpp``, with blocks of one thread. The other packs
codes, and is left out: the weights are those that GPTQModel itself puts into the model. Streams are left out, too.
Rows and columns are filled up with zeros to multiples of 128, as the format asks.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.nn.functional import pad

from loopq.errors import ConfigError

HOST = Path(__file__).with_name("exl3_host.hpp")
#: Where the kernel is, in the folder of GPTQModel's sources.
SOURCE = Path("exllamav3", "quant")
BLOCK = 128
#: GPTQModel's settings of a module: the codebook "mcg", and its seed and share of the diagonal.
SETTINGS = {"apply_out_scales": None, "sigma_reg": 0.025, "seed": 787, "mcg": True}
ENTRY = """
extern "C" void quantize_tiles(const float* tiles, float* values, uint16_t* states, int n) {
    std::vector<uint16_t> edges(256 * (65536 >> BITS));
    std::vector<half> costs(2 * (65536 >> BITS));
    half* tile = (half*) shared_memory.data();
    for (int t = 0; t < n; ++t) {
        for (int i = 0; i < 256; ++i) tile[i] = __float2half_rn(tiles[256 * t + i]);
        quantize_tiles_kernel<BITS, 1>(tiles + 256 * t, values + 256 * t, states + 256 * t, costs.data(), edges.data());
    }
}
"""


def source(folder: Path) -> str:
    """The published kernel as C++ for the processor, with its arithmetic, and shared memory of the host."""
    file = folder / "quantize.cu"
    _, begin, rest = file.read_text().partition("template <int K, int cb>")
    kernel, end, _ = rest.partition("#define __(i, cb)")
    if not end:
        raise ConfigError(f"{file}: the kernel is not where GPTQModel 7.7 has it; install that release")
    kernel = begin + kernel
    kernel = kernel.replace("extern __shared__ uint8_t shbuf[];", "uint8_t* shbuf = shared_memory.data();")
    kernel = re.sub(r"#pragma unroll(?=\s*for \(int k)", "#pragma GCC unroll 256", kernel)
    kernel = re.sub(r"#pragma unroll(?=\s*for \(int j)", "#pragma GCC ivdep", kernel)
    book = (folder / "codebook.cuh").read_text().replace("#pragma once", "")
    return f'#include "{HOST}"\n{book}\n{kernel}\n{ENTRY}'


def compiled(bits: int, folder: Path) -> ctypes.CDLL:
    """The kernel for one number of bits, from the folder of its source."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise ConfigError("EXL3: no C++ compiler for its kernel; install g++ or set CXX")
    with tempfile.TemporaryDirectory() as scratch:
        text, library = Path(scratch) / "exl3.cpp", Path(scratch) / "exl3.so"
        text.write_text(source(folder))
        flags = ["-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-w", "-fPIC", "-shared"]
        subprocess.run([compiler, *flags, f"-DBITS={bits}", "-o", library, text], check=True)
        return ctypes.CDLL(str(library))


def tiles_by(kernel: ctypes.CDLL, tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and states of tiles (n, 256)."""
    given = np.ascontiguousarray(tiles.numpy())
    values, states = np.empty_like(given), np.empty(given.shape, np.int16)
    arrays = (given, values, states)
    kernel.quantize_tiles(*(ctypes.c_void_p(a.ctypes.data) for a in arrays), len(given))
    return torch.from_numpy(values), torch.from_numpy(states)


@contextlib.contextmanager
def on_processor(bits: int) -> Iterator[Any]:
    """GPTQModel's module of the quantizer, with the compiled kernel and without streams."""
    quantizer = importlib.import_module("gptqmodel.exllamav3.modules.quant.exl3_lib.quantize")
    extension = importlib.import_module("gptqmodel_ext")
    kernel = compiled(bits, Path(extension.__path__[0]) / SOURCE)
    stream = mock.MagicMock()
    with (
        mock.patch.multiple(
            torch.cuda, current_stream=lambda *_: stream, stream=lambda *_: contextlib.nullcontext()
        ),
        mock.patch.multiple(
            quantizer,
            quantize_tiles=lambda tiles, _: tiles_by(kernel, tiles.contiguous()),
            get_quant_stream=lambda *_: stream,
            ext=SimpleNamespace(pack_trellis=lambda *_: None),
        ),
    ):
        yield quantizer


def solved(quantizer: Any, weight: torch.Tensor, hessian: torch.Tensor, bits: int) -> np.ndarray:
    """A weight (out, in) by GPTQModel, given its Hessian (in, in)."""
    rows, columns = weight.shape
    more, wider = -rows % BLOCK, -columns % BLOCK
    given = {
        "H": pad(hessian.float(), (0, wider, 0, wider)),
        "count": 1,
        "finalized": False,
        "single_use": True,
    }
    target = pad(weight.detach().float(), (0, wider, 0, more)).T.contiguous()
    settings = {**SETTINGS, "K": bits, "devices": [torch.device("cpu")]}
    found, *_ = quantizer.quantize_exl3(target, given, settings, return_weight_q=True)
    return found.T[:rows, :columns].contiguous().numpy()
