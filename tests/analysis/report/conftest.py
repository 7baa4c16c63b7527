"""A small page with all its sections: a diagnosis of the linear toy, and made-up weights, errors and measurements."""

from __future__ import annotations

import pytest

from loopq.analysis.diagnosis import survey
from loopq.analysis.diagnosis.config import DiagnoseConfig
from loopq.analysis.diagnosis.context import Context
from loopq.analysis.report import page
from loopq.settings.execution import Execution
from tests.support.looptoys import LinearLoop, LinearSystem, tokens

QUICK = DiagnoseConfig(n_prompts=2, n_ablation_prompts=2, seeds=(0,), group_sizes=(4, -1))
#: Sections of the product; what a room adds is tested with the room.
OURS = ["ranks", "overlap", "ablation", "injection", "feedback", "groups"]
ON = {"n_prompts": 3, "n_tokens": 24, "source": "a <text>", "n_steps": 3, "n_seeds": 1}


@pytest.fixture(scope="session")
def diagnosis():
    system = LinearSystem(LinearLoop(width=8))
    return survey.diagnose(
        Context(system, tokens(n_prompts=3, n_tokens=12), 5, QUICK, execution=Execution(threads=1)),
        only=OURS,
        name="toy <&>",
    )


def summary(name, kl, n_bytes=1000, **more):
    return {
        "name": name, "output": "logits", "kl": kl, "agreement": 0.9, "perplexity": 5.0, "bits_per_byte": 2.0,
        "n_bytes": n_bytes, "kl_95": [kl / 2, 2 * kl],
    } | more  # fmt: skip


def measured(*summaries):
    reference = summary("full precision", 0.0, 4000, kl_95=None)
    return {"model": "toy", "on": ON, "weights": [reference, *summaries]}


def weight(name, **more):
    return {"name": name, "shape": [64, 128], "n_bytes": 4096, "bits": 4, "grid": "INT4", "group_size": 32,
            "method": "gptq-cd", "steps": [0, 1, 2], "error": 0.03, "error_rtn": 0.06} | more  # fmt: skip


def left(name, reason, **more):
    return {"name": name, "shape": [64], "n_bytes": 256, "dtype": "F32", "reason": reason} | more


def errors(**maps):
    """Errors of two layers at four steps, of every shade, for each checkpoint times a factor."""
    rows = {
        "core.0.attn.weight": [0.02, 0.026, 0.033, 0.042],
        "core.0.mlp.weight": [0.054, 0.069, 0.09, 0.11],
    }
    return {
        "on": ON,
        "weights": {
            name: {
                "moved": {layer: [factor * v for v in row] for layer, row in rows.items()},
                "own": {layer: [factor * 0.5 * row[0]] * 4 for layer, row in rows.items()},
            }
            for name, factor in maps.items()
        },
    }


@pytest.fixture(scope="session")
def everything(diagnosis):
    """Keywords of `render`: one checkpoint, diagnosed, quantized and measured."""
    rows = [weight("core.0.attn.weight"), weight("core.0.mlp.weight", error=0.08)]
    return {
        "diagnosis": diagnosis,
        "weights": {"Q4": [*rows, left("core.0.norm.weight", "no matrix")]},
        "errors": errors(Q4=1.0),
        "measured": measured(summary("Q4", 0.02)),
    }


@pytest.fixture(scope="module")
def text(diagnosis):
    return page.render(diagnosis)


@pytest.fixture
def no_figures(monkeypatch):
    monkeypatch.setattr("loopq.analysis.report.diagnosis.all_figures", lambda d: [])
