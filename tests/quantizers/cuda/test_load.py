"""Loading and launching with a fake CuPy: the calls that it receives, and every refusal before them."""

from __future__ import annotations

import dataclasses
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from loopq.errors import KernelError, MissingExtraError
from loopq.quantizers.cuda import load, sources
from tests.support.cuda.fake_cupy import FakeCuPy

KERNEL = load.Kernel("w4a16_gemm.cu", "loopq_w4a16_gemm", ("-DLQ_MT=1",))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A pretended A100 on a pretended CUDA 12 build of torch."""
    state = SimpleNamespace(capturing=False, stream=5, capability=(8, 0), cupy=FakeCuPy())
    monkeypatch.setitem(sys.modules, "cupy", state.cupy)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda index: SimpleNamespace(
            name="Pretend", major=state.capability[0], minor=state.capability[1], multi_processor_count=108
        ),
    )
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda index=None: SimpleNamespace(cuda_stream=state.stream)
    )
    return state


def test_a_kernel_is_compiled_once_and_launched_on_torchs_stream(gpu: SimpleNamespace) -> None:
    backend = load.CudaBackend(0)
    assert backend.limits.multiprocessors == 108
    assert backend.limits.shared_bytes == 166_912
    arguments = (1234, np.int32(3), np.float32(0.5))
    backend.launch(KERNEL, (7, 2), 512, 99_000, arguments)
    gpu.stream = 6
    gpu.capturing = True  # loaded kernels may be captured
    backend.launch(KERNEL, (7, 2), 512, 99_000, arguments)
    assert len(gpu.cupy.modules) == 1
    assert gpu.cupy.modules[0]["code"] == sources.translation_unit("w4a16_gemm.cu")
    assert gpu.cupy.modules[0]["options"] == ("-std=c++17", "-DLQ_MT=1")
    assert gpu.cupy.shared == [166_912]
    assert gpu.cupy.function.calls == [
        ((7, 2, 1), (512, 1, 1), arguments, 99_000, ("stream", handle)) for handle in (5, 6)
    ]


def test_a_kernel_is_proven_once_and_not_kept_if_wrong(gpu: SimpleNamespace) -> None:
    seen: list[str] = []

    def prove(backend: load.Backend) -> None:
        seen.append("proof")
        backend.launch(tried, (1, 1), 32, 0, ())  # the kernel that is being tried out

    tried = dataclasses.replace(KERNEL, prove=prove)
    backend = load.CudaBackend(0)
    for _ in range(2):
        backend.launch(tried, (1, 1), 32, 0, ())
    assert seen == ["proof"]
    assert len(gpu.cupy.function.calls) == 3
    assert len(gpu.cupy.modules) == 1

    def refuse(backend: load.Backend) -> None:
        raise KernelError("wrong on this device")

    wrong = load.Kernel("beam.cu", "loopq_beam", (), refuse)
    for _ in range(2):
        with pytest.raises(KernelError, match="wrong on this device"):
            backend.launch(wrong, (1, 1), 32, 0, ())
    assert len(gpu.cupy.function.calls) == 3


def test_loading_during_capture_is_refused(gpu: SimpleNamespace) -> None:
    gpu.capturing = True
    with pytest.raises(KernelError, match="run the same call once before the capture"):
        load.CudaBackend(0).launch(KERNEL, (1, 1), 32, 0, ())
    assert not gpu.cupy.modules


def test_an_old_gpu_is_refused(gpu: SimpleNamespace) -> None:
    gpu.capability = (7, 5)
    with pytest.raises(KernelError, match=r"Pretend has compute capability 7\.5.*8\.0 \(A100\) or newer"):
        load.CudaBackend(0)


def test_a_compiler_error_names_the_file(gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", FakeCuPy(fails=Exception))
    with pytest.raises(KernelError, match=r"w4a16_gemm\.cu did not compile for device 0"):
        load.CudaBackend(0).prepare(KERNEL)


@pytest.mark.parametrize("error", [RuntimeError, OSError])
def test_a_missing_compiler_names_the_extra(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """CuPy raises RuntimeError where it finds no NVRTC, no CUDA headers, or a driver that is too old."""
    monkeypatch.setitem(sys.modules, "cupy", FakeCuPy(fails=error))
    with pytest.raises(KernelError, match=r"(?s)no libnvrtc.*pip install 'loopq\[cuda12\]'"):
        load.CudaBackend(0).prepare(KERNEL)


def test_an_older_cupy_is_refused(gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", FakeCuPy(version="13.6.0"))
    with pytest.raises(MissingExtraError, match=r"CuPy 13\.6\.0 is installed; the kernels need 14"):
        load.require_cupy()


@pytest.mark.parametrize(("available", "index"), [(False, 0), (True, 1)])
def test_no_such_device(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, available: bool, index: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    with pytest.raises(
        KernelError, match=f"CUDA device {index} is asked for and PyTorch sees {int(available)}"
    ):
        load.CudaBackend(index)


@pytest.mark.parametrize(("built", "extra"), [("12.8", "cuda12"), ("13.0", "cuda13")])
def test_missing_cupy_names_the_extra(built: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(MissingExtraError, match=rf"pip install 'loopq\[{extra}\]'"):
        load.require_cupy()


def test_cupy_of_another_major_is_refused(gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", FakeCuPy(runtime=13000))
    with pytest.raises(
        MissingExtraError, match=r"CuPy is built for CUDA 13, PyTorch for CUDA 12\.8.*cupy-cuda13x"
    ):
        load.require_cupy()


def test_torch_without_cuda_or_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(MissingExtraError, match="this one is CPU only"):
        load.require_cupy()
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'loopq\[torch\]'"):
        load.require_cupy()
