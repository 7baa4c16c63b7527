"""Work from several threads at once: the bits of one thread, and the process as it was."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from loopq.errors import ConfigError
from loopq.models.load import load_model
from loopq.systems.base import Batch

from ..support import threads as shared
from ..support.generating import generated
from ..support.looped import save_dense
from ..support.systems import CASES, Case, open_system, prompts
from .counts import Counts, before


def threads(model: Path, n_cases: int, rng: random.Random, until: float) -> Counts:
    """Let four threads load, roll out, quantize, evaluate or generate with one model of a random system."""
    counts = Counts()
    dense = save_dense(model.parent / "dense")
    folders = [str(model), f"looped:{dense}[1:3]x2"]
    kinds: dict[str, Callable[[Case], Callable[[int], Any]]] = {
        "roll out": _rolled_out,
        "quantize": shared.quantized,
        "evaluate": shared.evaluated,
        "generate": generated,
        "load": lambda case: _loaded(rng.choice(folders), rng.choice([None, 1])),
    }
    for number in before(until, range(n_cases)):
        kind = list(kinds)[number % len(kinds)]
        name = rng.choice(list(CASES))
        wrong = ""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                shared.at_once(kinds[kind](CASES[name]))
            except ConfigError as error:
                # Some options do not fit some systems, in one thread or in four.
                counts.add("refused", "" if kind == "quantize" else f"{kind}, {name}: {error}")
                continue
            except Exception as error:  # noqa: BLE001  # what is looked for
                wrong = f"{kind}, {name}: {type(error).__name__}: {str(error)[:300]}"
        counts.add(f"{kind}: {'another result' if wrong else 'the same bits'}", wrong)
    return counts


def _rolled_out(case: Case) -> Callable[[int], Any]:
    system, batch = open_system(case), prompts(case)
    return lambda n: system.rollout(batch, case.depths[n % len(case.depths)]).detach().numpy()


def _loaded(folder: str, memory: int | None) -> Callable[[int], Any]:
    ids = torch.randint(3, 200, (1, 12), generator=torch.Generator().manual_seed(0))
    small = {} if memory is None or ":" not in folder else {"memory": memory}

    def work(number: int) -> Any:
        system = load_model(folder, **small).system
        return system.rollout(Batch(ids, (0,)), 1 + number % 3).detach().numpy()

    return work
