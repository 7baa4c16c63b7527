"""loopq beside other tools at equal bits: `make peers`, or `python -m benches.quality.peers [MODEL ...]`.

Each tool runs in its own environment `.cache/venv-TOOL`, which `make peers` makes; a missing one is left out
and named. Model, calibration prompts, initial states, grid and evaluation are the same for all. By default
the prompts are as many as loopq takes. MODEL is a name of the zoo, "plbert", or one with a planted massive
activation at step 0 ("ouro_small+spike") or at a token ("ouro_small+token"), or with a loud channel
("huginn_small+outlier"), or a folder. `--calibration` and `--text` replace the texts that ship, and `--tasks`
scores each row on items of tasks beside full precision. Results are saved in .cache/peers, and an interrupted run is
resumed. The record goes to benches/record. It holds the KL with 95 % intervals over prompts at the depths N, N/2 and
2N, and on text of another kind. It also holds CPU seconds, peak memory, and the worst model of each method.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import json
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benches.pages import RECORD, ROOT, into, json_lines
from benches.quality.peak import Peak
from benches.quality.peer import TOOLS
from benches.quality.peers_table import (
    EVEN,
    FULL,
    PLAIN,
    SMALL,
    TRELLIS,
    UNTURNED,
    answers,
    page,
    processor,
    report,
)
from benches.quality.subjects import items_right, other_text, prepare
from benches.zoo import folders
from loopq import __version__, zoo
from loopq.calibrate.hessian_set import HessianSet
from loopq.calibrate.prompts import CALIBRATION_PROMPTS, RANDOM_TOKENS
from loopq.commands.variants import LLM_COMPRESSOR
from loopq.errors import LoopqError
from loopq.evaluation.compare import compare
from loopq.layers.layer import QuantizedLayer
from loopq.paper.models import Sizes
from loopq.paper.plbert import PLBERT, data_folder
from loopq.quantizers.gptq_cd import GPTQCD
from loopq.run.auto import choose_metric
from loopq.run.config import PRESETS, QuantConfig
from loopq.run.model_source import ModelSource
from loopq.run.plan import Plan
from loopq.run.solving import solve_from
from loopq.settings.execution import Execution

GRIDS = ((4, 128), (4, 32), (3, 32), (2, 32))
PLANTED = ("huginn_small+outlier", "ouro_small+spike", "ouro_small+token")
#: Default treatment of a calibration text; other tools, and their algorithms in our code, get the raw text.
_RANDOM = {"random_tokens": RANDOM_TOKENS}
#: Bits are those of the row, and matrices outside the loop stay as they are in all rows.
_SMALL = {k: v for k, v in PRESETS["small"].items() if k not in ("bits", "outside")} | _RANDOM
#: Settings of preset `best` on a trellis, which cost several times as much.
_TOP = {k: PRESETS["best"][k] for k in ("metric", "metric_draws", "inputs")}
OURS: dict[str, dict[str, Any]] = {
    "RTN": {"method": "rtn"},
    "RTN, paper": {"method": "rtn", "scale_search": "max"},
    "GPTQ, one step, paper": {**PRESETS["paper"], "steps": "first"},
    "GPTQ, trajectory, paper": dict(PRESETS["paper"]),
    "GPTQ, one step, searched scales": {"method": "gptq", "steps": "first"},
    "GPTQ, trajectory, searched scales": {"method": "gptq"},
    # The same algorithm as the tool's, in our code: how far the two agree.
    "GPTQ, llm-compressor's rules": dict(LLM_COMPRESSOR),
    "loopq fast": {**PRESETS["fast"], **_RANDOM},
    EVEN: {"levels": "even", **_RANDOM},
    "loopq default": dict(_RANDOM),
    PLAIN: {},
    UNTURNED: {"rotation": "none", **_RANDOM},
    "loopq best, inputs open": {**PRESETS["best"], "inputs": "open", **_RANDOM},
    "loopq best": {**PRESETS["best"], **_RANDOM},
    TRELLIS: {**PRESETS["best"], "method": "trellis", **_RANDOM},
    SMALL: _SMALL,
    f"{SMALL}, 10 state bits": {**_SMALL, "state_bits": 10},
    f"{SMALL}, inputs asymmetric, four draws": {**_SMALL, **_TOP},
}
#: Rows that cost hours on all models, or are refused, and are made where they are named.
NAMED_ONLY = ("auto-round, best", "GPTQModel, EXL3", "llm-compressor, no wrapper")
Result = tuple[str, int, int]
KEY = ("model", "draw", "bits", "group", "variant", "task")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", help="default: all there are, and three planted ones")
    parser.add_argument("--data", type=Path, help="data folder, for plbert and GSM8K (default: LOOPQ_DATA)")
    parser.add_argument("--tool", action="append", help=f"only these: {', '.join(TOOLS)}, loopq")
    parser.add_argument("--variant", action="append", help="only these rows, by their names in the table")
    parser.add_argument("--grid", action="append", help="BITS:GROUP (default 4:128 4:32 3:32 2:32)")
    parser.add_argument(
        "--draw", action="append", type=int, help="stretches of calibration text (default 0 1 2)"
    )
    parser.add_argument("--n-calibration", type=int, default=CALIBRATION_PROMPTS)
    parser.add_argument("--n-evaluation", type=int, default=32)
    parser.add_argument("--calibration", type=Path, help="text to calibrate on (default: the one that ships)")
    parser.add_argument("--text", type=Path, help="text to measure on, at the depth N alone")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--names", default="", help="regular expression of the matrices (default: all)")
    parser.add_argument(
        "--tasks", action="append", default=[], metavar="TASK:ITEMS", help="score on these, too"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "peers")
    parser.add_argument("--table", action="store_true", help="run nothing: write what is in the cache")
    parser.add_argument("--out", type=Path, default=RECORD)
    return parser.parse_args()


@dataclass
class Cost:
    """CPU seconds, and peak memory above that of the loaded model."""

    seconds: float = 0.0
    memory_mib: float = 0.0


class Bench:
    """One model and one draw of its calibration text, with the results that are saved."""

    #: Type of the computation; None is the model's own.
    dtype: str | None = None

    def __init__(self, name: str, draw: int, args: argparse.Namespace, sizes: Sizes) -> None:
        self.args = args
        self.data = data_folder(args.data)
        self.job = {
            "model": name,
            "draw": draw,
            "sizes": vars(sizes),
            "data": str(self.data.resolve()) if self.data else None,
            "threads": args.threads,
            "texts": [str(file.resolve()) if file else None for file in (args.calibration, args.text)],
            "dtype": self.dtype,
        }
        self.model = prepare(name, sizes, self.data, draw, self.job["texts"], self.dtype)
        self.system = self.model.loaded.system
        self.peak = Peak()
        self.source = self.prepared(0.0)
        #: Weights of the results that were measured last.
        self.weights: dict[int, Any] = {}
        self._sums: dict[float, tuple[ModelSource, HessianSet, Cost]] = {}
        self._metrics: dict[Any, Cost] = {}

    @property
    def exclude(self) -> tuple[str, ...]:
        """Matrices that are not asked for."""
        return (rf"re:^(?!.*({self.args.names}))",) if self.args.names not in ("", ".") else ()

    def prepared(self, share: float) -> ModelSource:
        """Rollouts of the calibration prompts; of a text a share of the tokens may be random."""
        tokens = self.model.calibration
        if share and tokens.packing == "windows":
            tokens = tokens.with_random_tokens(share, np.arange(self.model.loaded.config["vocab_size"]))
        config, how = QuantConfig(exclude=self.exclude), Execution(threads=self.args.threads)
        return ModelSource.of(self.system, tokens, config, execution=how)

    def sums(self, share: float) -> tuple[ModelSource, HessianSet, Cost]:
        """Hessians of all steps, collected once for each share of random tokens and timed."""
        if share not in self._sums:
            source = self.prepared(share) if share else self.source
            with self.costs() as collecting:
                sums = source.all_steps(source.plan(QuantConfig()))
            self._sums[share] = source, sums, collecting
        return self._sums[share]

    @contextlib.contextmanager
    def costs(self) -> Iterator[Cost]:
        """Give a cost that is filled when the block ends."""
        cost = Cost()
        self.peak.restart()
        began = time.process_time()
        yield cost
        cost.seconds, cost.memory_mib = time.process_time() - began, self.peak.mib()

    def ours(self, results: list[Result]) -> list[dict[str, Any]]:
        """Quantize by loopq; the cost is that of the collection, of the metric and of the solve."""
        lines, weights = [], {}
        for number, (variant, bits, group) in enumerate(results):
            settings = dict(OURS[variant])
            share = settings.pop("random_tokens", 0.0)
            config = QuantConfig.of(**{"bits": bits, "group_size": group, "rank_threshold": None} | settings)
            if config.layer.method.needs_hessian:
                source, sums, collecting = self.sums(share)
                plan = choose_metric(source.plan(config), source.job)
                parts = [collecting, *self.metric_costs(plan, source, sums, share)]
            else:
                source, plan = self.source, self.source.plan(config)
                sums, parts = source.sums(plan), []
            asked = plan.config.layer.flat()
            with self.costs() as solve:
                layers = solve_from(plan, source, sums)
            parts.append(solve)
            weights[number] = {n: x.in_model_orientation() for n, x in layers.items()}
            lines.append(
                {
                    "seconds": sum(part.seconds for part in parts),
                    "memory_mib": max(part.memory_mib for part in parts),
                    "metric": asked.get("metric"),
                    "stored_bits": stored_bits(layers.values()),
                }
            )
        return self.measured(lines, weights)

    def metric_costs(self, plan: Plan, source: ModelSource, sums: HessianSet, share: float) -> list[Cost]:
        """Collect the loop metrics that a run asks for, once for all grids; return what that took."""
        asked = {(share, t.gradients) for t in plan.tasks if t.gradients}
        for key in asked - set(self._metrics):
            with self.costs() as self._metrics[key]:
                source.collect_metrics(plan, sums, plan.tasks)
        return [self._metrics[key] for key in asked]

    def theirs(self, tool: str, results: list[Result]) -> list[dict[str, Any]]:
        """Quantize by another tool, in one process of its environment."""
        names = [t.name for t in self.source.plan(QuantConfig()).tasks]
        return self.measured(*answer_of(tool, self.job | {"names": names, "results": results}))

    def measured(self, lines: list[dict[str, Any]], weights: dict[int, Any]) -> list[dict[str, Any]]:
        """Add KL with its interval over prompts to each result; at other depths, and on other text."""
        self.weights = weights
        model, depth = self.model, self.system.n_steps
        seeds = (0, 1) if self.system.state_is_random else (0,)
        asked = {
            "kl": (model.evaluation, depth, seeds),
            "kl_half": (model.evaluation, depth // 2, (0,)),
            "kl_double": (model.evaluation, 2 * depth, (0,)),
        }
        text = None if self.args.text else other_text(model, self.data, self.args.n_evaluation)
        if self.args.text:
            asked = {"kl": asked["kl"]}
        if text is not None:
            asked["kl_other_text"] = (text, depth, (0,))
        named = {str(n): w for n, w in weights.items()}
        for what, (tokens, n_steps, states) in asked.items():
            try:
                measurements = compare(self.system, named, tokens, n_steps=n_steps, seeds=states)
            except LoopqError as error:
                for number in weights:
                    lines[number][f"{what}_refused"] = str(error)
                continue
            for number, one in zip(weights, measurements[1:], strict=True):
                lines[number][what] = float(one.kl.mean())
                if what == "kl":
                    interval = one.kl_interval()
                    lines[number] |= {
                        "kl_95": [interval.low, interval.high] if interval else None,
                        "agreement": float(one.agreement.mean()),
                        "kl_by_prompt": one.kl.mean(axis=0).tolist(),
                        "output": one.output,
                    }
        return lines


def answer_of(tool: str, job: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[int, Any]]:
    """Run a job of `benches.quality.peer` in the tool's environment.

    Returns
    -------
    list of dict, dict of int to weights
        A line for each result, and the weights of those that the tool did not refuse, by their number.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.json"
        path.write_text(json.dumps(job | {"tool": tool}))
        done = subprocess.run(
            [str(python_of(tool)), "-m", "benches.quality.peer", str(path)],
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
        )
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        if len(lines) < len(job["results"]):
            raise SystemExit(f"{tool}: {done.stderr[-2000:]}")
        weights = {}
        for number, line in enumerate(lines):
            if "refused" not in line:
                with np.load(path.with_name(f"{number}.npz")) as arrays:
                    weights[number] = dict(arrays)
    return lines, weights


def stored_bits(layers: Iterable[QuantizedLayer]) -> float:
    """Bits for each weight of quantized layers, with scales and rotations."""
    of = [(layer.n_bytes, layer.codes.size) for layer in layers]
    return 8 * sum(n for n, _ in of) / sum(n for _, n in of)


def python_of(tool: str) -> Path:
    """Interpreter of a tool's environment, as the Makefile makes them."""
    return ROOT / ".cache" / f"venv-{tool.removesuffix('model')}" / "bin" / "python"


class Saved:
    """One JSON file for each result."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.settings = folder, settings

    def path(self, key: dict[str, Any]) -> Path:
        """The file of a result."""
        text = json.dumps(self.settings | key, sort_keys=True)
        return self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:20]}.json"

    def find(self, key: dict[str, Any]) -> dict[str, Any] | None:
        """A result, if it is there."""
        path = self.path(key)
        return json.loads(path.read_text()) if path.is_file() else None

    def keep(self, key: dict[str, Any], row: dict[str, Any]) -> None:
        """Save a result."""
        path = self.path(key)
        path.with_suffix(".part").write_text(
            json.dumps(key | row | {"loopq": __version__, "cpu": processor()}, indent=1)
        )
        path.with_suffix(".part").rename(path)
        column = "mean" if "values" in row else "kl"
        print(*(key.get(k, "") for k in KEY), row.get(column, row.get("refused")), flush=True)

    def weights(self, key: dict[str, Any]) -> Path:
        """The file of a result's weights, which are kept for tasks."""
        return self.path(key).with_suffix(".npz")


def asked_of(
    name: str, draw: int, grids: list[tuple[int, int]], chosen: list[str]
) -> list[tuple[str, dict[str, Any]]]:
    """Every requested result with its tool."""
    wanted = []
    for tool in chosen:
        for variant in OURS if tool == "loopq" else TOOLS[tool]:
            for bits, group in grids:
                key: dict[str, Any] = {
                    "model": name,
                    "draw": draw,
                    "bits": bits,
                    "group": group,
                    "variant": variant,
                }
                if tool == "loopq":
                    settings = OURS[variant]
                    # Defaults may change: a result belongs to the defaults of its time.
                    unsaid = GPTQCD().flat()
                    descends = settings.get("method", "gptq-cd") == "gptq-cd"
                    key["settings"] = [settings, unsaid] if descends else settings
                wanted.append((tool, key))
    return wanted


def measure(
    saved: Saved, name: str, draw: int, asked: list[tuple[str, dict[str, Any]]], args: Any, sizes: Sizes
) -> None:
    """Make what is missing of one model and draw."""
    tasks = dict(task.split(":") for task in args.tasks)
    missing = [
        (tool, key)
        for tool, key in asked
        if saved.find(key) is None or (tasks and not saved.weights(key).is_file())
    ]
    if not missing and not tasks:
        return
    bench = Bench(name, draw, args, sizes)
    for tool in dict.fromkeys(t for t, _ in missing):
        keys = [k for t, k in missing if t == tool]
        # Full precision runs once for all that are measured together; loopq's results are many, and saved grid by grid.
        parts = (
            [keys]
            if tool != "loopq"
            else [
                [k for k in keys if k["bits"] == b and k["group"] == g]
                for b, g in dict.fromkeys((k["bits"], k["group"]) for k in keys)
            ]
        )
        for part in parts:
            results = [(k["variant"], k["bits"], k["group"]) for k in part]
            lines = bench.ours(results) if tool == "loopq" else bench.theirs(tool, results)
            for number, (key, line) in enumerate(zip(part, lines, strict=True)):
                if saved.find(key) is None:
                    saved.keep(key, line)
                if tasks and number in bench.weights:
                    np.savez(saved.weights(key), **bench.weights[number])
    for task, limit in tasks.items():
        score(saved, bench, [key for _, key in asked], {"task": task, "limit": int(limit)})


def score(saved: Saved, bench: Bench, asked: list[dict[str, Any]], task: dict[str, Any]) -> None:
    """Score full precision and every result on the items of a task, and save which are right."""
    full = {"model": bench.job["model"], "draw": 0, "bits": 0, "group": 0, "variant": FULL}
    for key in (full, *asked):
        if saved.find(key | task) is None and (key is full or saved.weights(key).is_file()):
            weights = {} if key is full else dict(np.load(saved.weights(key)))
            values = items_right(bench.model, weights, bench.data, **task)
            saved.keep(key | task, {"values": values, "mean": float(np.mean(values))})


def scored(saved: Saved, name: str, asked: list[dict[str, Any]], tasks: list[str]) -> list[dict[str, Any]]:
    """Saved scores of a model."""
    full = {"model": name, "draw": 0, "bits": 0, "group": 0, "variant": FULL}
    parts = [{"task": task, "limit": int(n)} for task, n in (t.split(":") for t in tasks)]
    rows = [saved.find(key | part) for part in parts for key in (full, *asked)]
    return [row for row in rows if row is not None]


def main() -> None:
    args = parse()
    args.out.mkdir(parents=True, exist_ok=True)
    sizes = Sizes(args.n_calibration, 16, args.n_evaluation, args.seq_len)
    settings = vars(sizes) | {
        k: str(v) for k, v in vars(args).items() if k in ("calibration", "text", "names") and v
    }
    saved = Saved(args.cache, settings)
    asked_grids = ((int(b), int(g)) for b, g in (grid.split(":") for grid in args.grid or ()))
    grids = list(asked_grids) or list(GRIDS)
    chosen = args.tool or ["loopq", *TOOLS]
    absent = [t for t in chosen if t in TOOLS and not (python_of(t).parents[1] / "stamp").exists()]
    if args.table:
        absent = []
    models = args.models or [
        *zoo.available(), *(Path(f).name for f in folders()), *PLANTED, *([PLBERT] if data_folder(args.data) else [])
    ]  # fmt: skip
    records: list[dict[str, Any]] = []
    scores: list[dict[str, Any]] = []
    for draw in args.draw if args.draw is not None else range(3):
        for name in models:
            asked = asked_of(name, draw, grids, [t for t in chosen if t not in absent])
            wanted = args.variant or {key["variant"] for _, key in asked} - set(NAMED_ONLY)
            asked = [a for a in asked if a[1]["variant"] in wanted]
            if not args.table:
                measure(saved, name, draw, asked, args, sizes)
            rows = [saved.find(key) for _, key in asked]
            scores += scored(saved, name, [key for _, key in asked], args.tasks)
            records += [{k: v for k, v in r.items() if k != "settings"} for r in rows if r is not None]
    text = report(records, settings, absent, list(OURS)) + answers(records, scores, list(OURS))
    print(text)
    stem = args.out / f"peers-{datetime.date.today().isoformat()}"
    stem.with_suffix(".json").write_text(
        json_lines({"settings": settings, "records": records, "scores": scores}) + "\n"
    )
    stem.with_suffix(".md").write_text(text + "\n")
    if args.out == RECORD:
        into(ROOT / "docs" / "comparison.md", "peers", page(records, list(OURS)))


if __name__ == "__main__":
    main()
