"""loopq beside other tools at equal bits: `python -m benches.quality.peers [MODEL ...] --tool NAME=PYTHON ...`.

PYTHON is the interpreter of an environment that has the tool (`make peers` makes them under .cache). Same model, same
calibration text, same grid, same evaluation: the other tools' own solvers get loopq's sums over all calls, which is
what llm-compressor's pipeline "basic" collects; its default pipeline solves every weight once per call and is far
worse, and GPTQModel by itself sees the first call alone. Every result is saved as soon as it is there. The record
goes to benches/record: KL with 95 % intervals over prompts, per draw of the calibration text, seconds of the solves.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import loopq
from benches.quality.run import HERE, RECORD, ROOT, Cache, table
from benches.zoo import folders
from loopq import zoo
from loopq.calibrate.collect import HessianSet
from loopq.evaluate.compare import compare
from loopq.execution import Execution
from loopq.reproduce.models import PLBERT, PreparedModel, Sizes, data_folder, prepare_model
from loopq.run.auto import choose_metric
from loopq.run.config import PRESETS, QuantConfig
from loopq.run.engine import Run

GRIDS = ((4, 128), (4, 32), (3, 32), (2, 32))
OURS: dict[str, dict[str, Any]] = {
    "RTN, paper": {"method": "rtn", "scale_search": "max"},
    "RTN": {"method": "rtn"},
    "GPTQ, one step, paper": {**PRESETS["paper"], "steps": "first"},
    "GPTQ, trajectory, paper": dict(PRESETS["paper"]),
    "GPTQ, trajectory": {"method": "gptq"},
    "loopq fast": dict(PRESETS["fast"]),
    "loopq default": {},
    "loopq best": dict(PRESETS["best"]),
}
TOOLS = {"llm-compressor": "llmcompressor", "GPTQModel": "gptqmodel", "HQQ": "hqq"}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", help="huginn_small, folders, plbert (default: all there are)")
    parser.add_argument("--data", type=Path, help="data folder, for plbert (default: LOOPQ_DATA)")
    parser.add_argument(
        "--tool", action="append", default=[], metavar="NAME=PYTHON", help="llm-compressor, HQQ, ..."
    )
    parser.add_argument("--grid", action="append", help="BITS:GROUP (default 4:128 4:32 3:32 2:32)")
    parser.add_argument("--draws", type=int, default=3, help="stretches of calibration text")
    parser.add_argument("--n-calibration", type=int, default=64)
    parser.add_argument("--n-evaluation", type=int, default=48)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--n-seeds", type=int, default=2, help="initial states of the evaluation")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "peers")
    parser.add_argument("--table", action="store_true", help="run nothing: write what is in the cache")
    parser.add_argument("--out", type=Path, default=RECORD)
    return parser.parse_args()


class Bench:
    """One model and one draw of its calibration text."""

    def __init__(self, model: PreparedModel, args: argparse.Namespace) -> None:
        self.model = model
        self.args = args
        self.run = Run.prepare(
            model.loaded.system, model.calibration, execution=Execution(threads=args.threads)
        )
        self._sums: HessianSet | None = None

    @property
    def sums(self) -> HessianSet:
        """Hessians of all steps, collected once."""
        if self._sums is None:
            self._sums = self.run.all_steps()
        return self._sums

    def ours(self, settings: dict[str, Any], bits: int, group: int) -> dict[str, Any]:
        """Quantize by loopq and measure."""
        config = QuantConfig.of(bits=bits, group_size=group, rank_threshold=None, **settings)
        run = choose_metric(Run(self.run.job, config, self.run.probe_seconds))
        sums = self.sums
        began = time.perf_counter()
        layers = run.solve_from(sums)
        seconds = time.perf_counter() - began
        weights = {n: x.in_model_orientation() for n, x in layers.items()}
        asked = run.config.layer.flat()
        return self.measured(weights, seconds) | {"metric": asked.get("metric"), "method": asked["method"]}

    def theirs(self, tool: str, python: str, bits: int, group: int) -> dict[str, Any]:
        """Quantize by another tool's solver and measure."""
        with tempfile.TemporaryDirectory() as folder:
            tasks = [t for t in self.run.tasks if t.leader]
            for number, task in enumerate(tasks):
                weight = self.run.weights.oriented(task.parameter)
                if weight.shape[1] % group:
                    raise loopq.LoopqError(
                        f"{task.name}: {weight.shape[1]} inputs are no multiple of {group}"
                    )
                np.save(Path(folder) / f"{number}.w.npy", weight)
                np.save(Path(folder) / f"{number}.h.npy", self.sums.accumulators[str(task.leader)].matrix())
            command = [
                python,
                str(HERE / "peer.py"),
                tool,
                str(bits),
                str(group),
                folder,
                str(self.args.threads),
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise loopq.LoopqError(f"{tool}: {done.stderr.strip().splitlines()[-1]}")
            found = {t.name: np.load(Path(folder) / f"{i}.q.npy") for i, t in enumerate(tasks)}
        for task in tasks:
            if task.parameter.orientation == "in_out":
                found[task.name] = np.ascontiguousarray(found[task.name].T)
        return self.measured(found, float(json.loads(done.stdout)["seconds"]))

    def measured(self, weights: dict[str, Any], seconds: float) -> dict[str, Any]:
        """KL with its interval over prompts."""
        model = self.model
        found = compare(
            model.loaded.system,
            {"q": weights},
            model.evaluation,
            seeds=range(self.args.n_seeds),
            scored_from=model.scored_from,
        )[1]
        interval = found.kl_interval()
        return {
            "kl": float(found.kl.mean()),
            "kl_95": [interval.low, interval.high] if interval else None,
            "agreement": float(found.agreement.mean()),
            "output": found.output,
            "seconds": seconds,
        }


def main() -> None:
    args = parse()
    sizes = Sizes(args.n_calibration, 16, args.n_evaluation, args.seq_len)
    settings = {"loopq": loopq.__version__, **vars(sizes), "seeds": args.n_seeds}
    cache = Cache(args.cache, settings, args.table)
    tools = dict(t.split("=", 1) for t in args.tool)
    grids = [tuple(map(int, g.split(":"))) for g in args.grid] if args.grid else GRIDS
    records: list[dict[str, Any]] = []
    data = data_folder(args.data)
    models = args.models or [*zoo.available(), *folders(), *([PLBERT] if data else [])]
    for draw in range(args.draws):
        for name in models:
            bench: Bench | None = None

            def made(name: str = name, draw: int = draw) -> Bench:
                nonlocal bench
                bench = bench or Bench(prepare_model(name, sizes, data, draw), args)
                return bench

            for bits, group in grids:
                what = {"model": Path(name).name, "draw": draw, "bits": bits, "group": group}
                for label, own in OURS.items():
                    key = what | {"variant": label, "settings": own}
                    row = cache.get(key, lambda o=own, b=bits, g=group, m=made: m().ours(o, b, g))
                    records += [] if row is None else [what | {"variant": label} | row]
                for tool, python in tools.items():
                    row = cache.get(
                        what | {"variant": tool},
                        lambda t=tool, p=python, b=bits, g=group, m=made: m().theirs(t, p, b, g),
                    )
                    records += [] if row is None else [what | {"variant": tool} | row]
    text = report(records, settings)
    print(text)
    stem = args.out / f"peers-{datetime.date.today().isoformat()}"
    stem.with_suffix(".json").write_text(
        json.dumps(
            {"settings": settings, "machine": processor(), "records": records, "refused": cache.refused},
            indent=1,
        )
    )
    stem.with_suffix(".md").write_text(text + "\n")


def processor() -> str:
    """Name of the processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def report(records: list[dict[str, Any]], settings: dict[str, Any]) -> str:
    """Tables: over models, the ratio to the best other tool; then each model."""
    means: dict[tuple[Any, ...], dict[str, float]] = {}
    for r in records:
        means.setdefault((r["bits"], r["group"], r["model"], r["variant"]), {}).setdefault("n", 0)
    for key in means:
        mine = [r for r in records if (r["bits"], r["group"], r["model"], r["variant"]) == key]
        means[key] = {k: float(np.mean([r[k] for r in mine])) for k in ("kl", "agreement", "seconds")}
    parts = ["# loopq beside other tools", "", f"{processor()}; settings `{json.dumps(settings)}`", ""]
    for bits, group in dict.fromkeys((k[0], k[1]) for k in means):
        here = {k[2:]: v for k, v in means.items() if k[:2] == (bits, group)}
        models = list(dict.fromkeys(m for m, _ in here))
        variants = list(dict.fromkeys(v for _, v in here))
        others = [v for v in variants if v not in OURS]
        best = {
            m: min((here[m, o]["kl"] for o in others if (m, o) in here and o != "HQQ"), default=float("nan"))
            for m in models
        }
        rows = []
        for v in variants:
            ratio = {m: here[m, v]["kl"] / best[m] for m in models if (m, v) in here and best[m] > 0}
            row: dict[str, Any] = {"variant": v} | {m: here[m, v]["kl"] for m in models if (m, v) in here}
            if ratio:
                worst = max(ratio, key=lambda m: ratio[m])
                row["ratio"] = float(np.exp(np.mean(np.log(list(ratio.values())))))
                row["worst"] = f"{ratio[worst]:.2f} ({worst})"
            rows.append(
                row | {"seconds": float(np.mean([here[m, v]["seconds"] for m in models if (m, v) in here]))}
            )
        columns = [("variant", "KL", ""), *((m, m, ".5f") for m in models)]
        columns += [
            ("ratio", "over the best other tool", ".2f"),
            ("worst", "worst", ""),
            ("seconds", "solve s", ".1f"),
        ]
        parts += [f"## INT{bits} g{group}", "", table(rows, columns), ""]
    return "\n".join(parts)


if __name__ == "__main__":
    sys.exit(main())
