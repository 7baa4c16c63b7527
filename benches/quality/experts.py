"""Experts of a loop: rounded, solved from the rows that are sent to them, and from the rows of all tokens.

    python -m benches.quality.experts [--steps 1200] [--work FOLDER] [--record FILE]

Trains a small byte-level OLMoE whose two middle layers run three times (some minutes on one thread; it is kept in the
work folder), quantizes its experts alone with few and with many calibration prompts, and prints KL to full precision on
held-out text. Ratios are to "rows routed" with the same prompts, with 95 % intervals over the prompts of the text. "all
tokens" gives every expert the rows of all tokens while Hessians are collected, so that none has few; what the experts
add to the output stays as it is.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import OlmoeConfig, OlmoeForCausalLM

import loopq
from benches.python.record import write
from benches.zoo.corpus import REPOSITORY, prepare
from benches.zoo.recipes import Recipe
from benches.zoo.train import draw
from loopq.evaluate.stats import geometric_mean_ratio
from loopq.models.from_python import wrap
from loopq.models.load import LoadedModel
from loopq.systems.base import Batch
from loopq.systems.experts import Experts, unfuse
from loopq.terminal.table import render

RECIPE = Recipe("olmoe", {}, depth=(3, 3), steps=0, batch=8, seq_len=128)
ROUTED = "GPTQ-CD, rows routed"
METHODS: dict[str, dict[str, Any]] = {
    "RTN": {"method": "rtn"},
    "GPTQ-CD, all tokens": {"metric": "inputs"},
    ROUTED: {"metric": "inputs"},
    "GPTQ-CD, rows routed, loop metric": {"metric": "loop"},
}
GRIDS = ((4, 32), (3, 32))
N_PROMPTS = (2, 32)


def untrained() -> LoadedModel:
    """Return the model with drawn weights."""
    torch.manual_seed(0)
    config = OlmoeConfig(
        vocab_size=256, hidden_size=128, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, num_experts=16, num_experts_per_tok=2, max_position_embeddings=256,
        bos_token_id=0, eos_token_id=0, pad_token_id=0, looped_layers=[1, 3, 3],
    )  # fmt: skip
    model = OlmoeForCausalLM(config)
    unfuse(model)
    return wrap(model)


def train(loaded: LoadedModel, n_steps: int, work: Path) -> dict[str, Any]:
    """Train, or take what was trained before; return what it cost and bits per byte on held-out text."""
    data, held_out, _ = prepare(work / "corpus")
    system, path = loaded.system, work / f"olmoe-{n_steps}.pt"
    cost: dict[str, Any] = {"steps": n_steps, "threads": torch.get_num_threads()}
    if path.is_file():
        saved = torch.load(path, weights_only=True)
        system.model.load_state_dict(saved["model"])
        cost["seconds"] = saved["seconds"]
    else:
        began = time.monotonic()
        optimiser = torch.optim.AdamW(system.model.parameters(), lr=2e-3, betas=(0.9, 0.95))
        rate = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, n_steps, pct_start=0.1)
        for step in range(n_steps):
            loss = _loss(loaded, draw(data, RECIPE, step)[0])
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(system.model.parameters(), 1.0)
            optimiser.step()
            rate.step()
            if step % 50 == 49:
                print(f"step {step + 1}: {loss.item() / math.log(2.0):.3f} bits a byte", flush=True)
        cost["seconds"] = round(time.monotonic() - began)
        torch.save({"model": system.model.state_dict(), "seconds": cost["seconds"]}, path)
    with torch.no_grad():
        losses = [_loss(loaded, draw(held_out, RECIPE, step)[0]).item() for step in range(8)]
    return cost | {"bits_per_byte": sum(losses) / len(losses) / math.log(2.0)}


def _loss(loaded: LoadedModel, rows: Any) -> Tensor:
    ids = torch.from_numpy(rows)
    with loaded.system.differentiable():
        logits = loaded.system.rollout(Batch(ids[:, :-1], tuple(range(len(ids)))), loaded.system.n_steps)
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


@contextlib.contextmanager
def all_tokens() -> Iterator[None]:
    """Call every expert with all rows; each adds what it would anyway."""

    def forward(self: Experts, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        gate, up, down = self.names
        out = torch.zeros_like(hidden_states)
        for number, expert in enumerate(self):
            part = expert[down](self.activation(expert[gate](hidden_states)) * expert[up](hidden_states))
            share = (top_k_weights * (top_k_index == number)).sum(-1, keepdim=True)
            out += part * share
        return out

    with mock.patch.object(Experts, "forward", forward):
        yield


def measure(loaded: LoadedModel, n_prompts: int, bits: int, group_size: int) -> list[dict[str, Any]]:
    """KL of each method with so many prompts of calibration."""
    made = {}
    for name, options in METHODS.items():
        with all_tokens() if "all tokens" in name else contextlib.nullcontext():
            made[name] = loopq.quantize(
                loaded,
                bits=bits,
                group_size=group_size,
                n_prompts=n_prompts,
                seq_len=128,
                threads=1,
                exclude=("*self_attn*",),
                **options,
            )
    measured = loopq.evaluate(loaded, made, n_prompts=32, seq_len=128)[1:]
    rows = [layer.report["step_rows"] for layer in made[ROUTED].layers.values()
            if layer.report.get("step_rows")]  # fmt: skip
    few = {
        "none": sum(not sum(r) for r in rows),
        "below_inputs": sum(sum(r) < 128 for r in rows),
        "of": len(rows),
    }
    base = next(m for m in measured if m.name == ROUTED)
    return [
        {"bits": bits, "group": group_size, "n_prompts": n_prompts, "method": m.name, "kl": float(m.kl.mean()),
         "ratio": geometric_mean_ratio(m.kl.ravel(), base.kl.ravel()).to_json(),
         "agreement": float(m.agreement.mean()), "few": few}
        for m in measured
    ]  # fmt: skip


def main() -> None:
    """Train, measure, print and record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1200, help="of training")
    parser.add_argument("--work", type=Path, default=REPOSITORY / ".cache" / "zoo")
    parser.add_argument("--record", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.work.mkdir(parents=True, exist_ok=True)
    loaded = untrained()
    cost = train(loaded, args.steps, args.work)
    print(cost, flush=True)
    found = [one for n in N_PROMPTS for grid in GRIDS for one in measure(loaded, n, *grid)]
    heads = ("grid", "prompts", "few rows", "none", "method", "KL (nats)", "ratio", "95 %", "agreement")
    rows = [
        (f"INT{r['bits']} g{r['group']}", r["n_prompts"], f"{r['few']['below_inputs']} of {r['few']['of']}",
         r["few"]["none"], r["method"], f"{r['kl']:.5f}", f"{r['ratio']['estimate']:.2f}",
         f"[{r['ratio']['low']:.2f}, {r['ratio']['high']:.2f}]", f"{100 * r['agreement']:.2f} %")
        for r in found
    ]  # fmt: skip
    print(render(heads, rows))
    print("few rows: weights of experts with fewer rows than inputs; none: of these, without any")
    write(args.record, found, training=cost)


if __name__ == "__main__":
    main()
