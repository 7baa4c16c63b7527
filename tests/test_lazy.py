"""Packages that are imported where they are needed."""

from __future__ import annotations

from tests.support.interpreters import python


def test_import_needs_numpy_and_safetensors_only():
    loaded = python("import sys, loopq; print(*{m.split('.')[0] for m in sys.modules})").split()
    extras = {
        "torch",
        "transformers",
        "scipy",
        "threadpoolctl",
        "matplotlib",
        "cupy",
        "lm_eval",
        "sentencepiece",
        "tokenizers",
    }
    assert not extras & set(loaded)
    code = (
        "import sys\n"
        f"for name in {sorted(extras)}: sys.modules[name] = None\n"
        "import loopq\n"
        "try: loopq.quantize('huginn_small', bits=4)\n"
        "except loopq.LoopqError as error: print(error)\n"
    )
    assert "loopq[torch]" in python(code)
