"""Sources of kernels in the package."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from loopq.errors import ConfigError
from loopq.quantizers.cuda import sources


def test_sources_are_whole() -> None:
    texts = sources.kernel_sources()
    assert {"primitives.cuh", "w4a16_gemm.cu", "beam.cu", "w4_dequantize.cu"} <= set(texts)
    for name in texts:
        if name.endswith(".cu"):
            unit = sources.translation_unit(name)
            assert "#include" not in unit
            assert "LOOPQ_PRIMITIVES_CUH" in unit
    with pytest.raises(ConfigError, match=r"no kernel source 'nothing\.cu'; there are .*beam\.cu"):
        sources.translation_unit("nothing.cu")


def test_embedded_sources_are_the_files() -> None:
    embedded = sources.embedded_sources()
    if not embedded:
        pytest.skip("the compiled extension here was built without embedded kernel sources")
    built = Path(importlib.import_module("loopq._native").__file__).stat().st_mtime
    folder = Path(__file__).resolve().parents[3] / "kernels"
    if any(path.stat().st_mtime > built for path in folder.glob("*.cu*")):
        pytest.skip("the compiled extension here is older than kernels/: rebuild it to test what it embeds")
    assert embedded == sources.kernel_sources(), "rebuild the extension: kernels/ changed since"


def test_a_package_without_sources_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sources, "__file__", str(tmp_path / "a" / "b" / "c" / "d" / "sources.py"))
    monkeypatch.setattr(sources, "embedded_sources", dict)
    with pytest.raises(
        ConfigError, match=r"the CUDA sources are neither in .* nor in the compiled extension"
    ):
        sources.kernel_sources.__wrapped__()
