"""Cost of a run compared with llm-compressor: `python -m benches.cost`, after
`python -m benches.zoo.smollm2 fetch`.

loopq's presets and llm-compressor `basic` with its mse observer quantize the same matrices of looped SmolLM2-135M on
one thread, from the same token ids. Each tool runs its own code in its own environment, that of llm-compressor made by
`make .cache/venv-llmcompressor/stamp`. The record in benches/record has CPU seconds (user and system) of everything
after loading, peak memory above the loaded model, and the KL on other text. `--layer` takes some layers of the loop
alone, where the machine is small: rollouts then count for more than in a whole run, on either side. `--model Ouro-pair`
has random weights: two blocks of Ouro-1.4B's shapes, called four times, with SmolLM2's tokenizer.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
from pathlib import Path
from typing import Any

from benches.full_size import make
from benches.pages import RECORD, ROOT
from benches.quality.peers import Bench, python_of
from benches.quality.peers_table import processor
from loopq.errors import ConfigError
from loopq.evaluation.compare import compare
from loopq.paper.models import Sizes
from loopq.run.auto import choose_metric
from loopq.run.config import PRESETS, QuantConfig
from loopq.run.solving import solve

PEER = "llm-compressor, mse"
ROWS: dict[str, dict[str, Any]] = {
    "paper": dict(PRESETS["paper"]), "fast": dict(PRESETS["fast"]), "even": {"levels": "even"}, "default": {},
    "best": dict(PRESETS["best"]),
}  # fmt: skip
#: Most cost over the peer's.
BARS = {"paper": 0.6, "fast": 0.9, "even": 2.5, "default": 2.5, "best": 6.0}
OURO = "Ouro-pair"
SMOLLM2 = ROOT / ".cache" / "smollm2"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common(parser, n_calibration=64)
    parser.add_argument("--preset", action="append", choices=ROWS, help="only these (default: all)")
    parser.add_argument(
        "--layer", action="append", type=int, help="only these layers (default: all of the loop)"
    )
    parser.add_argument("--grid", default="3:64", help="BITS:GROUP (default %(default)s)")
    args = parsed(parser)
    config = json.loads((Path(args.model) / "config.json").read_text())
    args.layer = args.layer or list(range(*config["looped_layers"][:2]))
    chosen = "|".join(map(str, args.layer))
    args.names = rf"model\.layers\.({chosen})\."
    return args


def add_common(parser: argparse.ArgumentParser, n_calibration: int) -> None:
    """Add what every bench of this model asks for."""
    parser.add_argument("--model", default=str(SMOLLM2 / "looped"), help=f"a folder, or {OURO}")
    parser.add_argument("--n-calibration", type=int, default=n_calibration)
    parser.add_argument("--n-evaluation", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--calibration", type=Path, help="text to calibrate on (default: the one that ships)")
    parser.add_argument("--text", type=Path, help="text to measure on (default: the one that ships)")
    parser.add_argument("--out", type=Path, default=RECORD)


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Read the command line, for one thread.

    Raises
    ------
    ConfigError
        There is no such model.
    """
    args = parser.parse_args()
    if args.model == OURO:
        args.model = str(ouro_pair())
    if os.sep in args.model and not Path(args.model).is_dir():
        raise ConfigError(f"{args.model}: no such folder; run `python -m benches.zoo.smollm2 fetch`")
    args.data, args.threads = Path(os.environ.get("LOOPQ_DATA", "../shared/data")), 1
    return args


def ouro_pair() -> Path:
    """Return the folder of two blocks with Ouro-1.4B's shapes, made unless it is there."""
    folder = ROOT / ".cache" / OURO
    if not folder.exists():
        make(OURO, None, folder)
        for file in (SMOLLM2 / "packed").glob("tokenizer*"):
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


def written(out: Path, name: str, text: str) -> None:
    """Write a record in the place of older ones."""
    path = out / f"{name}-{datetime.date.today()}.md"
    path.write_text(text, "utf-8")
    for older in set(out.glob(f"{name}-*.md")) - {path}:
        older.unlink()


class Costs(Bench):
    """The comparison of quality, on some layers, with the KL on one text alone."""

    def run(self, settings: dict[str, Any], bits: int, group: int) -> dict[str, Any]:
        """Quantize by loopq, as `loopq quantize` does."""
        source = self.prepared(0.0)
        asked = QuantConfig.of(bits=bits, group_size=group, exclude=self.exclude, **settings)
        with self.costs() as cost:
            plan = choose_metric(source.plan(asked), source.job)
            layers = solve(plan.config.inputs, plan, source)
        line = vars(cost) | {"metric": plan.config.layer.flat().get("metric")}
        return self.measured([line], {0: {n: x.in_model_orientation() for n, x in layers.items()}})[0]

    def measured(self, lines: list[dict[str, Any]], weights: dict[int, Any]) -> list[dict[str, Any]]:
        """Add the KL with its interval over prompts."""
        named = {str(number): w for number, w in weights.items()}
        for number, one in zip(weights, compare(self.system, named, self.model.evaluation)[1:], strict=True):
            interval = one.kl_interval()
            lines[number] |= {
                "kl": float(one.kl.mean()), "kl_95": [interval.low, interval.high] if interval else None,
                "agreement": float(one.agreement.mean()),
            }  # fmt: skip
        return lines


def page(args: argparse.Namespace, n_matrices: int, rows: dict[str, dict[str, Any]]) -> str:
    """The record."""
    base = rows[PEER]
    lines = [
        f"# The cost of a run beside llm-compressor's, {datetime.date.today()}", "",
        f"`python -m benches.cost`: {n_matrices} matrices of `{Path(args.model).name}`, "
        f"INT{args.grid.replace(':', ' g')}, {args.n_calibration} x {args.seq_len} tokens, "
        f"one thread of {processor()}. CPU seconds of everything after loading; "
        f"KL on {args.n_evaluation} x {args.seq_len} other tokens.", "",
        "| run | CPU s | over llm-compressor | bar | MiB | KL (95 % over prompts) | over llm-compressor | agreement |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, row in rows.items():
        low, high = row["kl_95"] or (row["kl"], row["kl"])
        metric = f", metric {row['metric']}" if row.get("metric") else ""
        lines.append(
            f"| {name}{metric} | {row['seconds']:.1f} | {row['seconds'] / base['seconds']:.2f} | "
            f"{BARS.get(name, '')} | {row['memory_mib']:.0f} | {row['kl']:.4f} ({low:.4f}-{high:.4f}) | "
            f"{row['kl'] / base['kl']:.2f} | {row['agreement']:.1%} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    args = parse()
    bits, group = map(int, args.grid.split(":"))
    if not python_of("llmcompressor").is_file():
        raise ConfigError(
            f"{python_of('llmcompressor')}: missing; run `make .cache/venv-llmcompressor/stamp`"
        )
    bench = Costs(args.model, 0, args, Sizes(args.n_calibration, 16, args.n_evaluation, args.seq_len))
    chosen = args.preset or list(ROWS)
    rows = {PEER: bench.theirs("llmcompressor", [(PEER, bits, group)])[0]}
    print(rows, flush=True)
    if "refused" in rows[PEER]:
        raise ConfigError(f"llm-compressor: {rows[PEER]['refused']}")
    for name in chosen:
        rows[name] = bench.run(ROWS[name], bits, group)
        print(name, rows[name], flush=True)
    text = page(args, len(bench.source.plan(QuantConfig()).tasks), rows)
    written(args.out, "ouro-cost" if Path(args.model).name == OURO else "cost", text)
    print(text)


if __name__ == "__main__":
    main()
