"""Measure a finished model and write its card; every number on a card comes from ``measured.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from benches.zoo.boundary import N_LAST
from benches.zoo.chains import MEASURING_SEED, chains
from benches.zoo.measure import bits_per_answer, bits_per_byte, state_movement, thought_movement
from benches.zoo.recipes import Recipe
from loopq.systems.base import LoopedSystem

N_SEQUENCES = 256
SOURCE = """\
Trained on the novels of the English Novel Corpus (ELTeC-eng), edited by Lou Burnard, in European Literary
Text Collection (ELTeC), COST Action Distant Reading for European Literary History, version 1.0.1, April 2021,
DOI 10.5281/zenodo.3533868. The texts are in the public domain; the collection's markup is CC BY 4.0 and was
removed; quotes, dashes and accents were reduced to ASCII."""
CHAINS = "Trained on chains of letters made by `benches.zoo.chains`; no outside data."


def held_out_rows(held_out: np.ndarray, recipe: Recipe) -> np.ndarray:
    """Return the sequences to measure on: int64 (N_SEQUENCES, seq_len + 1)."""
    if recipe.data == "chains":
        return chains(N_SEQUENCES, MEASURING_SEED)
    # Spread over all held-out novels, so that no single author decides.
    stride = (len(held_out) - recipe.seq_len - 1) // N_SEQUENCES
    rows = [held_out[i * stride :][: recipe.seq_len + 1] for i in range(N_SEQUENCES)]
    return np.stack(rows).astype(np.int64)


def measure(
    system: LoopedSystem, held_out: np.ndarray, recipe: Recipe, bytes_per_token: float = 1.0
) -> dict[str, Any]:
    """Return bits per byte for N = 1 .. 2N, the state's movement by step, and the verdict."""
    rows = held_out_rows(held_out, recipe)
    full = system.n_steps
    looped, task = recipe.margin is not None, recipe.data == "chains"
    depths = range(1, 2 * full + 1) if looped else [1]
    spent = bits_per_answer if task else bits_per_byte
    bpb = {str(n): round(spent(system, rows, n) / bytes_per_token, 4) for n in depths}
    movement = thought_movement if task else state_movement
    moves = [round(m, 4) for m in movement(system, rows[:64], full)] if looped else []
    gap = bpb["1"] - bpb[str(full)]
    return {
        "n_parameters": sum(p.numel() for p in system.model.parameters()),
        "full_depth": full,
        "n_sequences": N_SEQUENCES,
        "seq_len": recipe.seq_len,
        "bytes_per_token": bytes_per_token,
        "bits_per_byte": bpb,
        "state_movement": moves,
        "gap_bits_per_byte": round(gap, 4),
        "accepted": recipe.margin is None or gap > recipe.margin,
    }


def write_card(folder: Path, name: str, results: dict[str, Any]) -> None:
    """Write ``measured.json`` and ``README.md`` beside the weights."""
    _replace(folder / "measured.json", json.dumps(results, indent=1, sort_keys=True) + "\n")
    _replace(folder / "README.md", card_text(name, results))


def card_text(name: str, results: dict[str, Any]) -> str:
    """Return the card of a model as Markdown."""
    recipe, cost = results["recipe"], results["cost"]
    full = results["full_depth"]
    bpb = {n: results["bits_per_byte"][n] for n in sorted(results["bits_per_byte"], key=int)}
    size = ", ".join(f"{k} {v}" for k, v in recipe["config"].items())
    verdict = (
        f"One step costs {results['gap_bits_per_byte']:.2f} bits per byte more than {full} steps."
        if recipe["margin"] is not None
        else "Not looped: a control."
    )
    lines = [
        f"# {name}",
        "",
        f"A `{recipe['model_type']}` model, {results['n_parameters']:,} parameters "
        f"({size}), {_level(results)}, weights stored in float16.",
        "",
        verdict,
        "",
        "| depth N | " + " | ".join(bpb) + " |",
        "|---|" + "---|" * len(bpb),
        "| bits per byte | " + " | ".join(f"{v:.3f}" for v in bpb.values()) + " |",
        "",
        *_movement(results["state_movement"]),
        _measured_on(results),
        "",
        "## Training",
        "",
        f"`python -m benches.zoo.train {name}`: {cost['n_steps']:,} steps, {cost['n_tokens']:,} {_unit(results)}, "
        f"{cost['wall_s'] / 60:.1f} minutes on {cost['threads']} CPU thread ({cost['machine']}, torch "
        f"{cost['torch']}), seed {recipe['seed']}, depth drawn from {recipe['depth'][0]} to "
        f"{recipe['depth'][1]} at each step, {_gradient(recipe)}.",
        "",
        "## Data and licence",
        "",
        CHAINS if recipe["data"] == "chains" else SOURCE,
        "",
        "The weights are under the Apache License 2.0, as the rest of loopq.",
        "",
    ]
    return "\n".join(lines)


def _gradient(recipe: dict[str, Any]) -> str:
    """Steps that the gradient passes, and what else a run near the boundary has."""
    if not recipe.get("growth"):
        return "gradient through all steps"
    return (
        f"gradient through the last {N_LAST} steps, from the weights of `{recipe['start']}`; `benches.zoo.boundary` "
        f"trains a small change of the last state to grow by {recipe['growth']} in a step"
    )


def _unit(results: dict[str, Any]) -> str:
    return "tokens" if results["recipe"]["data"] == "subwords" else "bytes"


def _level(results: dict[str, Any]) -> str:
    """The meaning of a token."""
    if _unit(results) == "bytes":
        return "byte level"
    return f"subwords of {results['bytes_per_token']:.2f} bytes on the mean"


def _movement(moves: list[float]) -> list[str]:
    if not moves:
        return []
    return [
        "| step t | " + " | ".join(str(t) for t in range(len(moves))) + " |",
        "|---|" + "---|" * len(moves),
        "| state movement | " + " | ".join(f"{m:.3f}" for m in moves) + " |",
        "",
    ]


def _measured_on(results: dict[str, Any]) -> str:
    text = f"Measured on {results['n_sequences']} sequences of {results['seq_len']} {_unit(results)} "
    text += "spread over the "
    text += f"held-out novels ({', '.join(results['held_out_novels'])})"
    if results["recipe"]["data"] == "chains":
        text = (
            f"Measured on {results['n_sequences']} chains: bits spent on the letter that is "
            f"{results['full_depth']} hops from the start, by passes made"
        )
    text += ", weights as stored, start states of seed 0."
    if results["state_movement"]:
        text += " State movement is the mean of |s(t+1) - s(t)| / |s(t)| over positions, at full depth."
    return text


def _replace(path: Path, text: str) -> None:
    tmp = path.with_suffix(".part")
    tmp.write_text(text, encoding="utf-8")
    tmp.replace(path)
