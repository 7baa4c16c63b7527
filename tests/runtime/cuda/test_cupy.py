"""The real CuPy without a GPU: the functions that this package uses exist, take these arguments, and compile
our sources.

The stand-in of tests/support/cuda/fake_cupy.py has the same names; here they are held against the library itself.
"""

from __future__ import annotations

import inspect

import pytest
import torch

from loopq.errors import KernelError
from loopq.quantizers.cuda import load
from loopq.quantizers.cuda.sources import translation_unit
from loopq.runtime.cuda.plan import Variant
from tests.support.cuda import nvrtc

cupy = pytest.importorskip(
    "cupy", reason="NO CUPY: its interface is NOT checked here; install extra cuda12 or cuda13"
)

no_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="there is a GPU: this is about machines without"
)


def test_what_is_asked_of_cupy_is_there() -> None:
    assert int(cupy.__version__.split(".")[0]) >= 14
    raw_module = cupy.RawModule.__doc__.split("\n")[0]
    assert all(name in raw_module for name in ("code=", "tuple options=", "backend="))
    assert callable(cupy.RawModule.get_function)
    assert {"kernel", "max_dynamic_shared_size_bytes"} <= set(dir(cupy.RawKernel))
    assert {"ptr", "__call__"} <= set(dir(cupy.cuda.function.Function))
    assert issubclass(cupy.cuda.compiler.CompileException, Exception)
    assert "attributes" in dir(cupy.cuda.Device)
    assert {"__enter__", "__exit__"} <= set(dir(cupy.cuda.Device))


def test_its_cuda_version_is_known_without_a_driver() -> None:
    assert cupy.cuda.runtime.runtimeGetVersion() // 1000 in (12, 13)


@pytest.mark.parametrize("handle", [0, 12345])
def test_a_stream_of_torch_becomes_one_of_cupys(handle: int) -> None:
    """Warnings are errors here: CuPy 14 deprecates other ways of taking a stream over."""
    stream = cupy.cuda.Stream.from_external(load._Stream(handle))
    assert stream.ptr == handle
    del stream  # must not destroy what torch owns


@pytest.mark.skipif(torch.version.cuda is None, reason="this PyTorch is built without CUDA")
def test_what_is_asked_of_torch_is_there() -> None:
    cuda = torch.cuda
    assert list(inspect.signature(cuda.graph.__init__).parameters)[:2] == ["self", "cuda_graph"]
    assert {"replay", "capture_begin", "capture_end"} <= set(dir(cuda.CUDAGraph))
    assert "enable_timing" in str(inspect.signature(cuda.Event.__new__))
    assert {"record", "synchronize", "elapsed_time"} <= set(dir(cuda.Event))
    assert {"wait_stream", "cuda_stream"} <= set(dir(cuda.Stream))
    for name in (
        "current_stream",
        "device",
        "device_count",
        "get_device_name",
        "get_device_properties",
        "is_available",
        "is_current_stream_capturing",
        "stream",
        "synchronize",
    ):
        assert callable(getattr(cuda, name))
    assert {"major", "minor", "multi_processor_count", "name", "shared_memory_per_block_optin"} <= set(
        dir(torch._C._CudaDeviceProperties)
    )
    schema = str(torch.ops.aten._weight_int4pack_mm.default._schema)
    assert "Tensor self, Tensor mat2, int qGroupSize, Tensor qScaleAndZeros" in schema
    assert "Tensor self, int innerKTiles" in str(torch.ops.aten._convert_weight_to_int4pack.default._schema)


@pytest.mark.skipif(
    nvrtc.library() is None,
    reason="NO NVRTC: CuPy cannot compile here; install extra cuda12 or cuda13",
)
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_our_sources_compile_with_cupys_own_options(architecture: str) -> None:
    """The options that `RawModule` adds: its include folders, and device code by default."""
    from cupy._core import core
    from cupy.cuda import compiler

    for kernel, defines in (
        ("w4a16_gemm.cu", Variant("bf16", 1, 2, 4).defines),
        ("beam.cu", ("-DLQ_PATHS=16",)),
        ("descent.cu", ("-DLQ_CODES=1",)),
        ("w4_dequantize.cu", ("-DLQ_FLOAT16=0", "-DLQ_TABLE=0")),
    ):
        options = core.assemble_cupy_compiler_options(("-std=c++17", *defines))
        program = compiler._NVRTCProgram(translation_unit(kernel), kernel, (), (), method="cubin")
        cubin, _ = program.compile(
            (*options, "--device-as-default-execution-space", f"-arch={architecture}"), None
        )
        assert cubin[:4] == b"\x7fELF"


def test_a_compiler_error_is_the_exception_that_is_caught() -> None:
    from cupy.cuda import compiler

    program = compiler._NVRTCProgram("no such thing", "kern.cu", (), (), method="cubin")
    with pytest.raises(compiler.CompileException, match="error"):
        program.compile(("-arch=sm_90",), None)


@no_gpu
def test_without_a_driver_the_message_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", f"{cupy.cuda.runtime.runtimeGetVersion() // 1000}.0")
    with pytest.raises(KernelError, match=r"CUDA device 0 is asked for and PyTorch sees 0.*nvidia-smi"):
        load.CudaBackend(0)


@no_gpu
def test_what_cupy_raises_without_a_driver_becomes_an_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past all checks, as with a driver that is too old: CuPy's own error carries the advice with it."""
    monkeypatch.setattr(torch.version, "cuda", f"{cupy.cuda.runtime.runtimeGetVersion() // 1000}.0")
    backend = object.__new__(load.CudaBackend)
    backend._torch, backend._cupy, backend.index = torch, cupy, 0
    backend.limits = load.DeviceLimits(132, 232_448, (9, 0))
    kernel = load.Kernel("w4_dequantize.cu", "loopq_w4_dequantize", ("-DLQ_FLOAT16=0", "-DLQ_TABLE=0"))
    with pytest.raises(KernelError, match=r"(?s)CuPy could not build w4_dequantize\.cu.*loopq\[cuda1"):
        backend._load(kernel)
