"""Is a quantized loop as stable as the original, and what becomes of its error at four times the depth?

    python -m benches.quality.stability [MODEL ...] [--n-prompts 4] [--record FILE]
    python -m benches.quality.stability --page RECORD      # the table of docs/next.md from a record

For each model that has single steps: the spectral radius of the step's Jacobian at the final state of full precision,
with the weights as they are and quantized, on the same prompts of 32 tokens (difference with its 95 % interval), and KL
to full precision at depths N, 2N and 4N. A prompt whose eigenvalue did not converge is counted and left out.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import benches.zoo.register  # noqa: F401  opens the folders of the small models
import loopq
from benches.pages import into
from benches.python.record import write
from benches.quality.run import ROOT
from benches.zoo import WEIGHTS
from loopq.calibrate.prompts import Take, evaluation_tokens
from loopq.diagnose.spectral import radius_study
from loopq.evaluate.compare import compare
from loopq.models.load import load_model
from loopq.terminal.table import render

MODELS = ("huginn_small", "ouro_small", "parcae_small", "rllama_small", "loopformer_small", "nanbeige_small")
METHODS: dict[str, dict[str, Any]] = {"RTN": {"method": "rtn"}, "loopq": {}}
GRIDS = ((4, 32), (3, 32), (2, 32))
DEPTHS = (1, 2, 4)
DOCUMENT = ROOT / "docs" / "next.md"


def measure(name: str, bits: int, group_size: int, method: str, n_prompts: int) -> dict[str, Any]:
    """Radius before and after, and KL by depth, of one way to quantize a model."""
    folder = WEIGHTS / name
    loaded = load_model(str(folder) if folder.is_dir() else name)
    system = loaded.system
    made = loopq.quantize(loaded, bits=bits, group_size=group_size, n_prompts=32, **METHODS[method])
    weights = {n: layer.dequantize() for n, layer in made.layers.items()}
    # Products with the Jacobian, of which a radius takes hundreds, cost as much as the state is long.
    short = evaluation_tokens(loaded, None, Take(n_prompts, 32))
    studied = radius_study(system, short, system.n_steps, weights, with_bypass=False, with_norm=False)
    studied = studied["states"]["plain"]
    tokens = evaluation_tokens(loaded, None, Take(16, 128))
    stored = {"q": {n: layer.in_model_orientation() for n, layer in made.layers.items()}}
    kl = {n: compare(system, stored, tokens, n_steps=n * system.n_steps)[1] for n in DEPTHS}
    return {
        "model": name, "bits": bits, "group": group_size, "method": method, "n_steps": system.n_steps,
        "radius": studied["maps"], "shift": studied.get("shift"),
        "accepted": [studied["n_accepted"], studied["n_prompts"]],
        "kl": {n: float(found.kl.mean()) for n, found in kl.items()},
    }  # fmt: skip


def table(found: list[dict[str, Any]]) -> str:
    """The results as text."""
    rows = []
    for one in found:
        radius, shift = one["radius"], one["shift"]
        rows.append([
            one["model"], f"INT{one['bits']}", one["method"],
            *(f"{radius[m]['radius']['estimate']:.4f}" if radius else "-" for m in ("reference", "changed")),
            f"{shift['estimate']:+.4f} [{shift['low']:+.4f}, {shift['high']:+.4f}]" if shift else "-",
            "{}/{}".format(*one["accepted"]), *(f"{one['kl'][n]:.5f}" for n in DEPTHS),
        ])  # fmt: skip
    heads = ["model", "grid", "method", "radius", "quantized", "difference", "prompts", "KL at N", "2N", "4N"]
    return render(heads, rows)


def page(found: list[dict[str, Any]]) -> str:
    """Radii, their change by grid, and KL at four times the depth, as a table of Markdown; bold where a radius rose."""
    by = {(one["model"], one["method"], one["bits"]): one for one in found}
    grids = [bits for bits, _ in GRIDS]
    names = [f"INT{bits}" for bits in grids]
    lines = [
        f"| model, N | radius | weights | change at {' | '.join(names)} | KL at 4N over N: {', '.join(names)} |",
        "|" + "---|" * (4 + len(grids)),
    ]
    for model in dict.fromkeys(one["model"] for one in found):
        for i, method in enumerate(METHODS):
            rows = [by[model, method, bits] for bits in grids]
            radius = rows[0]["radius"]["reference"]["radius"]["estimate"]
            head = "|  |  |" if i else f"| {model}, {rows[0]['n_steps']} | {radius:.3f} |"
            growth = ", ".join(f"{one['kl']['4'] / one['kl']['1']:.2f}" for one in rows)
            lines.append(
                f"{head} {method} | {' | '.join(_change(one['shift']) for one in rows)} | {growth} |"
            )
    return "\n".join(lines)


def _change(shift: dict[str, float]) -> str:
    estimate = f"{shift['estimate']:+.3f}"
    marked = f"**{estimate}**" if shift["low"] > 0 else estimate
    return f"{marked} [{shift['low']:+.3f}, {shift['high']:+.3f}]"


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--n-prompts", type=int, default=6, help="of the radii")
    parser.add_argument("--record", type=Path)
    parser.add_argument(
        "--page", type=Path, metavar="RECORD", help="run nothing: write docs/next.md from a record"
    )
    args = parser.parse_args()
    if args.page:
        into(DOCUMENT, "stability", page(json.loads(args.page.read_text())["results"]))
        return
    found = []
    for name in args.models:
        for bits, group_size in GRIDS:
            for method in METHODS:
                found.append(measure(name, bits, group_size, method, args.n_prompts))
                print(table(found[-1:]).splitlines()[-1], flush=True)
    print(table(found))
    write(args.record, found)


if __name__ == "__main__":
    main()
