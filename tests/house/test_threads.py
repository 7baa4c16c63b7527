"""Nothing changes the process: work from several threads at once gives the bits of one, and leaves all as it was."""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import loopq
from benches.zoo.store import save_model
from loopq.calibrate.data import from_ids
from loopq.errors import ConfigError, SystemContractError
from loopq.models.load import load_model
from loopq.runtime.generate import Decoder, Generation, generate
from loopq.systems.base import Batch
from tests.conftest import tiny_model
from tests.support.interpreters import ROOT
from tests.support.looped import save_dense
from tests.support.systems import CASES, Case, as_loaded, open_system, prompts

N_THREADS = 4
OPTIONS: dict[str, Any] = {"group_size": 16, "preset": "fast", "n_prompts": 2, "n_steps": 2}


def _process() -> tuple[Any, ...]:
    """State that a thread could change for all others."""
    return (
        {name: value for name, value in vars(nn.init).items() if callable(value)},
        {name: value for name, value in vars(nn.Module).items() if callable(value)},
        torch.linspace,
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_grad_enabled(),
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.backends.mha.get_fastpath_enabled(),
        torch.get_rng_state().tolist(),
        nn.Linear(2, 2, bias=False).weight.device,
    )


def _at_once(work: Callable[[int], Any]) -> None:
    """The results of several threads are those of one after the other, bit for bit."""
    torch.manual_seed(3)
    expected = [work(number) for number in range(N_THREADS)]
    results: list[Any] = [None] * N_THREADS
    start = threading.Barrier(N_THREADS)

    def run(number: int) -> None:
        try:
            start.wait()
            results[number] = work(number)
        except Exception as error:  # noqa: BLE001  # raised by the test's own thread
            results[number] = error

    torch.manual_seed(4)
    before = _process()
    torch.manual_seed(4)
    threads = [threading.Thread(target=run, args=(number,)) for number in range(N_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert _process() == before
    for mine, alone in zip(results, expected, strict=True):
        if isinstance(mine, Exception):
            raise mine
        _same(mine, alone)


def _same(actual: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            _same(actual[name], value)
    else:
        np.testing.assert_array_equal(np.asarray(actual), np.asarray(expected))


def _codes(result: Any) -> dict[str, Any]:
    return {name: layer.dequantize() for name, layer in result.layers.items()}


@pytest.mark.parametrize("name", CASES)
def test_rollouts_at_several_depths_share_a_model(name: str) -> None:
    case = CASES[name]
    system, batch = open_system(case), prompts(case)
    _at_once(lambda n: system.rollout(batch, case.depths[n % len(case.depths)]).detach().numpy())


def _quantized(case: Case) -> Callable[[int], dict[str, Any]]:
    loaded, ids = as_loaded(open_system(case)), prompts(case).input_ids.numpy()
    options = OPTIONS | {"n_steps": case.depths[0], "seq_len": case.n_tokens}
    return lambda n: _codes(loopq.quantize(loaded, ids, bits=3 + n % 2, seed=n, **options))


def _evaluated(case: Case) -> Callable[[int], Any]:
    loaded, ids = as_loaded(open_system(case)), prompts(case).input_ids.numpy()
    options = OPTIONS | {"n_steps": case.depths[0], "seq_len": case.n_tokens}
    results = [loopq.quantize(loaded, ids, bits=bits, **options) for bits in (3, 4)]
    tokens = from_ids(list(ids))

    def work(n: int) -> dict[str, Any]:
        _, measured = loopq.evaluate(loaded, {"q": results[n % 2]}, tokens, n_steps=case.depths[0])
        return {"kl": measured.kl, "agreement": measured.agreement}

    return work


def _generated(case: Case) -> Callable[[int], Any]:
    loaded = as_loaded(open_system(case))

    def work(n: int) -> list[int]:
        settings = Generation(n_tokens=3, seed=n)
        try:
            depth = case.depths[n % len(case.depths)]
            return list(generate(loaded, [5, 6, 7], Decoder(loaded.system, depth, settings), settings))
        except (ConfigError, SystemContractError):
            return []

    return work


QUICK = ("looped Llama", "Ouro", "transformers ALBERT")


@pytest.mark.filterwarnings("ignore:not quantized")
@pytest.mark.parametrize("work", [_quantized, _evaluated, _generated])
@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_one_model_is_worked_on_by_several_threads(
    name: str, work: Callable[[Case], Callable[[int], Any]]
) -> None:
    _at_once(work(CASES[name]))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    base = tmp_path_factory.mktemp("models")
    save_model(tiny_model(), base / "tiny")
    dense = save_dense(base / "dense")
    by_kind = {"registered": str(base / "tiny"), "transformers": f"looped:{dense}[1:3]x2"}
    ids = torch.randint(3, 200, (2, 12)).numpy()
    for kind in list(by_kind):
        by_kind[f"{kind}, quantized"] = str(base / f"{kind}-q")
        loopq.quantize(by_kind[kind], ids, out=by_kind[f"{kind}, quantized"], seq_len=12, **OPTIONS)
    return by_kind


def test_loading_and_running_from_several_threads(folders: dict[str, str]) -> None:
    ids = torch.randint(3, 200, (1, 12), generator=torch.Generator().manual_seed(0))

    def work(number: int) -> dict[str, Any]:
        outputs = {}
        for name, folder in folders.items():
            loaded = loopq.load(folder) if "quantized" in name else load_model(folder)
            outputs[name] = loaded.system.rollout(Batch(ids, (0,)), 2).detach().numpy()
        streamed = load_model(folders["transformers"], memory=1).system
        return outputs | {"streamed": streamed.rollout(Batch(ids, (0,)), 2).numpy()}

    _at_once(work)


def test_a_model_read_layer_by_layer_is_shared(folders: dict[str, str]) -> None:
    loaded = load_model(folders["transformers"], memory=1)
    batch = Batch(torch.randint(3, 200, (2, 12)), (0, 1))
    _at_once(lambda n: loaded.system.rollout(batch, 1 + n % 3).detach().numpy())


def _changed(tree: ast.AST) -> list[str]:
    """Assignments and deletions of attributes of torch, of its modules and classes, and of the interpreter."""
    foreign: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            foreign |= {
                (a.asname or a.name).split(".")[0] for a in node.names if not a.name.startswith("loopq")
            }
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("loopq"):
            foreign |= {a.asname or a.name for a in node.names}

    def root(node: ast.AST) -> str:
        while isinstance(node, ast.Attribute):
            node = node.value
        return node.id if isinstance(node, ast.Name) else ""

    changes = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load) and root(node) in foreign:
            changes.append(ast.unparse(node))
        setter = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if setter and node.func.id in ("setattr", "delattr") and root(node.args[0]) in foreign:  # type: ignore[attr-defined]
            changes.append(ast.unparse(node))
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in SETTINGS:
            changes.append(ast.unparse(node.func))
    return changes


#: Functions that change a setting of the whole process.
SETTINGS = {
    "manual_seed_all",
    "set_default_device",
    "set_default_dtype",
    "set_fastpath_enabled",
    "set_float32_matmul_precision",
    "set_num_threads",
    "fork_rng",
    "set_rng_state",
}


def test_no_attribute_of_the_process_is_replaced() -> None:
    # The command `loopq` owns its process: its streams, and what a Ctrl-C at its end prints.
    program = {"__main__.py", "interrupts.py"}
    files = (f for f in sorted((ROOT / "python/loopq").rglob("*.py")) if f.name not in program)
    by_file = {file.name: _changed(ast.parse(file.read_text("utf-8"))) for file in files}
    assert {name: changes for name, changes in by_file.items() if changes} == {}


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.nn.init.normal_ = print",
        "from torch import nn\nnn.Module.forward = print",
        "import sys\nsetattr(sys, 'argv', [])",
        "import torch\ntorch.set_default_dtype(torch.half)",
    ],
)
def test_a_replaced_attribute_is_found(text: str) -> None:
    assert _changed(ast.parse(text))
