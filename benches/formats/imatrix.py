"""What an importance matrix gains in llama.cpp's own quantizer, on a real model with a loop.

Run: python -m benches.formats.imatrix --tools DIR --vocabulary FILE.gguf --calibration TEXT --text TEXT [--record FILE]

DIR holds `llama-quantize` and `llama-imatrix`. The model, `.cache/smollm2/looped` by default, is written out as a GGUF
file in bfloat16, a layer for each time that it runs, and quantized by `llama-quantize` to each type: without an
importance matrix; with that of `llama-imatrix`, which sees each run of a layer as a layer of its own; and with those of
`loopq export --format imatrix`, the Hessian's diagonal over all steps and the loop metric's. All three see the same
tokens. Beside them stands the same model by `loopq solve`, INT4 in groups of 32 by preset `fast`, as
`loopq export --format gguf` writes it: Q4_0. Each file is dequantized by the package `gguf`, and its KL to full
precision is measured in float32, so that nothing of an engine's own rounding is in it. The embedding, which is the head
too, stays in bfloat16 in all files.

Most types have blocks of 256 weights, and rows of SmolLM2 have 576, so that llama-quantize takes other types for them,
of 4 bits or more. `--padded` names types for which each row, and its importance, goes to llama-quantize with zeros up
to whole blocks, which are cut away again: the types as models have them whose width is a multiple of 256.

What is found stays under `--work`, and is not computed again.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, GGUFWriter
from gguf.quants import dequantize

import loopq
from benches.python.record import write
from loopq.calibrate.data import TokenSet, windows
from loopq.evaluate.compare import Measurement, compare
from loopq.evaluate.stats import mean_interval
from loopq.formats.gguf import Shape, write_gguf
from loopq.layers.loop_spec import LOOP, layer_order
from loopq.models.load import LoadedModel, load_model
from loopq.run.config import PRESETS
from loopq.run.imatrix import write_imatrix
from loopq.systems.looped import Looped

TYPES, PADDED = "Q4_0,IQ4_NL", "Q3_K_M,IQ3_S,Q2_K"
BLOCK = 256
NONE, OWN = "none", "llama-imatrix"
OURS = {"loopq, diag(H)": "dump", "loopq, loop metric": "dump-metric"}
EXPORT = "loopq INT4 g32, preset fast"
CALIBRATION_PROMPTS, SEQ_LEN = 32, 256
METRIC = ("--metric", "loop", "--metric-prompts", "16", "--metric-draws", "2")
#: Files of an importance matrix in the work folder.
FILES = {OWN: "llama.imatrix.gguf", **{name: f"{dump}.imatrix.gguf" for name, dump in OURS.items()}}


def run(command: list[Any], log: Path) -> None:
    """Run a tool, its output in a file."""
    with log.open("w") as out:
        subprocess.run([str(c) for c in command], check=True, stdout=out, stderr=subprocess.STDOUT)


def prepare(args: argparse.Namespace) -> None:
    """Write the full-precision GGUF file, the importance matrices and loopq's own Q4_0, where they are not there."""
    work, full = args.work, args.work / "full.gguf"
    work.mkdir(parents=True, exist_ok=True)
    if not full.exists():
        write_gguf(args.model, full, args.vocabulary)
    own = work / FILES[OWN]
    if not own.exists():
        command = [args.tools / "llama-imatrix", "-m", full, "-f", args.calibration, "-o", own, "--no-ppl"]
        command += ["-c", SEQ_LEN, "-b", SEQ_LEN, "--chunks", CALIBRATION_PROMPTS, "-t", args.threads]
        run(command, work / "llama-imatrix.log")
    for name, dump in OURS.items():
        if not (work / dump).exists():
            command = [
                sys.executable,
                "-m",
                "loopq",
                "collect",
                args.model,
                "--out",
                work / dump,
                "--hessian",
            ]
            command += METRIC if "metric" in dump else []
            command += ["--calibration", args.calibration, "--n-prompts", CALIBRATION_PROMPTS]
            run([*command, "--seq-len", SEQ_LEN, "--threads", args.threads], work / f"{dump}.log")
        if not (work / FILES[name]).exists():
            write_imatrix(work / dump, work / FILES[name])
    if not (work / "loopq.gguf").exists():
        settings = {"bits": 4, "group_size": 32, "threads": args.threads, **PRESETS["fast"]}
        loopq.solve(work / "dump", out=work / "Q", **settings)
        write_gguf(work / "Q", work / "loopq.gguf", args.vocabulary)


def padded(file: Path) -> Path:
    """Return a GGUF file, of a model or of importance, with zeros at the end of each row up to whole blocks of 256."""
    out = file.with_name(f"padded-{file.name}")
    if out.exists():
        return out
    reader = GGUFReader(file)
    made = out.with_suffix(".partial")
    writer = GGUFWriter(made, "llama")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kinds = [*field.types, None]
            writer.add_key_value(field.name, field.contents(), kinds[0], kinds[1])
    for tensor in reader.tensors:
        data = tensor.data
        if tensor.name.endswith(".in_sum2") or (tensor.name.endswith(".weight") and data.ndim == 2):
            missing = -int(tensor.shape[0]) % BLOCK * data.shape[-1] // int(tensor.shape[0])
            data = np.pad(data, [*[(0, 0)] * (data.ndim - 1), (0, missing)])
        writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    for finish in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        finish()
    writer.close()
    made.replace(out)
    return out


def quantized(args: argparse.Namespace, kind: str, name: str, pad: bool) -> Path:
    """Return the file that llama-quantize writes of a type with an importance matrix."""
    file = args.work / f"{'padded-' * pad}{kind}-{name.replace(' ', '-')}.gguf"
    if not file.exists():
        made = file.with_suffix(".partial")
        full, *others = (args.work / n for n in ("full.gguf", *([FILES[name]] if name != NONE else [])))
        if pad:
            full, *others = (padded(f) for f in (full, *others))
        command = [args.tools / "llama-quantize", "--token-embedding-type", "bf16"]
        command += ["--imatrix", others[0]] if others else []
        run([*command, full, made, kind, args.threads], file.with_suffix(".log"))
        made.replace(file)
    return file  # type: ignore[no-any-return]


def written_out(folder: Path) -> tuple[LoadedModel, Looped, Shape]:
    """Return the loaded model, and its adapter and shape with a layer for each time that one runs."""
    loaded = load_model(str(folder), dtype="float32")
    config = copy.deepcopy(loaded.model.config)
    order = layer_order(getattr(config, LOOP), config.num_hidden_layers)
    config.num_hidden_layers = len(order)
    setattr(config, LOOP, [0, 1, 1])
    model = type(loaded.model)(config).float().eval()
    state = loaded.model.state_dict()
    found = {name: state[_source(name, order)] for name in model.state_dict()}
    model.load_state_dict(found)
    shape = Shape.of({**loaded.config, "num_hidden_layers": len(order), LOOP: [0, 1, 1]})
    return loaded, Looped(model), shape


def _source(name: str, order: list[int]) -> str:
    """The name of a written-out model's tensor in the looped one."""
    parts = name.split(".")
    return ".".join([*parts[:2], str(order[int(parts[2])]), *parts[3:]]) if parts[1] == "layers" else name


def read(file: Path, system: Looped, shape: Shape) -> tuple[dict[str, np.ndarray], dict[str, int], float]:
    """Return the linear layers of a GGUF file by the model's names, their types, and their mean bits of a weight."""
    tensors = {t.name: t for t in GGUFReader(file).tensors}
    weights, kinds, n_bytes, n_weights = {}, Counter[str](), 0, 0
    for parameter in system.shared_parameters(1):
        (name,) = shape.tensors(parameter.name)
        tensor = tensors[name]
        values = dequantize(tensor.data, tensor.tensor_type)
        n_weights += values.size
        # What a row was padded with.
        values = values[:, : system.model.get_parameter(parameter.name).shape[1]]
        weights[parameter.name] = np.empty_like(values)
        weights[parameter.name][shape.rows(parameter.name, len(values))] = values
        kinds[tensor.tensor_type.name] += 1
        n_bytes += int(tensor.n_bytes)
    return weights, dict(kinds), 8 * n_bytes / n_weights


def measured(
    args: argparse.Namespace, tokens: TokenSet, system: Looped, shape: Shape, kind: str, pad: bool
) -> list[Any]:
    """Return the rows of one type, measured or as they were found before."""
    kept = args.work / f"{'padded-' * pad}{kind}.json"
    rows = json.loads(kept.read_text()) if kept.exists() else {}
    names = [NONE, *FILES, *([EXPORT] if kind == "Q4_0" else [])]
    missing = [name for name in names if name not in rows]
    weights = {}
    for name in missing:
        file = args.work / "loopq.gguf" if name == EXPORT else quantized(args, kind, name, pad)
        weights[name], kinds, bits = read(file, system, shape)
        rows[name] = {"type": f"{kind}{', padded' * pad}", "importance": name, "bits": bits, "tensors": kinds}
    for score in compare(system, weights, tokens, batch_size=4)[1:] if missing else ():
        rows[score.name].update(_numbers(score))
    kept.write_text(json.dumps(rows))
    return [rows[name] for name in names]


def _numbers(score: Measurement) -> dict[str, Any]:
    return {
        "kl": float(score.kl.mean()), "by_prompt": score.kl[0].tolist(), "agreement": float(score.agreement.mean()),
        "perplexity": score.perplexity,
    }  # fmt: skip


def table(rows: list[Any]) -> list[str]:
    """Lines of the table; each KL with its interval, and its difference from that by llama.cpp's own importance."""
    lines = [
        "| type | importance | bits | KL (95 % over prompts) | beside llama-imatrix (95 %, paired) | agreement |",
        "|---|---|---|---|---|---|",
    ]
    own = {row["type"]: np.array(row["by_prompt"]) for row in rows if row["importance"] == OWN}
    for row in rows:
        kl = np.array(row["by_prompt"])
        at, change = mean_interval(kl), mean_interval(kl - own[row["type"]])
        more = f"{change.estimate:+.4f} ({change.low:+.4f} to {change.high:+.4f})"
        more = "" if row["importance"] == OWN else more
        lines.append(
            f"| {row['type']} | {row['importance']} | {row['bits']:.2f} "
            f"| {at.estimate:.4f} ({at.low:.4f}-{at.high:.4f}) | {more} | {row['agreement']:.1%} |"
        )
    return lines


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tools", type=Path, required=True, help="folder of llama-quantize and llama-imatrix"
    )
    parser.add_argument("--model", type=Path, default=Path(".cache/smollm2/looped"))
    parser.add_argument(
        "--vocabulary", type=Path, required=True, help="GGUF file of the model, for its tokenizer"
    )
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True, help="held-out text")
    parser.add_argument("--types", default=TYPES, help="separated by commas (default %(default)s)")
    parser.add_argument("--padded", default=PADDED, help="types for padded rows (default %(default)s)")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--work", type=Path, default=Path(".cache/imatrix"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--record", type=Path)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    prepare(args)
    loaded, system, shape = written_out(args.model)
    text = args.text.read_text("utf-8")[:200_000]
    tokens = windows(text, loaded.encode, args.seq_len, args.prompts, args.text.name)
    rows = []
    for kinds, pad in ((args.types, False), (args.padded, True)):
        for kind in filter(None, kinds.split(",")):
            rows += measured(args, tokens, system, shape, kind, pad)
            print("\n".join(table(rows)), flush=True)
    write(
        args.record,
        rows,
        prompts=args.prompts,
        seq_len=args.seq_len,
        calibration=[CALIBRATION_PROMPTS, SEQ_LEN],
    )


if __name__ == "__main__":
    main()
