"""NVRTC without a GPU: find the library of the CUDA wheels, compile, and read the cubin's resource usage."""

from __future__ import annotations

import ctypes
import importlib.util
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Resources:
    """Of one kernel in a cubin: registers per thread and bytes of stack, where spills lie."""

    registers: int
    stack_bytes: int


@cache
def library() -> ctypes.CDLL | None:
    """NVRTC from the `nvidia` wheels (CUDA 12 or 13 layout), or None."""
    spec = importlib.util.find_spec("nvidia")
    for root in map(Path, (spec.submodule_search_locations or []) if spec else []):
        for folder in (root / "cu13" / "lib", root / "cuda_nvrtc" / "lib"):
            files = sorted(folder.glob("libnvrtc.so.1?"))
            if not files:
                continue
            # NVRTC looks its builtins up by plain name; they must be loaded first to be found beside it.
            for builtins in sorted(folder.glob("libnvrtc-builtins.so.*")):
                ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(str(files[-1]))
    return None


def compile_cubin(source: str, name: str, options: list[str]) -> bytes:
    """The cubin.

    Raises
    ------
    RuntimeError
        With the compiler's log.
    """
    nvrtc = library()
    assert nvrtc is not None, "ask library() first"
    program = ctypes.c_void_p()
    status = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), 0, None, None)
    assert status == 0, f"nvrtcCreateProgram: {status}"
    try:
        encoded = [option.encode() for option in options]
        status = nvrtc.nvrtcCompileProgram(program, len(encoded), (ctypes.c_char_p * len(encoded))(*encoded))
        if status:
            raise RuntimeError(_text(nvrtc, program, "ProgramLog").decode())
        return _text(nvrtc, program, "CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _text(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, text)
    return text.value if what == "ProgramLog" else text.raw


def _sections(cubin: bytes) -> dict[str, tuple[bytes, int]]:
    """ELF sections by name: contents and sh_info."""
    assert cubin[:5] == b"\x7fELF\x02", "a cubin is a 64-bit ELF file"
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    rows = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + i * size) for i in range(count)]
    names_at = rows[names_index][4]
    sections = {}
    for row in rows:
        start = names_at + row[0]
        label = cubin[start : cubin.index(b"\0", start)].decode()
        sections[label] = (b"" if row[1] == 8 else cubin[row[4] : row[4] + row[5]], row[7])
    return sections


def resources(cubin: bytes, kernel: str) -> Resources:
    """Attributes that the loader sees in `.nv.info`: 0x2f (registers), 0x11 and 0x12 (frame, least stack)."""
    sections = _sections(cubin)
    assert f".text.{kernel}" in sections, f"no kernel {kernel} in the cubin"
    info, _ = sections[".nv.info"]
    symbols = _symbols(sections)
    registers, stack = -1, 0
    at = 0
    while at < len(info):
        kind, attribute, length = struct.unpack_from("<BBH", info, at)
        if kind == 4:  # sized value: symbol index, value
            symbol, value = struct.unpack_from("<II", info, at + 4) if length >= 8 else (-1, 0)
            if symbols.get(symbol) == kernel:
                if attribute == 0x2F:
                    registers = value
                elif attribute in (0x11, 0x12):
                    stack = max(stack, value)
            at += 4 + length
        else:
            at += 4
    assert registers >= 0, f"no register count of {kernel} in .nv.info"
    return Resources(registers, stack)


def _symbols(sections: dict[str, tuple[bytes, int]]) -> dict[int, str]:
    table, _ = sections[".symtab"]
    strings, _ = sections[".strtab"]
    names = {}
    for index in range(len(table) // 24):
        (start,) = struct.unpack_from("<I", table, index * 24)
        names[index] = strings[start : strings.index(b"\0", start)].decode()
    return names
