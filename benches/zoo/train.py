"""Train members of the zoo: ``python benches/zoo/train.py NAME``; stop it at will, it goes on where it was.

Every step draws its batch, depth and noise from (seed, step) alone, so a resumed run walks the same path.
The finished weights are rounded to float16 and measured after that; the card is made of what was measured.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import platform
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from card import measure, write_card  # noqa: E402
from corpus import REPOSITORY, prepare  # noqa: E402
from optim import Mixed  # noqa: E402
from recipes import RECIPES, Recipe  # noqa: E402

from loopq.zoo._model import ZooModel  # noqa: E402


def build(recipe: Recipe) -> ZooModel:
    """Return the untrained model of a recipe, seeded."""
    module = importlib.import_module(f"loopq.zoo.{recipe.module}")
    model_class: type[ZooModel] = getattr(module, recipe.model_class)
    torch.manual_seed(recipe.seed)
    return model_class.from_config(dict(recipe.config)).train()


def draw(data: np.ndarray, recipe: Recipe, step: int) -> tuple[torch.Tensor, int]:
    """Return the batch (batch, seq + 1) and the depth of a step."""
    rng = np.random.default_rng([recipe.seed, step])
    low, high = recipe.depth
    depth = int(rng.integers(low, high + 1))
    starts = rng.integers(0, len(data) - recipe.seq_len - 1, size=recipe.batch)
    rows = np.stack([data[s : s + recipe.seq_len + 1] for s in starts]).astype(np.int64)
    torch.manual_seed(int(rng.integers(2**62)))
    return torch.from_numpy(rows), depth


def learning_rate(recipe: Recipe, step: int) -> float:
    """Warm up linearly, then fall linearly to zero at the last step."""
    return min(1.0, (step + 1) / recipe.warmup) * (1.0 - step / recipe.steps)


def train_step(model: ZooModel, optimiser: Mixed, recipe: Recipe, data: np.ndarray, step: int) -> float:
    """Do one update; returns the loss in bits per byte."""
    ids, depth = draw(data, recipe, step)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=recipe.bfloat16):
        loss = model.training_loss(ids, depth)
    for p in model.parameters():
        p.grad = None
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step(learning_rate(recipe, step))
    return float(loss.detach()) / math.log(2.0)


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write the training state by rename, so that a kill leaves the last good one."""
    tmp = path.with_suffix(".part")
    torch.save(state, tmp)
    tmp.replace(path)


def train(name: str, work: Path, save_every_s: float) -> tuple[ZooModel, dict[str, Any]]:
    """Train to the end from whatever checkpoint is there; returns the model and what it cost."""
    recipe = RECIPES[name]
    data, _, _ = prepare(work / "corpus")
    model = build(recipe)
    optimiser = Mixed(model, recipe.matrix_lr, recipe.vector_lr, recipe.weight_decay)
    work = work / name
    work.mkdir(parents=True, exist_ok=True)
    path = work / "state.pt"
    step, wall, history, resumed = 0, 0.0, [], 0
    if path.exists():
        state = torch.load(path, weights_only=True)
        if state["recipe"] != recipe.as_json():
            raise SystemExit(f"{path} belongs to another recipe of {name}: delete it to start anew")
        model.load_state_dict(state["model"])
        optimiser.load_state_dict(state["optimiser"])
        step, wall, history, resumed = state["step"], state["wall_s"], state["history"], state["resumed"] + 1
    smooth: list[float] = []
    last_save = last = time.monotonic()
    while step < recipe.steps:
        smooth.append(train_step(model, optimiser, recipe, data, step))
        step += 1
        now = time.monotonic()
        wall, last = wall + now - last, now
        done = step == recipe.steps
        if step % 50 == 0 or done:
            history.append((step, round(sum(smooth) / len(smooth), 4)))
            smooth = []
            rate = step * recipe.batch * recipe.seq_len / wall
            print(
                f"{name} step {step}/{recipe.steps} bpb {history[-1][1]:.3f} {rate:.0f} tok/s {wall:.0f} s",
                flush=True,
            )
        if done or (now - last_save > save_every_s and step % 50 == 0):
            last_save = now
            save_checkpoint(
                path,
                {
                    "model": model.state_dict(),
                    "optimiser": optimiser.state_dict(),
                    "step": step,
                    "wall_s": wall,
                    "history": history,
                    "resumed": resumed,
                    "recipe": recipe.as_json(),
                },
            )
            model.save(work / "latest", torch.float16)
            last = time.monotonic()
    cost = {
        "wall_s": round(wall, 1),
        "n_tokens": step * recipe.batch * recipe.seq_len,
        "n_steps": step,
        "threads": torch.get_num_threads(),
        "resumed": resumed,
        "torch": torch.__version__,
        "machine": platform.machine(),
        "history_bits_per_byte": history,
    }
    return model, cost


def main() -> None:
    """Train, round, measure, write weights and card."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", nargs="+", choices=sorted(RECIPES))
    parser.add_argument(
        "--work", type=Path, default=REPOSITORY / ".cache" / "zoo", help="checkpoints and packed text"
    )
    parser.add_argument(
        "--out", type=Path, default=HERE / "weights", help="finished weights, one folder each"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save-every", type=float, default=60.0, help="seconds between checkpoints")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    for name in args.name:
        recipe = RECIPES[name]
        model, cost = train(name, args.work, args.save_every)
        out = args.out / name
        model.save(out, torch.float16)
        stored = type(model).load(out)
        _, held_out, held_ids = prepare(args.work / "corpus")
        results = measure(stored, held_out, recipe)
        results["cost"], results["recipe"] = cost, json.loads(recipe.as_json())
        results["held_out_novels"] = held_ids
        write_card(out, name, results)
        verdict = "uses its loop" if results["accepted"] else "REFUSED: does not use its loop"
        print(f"{name}: {verdict}; bits per byte {results['bits_per_byte']}", flush=True)


if __name__ == "__main__":
    main()
