"""Compile, cache and launch the CUDA kernels with CuPy, on torch's current stream.

CuPy compiles a source once per device, options and source text. It keeps the binary on disk (`CUPY_CACHE_DIR`) and
this module keeps the loaded functions. Nothing is copied: kernels get the pointers of torch tensors. `CudaBackend`
holds everything that touches the CUDA runtime: launches, graphs and clocks. The rest of `loopq.cuda` uses a `Backend`,
so tests can replace it.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from loopq.cuda.plan import DeviceLimits
from loopq.cuda.sources import translation_unit
from loopq.errors import KernelError, MissingExtraError, require

_OLDEST = (8, 0)
_OLDEST_CUPY = 14
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID


@dataclass(frozen=True)
class Kernel:
    """A kernel's file, entry point and compile-time definitions, and its self-test after loading (or None)."""

    file: str
    entry: str
    defines: tuple[str, ...]
    prove: Callable[[Backend], None] | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Captured:
    """Recorded work. `keep` holds the objects that the recording refers to."""

    replay: Callable[[], None]
    keep: Any = None


class Backend(Protocol):
    """Runs kernels: the GPU through CuPy, or a substitute in tests."""

    limits: DeviceLimits
    ring_stages: int | None  # None: as deep as fits
    device: Any  # torch.device of the tensors

    def launch(
        self, kernel: Kernel, grid: tuple[int, int], threads: int, shared_bytes: int, args: Sequence[Any]
    ) -> None:
        """Run one kernel. `args` are int (pointers), numpy.int32 and numpy.float32 in parameter order."""

    def capture(self, work: Callable[[], None], warm_up: Callable[[], None] | None = None) -> Captured:
        """Record `work` for replay. Runs `warm_up` (or `work`) once before, so that everything is loaded."""

    def microseconds(self, work: Callable[[], object]) -> float:
        """Time of one run of `work` on the otherwise idle device."""


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


class _LaunchAttribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int * 16))


class _LaunchConfig(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("n_attributes", ctypes.c_uint),
    )


class CudaBackend:
    """One GPU: its limits, its loaded kernels, and launches on torch's current stream.

    Parameters
    ----------
    index : int
        CUDA device.
    overlap : bool
        Start a kernel while the previous one finishes (programmatic dependent launch, compute capability 9.0). Each
        kernel waits before it touches data that an earlier kernel wrote.

    Raises
    ------
    MissingExtraError
        See `require_cupy`.
    KernelError
        If the device does not exist or is older than compute capability 8.0.
    """

    def __init__(self, index: int, overlap: bool = False) -> None:
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
        self.overlap = overlap and capability >= (9, 0)
        self._functions: dict[Kernel, Any] = {}
        self._streams: dict[int, Any] = {}
        self._driver: ctypes.CDLL | None = ctypes.CDLL("libcuda.so.1") if self.overlap else None

    def prepare(self, kernel: Kernel) -> Any:
        """Compile, load and test a kernel, so that a graph may capture a later launch.

        Raises
        ------
        KernelError
            If the kernel is not loaded and the current stream is being captured, or if compiling or the self-test
            fails. A kernel that fails its test is not kept.
        """
        found = self._functions.get(kernel)
        if found is not None:
            return found
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
        if self._driver is not None:
            self._launch_overlapping(function.ptr, grid, threads, shared_bytes, args, handle)
            return
        stream = self._streams.get(handle)
        if stream is None:
            stream = self._streams[handle] = self._cupy.cuda.Stream.from_external(_Stream(handle))
        with self._cupy.cuda.Device(self.index):
            function((*grid, 1), (threads, 1, 1), tuple(args), shared_bytes, stream)

    def _launch_overlapping(
        self,
        function: int,
        grid: tuple[int, int],
        threads: int,
        shared_bytes: int,
        args: Sequence[Any],
        stream: int,
    ) -> None:
        assert self._driver is not None
        values = [
            ctypes.c_int32(int(a))
            if isinstance(a, np.int32)
            else ctypes.c_float(float(a))
            if isinstance(a, np.float32)
            else ctypes.c_void_p(a)
            for a in args
        ]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        attribute = _LaunchAttribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION)
        attribute.value[0] = 1
        config = _LaunchConfig(
            (ctypes.c_uint * 3)(*grid, 1),
            (ctypes.c_uint * 3)(threads, 1, 1),
            shared_bytes,
            stream,
            ctypes.pointer(attribute),
            1,
        )
        with self._torch.cuda.device(self.index):
            status = self._driver.cuLaunchKernelEx(
                ctypes.byref(config), ctypes.c_void_p(function), pointers, None
            )
        if status:
            raise KernelError(f"cuLaunchKernelEx failed with CUDA error {status}")

    def capture(self, work: Callable[[], None], warm_up: Callable[[], None] | None = None) -> Captured:
        torch = self._torch
        with torch.cuda.device(self.index):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                (warm_up or work)()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with _no_collection(), torch.cuda.graph(graph):
                work()
        return Captured(graph.replay, (graph, work))

    def microseconds(self, work: Callable[[], object]) -> float:
        torch = self._torch
        with torch.cuda.device(self.index):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            work()
            end.record()
            end.synchronize()
        return float(start.elapsed_time(end)) * 1000.0


@contextmanager
def _no_collection() -> Iterator[None]:
    """Pause garbage collection: if it frees a graph during a capture, CUDA discards the capture."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@cache
def cuda_backend(index: int) -> CudaBackend:
    """The backend of a CUDA device, created once."""
    return CudaBackend(index)
