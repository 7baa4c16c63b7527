"""`loopq quantize --fit` beside every single grid at the same bytes: `python -m benches.fit [MODEL ...]`.

A model of the zoo is quantized on each single grid, with all else as it is. `--fit` is given the bytes that each file
has, and may choose grids of layers and what becomes of the matrices outside the loop. KL is on held-out prompts.
"""

from __future__ import annotations

import argparse
import datetime
import tempfile
import time
from pathlib import Path
from typing import Any

import benches.zoo.register  # noqa: F401  registers the classes of the zoo
import loopq
from benches.quality.peers_table import processor
from loopq.evaluation.compare import Measurement
from loopq.formats.checkpoint import Checkpoint
from loopq.models.load import LoadedModel, load_model

MODELS = ("huginn_small", "ouro_small", "nanbeige_small", "rllama_small")
#: Levels, bits, group size, and what becomes of the matrices outside the loop.
GRIDS = (("even", 2, 32, None), ("even", 3, 64, 8), ("uneven", 3, 64, 8), ("even", 4, 128, 8))
_ZOO = Path(__file__).parent / "zoo" / "weights"


def kl_of(loaded: LoadedModel, found: Checkpoint, args: argparse.Namespace) -> Measurement:
    """Measure on prompts that calibration did not see."""
    return loopq.evaluate(loaded, {"Q": found}, n_prompts=args.n_evaluation)[1]


def written(loaded: LoadedModel, **settings: Any) -> tuple[Checkpoint, int]:
    """Quantize; return the checkpoint and the size of its file."""
    with tempfile.TemporaryDirectory() as folder:
        found = loopq.quantize(loaded, out=f"{folder}/q", **settings)
        return found, (Path(folder) / "q" / "model.safetensors").stat().st_size


def rows_of(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Each grid, and what fits its bytes."""
    loaded = load_model(name if name == "huginn_small" else _ZOO / name)
    take = {
        "method": "gptq-cd",
        "metric": "inputs",
        "n_prompts": args.n_calibration,
        "seq_len": 64,
        "threads": 1,
    }
    rows = []
    for levels, bits, group, outside in GRIDS:
        single, budget = written(loaded, levels=levels, bits=bits, group_size=group, outside=outside, **take)
        start = time.process_time()
        fitted, size = written(loaded, fit=budget, fit_n_prompts=args.n_prompts, **take)
        rows.append(
            {
                "model": name, "grid": f"{bits} bits, {levels}, g{group}, outside {outside or 'as it was'}",
                "bytes": budget, "fitted": size, "kl": kl_of(loaded, single, args),
                "fit": kl_of(loaded, fitted, args), "outside": fitted.settings["quantization"]["outside"],
                "seconds": time.process_time() - start,
            }
        )  # fmt: skip
        print(line(rows[-1]), flush=True)
    return rows


def line(row: dict[str, Any]) -> str:
    """A line of the record."""
    kl, fit = (float(row[key].kl.mean()) for key in ("kl", "fit"))
    return (
        f"| {row['model']} | {row['grid']} | {row['bytes']:,} | {row['fitted'] / row['bytes']:.4f} | {kl:.5f} | "
        f"{fit:.5f} | {fit / kl:.3f} | {row['outside'] or 'as it was'} | {row['seconds']:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--n-calibration", type=int, default=16)
    parser.add_argument("--n-prompts", type=int, default=2, help="of the scores (default %(default)s)")
    parser.add_argument("--n-evaluation", type=int, default=16)
    parser.add_argument("--out", type=Path, default=Path("benches/record"))
    args = parser.parse_args()
    lines = [
        f"# A size instead of a grid, {datetime.date.today()}", "",
        f"`python -m benches.fit {' '.join(args.models)}`: {args.n_calibration} calibration prompts of 64 tokens, "
        f"scores by ablation on {args.n_prompts}, KL on {args.n_evaluation} held-out prompts; gptq-cd, metric inputs, "
        f"one thread of {processor()}.", "",
        "| model | single grid | bytes | fitted, of them | KL, single | KL, fitted | ratio | outside | CPU s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name in args.models:
        lines += [line(row) for row in rows_of(name, args)]
        (args.out / f"fit-{datetime.date.today()}.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
