"""Train small models: ``python -m benches.zoo.train NAME``; a stopped run resumes.

Every step draws its batch, depth and noise from (seed, step) alone, so a resumed run walks the same path.
The finished weights are rounded to float16 and measured after that; the card is made of what was measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from benches.zoo import WEIGHTS
from benches.zoo.boundary import N_LAST, WEIGHT, penalty
from benches.zoo.card import measure, write_card
from benches.zoo.chains import QUESTION_LENGTH, chains, marked
from benches.zoo.corpus import REPOSITORY, prepare
from benches.zoo.models import build
from benches.zoo.optim import Mixed
from benches.zoo.recipes import RECIPES, SHIPPED, Recipe
from benches.zoo.store import save_model
from benches.zoo.subwords import add_tokenizer, prepare_tokens
from loopq.models.load import load_model
from loopq.systems import find_system
from loopq.systems.base import Batch, LoopedSystem, differentiable
from loopq.systems.stepwise import single_steps


def untrained(recipe: Recipe) -> LoopedSystem:
    """Return the untrained model of a recipe, seeded or with the weights of another, in its adapter."""
    torch.manual_seed(recipe.seed)
    model = build({"model_type": recipe.model_type, **recipe.config}).train()
    if recipe.start:
        model.load_state_dict(load_model(recipe.start).model.state_dict())
    return find_system(model)


def draw(data: np.ndarray, recipe: Recipe, step: int) -> tuple[np.ndarray, int, int]:
    """Return the rows (batch, seq + 1), the depth and the seed of the start states of a step."""
    rng = np.random.default_rng([recipe.seed, step])
    low, high = recipe.depth
    depth = int(rng.integers(low, high + 1))
    if recipe.data == "chains":
        rows = chains(recipe.batch, int(rng.integers(2**62)))
    else:
        starts = rng.integers(0, len(data) - recipe.seq_len - 1, size=recipe.batch)
        rows = np.stack([data[s : s + recipe.seq_len + 1] for s in starts]).astype(np.int64)
    return rows, depth, int(rng.integers(2**62))


def text_loss(system: LoopedSystem, rows: np.ndarray, n_steps: int, seed: int) -> torch.Tensor:
    """Return the mean loss in nats of predicting each next byte of int64 (batch, seq + 1) at depth `n_steps`."""
    ids = torch.from_numpy(rows)
    with differentiable(system):
        logits = system.rollout(Batch(ids[:, :-1], tuple(range(len(ids))), seed), n_steps)
    return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def boundary_loss(
    system: LoopedSystem, rows: np.ndarray, n_steps: int, seed: int, growth: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of `text_loss`, and how far the growth of small changes of the last state is from `growth`."""
    ids, steps = torch.from_numpy(rows), single_steps(system)
    with differentiable(system):
        embedding = steps.embed(batch := Batch(ids[:, :-1], tuple(range(len(ids))), seed))
        state = steps.initial_state(batch, embedding)
        for t in range(n_steps):
            with torch.set_grad_enabled(t >= n_steps - N_LAST):
                state = steps.step(state, embedding, t, n_steps)
        logits = steps.predict(state, embedding)
        with torch.autocast("cpu", enabled=False):
            end, inputs = state.detach().float(), embedding.float()
            off = penalty(lambda s: steps.step(s, inputs, n_steps, n_steps), end, seed, growth)
    return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten()), off


def chain_loss(system: LoopedSystem, rows: np.ndarray, n_steps: int) -> torch.Tensor:
    """Return the mean loss in nats over the thoughts and the answer of `benches.zoo.chains`.

    Pass ``t`` predicts hop ``t`` of the chain through the head. The answer spells the hops from the last
    pass's on, so that following the map is also learnt on letters, where it is easier.
    """
    model, question, hops = system.model, rows[:, :QUESTION_LENGTH], rows[:, QUESTION_LENGTH:]
    ids = marked(
        question, hops[:, n_steps - 1 : -1], model.start_latent_id, model.end_latent_id,
        n_steps - 1, model.latent_token_id,
    )  # fmt: skip
    logits = model(torch.from_numpy(ids)).logits[:, QUESTION_LENGTH:]
    # All passes but the last end at the start token and the latents but the last, which predicts nothing.
    asked = torch.cat((logits[:, : n_steps - 1], logits[:, n_steps:]), 1)
    return F.cross_entropy(asked.flatten(0, 1), torch.from_numpy(hops).flatten())


def learning_rate(recipe: Recipe, step: int) -> float:
    """Warm up linearly, stay, and fall linearly to zero over the last ``recipe.fall`` steps."""
    fall = recipe.fall or recipe.steps
    return min(1.0, (step + 1) / recipe.warmup) * min(1.0, (recipe.steps - step) / fall)


def train_step(system: LoopedSystem, optimiser: Mixed, recipe: Recipe, data: np.ndarray, step: int) -> float:
    """Do one update; returns the loss in bits per token."""
    rows, depth, seed = draw(data, recipe, step)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=recipe.bfloat16):
        off = torch.zeros(())
        if recipe.growth:
            loss, off = boundary_loss(system, rows, depth, seed, recipe.growth)
        else:
            task = recipe.data == "chains"
            loss = chain_loss(system, rows, depth) if task else text_loss(system, rows, depth, seed)
    parameters = list(system.model.parameters())
    for p in parameters:
        p.grad = None
    (loss + WEIGHT * off).backward()
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimiser.step(learning_rate(recipe, step))
    return float(loss.detach()) / math.log(2.0)


class Run:
    """A training run that can be stopped and taken up again.

    Parameters
    ----------
    name : str
        A key of `RECIPES`.
    work : path
        Folder of packed text and checkpoints.
    """

    def __init__(self, name: str, work: Path) -> None:
        self.name, self.recipe = name, RECIPES[name]
        self.data, self.held_out, self.held_ids, self.bytes_per_token = packed(self.recipe, work)
        self.system = untrained(self.recipe)
        self.model = self.system.model
        self.optimiser = Mixed(
            self.model, self.recipe.matrix_lr, self.recipe.vector_lr, self.recipe.weight_decay
        )
        self.folder = work / name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = self.folder / "state.pt"
        self.step, self.wall_s, self.resumed = 0, 0.0, 0
        self.history: list[tuple[int, float]] = []
        self.ended: dict[str, int] = {}
        if self.path.exists():
            self._take_up()

    def _take_up(self) -> None:
        state = torch.load(self.path, weights_only=True)
        if state["recipe"] != self.recipe.as_json():
            raise SystemExit(f"{self.path} belongs to another recipe of {self.name}: delete it to start anew")
        self.recipe = dataclasses.replace(self.recipe, **state["ended"])
        self.ended = state["ended"]
        self.model.load_state_dict(state["model"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.step, self.wall_s, self.history = state["step"], state["wall_s"], state["history"]
        self.resumed = state["resumed"] + (self.step < self.recipe.steps)

    def save(self) -> None:
        """Write the training state by rename, so that a kill leaves the last good one."""
        tmp = self.path.with_suffix(".part")
        state = {
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "step": self.step,
            "wall_s": self.wall_s,
            "history": self.history,
            "resumed": self.resumed,
            "recipe": RECIPES[self.name].as_json(),
            "ended": self.ended,
        }
        torch.save(state, tmp)
        tmp.replace(self.path)
        save_model(self.model, self.folder / "latest", torch.float16)

    def finish(self, save_every_s: float) -> dict[str, Any]:
        """Train to the last step; returns what it cost."""
        recent: list[float] = []
        last_save = last = time.monotonic()
        while self.step < self.recipe.steps:
            recent.append(train_step(self.system, self.optimiser, self.recipe, self.data, self.step))
            self.step += 1
            now = time.monotonic()
            self.wall_s, last = self.wall_s + now - last, now
            done = self.step == self.recipe.steps
            if self.step % 50 == 0 or done:
                self._note(sum(recent) / len(recent))
                recent = []
                self._end_when_asked()
                if done or now - last_save > save_every_s:
                    self.save()
                    last_save = last = time.monotonic()
        return self.cost()

    def _end_when_asked(self) -> None:
        """Take over the number of steps that `--finish` left in the folder: so many more, with a falling rate."""
        asked = self.folder / "finish"
        if asked.exists() and not self.ended:
            fall = int(asked.read_text())
            self.ended = {"steps": self.step + fall, "fall": fall}
            self.recipe = dataclasses.replace(self.recipe, steps=self.step + fall, fall=fall)
            asked.unlink()

    def n_bytes(self) -> int:
        """Return the bytes of text read so far, for subwords by their mean length on held-out text."""
        return round(self.step * self.recipe.batch * self.recipe.seq_len * self.bytes_per_token)

    def _note(self, bits: float) -> None:
        bits /= self.bytes_per_token
        self.history.append((self.step, round(bits, 4)))
        rate = self.n_bytes() / self.wall_s
        print(
            f"{self.name} step {self.step}/{self.recipe.steps} bits per byte {bits:.3f}, "
            f"{rate:.0f} bytes/s, {self.wall_s:.0f} s",
            flush=True,
        )

    def cost(self) -> dict[str, Any]:
        """Return what the run cost so far."""
        return {
            "wall_s": round(self.wall_s, 1),
            "n_tokens": self.step * self.recipe.batch * self.recipe.seq_len,
            "n_steps": self.step,
            "threads": torch.get_num_threads(),
            "resumed": self.resumed,
            "torch": torch.__version__,
            "machine": platform.machine(),
            "history_bits_per_byte": self.history,
        }


def packed(recipe: Recipe, work: Path) -> tuple[np.ndarray, np.ndarray, list[str], float]:
    """Return training and held-out tokens of a recipe, the held-out novels and the bytes of a token."""
    if recipe.data == "subwords":
        return prepare_tokens(work / "corpus")
    return *prepare(work / "corpus"), 1.0


def publish(run: Run, cost: dict[str, Any], out: Path, work: Path) -> bool:
    """Round, measure and write weights and card; a model that does not use its loop goes to ``work``."""
    latest = run.folder / "latest"
    save_model(run.model, latest, torch.float16)
    results = measure(load_model(latest).system, run.held_out, run.recipe, run.bytes_per_token)
    results["cost"], results["recipe"] = cost, json.loads(run.recipe.as_json())
    results["held_out_novels"] = run.held_ids
    accepted = bool(results["accepted"])
    folder = out if accepted else latest
    save_model(run.model, folder, torch.float16)
    if run.recipe.data == "subwords":
        add_tokenizer(work / "corpus", folder)
    write_card(folder, run.name, results)
    verdict = "accepted" if accepted else "REFUSED, it does not use its loop"
    print(f"{run.name}: {verdict}; bits per byte by depth {results['bits_per_byte']}", flush=True)
    return accepted


def main() -> None:
    """Train, round, measure, write weights and card."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", nargs="+", choices=sorted(RECIPES))
    parser.add_argument(
        "--work", type=Path, default=REPOSITORY / ".cache" / "zoo", help="checkpoints and packed text"
    )
    parser.add_argument(
        "--out", type=Path, help="folder for finished weights; else that of the other weights"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--finish",
        type=int,
        metavar="STEPS",
        help="tell running ones to end after STEPS more, with a falling rate",
    )
    parser.add_argument("--save-every", type=float, default=60.0, help="seconds between checkpoints")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    if args.finish:
        for name in args.name:
            (args.work / name / "finish").write_text(str(args.finish))
        return
    refused = []
    for name in args.name:
        run = Run(name, args.work)
        cost = run.finish(args.save_every)
        inside = REPOSITORY / "python" / "loopq" / "zoo" / "weights"
        out = (args.out or (inside if name in SHIPPED else WEIGHTS)) / name
        if not publish(run, cost, out, args.work):
            refused.append(name)
    if refused:
        raise SystemExit(f"not accepted: {', '.join(refused)}")


if __name__ == "__main__":
    main()
