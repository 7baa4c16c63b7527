"""Tables of the real models, SmolLM2 with a loop and PL-BERT: `python -m benches.quality.real [RESULT.json ...]`.

Results of `benches.quality.peers` and `benches.gguf` are added to the record's JSON file, in the place of older ones of
the same key. The tables of the record, of README.md and of pages in docs are then written from it, between their marks.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from benches.gguf import FILES, PADDED
from benches.pages import RECORD, ROOT, into, json_lines
from benches.quality.exl3 import BLOCK
from benches.quality.peers import OURS
from benches.quality.peers_table import EVEN, FULL, SMALL, UNTURNED, Rows, answers, by_grid, flips, table
from loopq.evaluation.stats import bootstrap, mcnemar_exact
from loopq.paper.plbert import PLBERT
from loopq.paper.stats import holm

DATA = RECORD / "smollm2-peers-2026-11-27.json"
CALLS = RECORD / "calls-2026-11-29.json"
OPENING = RECORD / "plbert-2026-11-29.json"
PAGE, README = DATA.with_suffix(".md"), ROOT / "README.md"
ZOO, COMPARISON = ROOT / "docs" / "zoo.md", ROOT / "docs" / "comparison.md"
TRELLIS = ROOT / "docs" / "formats" / "trellis.md"
SMOLLM2, LOOP = "smollm2_loop", "loop alone"
#: Small models whose rows stand beside EXL3.
SMALL_MODELS = ("rllama_small", "ouro_small")
#: Where the record has the rows of a model.
PARTS = {SMOLLM2: "peers", LOOP: "loop", PLBERT: "plbert", **dict.fromkeys(SMALL_MODELS, "small")}
#: Names of rows, in their order.
NAMES = {
    # The paper's scales are those of the largest weight of a group.
    "RTN, paper": "RTN, unsearched scales",
    "GPTQ, one step, paper": "GPTQ, one step, unsearched scales",
    "GPTQ, trajectory, paper": "GPTQ, all steps, unsearched scales",
    "RTN": "RTN, searched scales",
    "GPTQ, one step, searched scales": "GPTQ, one step, searched scales",
    "GPTQ, trajectory, searched scales": "GPTQ, all steps, searched scales",
    "llm-compressor": "llm-compressor",
    "llm-compressor, mse": "llm-compressor, `mse`",
    "llm-compressor, imatrix_mse": "llm-compressor, `imatrix_mse`",
    "GPTQModel": "GPTQModel",
    "auto-round": "auto-round",
    "auto-round, best": "auto-round, recipe `best`",
    "loopq fast": "loopq, `--preset fast`",
    EVEN: "loopq, `--levels even`",
    UNTURNED: "loopq, `--set rotation=none`",
    "loopq default": "loopq",
    "loopq best, inputs open": "loopq, `--preset best --inputs open`",
    f"{SMALL}, 10 state bits": "loopq, `--preset small --set state_bits=10`",
    f"{SMALL}, inputs asymmetric, four draws": "loopq, `--preset small --inputs asymmetric --set metric_draws=4`",
    SMALL: "loopq, `--preset small`",
    # Rows of settings that the preset had before.
    f"{SMALL}, inputs open, 12 state bits": "loopq, trellis of 12 state bits, four draws",
    f"{SMALL}, inputs open": "loopq, trellis of 14 state bits, four draws",
}
#: EXL3 has no groups, and a table of its own.
EXL3 = "GPTQModel, EXL3"
#: Rows of README.md, and the bits of its columns.
FIRST = {
    "llm-compressor, imatrix_mse": NAMES["llm-compressor, imatrix_mse"],
    "auto-round, best": NAMES["auto-round, best"],
    EXL3: "EXL3, by GPTQModel",
    EVEN: "loopq, `--for vllm` and most engines",
    "loopq default": NAMES["loopq default"],
    SMALL: NAMES[SMALL],
}
COLUMNS = (4, 3)
#: Rows beside EXL3.
TRELLISES = (EXL3, "loopq default", SMALL)
#: Rows of published models: the name, PL-BERT's row and Fracast-0's.
PUBLISHED = (
    ("rounding", "RTN", "rounding"),
    ("GPTQ, one step", "GPTQ, one step, searched scales", "GPTQ, one step"),
    ("GPTQ, all steps", "GPTQ, trajectory, searched scales", "GPTQ, all steps"),
    ("llm-compressor, `imatrix_mse`", "llm-compressor, imatrix_mse", "llm-compressor, imatrix_mse"),
    ("EXL3, 3.03 bits in all", EXL3, "EXL3"),
    ("loopq, `--levels even`", EVEN, "loopq, even levels"),
    ("loopq", "loopq default", "loopq"),
    ("loopq, `--preset small`, 3.02 bits in all", SMALL, "loopq, preset small"),
)
FRACAST = ("fracast", 3, 0)
#: Shapes (out, in) of a layer's matrices.
SHAPES = {
    SMOLLM2: ((576, 576),) * 2 + ((192, 576),) * 2 + ((1536, 576),) * 2 + ((576, 1536),),
    PLBERT: ((768, 768),) * 4 + ((2048, 768), (768, 2048)),
    "rllama_small": ((128, 256),) + ((256, 128), (128, 128), (768, 128), (128, 384)) * 2,
    "ouro_small": ((128, 128),) * 4 + ((384, 128),) * 2 + ((128, 384),),
}
#: The tool and observer that cost is compared with, and the bits.
COST, COST_BITS = "llm-compressor, mse", 3
#: Weights in the 210 matrices, and bytes of the tensors beside them: norms, and the table of tokens in bfloat16.
N_WEIGHTS, REST = 106_168_320, 49_152 * 576 * 2 + 61 * 576 * 2
TEXTS = {"calibration.txt": "Wikipedia's articles", "wiki.valid.raw": "WikiText-2, validation"}
TASKS = {"lambada": "LAMBADA", "arc_easy": "ARC-easy", "hellaswag": "HellaSwag"}
ROWS = ("model", "names", "calibration", "draw", "bits", "group", "variant", "task", "limit")


def add(data: dict[str, Any], result: dict[str, Any], *, aside: bool = False) -> None:
    """Put the results of a bench into a record. `aside`: their seconds are not those of the other rows' machine."""
    if "records" not in result:
        for run in result.values():
            data["gguf"] |= run["rows"]
        return
    for where in ("records", "scores"):
        for row in result.get(where, []):
            names, text = (result["settings"].get(k) for k in ("names", "calibration"))
            model = row["model"] if row["model"] in PARTS else LOOP if names else SMOLLM2
            new = row | {"model": model} | ({"names": names, "calibration": Path(text).name} if names else {})
            new |= {"aside": True} if aside else {}
            # One character for each item.
            new |= {"values": "".join(f"{v:.0f}" for v in new["values"])} if "values" in new else {}
            part = PARTS[model] if where == "records" else where
            part = "exl3" if row["variant"] == EXL3 and where == "records" else part
            data.setdefault(part, [])
            same = [r for r in data[part] if all(r.get(k) == new.get(k) for k in ROWS)]
            # The first of equal results stays, with its seconds.
            held = same and same[0].get("seconds", 0) is not None
            if not held or "kl" not in new or same[0].get("kl") != new["kl"]:
                data[part] = [*(r for r in data[part] if r not in same), new]


def seconds_of(row: dict[str, Any]) -> float | None:
    """CPU seconds of a row that ran on the machine of the others."""
    return None if row.get("aside") else row["seconds"]


def of(data: dict[str, Any], model: str) -> Rows:
    """Rows of a model that were not refused, in the order of the tables."""
    rows = [r for r in data.get(PARTS[model], []) if "kl" in r and r["variant"] in NAMES]
    return sorted(rows, key=lambda r: (-r["bits"], r["draw"], list(NAMES).index(r["variant"])))


def best(rows: Rows) -> float:
    """The least KL of another tool."""
    others = (r["kl"] for r in rows if r["variant"] not in OURS and not r["variant"].startswith("loopq"))
    return min(others, default=float("nan"))


def stored_bits(row: dict[str, Any]) -> float:
    """Bits of a weight with its scales. Without a measure, each group has one scale of 16 bits."""
    if row["variant"] == EXL3:
        return exl3_bits(row["model"], row["bits"])
    return float(row.get("stored_bits") or row["bits"] + 16 / row["group"])


def megabytes(bits: float) -> float:
    """The whole file, in 10^6 bytes, of SmolLM2 with so many bits for each weight of its matrices."""
    return (N_WEIGHTS * bits / 8 + REST) / 1e6


def percent(share: float) -> str:
    """A share in percent."""
    return f"{share:.1%}"


def spread(row: dict[str, Any], kl: str = "kl", interval: str = "kl_95") -> str:
    """A KL with its interval."""
    low, high = row[interval]
    return f"{row[kl]:.4f} ({low:.4f}-{high:.4f})"


def peers(rows: Rows, size: bool = True) -> str:
    """One row for each result."""
    lines = []
    for (bits, group), here in by_grid(rows).items():
        for r in here:
            least = best([x for x in here if x["draw"] == r["draw"]])
            lines.append(
                {
                    "grid": f"INT{bits} g{group}", "draw": r["draw"], "weights": NAMES[r["variant"]], "kl": spread(r),
                    "agreement": percent(r["agreement"]), "bits": stored_bits(r), "mb": megabytes(stored_bits(r)),
                }
                | ({"over": r["kl"] / least} if np.isfinite(least) else {})
                | ({} if seconds_of(r) is None else {"s": r["seconds"]})
            )  # fmt: skip
    columns = [("grid", "grid", ""), ("weights", "weights", ""), ("kl", "KL (95 % over prompts)", "")]
    columns += [("agreement", "agreement", ""), ("over", "over the best tool", ".2f")]
    columns += [("bits", "bits", ".2f"), *([("mb", "file, MB", ".1f")] if size else [])]
    columns += [("draw", "draw", "d")] if len({r["draw"] for r in rows}) > 1 else []
    return table(lines, [*columns, ("s", "CPU s", ".0f")])


def readme(rows: Rows, exl3_rows: Rows) -> str:
    """The table of the first page: the best rows of each tool, with what they store."""
    shown = [r for r in (*rows, *exl3_rows) if r["variant"] in FIRST and r["draw"] == 0]
    least = {bits: min(r["kl"] for r in shown if r["bits"] == bits) for bits in COLUMNS}
    lines = []
    for variant, name in FIRST.items():
        line: dict[str, Any] = {"weights": name}
        seconds = []
        for r in (r for r in shown if r["variant"] == variant and r["bits"] in COLUMNS):
            bits, kl = r["bits"], f"{r['kl']:.3f}"
            line[f"bits{bits}"] = stored_bits(r)
            line[f"kl{bits}"] = f"**{kl}**" if r["kl"] == least[bits] else kl
            line[f"agreement{bits}"] = percent(r["agreement"])
            # EXL3's seconds are those of a kernel for other processors.
            seconds += [r["seconds"]] if seconds_of(r) is not None and variant != EXL3 else []
        lines.append(line | ({"seconds": sum(seconds) / len(seconds)} if seconds else {}))
    columns = [("weights", "weights", "")]
    for bits in COLUMNS:
        columns += [
            (f"bits{bits}", "bits", ".2f"),
            (f"kl{bits}", "KL", ""),
            (f"agreement{bits}", "agreement", ""),
        ]
    return table(lines, [*columns, ("seconds", "CPU s", ".0f")])


def scored(data: dict[str, Any]) -> Rows:
    """Scores in the order of the tables."""
    order = [FULL, *NAMES]
    return sorted(
        data["scores"],
        key=lambda r: (list(TASKS).index(r["task"]), -(r["bits"] or 99), order.index(r["variant"])),
    )


def right(data: dict[str, Any]) -> str:
    """Right answers: one row for each method and grid, one column for each task."""
    lines: dict[tuple[int, str], dict[str, Any]] = {}
    for r in scored(data):
        grid = f"{r['bits']} bits: " if r["bits"] else ""
        line = lines.setdefault(
            (r["bits"], r["variant"]), {"weights": f"{grid}{NAMES.get(r['variant'], FULL)}"}
        )
        line[r["task"]] = percent(r["values"].count("1") / len(r["values"]))
    rows = table(list(lines.values()), [("weights", "weights", ""), *((t, TASKS[t], "") for t in TASKS)])
    return f"{rows}\n\n{told_apart(data)}"


def told_apart(data: dict[str, Any]) -> str:
    """Pairs of a row of loopq and another tool's that right answers tell apart.

    All pairs are one family: p is adjusted after Holm, as in docs/paper.md.
    """
    pairs, p = [], []
    rows = [r for r in scored(data) if r["bits"]]
    for ours in (r for r in rows if r["variant"] in OURS):
        for tool in (r for r in rows if r["variant"] not in OURS):
            if (ours["task"], ours["bits"]) == (tool["task"], tool["bits"]):
                gained, lost = flips(*(np.array([float(c) for c in r["values"]]) for r in (ours, tool)))
                grid = f"{ours['bits']} bits, {TASKS[ours['task']]}"
                names = [NAMES[r["variant"]] for r in (ours, tool)]
                pairs.append((grid, *(names if gained > lost else names[::-1])))
                p.append(mcnemar_exact(gained, lost))
    found = [
        {"grid": grid, "more": more, "less": less, "p": value}
        for (grid, more, less), value in zip(pairs, holm(p), strict=True)
        if value < 0.05
    ]
    head = f"Of {len(p)} pairs of loopq and another tool, {len(found) or 'none'} differ"
    rule = "by the exact McNemar test, with p after Holm's correction"
    columns = [("grid", "task", ""), ("more", "more right", ""), ("less", "than", ""), ("p", "p", ".2g")]
    return f"{head} {rule}:\n\n{table(found, columns)}" if found else f"{head} {rule}."


def cost(rows: Rows) -> str:
    """CPU seconds and KL of loopq's presets over those of another tool, at one grid."""
    here = {r["variant"]: r for r in rows if r["bits"] == COST_BITS}
    peer = here[COST]
    lines = [
        {
            "weights": NAMES[variant], "s": r["seconds"] / peer["seconds"], "kl": r["kl"] / peer["kl"],
            "mib": r["memory_mib"],
        }
        for variant, r in here.items()
        if variant in OURS and not variant.startswith("RTN") and seconds_of(r) is not None
    ]  # fmt: skip
    columns = [
        ("weights", "weights", ""), ("s", f"CPU seconds over {NAMES[COST]}", ".2f"), ("kl", "KL over it", ".2f"),
        ("mib", f"MiB above the model ({NAMES[COST]}: {peer['memory_mib']:,.0f})", ",.0f"),
    ]  # fmt: skip
    return table(lines, columns)


def loop(rows: Rows) -> str:
    """Plain GPTQ on the six layers that loop: all steps over one step, paired over prompts."""
    lines = []
    by_variant = {(r["calibration"], r["variant"]): r for r in rows}
    for text in dict.fromkeys(text for text, _ in by_variant):
        for scales, rtn in (("paper", "RTN, paper"), ("searched scales", "RTN")):
            one, every = (
                by_variant.get((text, f"GPTQ, {steps}, {scales}")) for steps in ("one step", "trajectory")
            )
            if one is None or every is None:
                continue
            both = [every["kl_by_prompt"], one["kl_by_prompt"]]
            ratio = bootstrap(both, lambda a, b, axis: np.mean(a, axis) / np.mean(b, axis))
            line = {
                "text": TEXTS.get(text, text), "scales": "of the largest weight" if scales == "paper" else "searched",
                "one": spread(one), "all": spread(every),
                "ratio": f"{ratio.estimate:.2f} ({ratio.low:.2f}-{ratio.high:.2f})",
            }  # fmt: skip
            lines.append(line | ({"rtn": spread(by_variant[text, rtn])} if (text, rtn) in by_variant else {}))
    columns = [
        ("text", "calibration", ""),
        ("scales", "scales", ""),
        ("rtn", "RTN", ""),
        ("one", "GPTQ, one step", ""),
    ]
    return table(
        lines, [*columns, ("all", "GPTQ, all steps", ""), ("ratio", "all over one (95 %, paired)", "")]
    )


def named(kind: str) -> str:
    """A type of a file, of all matrices, or of matrices with rows filled up to whole blocks."""
    if kind in FILES:
        return f"{kind}, a file's choice"
    return kind.removesuffix(PADDED).upper() + (", rows filled up" if kind.endswith(PADDED) else "")


def near(rows: Rows, bits: float) -> str:
    """loopq's even and uneven levels at the bits nearest to those of a type."""
    grids = {b + 16 / g: here for (b, g), here in by_grid(rows).items()}
    size = min(grids, key=lambda b: abs(b - bits))
    found = {r["variant"]: f"{r['kl']:.3f}" for r in grids[size]}
    return f"{size:g} bits: {found[EVEN]}, uneven {found[UNTURNED]}"


def gguf(rows: dict[str, dict[str, Any]], others: Rows) -> str:
    """Types of llama.cpp, by the bits of their matrices."""
    lines = []
    tool, ours = "tool, importance", "loopq"
    for kind, r in sorted(rows.items(), key=lambda item: item[1]["bits"]):
        line = {
            "kind": named(kind), "bits": r["bits"], "tool": spread(r, tool, f"{tool}, 95 %"),
            "agreement": percent(r[f"{tool}, agreement"]), "s": r[f"{tool}, seconds"],
        }  # fmt: skip
        line |= {"plain": spread(r, "tool", "tool, 95 %")} if "tool" in r else {}
        line |= {} if kind.endswith(PADDED) else {"mb": megabytes(r["bits"])}
        if ours in r:
            line |= {"ours": spread(r, ours, f"{ours}, 95 %"), "over": r[ours] / r[tool]}
            line |= {"our s": r[f"{ours}, seconds"], "our agreement": percent(r[f"{ours}, agreement"])}
        lines.append(line | {"near": near(others, r["bits"])})
    columns = [
        ("kind", "type", ""), ("bits", "bits", ".3f"), ("mb", "file, MB", ".1f"),
        ("plain", "llama.cpp's rounding", ""), ("tool", "with importance", ""), ("agreement", "agreement", ""),
        ("s", "CPU s", ".0f"),
        ("ours", "loopq", ""), ("our agreement", "agreement", ""), ("over", "ratio", ".2f"), ("our s", "CPU s", ".0f"),
        ("near", "loopq, INT3 or INT4 g64", ""),
    ]  # fmt: skip
    return table(lines, columns)


def exl3_bits(model: str, bits: int, block: int = 1) -> float:
    """Bits of a weight in EXL3, with a scale for each row and column; `block` fills both up to whole blocks."""
    filled = [(n + -n % block, m + -m % block) for n, m in SHAPES[model]]
    return sum(bits * n * m + 16 * (n + m) for n, m in filled) / sum(n * m for n, m in SHAPES[model])


def exl3_at(rows: Rows, bits: float) -> float:
    """KL of EXL3 at some bits, on the line through the logarithms of its two."""
    line = np.polyfit([stored_bits(r) for r in rows], [np.log(r["kl"]) for r in rows], 1)
    return float(np.exp(np.polyval(line, bits)))


def claim(data: dict[str, Any]) -> str:
    """Ratios of the comparison: KL at four and three bits, and the CPU seconds of the same two settings."""
    rows = {(r["variant"], r["bits"]): r for r in of(data, SMOLLM2) if r["draw"] == 0}
    exl3_rows = [r for r in data.get("exl3", []) if r["model"] == SMOLLM2]

    def over(ours: str, other: str) -> dict[str, str]:
        both = [(rows[ours, bits], rows[other, bits]) for bits in COLUMNS]
        ratio = {"kl": " and ".join(f"{a['kl'] / b['kl']:.2f}" for a, b in both)}
        if None in [seconds_of(r) for pair in both for r in pair]:
            return ratio
        seconds = sum(a["seconds"] for a, _ in both) / sum(b["seconds"] for _, b in both)
        return ratio | {"s": f"{seconds:.2g}"}

    def beside_exl3(ours: str) -> dict[str, str]:
        here = [rows[ours, bits] for bits in COLUMNS]
        return {"kl": " and ".join(f"{r['kl'] / exl3_at(exl3_rows, stored_bits(r)):.2f}" for r in here)}

    default, tool, best = "loopq default", "llm-compressor, imatrix_mse", "auto-round, best"
    pairs = [(EVEN, tool), (EVEN, "auto-round"), (EVEN, best), (default, tool), (default, best)]
    lines = [{"ours": NAMES[ours], "other": NAMES[other]} | over(ours, other) for ours, other in pairs]
    equal = "EXL3, at equal bits"
    lines += [{"ours": NAMES[ours], "other": equal} | beside_exl3(ours) for ours in (default, SMALL)]
    columns = [("ours", "loopq", ""), ("other", "over", ""), ("kl", "KL at 4 and at 3 bits", "")]
    return table(lines, [*columns, ("s", "CPU seconds", "")])


def opening() -> str:
    """The claim of the first page: error and CPU seconds beside another tool, on a published model, in one run."""
    run = json.loads(OPENING.read_text("utf-8"))
    tool, *ours = (
        next(r for r in run["records"] if r["variant"] == name)
        for name in ("llm-compressor, imatrix_mse", "loopq default", EVEN, "loopq fast")
    )
    default, even, fast = (f"{r['kl'] / tool['kl']:.2f}" for r in ours)
    seconds = [f"{r['seconds'] / tool['seconds']:.1f}" for r in ours]
    lines = (
        "PL-BERT, a published model, runs one layer twelve times. **At 3 bits loopq leaves",
        f"{default} of the error that llm-compressor leaves at its best,** at {seconds[0]} times its CPU time.",
        f"Files for vLLM and most engines need evenly spaced levels, which leave {even}",
        f"at {seconds[1]} times. The preset `fast` leaves {fast} at {seconds[2]} times.",
    )
    return "\n".join(lines)


def published(data: dict[str, Any], calls: Rows) -> str:
    """One step, all steps and loopq on published looped models, at 3 bits in groups of 32, all with searched scales."""
    held = {r["variant"]: r["kl"] for r in of(data, PLBERT) if (r["bits"], r["group"]) == (3, 32)}
    # Two settings of about three bits in all.
    held |= {r["variant"]: r["kl"] for r in data.get("exl3", []) if (r["model"], r["bits"]) == (PLBERT, 3)}
    held |= {r["variant"]: r["kl"] for r in of(data, PLBERT) if (r["bits"], r["variant"]) == (3, SMALL)}
    chosen = [r for r in calls if (r["model"], r["bits"], r["draw"]) == FRACAST and "error" in r]
    series = {r["variant"]: np.median(r["error"]) for r in chosen}
    lines = [
        {"weights": name}
        | ({"plbert": held[one]} if one in held else {})
        | ({"fracast": series[other]} if other in series else {})
        for name, one, other in PUBLISHED
    ]
    columns = [("weights", "weights", ""), ("plbert", "PL-BERT: error", ".3f")]
    return table(lines, [*columns, ("fracast", "Fracast-0: error, median of windows", ".4f")])


def exl3(rows: Rows) -> str:
    """EXL3 by GPTQModel. Its seconds are those of a kernel for other processors, and stand nowhere."""
    lines = []
    for r in sorted(rows, key=lambda r: (r["model"] != SMOLLM2, -r["bits"])):
        file = exl3_bits(r["model"], r["bits"], BLOCK)
        line = {
            "model": r["model"], "name": f"EXL3, {r['bits']} bits", "bits": exl3_bits(r["model"], r["bits"]),
            "file": file, "kl": spread(r), "agreement": percent(r["agreement"]),
        }  # fmt: skip
        lines.append(line | ({"mb": megabytes(file)} if r["model"] == SMOLLM2 else {}))
    columns = [
        ("model", "model", ""),
        ("name", "weights", ""),
        ("bits", "bits", ".2f"),
        ("file", "in its file", ".2f"),
    ]
    columns += [
        ("mb", "file, MB", ".1f"),
        ("kl", "KL (95 % over prompts)", ""),
        ("agreement", "agreement", ""),
    ]
    return table(lines, columns)


def beside_exl3(data: dict[str, Any]) -> str:
    """Preset `small`, EXL3 and the default at three bits, on every model that all of them took."""
    lines = []
    for model in (SMOLLM2, PLBERT, *SMALL_MODELS):
        rows = [
            r for r in (*data.get(PARTS[model], []), *data["exl3"]) if r["model"] == model and r["bits"] == 3
        ]
        rows = [r for r in rows if r["draw"] == 0 and r["variant"] in TRELLISES]
        peer = min((r["kl"] for r in rows if r["variant"] == EXL3), default=None)
        if peer is None:
            continue
        for r in sorted(rows, key=lambda r: TRELLISES.index(r["variant"])):
            lines.append(
                {
                    "model": model, "weights": NAMES.get(r["variant"], "EXL3"), "bits": stored_bits(r), "kl": spread(r),
                    "over": r["kl"] / peer,
                }
                | ({} if r["seconds"] is None or r["variant"] == EXL3 else {"s": r["seconds"]})
            )  # fmt: skip
    columns = [("model", "model", ""), ("weights", "weights", ""), ("bits", "bits", ".2f")]
    columns += [("kl", "KL (95 % over prompts)", ""), ("over", "over EXL3", ".2f"), ("s", "CPU s", ".0f")]
    return table(lines, columns)


def scores(data: dict[str, Any]) -> str:
    """Tables of tasks, with the names of the other tables."""
    rows = [
        r | {"variant": NAMES.get(r["variant"], r["variant"]), "values": [float(v) for v in r["values"]]}
        for r in scored(data)
    ]
    records = [r | {"variant": NAMES[r["variant"]]} for r in of(data, SMOLLM2)]
    return answers(records, rows, [NAMES[v] for v in OURS if v in NAMES] + [FULL]).rstrip()


def pages(data: dict[str, Any]) -> dict[tuple[Path, str], str]:
    """Each table by its page and its mark."""
    smol, alone = of(data, SMOLLM2), data.get(PARTS[LOOP], [])
    first, others = ([r for r in smol if (r["draw"] == 0) == is_first] for is_first in (True, False))
    texts = {
        (PAGE, "peers"): peers(first),
        (PAGE, "draws"): peers(others),
        (PAGE, "loop"): loop(alone),
        (PAGE, "gguf"): gguf(data["gguf"], first),
        (COMPARISON, "claim"): claim(data),
        (COMPARISON, "cost"): cost(first),
        (PAGE, "answers"): scores(data),
        (PAGE, "plbert"): peers(of(data, PLBERT), size=False),
        (PAGE, "exl3"): exl3(data.get("exl3", [])),
        (TRELLIS, "small"): beside_exl3(data),
        (README, "claim"): opening(),
        (README, "published"): published(data, json.loads(CALLS.read_text("utf-8"))["rows"]),
        (README, "smollm2"): readme(smol, [r for r in data.get("exl3", []) if r["model"] == SMOLLM2]),
        (COMPARISON, "answers"): right(data),
        (ZOO, "loop"): loop(alone),
    }
    # A table without a row is its head alone.
    return {place: text for place, text in texts.items() if text.count("\n") > 1}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="*", type=Path, help="files of JSON that the benches left")
    parser.add_argument(
        "--aside", action="store_true", help="seconds of RESULT are of another machine or a busy one"
    )
    args = parser.parse_args()
    data = json.loads(DATA.read_text("utf-8"))
    for file in args.results:
        add(data, json.loads(file.read_text("utf-8")), aside=args.aside)
    DATA.write_text(json_lines(data) + "\n", "utf-8")
    for (page, mark), text in pages(data).items():
        into(page, mark, text)


if __name__ == "__main__":
    main()
