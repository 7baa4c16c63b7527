"""loopq's types of GGUF and FP4 beside the engines' own tools: `python -m benches.gguf --engine LIBRARY`.

Matrices of some layers of the loop become each type in two ways: by loopq (rounding; its default), and by the
functions that `llama-quantize` calls. The latter run without and with an importance matrix, the diagonal of
the same Hessian summed over all runs. NVFP4 and MXFP4 are llm-compressor's GPTQ, in its own environment, with
the better of two observers. LIBRARY is a shared library with ggml's `quantize_*`: that of xllamacpp, or
`libggml-base.so` of llama-cpp-python. Rows that are no whole blocks get the type that `llama-quantize` falls
back to, from either tool. A type of files, such as IQ3_XXS, gives each matrix the type that `llama-quantize` chooses
for it, always with importance. Where loopq has no codes of a type, the row is the tool's alone. "padded" types fill
rows up to whole blocks with zeros, and do not count these. Bits are those of the matrices; KL is on other text, in
float32 on dequantized weights. `python -m benches.zoo.smollm2 fetch` makes SmolLM2; `--model plbert` has rows of
whole blocks of 256. Results are kept in the record, and a type that it has is not measured again.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benches.cost import Costs, add_common, parsed, written
from benches.pages import RECORD, ROOT, into, json_lines
from benches.quality.peer import FLOATS
from benches.quality.peers_table import processor
from loopq.errors import ConfigError
from loopq.paper.models import Sizes
from loopq.quantizers.config import Override
from loopq.run.config import QuantConfig
from loopq.run.solving import solve_from

#: Types: weights and bytes of a block, the bar for loopq's KL over the tool's, what llama-quantize takes instead.
TYPES = {
    "q2_0": (64, 18, 0.35, ""), "q2_k": (256, 84, 0.5, "iq4_nl"), "q3_k": (256, 110, 0.5, "iq4_nl"),
    "iq4_xs": (256, 136, 0.5, "iq4_nl"), "iq4_nl": (32, 18, 0.5, ""), "q4_k": (256, 144, 0.5, "q5_0"),
    "q4_0": (32, 18, 0.5, ""), "q4_1": (32, 20, 0.5, ""), "q5_0": (32, 22, 0.5, ""), "q5_k": (256, 176, 0.5, "q5_1"),
    "q5_1": (32, 24, 0.5, ""), "q6_k": (256, 210, 0.5, "q8_0"), "q8_0": (32, 34, 0.5, ""),
    "mxfp4": (32, 17, 0.5, ""), "nvfp4": (16, 9, 0.5, ""),
    "iq2_xxs": (256, 66, 0.5, "iq4_nl"), "iq2_xs": (256, 74, 0.5, "iq4_nl"), "iq2_s": (256, 82, 0.5, "iq4_nl"),
    "iq3_xxs": (256, 98, 0.5, "iq4_nl"), "iq3_s": (256, 110, 0.5, "iq4_nl"),
}  # fmt: skip
#: The number of a type that ggml prepares tables for.
PREPARED = {"iq2_xxs": 16, "iq2_xs": 17, "iq3_xxs": 18, "iq3_s": 21, "iq2_s": 22}
PADDED = " padded"
DOWN, V, OUT = "down_proj", "v_proj", "o_proj"
#: Types of files: the type of most matrices, and others by a part of the name, for the first layers or those that
#: `more` names. They are the choices of `llama-quantize` for a dense model of fewer than four queries to a key.
FILES: dict[str, tuple[str, dict[str, tuple[str, str]]]] = {
    "IQ2_XXS": ("iq2_xxs", {V: ("q2_k", "all"), DOWN: ("q2_k", "eighth")}),
    "IQ2_XS": ("iq2_xs", {V: ("q2_k", "all"), DOWN: ("q2_k", "eighth")}),
    "IQ2_M": ("iq2_s", {V: ("iq3_s", "all"), OUT: ("iq3_s", "all"), DOWN: ("iq3_s", "eighth")}),
    "IQ3_XXS": ("iq3_xxs", {"q_proj": ("iq2_s", "all"), "k_proj": ("iq2_s", "all"), OUT: ("iq3_s", "all")}),
    "IQ3_S": ("iq3_s", {}),
    "IQ3_M": ("iq3_s", {V: ("q4_k", "all"), OUT: ("q4_k", "all"), DOWN: ("q4_k", "eighth")}),
    "Q2_K": ("q2_k", {V: ("q3_k", "all"), OUT: ("q3_k", "all"), DOWN: ("q3_k", "all")}),
    "Q4_K_S": ("q4_k", {V: ("q5_k", "four"), DOWN: ("q5_k", "eighth")}),
    "Q4_K_M": ("q4_k", {V: ("q6_k", "more"), DOWN: ("q6_k", "more")}),
}
FP4 = ("mxfp4", "nvfp4")
#: Model and types in the table of docs/formats/gguf.md; the record has all.
SHOWN_MODEL = "looped"
SHOWN = ("q2_0", "q2_k", "q3_k", "mxfp4", "q4_0", "nvfp4", "q4_k", "q6_k", "q8_0")
GRIDS: dict[str, dict[str, Any]] = {
    "mxfp4": {"bits": 4, "group_size": 32},
    "nvfp4": {"bits": 4, "group_size": 16},
}
COLUMNS = ("tool", "tool, importance", "loopq, rounding", "loopq")
_FLOATS = ctypes.POINTER(ctypes.c_float)


def chosen(kind: str, name: str, n_layers: int) -> str:
    """The type that `llama-quantize` asks for a matrix, in a file of this type."""
    kind, others = FILES.get(kind, (kind, {}))
    layer, eighth = int((re.findall(r"\.(\d+)\.", name) or ["0"])[0]), n_layers // 8
    where = {
        "all": True, "eighth": layer < eighth, "four": layer < 4,
        "more": layer < eighth or layer >= 7 * n_layers // 8 or (layer - eighth) % 3 == 2,
    }  # fmt: skip
    alike = [other for part, (other, layers) in others.items() if part in name and where[layers]]
    return alike[0] if alike else kind


def held(kind: str, columns: int) -> str:
    """The type that a matrix of a file of this type gets."""
    if kind.endswith(PADDED):
        return kind
    return kind if columns % TYPES[kind][0] == 0 else TYPES[kind][3]


class Engine:
    """ggml's quantizers."""

    def __init__(self, path: str) -> None:
        try:
            self.library = ctypes.CDLL(path)
        except OSError as cause:
            raise ConfigError(f"{path}: no library with ggml's quantizers: {cause}") from cause

    def weight(
        self, kind: str, w: NDArray[np.float32], importance: NDArray[Any] | None
    ) -> NDArray[np.float32]:
        """Return what a weight (out, in) becomes."""
        size, n_bytes, *_ = TYPES[kind.removesuffix(PADDED)]
        if kind.endswith(PADDED):
            return self.padded(kind.removesuffix(PADDED), w, importance)
        if kind in PREPARED:
            self.library.ggml_quantize_init(PREPARED[kind])
        name = kind.replace("_k", "_K")
        w, out = np.ascontiguousarray(w), np.zeros_like(w)
        blocks = np.zeros((len(w), w.shape[1] // size * n_bytes), np.uint8)
        counts = None if importance is None else np.ascontiguousarray(importance, np.float32)
        pack, unpack = (getattr(self.library, f) for f in (f"quantize_{name}", f"dequantize_row_{name}"))
        pack.argtypes = [_FLOATS, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, _FLOATS]
        unpack.argtypes, unpack.restype = [ctypes.c_void_p, _FLOATS, ctypes.c_int64], None
        pack(_at(w), blocks.ctypes.data, *w.shape, None if counts is None else _at(counts))
        unpack(blocks.ctypes.data, _at(out), out.size)
        return out

    def padded(
        self, kind: str, w: NDArray[np.float32], importance: NDArray[Any] | None
    ) -> NDArray[np.float32]:
        """As `weight`, with zeros up to whole blocks, which are cut off again."""
        n = w.shape[1]
        more = -n % TYPES[kind][0]
        wide = np.pad(w, ((0, 0), (0, more)))
        counts = None if importance is None else np.pad(importance, (0, more))
        return self.weight(kind, wide, counts)[:, :n]


def _at(values: NDArray[np.float32]) -> Any:
    return values.ctypes.data_as(_FLOATS)


class Kept(Costs):
    """The matrices with matching names, and the sums and metrics of the default settings.

    In bfloat16 a rollout's own rounding would hide what little one layer loses.
    """

    dtype = "float32"

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args.model, 0, args, Sizes(args.n_calibration, 16, args.n_evaluation, args.seq_len))
        self.source = self.prepared(0.0)
        plan = self.source.plan(QuantConfig.of(metric="loop"))
        with self.costs() as sums:
            self.hessians = self.source.all_steps(plan)
        self.metrics_plan = plan
        #: CPU seconds of what a row of each column needs before it begins.
        self.before = {"tool, importance": sums.seconds}

    def collect(self) -> None:
        """Collect the loop metrics, if they are not there."""
        if "loopq" not in self.before:
            with self.costs() as metrics:
                self.source.collect_metrics(self.metrics_plan, self.hessians, self.metrics_plan.tasks)
            self.before["loopq"] = self.before["tool, importance"] + metrics.seconds

    def solved(self, config: QuantConfig) -> dict[str, NDArray[np.float32]]:
        """The weights by loopq."""
        layers = solve_from(self.source.plan(config), self.source, self.hessians)
        return {name: layer.in_model_orientation() for name, layer in layers.items()}


class Types(Kept):
    """The comparison."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        tasks = self.source.plan(QuantConfig()).tasks
        self.dense = {t.name: self.source.weights.tensors[t.name].float32() for t in tasks}
        self.importance = {
            t.name: np.diag(self.hessians.accumulator(t.input_group, t.steps).matrix(list(t.steps)))
            for t in tasks
            if t.input_group
        }

        self._rounded: dict[tuple[str, str, bool], tuple[NDArray[np.float32], float]] = {}

    def types(self, kind: str) -> dict[str, str]:
        """The type of every matrix."""
        return {n: held(chosen(kind, n, self.args.n_layers), w.shape[1]) for n, w in self.dense.items()}

    def bits(self, kind: str) -> float:
        """Bits of a weight, over all matrices."""
        types = self.types(kind)
        sizes = [(w.size, *TYPES[types[n].removesuffix(PADDED)][:2]) for n, w in self.dense.items()]
        return sum(n * 8 * n_bytes / size for n, size, n_bytes in sizes) / sum(n for n, *_ in sizes)

    def rounded(
        self, engine: Engine, kind: str, important: bool
    ) -> tuple[dict[str, NDArray[np.float32]], float]:
        """The weights of a type by the tool, and CPU seconds; a matrix is rounded once to each type."""
        by_name = {}
        for name, one in self.types(kind).items():
            key = (name, one, important)
            if key not in self._rounded:
                with self.costs() as cost:
                    weight = engine.weight(
                        one, self.dense[name], self.importance.get(name) if important else None
                    )
                self._rounded[key] = weight, cost.seconds
            by_name[name] = self._rounded[key]
        return {name: weight for name, (weight, _) in by_name.items()}, sum(
            seconds for _, seconds in by_name.values()
        )

    def of(self, kind: str, settings: dict[str, Any]) -> dict[str, NDArray[np.float32]]:
        """The weights of a type by loopq."""
        other = self.types(kind)
        overrides = [Override(n, {"levels": k}) for n, k in other.items() if k != kind]
        config = QuantConfig.of(*overrides, levels=kind, **GRIDS.get(kind, {}), **settings)
        return self.solved(config)

    def row(self, kind: str, engine: Engine) -> dict[str, Any]:
        """KL of a type by each tool."""
        weights: dict[str, dict[str, NDArray[np.float32]]] = {}
        cells: dict[str, Any] = {"bits": self.bits(kind)}
        ours = ("loopq, rounding", {"method": "rtn"}), ("loopq", {"metric": "loop"})
        alone = kind in FILES or kind.endswith(PADDED) or kind in PREPARED
        if not alone:
            self.collect()
        for name, settings in () if alone else ours:
            with self.costs() as cost:
                weights[name] = self.of(kind, settings)
            cells[f"{name}, seconds"] = self.before.get(name, 0.0) + cost.seconds
        if kind in FP4:
            asked = [name for name in FLOATS if name.startswith(kind.upper())]
            lines = self.theirs("llmcompressor", [(name, 4, TYPES[kind][0]) for name in asked])
            cells |= {
                name: line.get("kl", line.get("refused")) for name, line in zip(asked, lines, strict=True)
            }
            cells["tool, importance"] = min(k for k in map(cells.get, asked) if isinstance(k, float))
        else:
            for name in ("tool, importance",) if alone else ("tool", "tool, importance"):
                weights[name], seconds = self.rounded(engine, kind, name != "tool")
                cells[f"{name}, seconds"] = self.before.get(name, 0.0) + seconds
        lines = self.measured([{} for _ in weights], dict(enumerate(weights.values())))
        for name, line in zip(weights, lines, strict=True):
            cells |= {
                name: line["kl"],
                f"{name}, 95 %": line["kl_95"],
                f"{name}, agreement": line["agreement"],
            }
        return cells


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common(parser, n_calibration=64)
    parser.add_argument("--engine", required=True, help="library with ggml's quantizers")
    parser.add_argument(
        "--type",
        action="append",
        choices=[*TYPES, *FILES, *(k + PADDED for k in TYPES)],
        help="only these (default: all types)",
    )
    parser.add_argument(
        "--names", help="regular expression of the matrices, . for all (default: of a whole loop)"
    )
    args = parsed(parser)
    folder = Path(args.model)
    args.names = args.names or (r"model\.layers\.1[2-7]\." if folder.is_dir() else "")
    args.n_layers = (
        json.loads((folder / "config.json").read_text())["num_hidden_layers"] if folder.is_dir() else 1
    )
    return args


def _both(row: dict[str, Any], what: str, form: str) -> str:
    """A figure of the tool with importance and of loopq; older rows have none."""
    return ", ".join(
        format(row[key], form) for key in (f"tool, importance, {what}", f"loopq, {what}") if key in row
    )


def types_table(run: dict[str, Any]) -> str:
    """A row for each type."""
    lines = [
        "| type | bits | tool | with importance | loopq, rounding | loopq (95 % over prompts) | ratio | bar "
        "| agreement: tool, loopq | CPU s: tool, loopq |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for kind, row in sorted(run["rows"].items(), key=lambda item: item[1]["bits"]):
        plain = f"{row['tool']:.2e}" if "tool" in row else ""
        ours = " |  |  | "
        if "loopq" in row:
            low, high = row["loopq, 95 %"]
            ours = (
                f"{row['loopq, rounding']:.2e} | {row['loopq']:.2e} ({low:.2e}-{high:.2e}) | "
                f"{row['loopq'] / row['tool, importance']:.2f} | {TYPES[kind][2]}"
            )
        lines.append(
            f"| {kind.upper()} | {row['bits']:.4g} | {plain} | {row['tool, importance']:.2e} | {ours} | "
            f"{_both(row, 'agreement', '.1%')} | {_both(row, 'seconds', '.0f')} |"
        )
    return "\n".join(lines)


def shown(run: dict[str, Any]) -> str:
    """A row for each of some types, as docs/formats/gguf.md shows it."""
    lines = ["| type | bits | tool, with importance | loopq | ratio |", "|---|---|---|---|---|"]
    for kind, row in sorted(run["rows"].items(), key=lambda item: item[1]["bits"]):
        if kind in SHOWN:
            theirs, ours = row["tool, importance"], row["loopq"]
            cells = (
                kind.upper(),
                f"{row['bits']:.4g}",
                f"{theirs:.2e}",
                f"{ours:.2e}",
                f"{ours / theirs:.2f}",
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def page(runs: dict[str, dict[str, Any]]) -> str:
    """The record."""
    lines = [f"# Types of GGUF and FP4 by loopq and by the engines' tools, {datetime.date.today()}", ""]
    for run in runs.values():
        lines += [
            f"## {run['model']}", "",
            f"`python -m benches.gguf`: {run['matrices']} matrices of {run['model']}, names `{run['names']}`, "
            f"{run['prompts']}, one thread of {run['processor']}.", "",
            types_table(run), "",
        ]  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    args = parse()
    stored = args.out / f"gguf-{datetime.date.today()}.json"
    runs = json.loads(stored.read_text("utf-8")) if stored.is_file() else {}
    bench, engine = Types(args), Engine(args.engine)
    name = Path(args.model).name
    sizes = f"{args.n_calibration} x {args.seq_len} tokens to calibrate, {args.n_evaluation} x {args.seq_len} others"
    run = runs.setdefault(f"{name} {args.names}", {
        "model": name, "names": args.names, "matrices": len(bench.dense), "prompts": sizes,
        "processor": processor(), "rows": {},
    })  # fmt: skip
    for kind in args.type or TYPES:
        if kind in run["rows"]:
            continue
        run["rows"][kind] = bench.row(kind, engine)
        print(kind, run["rows"][kind], flush=True)
        # Written after each result, so an interrupted run leaves a table.
        stored.write_text(json_lines(runs, 3) + "\n", "utf-8")
        written(args.out, "gguf", page(runs))
    print(page(runs))
    if args.out == RECORD:
        for run in (r for r in runs.values() if r["model"] == SHOWN_MODEL):
            into(ROOT / "docs" / "formats" / "gguf.md", f"types of {run['model']}", shown(run))


if __name__ == "__main__":
    main()
