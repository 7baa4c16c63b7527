"""A stand-in for CuPy that records what is compiled and launched."""

from __future__ import annotations

from types import MappingProxyType, SimpleNamespace
from typing import Any


class FakeFunction:
    ptr = 77

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *args: Any) -> None:
        self.calls.append(args)


class FakeCuPy:
    """Records modules and launches; `fails` is what loading raises (Exception: the compiler's own)."""

    def __init__(
        self, runtime: int = 12090, fails: type[Exception] | None = None, version: str = "14.2.0"
    ) -> None:
        self.modules: list[dict[str, Any]] = []
        self.function = FakeFunction()
        self.shared: list[int] = []
        outer = self

        class CompileException(Exception):
            pass

        class Raw:
            kernel = self.function

            def __setattr__(self, name: str, value: int) -> None:
                assert name == "max_dynamic_shared_size_bytes"
                outer.shared.append(value)

        class RawModule:
            def __init__(self, **given: Any) -> None:
                outer.modules.append(given)

            def get_function(self, name: str) -> Raw:
                if fails is not None:
                    raise CompileException("line 3: no") if fails is Exception else fails("no libnvrtc.so.12")
                return Raw()

        class Device:
            attributes = MappingProxyType({"MaxSharedMemoryPerBlockOptin": 166_912})

            def __init__(self, index: int) -> None:
                pass

            def __enter__(self) -> None:
                pass

            def __exit__(self, *_: object) -> None:
                pass

        class Stream:
            @staticmethod
            def from_external(stream: Any) -> tuple[str, int]:
                version, handle = stream.__cuda_stream__()
                assert version == 0
                return "stream", handle

        self.__version__ = version
        self.RawModule = RawModule
        self.cuda = SimpleNamespace(
            runtime=SimpleNamespace(runtimeGetVersion=lambda: runtime),
            compiler=SimpleNamespace(CompileException=CompileException),
            Device=Device,
            Stream=Stream,
        )
