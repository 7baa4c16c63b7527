"""Subjects of the comparison with other tools: a model, plain or planted, with its prompts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import torch

import benches.zoo.register  # noqa: F401  opens the folders of the small models
from benches.zoo import folders
from benches.zoo.planted import plant_adapter_outlier, plant_kappa_spike
from loopq.calibrate.data import TokenSet, windows
from loopq.errors import ConfigError
from loopq.models.replace import Replaced, Weights
from loopq.paper.items import read_items
from loopq.paper.models import PreparedModel, Sizes, open_source
from loopq.paper.plbert import PLBERT
from loopq.paper.tables.benchmarks import METRICS
from loopq.paper.tasks import score
from loopq.systems import find_system

#: Powers of four: the planted models compute what the plain ones do, to the last bit.
KAPPA, OUTLIER = 1024.0, 64.0


def prepare(
    name: str,
    sizes: Sizes,
    data: Path | None,
    draw: int,
    texts: Sequence[str | None] = (None, None),
    dtype: str | None = None,
) -> PreparedModel:
    """Load a model by its name; "+spike", "+token" or "+outlier" behind it plants what large models have.

    A massive activation at step 0, one at the most frequent token, or a loud column of the adapter. `texts` are
    files to calibrate and to measure on, in the place of those that ship. `dtype` is that of the computation; by
    default it is the model's, where the processor has instructions for it.
    """
    plain, _, planted = name.partition("+")
    trained = {Path(folder).name: folder for folder in folders()}
    files = (Path(file) if file else None for file in texts)
    prepared = open_source(trained.get(plain, plain), data, *files, dtype=dtype).prompts(sizes, draw)
    if not planted:
        return prepared
    model = prepared.loaded.model
    if planted in ("spike", "token"):
        ids = torch.from_numpy(prepared.calibration.sequences[0])[None]
        token = int(ids.flatten().mode().values) if planted == "token" else None
        model, _ = plant_kappa_spike(model, ids, KAPPA, token=token)
    elif planted == "outlier":
        model, _ = plant_adapter_outlier(model, OUTLIER)
    else:
        raise ConfigError(f"{name}: nothing is called {planted!r}; spike, token and outlier can be planted")
    loaded = dataclasses.replace(prepared.loaded, model=model, system=find_system(model))
    return dataclasses.replace(prepared, name=name, loaded=loaded)


def other_text(model: PreparedModel, data: Path | None, n_prompts: int) -> TokenSet | None:
    """Text of another kind than a model is calibrated on: problems of GSM8K; None where there is none."""
    if data is None or model.name == PLBERT or model.evaluation.packing != "windows":
        return None
    lines = (data / "gsm8k" / "test.jsonl").read_text("utf-8").splitlines()[:400]
    records = map(json.loads, lines)
    text = "\n".join(f"{r['question']} {r['answer']}" for r in records).encode("ascii", "ignore").decode()
    length = model.evaluation.sequences[0].size
    return windows(text, model.loaded.encode, length, n_prompts, "GSM8K, test")


def items_right(
    model: PreparedModel, weights: Weights, data: Path | None, task: str, limit: int
) -> list[float]:
    """Score weights on the first items of a task: 1 where an item is right."""
    if data is None:
        raise ConfigError(f"{task}: its items are in a data folder; give --data DIR or set LOOPQ_DATA")
    items = read_items(task, data, limit)
    with Replaced(model.loaded.system, weights) as other:
        loaded = dataclasses.replace(model.loaded, model=other.model, system=other)
        return score(loaded, task, items)[METRICS[task]].values.tolist()
