"""Fracast-0, a published looped forecaster of time series, with series to calibrate and to measure on.

`loopq --register benches/zoo/register.py reproduce TABLE fracast` opens it. Its weights come with the package
`fracast`, and the real series with the package `statsmodels`. One block runs ten times, a second one six times.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from loopq.calibrate.calls import CallSet, given_calls
from loopq.calibrate.prompts import register_prompts
from loopq.errors import ConfigError
from loopq.models.from_python import wrap
from loopq.models.load import LoadedModel, to_device
from loopq.paper.models import register_source

NAME = "fracast"
#: Points of a forecast, and of the largest context, as the model has them.
HORIZON, CONTEXT = 48, 2048
#: Seed of the synthetic series that are measured. Those of calibration have the number of their draw.
MEASURED = 10_000
Batch = dict[str, Any]


class Forecaster(nn.Module):
    """Core and head of Fracast-0 in one module: a normalized series to the quantiles of what follows."""

    def __init__(self, weights: str = "fp32") -> None:
        super().__init__()
        _find("fracast", "Fracast-0 is in the package")
        from fracast.inference import FracastModel  # lazy: the other models need no such package

        whole = FracastModel.from_pretrained(weights=weights)
        self.core, self.head, self.quantiles = whole.core, whole.head, whole.quantiles

    def forward(self, values: Tensor, observed: Tensor, future: Tensor | None = None) -> Tensor:
        """Quantiles of shape (n, 48, 9). `future` is for a score alone."""
        hidden = self.core(values[:, None], observed[:, None], observed[:, None].float())
        quantiles: Tensor = self.head.forward_horizon(
            hidden, last_obs=values[:, -1:], ctx=values, ctx_mask=observed
        )
        return quantiles


def _find(package: str, what: str) -> Path:
    """Return the folder of a package, or say how to install it."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise ConfigError(f"{what} {package}: pip install {package}")
    return Path(found.submodule_search_locations[0])


def window(series: NDArray[np.float64]) -> Batch:
    """A batch of one series: all but its last 48 points as context, scaled to 0 and 1 as the package does."""
    context, future = series[:-HORIZON][-CONTEXT:], series[-HORIZON:]
    low = np.nanmin(context)
    span = max(np.nanmax(context) - low, 1e-5)
    values, observed = np.zeros(CONTEXT, np.float32), np.zeros(CONTEXT, bool)
    values[-len(context) :] = np.nan_to_num((context - low) / span)
    observed[-len(context) :] = np.isfinite(context)
    future = torch.tensor((future - low) / span, dtype=torch.float32)
    return {
        "values": torch.from_numpy(values)[None],
        "observed": torch.from_numpy(observed)[None],
        "future": future[None],
    }


def synthetic(n: int, seed: int, shortest: int = 200) -> list[Batch]:
    """Series of trend, two seasons, noise that remembers, and sometimes a break."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(n):
        length = int(rng.integers(shortest, CONTEXT)) + HORIZON
        at = np.arange(length)
        noise = rng.standard_normal(length) * rng.choice([0.05, 0.2, 0.5])
        memory = rng.uniform(0, 0.95)
        for i in range(1, length):
            noise[i] += memory * noise[i - 1]
        period = rng.integers(4, 100)
        season = np.sin(2 * np.pi * (at / period + rng.random())) * rng.uniform(0, 2)
        other = np.sin(2 * np.pi * (at / (period * rng.uniform(2, 9)) + rng.random())) * rng.uniform(0, 1)
        jump = rng.normal() * (at > rng.integers(0, length)) * (rng.random() < 0.3)
        made.append(window(season + other + noise + jump + rng.normal() * 2 * at / length))
    return made


def real() -> tuple[list[Batch], list[str]]:
    """Windows of CO2, sunspots, El Nino, the Nile and US macroeconomic data, and a label of each.

    Raises
    ------
    ConfigError
        The package with these files is missing.
    """
    folder = _find("statsmodels", "the real series are files of the package") / "datasets"

    def columns(name: str) -> NDArray[np.float64]:
        return np.genfromtxt(folder / name / f"{name}.csv", delimiter=",", skip_header=1)

    macro = columns("macrodata")
    names = ("realgdp", "realcons", "realinv", "cpi", "m1", "tbilrate", "unemp")
    places = (2, 3, 4, 7, 8, 9, 10)
    series = {
        "co2": (columns("co2")[:, 1], 3),
        "sunspots": (columns("sunspots")[:, 1], 3),
        "elnino": (columns("elnino")[:, 1:].flatten(), 3),
        "nile": (columns("nile")[:, 1], 1),
        **{name: (macro[:, i], 2) for name, i in zip(names, places, strict=True)},
    }
    windows, labels = [], []
    for name, (values, n) in series.items():
        for back in range(n):
            windows.append(window(values[: len(values) - back * HORIZON]))
            labels.append(f"real: {name} -{back}")
    return windows, labels


def held_out(n: int | None = None) -> tuple[list[Batch], list[str]]:
    """The real windows and then synthetic ones, 52 by default, and a label of each."""
    windows, labels = real()
    more = 28 if n is None else max(0, n - len(windows))
    windows += synthetic(more, MEASURED)
    labels += [f"synthetic: {i}" for i in range(more)]
    return windows[:n], labels[:n]


def prompts(loaded: LoadedModel, use: str, n_prompts: int, draw: int) -> CallSet:
    """Synthetic series to calibrate on, other for each draw, or the first of those to measure on."""
    batches = synthetic(n_prompts, draw) if use == "calibration" else held_out(n_prompts)[0]
    calls, _ = given_calls(batches, n_prompts)
    assert calls is not None
    source = "synthetic series" if use == "calibration" else "real and synthetic series"
    return dataclasses.replace(CallSet.of(loaded, calls), source=source)


def opened(data: Path | None, *, device: str = "cpu", **others: Any) -> LoadedModel:
    """Open the package's weights. Nothing of them is in a data folder.

    Raises
    ------
    ConfigError
        Another option of loading than the device is set.
    """
    chosen = [name for name, value in others.items() if value]
    if chosen:
        raise ConfigError(f"{NAME}: its package loads it, so {', '.join(chosen)} cannot be set")
    return dataclasses.replace(wrap(to_device(Forecaster(), device)), config={"model_type": NAME})


register_prompts(NAME, prompts)
register_source(NAME, opened)
