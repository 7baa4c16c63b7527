"""Compile, cache and launch the CUDA kernels with CuPy, on torch's current stream.

CuPy compiles a source once per device, options and source text. It keeps the binary on disk (`CUPY_CACHE_DIR`) and
this module keeps the loaded functions. Nothing is copied: kernels get the pointers of torch tensors. `CudaBackend`
holds everything that touches the CUDA runtime. All other code uses a `Backend`, so tests can replace it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any, Protocol

from loopq.errors import KernelError, MissingExtraError, require
from loopq.quantizers.cuda.sources import translation_unit

_OLDEST = (8, 0)
_OLDEST_CUPY = 14


@dataclass(frozen=True)
class DeviceLimits:
    """Inputs of a cut: multiprocessors, shared memory per block in bytes, compute capability."""

    multiprocessors: int
    shared_bytes: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class Kernel:
    """A kernel's file, entry point and compile-time definitions, and its self-test after loading (or None)."""

    file: str
    entry: str
    defines: tuple[str, ...]
    prove: Callable[[Backend], None] | None = field(default=None, compare=False)


class Backend(Protocol):
    """Runs kernels: the GPU through CuPy, or a substitute in tests."""

    limits: DeviceLimits
    ring_stages: int | None  # None: as deep as fits
    device: Any  # torch.device of the tensors

    def launch(
        self, kernel: Kernel, grid: tuple[int, int], threads: int, shared_bytes: int, args: Sequence[Any]
    ) -> None:
        """Run one kernel. `args` are int (pointers), numpy.int32 and numpy.float32 in parameter order."""


def require_cupy() -> ModuleType:
    """Return CuPy for the CUDA major version of torch.

    Raises
    ------
    MissingExtraError
        If torch has no CUDA, or CuPy is missing, older than 14 or for another CUDA major version. The message names
        the extra.
    """
    torch = require("torch")
    built = torch.version.cuda
    if built is None:
        raise MissingExtraError(
            "the CUDA kernels need a PyTorch built for CUDA; this one is CPU only. "
            "Install a CUDA build of PyTorch, then 'loopq[cuda12]' or 'loopq[cuda13]' to match it"
        )
    major = int(built.split(".")[0])
    # The installed PyTorch decides which extra provides CuPy.
    cupy: ModuleType = require("cupy", extra=f"cuda{major}")
    if int(cupy.__version__.split(".")[0]) < _OLDEST_CUPY:
        raise MissingExtraError(
            f"CuPy {cupy.__version__} is installed; the kernels need {_OLDEST_CUPY} or newer: pip install "
            f"--upgrade 'loopq[cuda{major}]'"
        )
    # CuPy's own CUDA version is known without a driver.
    runtime = cupy.cuda.runtime.runtimeGetVersion() // 1000
    if runtime != major:
        raise MissingExtraError(
            f"CuPy is built for CUDA {runtime}, PyTorch for CUDA {built}: only one major version may be "
            f"loaded. pip uninstall cupy-cuda{runtime}x, then pip install 'loopq[cuda{major}]'"
        )
    return cupy


def require_gpu(index: int = 0) -> ModuleType:
    """Return CuPy on a machine with a GPU that can run the kernels. A benchmark calls it first.

    Raises
    ------
    MissingExtraError
        See `loopq.errors.require` and `require_cupy`.
    KernelError
        If torch does not see this CUDA device.
    """
    torch = require("torch")
    cupy = require_cupy()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= count:
        raise KernelError(
            f"CUDA device {index} is asked for and PyTorch sees {count}: run this on a machine with an NVIDIA "
            f"GPU and its driver (nvidia-smi lists them), or look at CUDA_VISIBLE_DEVICES"
        )
    return cupy


@dataclass(frozen=True)
class _Stream:
    """A stream's handle in the CUDA stream protocol. torch's own streams support it from 2.9."""

    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


class CudaBackend:
    """One GPU: its limits, its loaded kernels, and launches on torch's current stream.

    Raises
    ------
    MissingExtraError
        See `require_cupy`.
    KernelError
        If the CUDA device of this index does not exist or is older than compute capability 8.0.
    """

    def __init__(self, index: int) -> None:
        self._torch = require("torch")
        self._cupy = require_gpu(index)
        self.index = index
        self.device = self._torch.device("cuda", index)
        self.ring_stages: int | None = None
        properties = self._torch.cuda.get_device_properties(index)
        capability = (int(properties.major), int(properties.minor))
        if capability < _OLDEST:
            raise KernelError(
                f"{properties.name} has compute capability {capability[0]}.{capability[1]}; the CUDA kernels "
                f"need 8.0 (A100) or newer. Packed layers run without them on the CPU"
            )
        shared = int(
            getattr(properties, "shared_memory_per_block_optin", 0)
            or self._cupy.cuda.Device(index).attributes["MaxSharedMemoryPerBlockOptin"]
        )
        self.limits = DeviceLimits(int(properties.multi_processor_count), shared, capability)
        self._functions: dict[Kernel, Any] = {}
        self._streams: dict[int, Any] = {}

    def prepare(self, kernel: Kernel) -> Any:
        """Compile, load and test a kernel, so that a graph may capture a later launch.

        Raises
        ------
        KernelError
            If the kernel is not loaded and the current stream is being captured, or if compiling or the self-test
            fails. A kernel that fails its test is not kept.
        """
        loaded = self._functions.get(kernel)
        if loaded is not None:
            return loaded
        if self._torch.cuda.is_current_stream_capturing():
            raise KernelError(
                f"{kernel.entry} {' '.join(kernel.defines)} is not loaded yet, and loading is not possible "
                f"while a CUDA graph is being captured: run the same call once before the capture"
            )
        with self._cupy.cuda.Device(self.index):
            function = self._load(kernel)
        self._functions[kernel] = function
        if kernel.prove is not None:
            try:
                kernel.prove(self)  # launches the kernel, which is registered by now
            except BaseException:
                del self._functions[kernel]
                raise
        return function

    def _load(self, kernel: Kernel) -> Any:
        module = self._cupy.RawModule(
            code=translation_unit(kernel.file), options=("-std=c++17", *kernel.defines), backend="nvrtc"
        )
        try:
            raw = module.get_function(kernel.entry)
            raw.max_dynamic_shared_size_bytes = self.limits.shared_bytes
            return raw.kernel
        except self._cupy.cuda.compiler.CompileException as error:
            raise KernelError(f"{kernel.file} did not compile for device {self.index}:\n{error}") from error
        except (RuntimeError, OSError) as error:
            # NVRTC or the runtime's headers are missing, the driver is too old, or the disk cache is not writable.
            major = self._torch.version.cuda.split(".")[0]
            raise KernelError(
                f"CuPy could not build {kernel.file} for device {self.index}: {error}\n"
                f"NVRTC and the CUDA headers that CuPy looks for come with: pip install 'loopq[cuda{major}]'"
            ) from error

    def launch(
        self, kernel: Kernel, grid: tuple[int, int], threads: int, shared_bytes: int, args: Sequence[Any]
    ) -> None:
        function = self.prepare(kernel)
        handle = self._torch.cuda.current_stream(self.index).cuda_stream
        stream = self._streams.get(handle)
        if stream is None:
            stream = self._streams[handle] = self._cupy.cuda.Stream.from_external(_Stream(handle))
        with self._cupy.cuda.Device(self.index):
            function((*grid, 1), (threads, 1, 1), tuple(args), shared_bytes, stream)


@cache
def cuda_backend(index: int) -> CudaBackend:
    """The backend of a CUDA device, created once."""
    return CudaBackend(index)
