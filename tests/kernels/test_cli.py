"""`loopq bench` with the host emulation in the GPU's place, and what it says where there is no GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from loopq.cli import main
from loopq.commands import bench as command
from loopq.kernels import shapes
from loopq.kernels.bench import Procedure
from loopq.kernels.bench_rollout import LoopSize
from loopq.kernels.shapes import Projection
from tests.support.kernels.backend import EmulatedBackend
from tests.support.kernels.emulation import compiler
from tests.support.kernels.fake_cupy import FakeCuPy

needs_compiler = pytest.mark.skipif(
    compiler() is None, reason="NO C++ COMPILER: loopq bench is NOT tried here; install g++ or set CXX"
)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> type[EmulatedBackend]:
    """Tiny layers and few trials, emulated."""
    tiny = {"huginn-3.5b": (Projection("adapter", 96, 48, 2),), "parcae-a": (Projection("o", 64, 32, 1),)}
    monkeypatch.setattr(shapes, "MODELS", tiny)
    monkeypatch.setattr(command, "_backend", lambda index: EmulatedBackend())
    monkeypatch.setattr(command, "_loop_size", lambda: LoopSize(width=32, heads=1, inner=64, blocks=1))
    monkeypatch.setattr(
        command,
        "_procedure",
        lambda args: Procedure(
            warm_ups=0, trials=args.trials, cold_bytes=1, calls_per_graph=2, copy_bytes=64
        ),
    )
    return EmulatedBackend


@needs_compiler
def test_kernel(small: object, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "found.json"
    assert main(["bench", "kernel", "--tokens", "1,9", "--trials", "3", "--json", str(target)]) == 0
    out = capsys.readouterr().out
    assert "copy on the device" in out
    assert "all calls of a step" in out
    assert "4 comparisons with float64" in out
    assert "parcae" not in out
    found = json.loads(target.read_text())
    model = found["models"]["huginn-3.5b"]
    assert found["exact"] is True
    assert [(r["layer"], r["tokens"]) for r in model["products"]] == [("adapter", 1), ("adapter", 9)]
    assert all(r["ratio"]["low"] <= r["ratio"]["ratio"] <= r["ratio"]["high"] for r in model["products"])
    assert [p.name for p in tmp_path.iterdir()] == ["found.json"]


@needs_compiler
def test_rollout(small: object, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "found.json"
    args = ["bench", "rollout", "--tokens", "2", "--steps", "2", "--trials", "2", "--json", str(target)]
    assert main(args) == 0
    out = capsys.readouterr().out
    assert "2 tokens: 10 products in 2 steps, a graph's replay equals single launches" in out
    assert "bf16_eager / int4_graph_plain" in out
    assert json.loads(target.read_text())["rollouts"][0]["n_steps"] == 2


@needs_compiler
def test_a_wrong_result_is_not_a_benchmark(
    small: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Wrong(EmulatedBackend):
        def launch(self, kernel, grid, threads, shared_bytes, args):  # type: ignore[no-untyped-def]
            arguments = list(args)
            arguments[-9] = type(args[-9])(args[-9] - 32)  # K ends early
            super().launch(kernel, grid, threads, shared_bytes, arguments)

    monkeypatch.setattr(command, "_backend", lambda index: Wrong())
    assert main(["bench", "kernel", "--shapes", "huginn", "--tokens", "1", "--trials", "1"]) == 1
    assert "WRONG on this device" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["kernel", "rollout"])
@pytest.mark.parametrize(
    ("cupy", "cuda", "message"),
    [
        (None, "13.0", "pip install 'loopq[cuda13]'"),
        (None, None, "needs a PyTorch built for CUDA"),
        ("there", "13.0", "CUDA device 0 is asked for and PyTorch sees 0"),
    ],
)
def test_without_a_gpu_it_says_what_to_do(
    what: str,
    cupy: str | None,
    cuda: str | None,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None if cupy is None else FakeCuPy(runtime=13000))
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", what]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"loopq: error: bench {what}: ")
    assert message in err


def test_without_torch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["bench", "kernel"]) == 2
    assert "pip install 'loopq[torch]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["kernel", "--shapes", "llama"], "no shapes of 'llama'; there are huginn-3.5b, "),
        (["kernel", "--group-size", "48"], "group sizes 32, 64, 128"),
        (["kernel", "--trials", "0"], "argument --trials: must be between 1 and 1048576; got 0"),
        (["rollout", "--steps", "0"], "argument --steps: must be between 1 and 65536; got 0"),
        (["rollout", "--shapes", "parcae"], "bench rollout runs Huginn's loop"),
    ],
)
def test_bad_options(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["bench", *args])
    except SystemExit as stopped:  # by the parser, before anything runs
        code = stopped.code
    assert code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("tokens", ["0", "65", "a", ""])
def test_bad_tokens(tokens: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "kernel", "--tokens", tokens])
    assert stopped.value.code == 2
    assert "from 1 to 64" in capsys.readouterr().err
