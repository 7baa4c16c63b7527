"""Work from several threads at once, held against the bits of one thread and the process as it was."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import loopq
from benches.zoo.store import save_model
from loopq.calibrate.data import from_ids
from tests.conftest import tiny_model
from tests.support.looped import save_dense
from tests.support.systems import CASES, Case, as_loaded, open_system, prompts

N_THREADS = 4
OPTIONS: dict[str, Any] = {"group_size": 16, "preset": "fast", "n_prompts": 2, "n_steps": 2}
QUICK = ("looped Llama", "Ouro", "transformers ALBERT")
#: Names of all systems; those that are not in `QUICK` are slow.
SYSTEMS = [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES]


def process() -> tuple[Any, ...]:
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


def at_once(work: Callable[[int], Any]) -> None:
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
    before = process()
    torch.manual_seed(4)
    threads = [threading.Thread(target=run, args=(number,)) for number in range(N_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert process() == before
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


def quantized(case: Case) -> Callable[[int], dict[str, Any]]:
    """Quantize one model, with another seed in each thread."""
    loaded, ids = as_loaded(open_system(case)), prompts(case).input_ids.numpy()
    options = OPTIONS | {"n_steps": case.depths[0], "seq_len": case.n_tokens}
    return lambda n: _codes(loopq.quantize(loaded, ids, bits=3 + n % 2, seed=n, **options))


def evaluated(case: Case) -> Callable[[int], Any]:
    """Evaluate one model, with one of two results in each thread."""
    loaded, ids = as_loaded(open_system(case)), prompts(case).input_ids.numpy()
    options = OPTIONS | {"n_steps": case.depths[0], "seq_len": case.n_tokens}
    results = [loopq.quantize(loaded, ids, bits=bits, **options) for bits in (3, 4)]
    tokens = from_ids(list(ids))

    def work(n: int) -> dict[str, Any]:
        _, measured = loopq.evaluate(loaded, {"q": results[n % 2]}, tokens, n_steps=case.depths[0])
        return {"kl": measured.kl, "agreement": measured.agreement}

    return work


def save_folders(base: Path) -> dict[str, str]:
    """Save a small model of each kind of loading; return where, by kind."""
    save_model(tiny_model(), base / "tiny")
    return {"registered": str(base / "tiny"), "transformers": f"looped:{save_dense(base / 'dense')}[1:3]x2"}
