"""A small mixture of experts, with shared sums and with sums of each expert: `python -m benches.experts`.

An OLMoE of four layers, of which two run twice, with 16 experts in each layer and two of them for each token, is
trained on novels (about two CPU minutes on one thread) and kept in `.cache/mixture`. The default then quantizes it in
two ways: as loopq does, where the experts of a block share the statistics of the inputs that they read and of the
outputs that they write; and the full way, where each expert has its own. The record in benches/record has the KL of
both, CPU seconds, and bytes of the sums. LOOPQ_DATA names the folder with the novels.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from transformers import OlmoeConfig, OlmoeForCausalLM

from benches.pages import RECORD, ROOT
from benches.quality.peers_table import processor
from benches.zoo.corpus import prepare
from loopq.calibrate.data import TokenSet, from_ids
from loopq.calibrate.hooks import find_input_groups
from loopq.evaluation.compare import compare
from loopq.models.load import load_model
from loopq.run.auto import choose_metric
from loopq.run.config import QuantConfig
from loopq.run.memory import pass_bytes
from loopq.run.model_source import ModelSource
from loopq.run.solving import solve
from loopq.settings.execution import Execution
from loopq.systems import find_system
from loopq.systems.base import Batch, LoopedSystem, differentiable

FOLDER = ROOT / ".cache" / "mixture"
#: Prompts of the calibration, and seeds of the loop metric.
N_PROMPTS, SEEDS = (2, 4), (0, 1, 2, 3, 4, 5)
LENGTH, BATCH, RATE = 128, 16, 3e-3


def config() -> OlmoeConfig:
    """Configuration of the model: bytes, four layers, of which two run twice."""
    return OlmoeConfig(
        vocab_size=256, hidden_size=96, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, num_experts=16, num_experts_per_tok=2, norm_topk_prob=True, looped_layers=[1, 3, 2],
        max_position_embeddings=256, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip


def unbalance(routed: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Loss of a router that prefers some experts: 1 if all are chosen alike."""
    logits, _, chosen = routed
    n_experts = logits.shape[-1]
    taken = F.one_hot(chosen, n_experts).float().mean((0, 1))
    return n_experts * (taken * logits.softmax(-1).mean(0)).sum()


def train(folder: Path, n_steps: int) -> None:
    """Train the model on novels and save it."""
    data, _, _ = prepare(ROOT / ".cache" / "novels")
    torch.manual_seed(0)
    model = OlmoeForCausalLM(config()).train()
    system = find_system(model)
    routed: list[tuple[torch.Tensor, ...]] = []
    for block in (layer.mlp for layer in model.model.layers):
        block.gate.register_forward_hook(lambda module, args, out: routed.append(out))
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.05)
    for step in range(n_steps):
        starts = np.random.default_rng([0, step]).integers(0, len(data) - LENGTH - 1, size=BATCH)
        rows = torch.from_numpy(np.stack([data[s : s + LENGTH + 1] for s in starts]).astype(np.int64))
        with differentiable(system):
            logits = system.rollout(Batch(rows[:, :-1], tuple(range(BATCH)), 0), system.n_steps)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())
        (loss + 0.02 * sum(map(unbalance, routed)) / len(routed)).backward()
        routed.clear()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimiser.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / 30) * (1 - step / n_steps)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        if step % 20 == 0:
            print(
                step,
                f"{float(loss.detach()) / math.log(2):.3f} bits a byte",
                f"{time.process_time():.0f} s",
                flush=True,
            )
    model.save_pretrained(folder)


def texts(data: np.ndarray, n_prompts: int) -> TokenSet:
    """Draw prompts of a text."""
    starts = np.random.default_rng(1).integers(0, len(data) - LENGTH, size=n_prompts)
    return from_ids(np.stack([data[s : s + LENGTH] for s in starts]).astype(np.int64), "novels")


def full(source: ModelSource) -> ModelSource:
    """Return the source with sums of each expert."""
    job, selection = source.job, source.job.selection
    probe = job.tokens.first(job.execution.seed)
    groups, shares = find_input_groups(job.system, selection.observed, probe, selection.n_steps)
    chosen = dataclasses.replace(selection, input_groups=groups, shares=shares)
    return dataclasses.replace(source, job=dataclasses.replace(job, selection=chosen), metrics={})


def measure(system: LoopedSystem, n_prompts: int, seed: int) -> dict[str, dict[str, Any]]:
    """Quantize both ways and measure."""
    data, held_out, _ = prepare(ROOT / ".cache" / "novels")
    config = QuantConfig.of(bits=3, group_size=32, rank_threshold=None)
    shared = ModelSource.of(system, texts(data, n_prompts), config, execution=Execution(threads=1, seed=seed))
    lines, weights = {}, {}
    for name, source in (("shared", shared), ("full", full(shared))):
        began = time.process_time()
        plan = choose_metric(source.plan(config), source.job)
        layers = solve(plan.config.inputs, plan, source)
        sums = plan.sums(source.job)
        n_bytes = pass_bytes(source.job, plan.tasks, sums, list(sums.steps))
        lines[name] = {"seconds": time.process_time() - began, "bytes": n_bytes}
        weights[name] = {n: x.in_model_orientation() for n, x in layers.items()}
    for name, one in zip(weights, compare(system, weights, texts(held_out, 24))[1:], strict=True):
        lines[name]["kl"] = float(one.kl.mean())
    return lines


def main() -> None:
    """Train unless that was done, measure, and write the record."""
    if not (FOLDER / "config.json").exists():
        train(FOLDER, 400)
    system = load_model(str(FOLDER), dtype="float32").system
    lines = [
        f"# A mixture of experts with shared sums, {datetime.date.today()}", "",
        "`python -m benches.experts`: an OLMoE of width 96 with 16 experts of width 64, two of them for each token; "
        f"INT3 g32, prompts of {LENGTH} tokens, KL on 24 x {LENGTH} others. Geometric means of {len(SEEDS)} seeds, "
        f"one thread of {processor()}.", "",
        "| prompts | KL, full | KL, shared | ratio | CPU s, full | CPU s, shared | MiB, full | MiB, shared |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for n_prompts in N_PROMPTS:
        by_seed = [measure(system, n_prompts, seed) for seed in SEEDS]

        def mean(name: str, what: str, results: list[dict[str, Any]] = by_seed) -> float:
            return math.exp(sum(math.log(one[name][what]) for one in results) / len(results))

        whole, part = mean("full", "kl"), mean("shared", "kl")
        lines.append(
            f"| {n_prompts} | {whole:.5f} | {part:.5f} | {part / whole:.3f} | {mean('full', 'seconds'):.1f} | "
            f"{mean('shared', 'seconds'):.1f} | {mean('full', 'bytes') / 2**20:.1f} | "
            f"{mean('shared', 'bytes') / 2**20:.1f} |"
        )
        print(lines[-1], *([round(one[n]["kl"], 5) for n in one] for one in by_seed), flush=True)
    (RECORD / f"experts-{datetime.date.today()}.md").write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    main()
