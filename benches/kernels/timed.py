"""A GPU, with its work recorded in CUDA graphs and timed by device events."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from loopq.quantizers.cuda.load import Backend, CudaBackend


@dataclass(frozen=True)
class Captured:
    """Recorded work. `keep` holds the objects that the recording refers to."""

    replay: Callable[[], None]
    keep: Any = None


class Timed(Backend, Protocol):
    """A backend that records and times: the GPU, or a substitute in a dry run."""

    def capture(self, work: Callable[[], None], warm_up: Callable[[], None] | None = None) -> Captured:
        """Record `work` for replay. Runs `warm_up` (or `work`) once before, so that everything is loaded."""

    def microseconds(self, work: Callable[[], object]) -> float:
        """Time of one run of `work` on the otherwise idle device."""


class TimedBackend(CudaBackend):
    """`CudaBackend` with graphs and clocks."""

    def capture(self, work: Callable[[], None], warm_up: Callable[[], None] | None = None) -> Captured:
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
