"""KL as llama-perplexity prints it: from llama.cpp's own logits, and by `loopq evaluate --llama-cpp-style`.

    python -m benches.llama_cpp_kl MODEL Q --base FULL.gguf --gguf Q.gguf --llama PYTHON --text FILE

The GGUF files are what `loopq export` wrote of MODEL and of Q. PYTHON is an interpreter that has `xllamacpp`, whose
library runs both files over the same chunks. No package has the tool itself, so its arithmetic is written out here:
base log-probabilities rounded to 16 bits, tokens below exp(-16) left out. The first line of the record is that
arithmetic on loopq's logits: it differs from loopq's by rounding alone. The second is on llama.cpp's logits, whose
products round activations to 8 bits.
"""

from __future__ import annotations

import argparse
import datetime
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benches.quality.peers_table import processor
from loopq.api import weights_of
from loopq.calibrate.prompts import Take, evaluation_chunks
from loopq.evaluation.compare import compare, spread
from loopq.formats.convert import read_any
from loopq.models.load import load_model
from loopq.models.replace import Replaced, placed

ENGINE = """
import ctypes as C, glob, sys
import numpy as np
import xllamacpp
lib = C.CDLL(glob.glob(xllamacpp.__path__[0] + "/xllamacpp*.so")[0])
# Settings are passed by value on the stack: a longer block than theirs leaves their fields where they are.
class Settings(C.Structure):
    _fields_ = [("words", C.c_uint32 * 256)]
class Batch(C.Structure):
    _fields_ = [("n", C.c_int32), ("token", C.POINTER(C.c_int32)), ("embedding", C.c_void_p),
                ("position", C.POINTER(C.c_int32)), ("n_texts", C.POINTER(C.c_int32)),
                ("text", C.POINTER(C.POINTER(C.c_int32))), ("logits", C.POINTER(C.c_int8))]
def function(name, result, *arguments):
    found = getattr(lib, name)
    found.restype, found.argtypes = result, arguments
    return found
path, ids, out, vocabulary = sys.argv[1], np.load(sys.argv[2]), sys.argv[3], int(sys.argv[4])
lib.llama_backend_init()
model = function("llama_model_load_from_file", C.c_void_p, C.c_char_p, Settings)(
    path.encode(), function("llama_model_default_params", Settings)())
settings = function("llama_context_default_params", Settings)()
settings.words[0] = settings.words[1] = settings.words[2] = ids.shape[1]
context = function("llama_init_from_model", C.c_void_p, C.c_void_p, Settings)(model, settings)
memory = function("llama_get_memory", C.c_void_p, C.c_void_p)(context)
batch = function("llama_batch_init", Batch, C.c_int32, C.c_int32, C.c_int32)(ids.shape[1], 0, 1)
first, kept = ids.shape[1] // 2, []
for chunk in ids:
    function("llama_memory_clear", None, C.c_void_p, C.c_bool)(memory, True)
    batch.n = len(chunk)
    for i, token in enumerate(chunk):
        batch.token[i], batch.position[i], batch.n_texts[i], batch.logits[i] = int(token), i, 1, 1
        batch.text[i][0] = 0
    assert function("llama_decode", C.c_int32, C.c_void_p, Batch)(context, batch) == 0
    at = function("llama_get_logits", C.POINTER(C.c_float), C.c_void_p)(context)
    kept.append(np.ctypeslib.as_array(at, (len(chunk), vocabulary))[first:-1].copy())
np.save(out, np.concatenate(kept))
"""


def of_engine(python: str, gguf: Path, ids: NDArray[np.int64], vocabulary: int) -> NDArray[np.float32]:
    """Logits of the scored positions by llama.cpp."""
    with tempfile.TemporaryDirectory() as folder:
        np.save(f"{folder}/ids.npy", ids)
        asked = [python, "-c", ENGINE, str(gguf), f"{folder}/ids.npy", f"{folder}/out.npy", str(vocabulary)]
        subprocess.run(asked, check=True, stderr=subprocess.DEVNULL)
        found: NDArray[np.float32] = np.load(f"{folder}/out.npy")
    return found


def of_loopq(loaded: Any, weights: Any, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """Logits of the scored positions by loopq."""
    import torch

    from loopq.systems.base import Batch

    found = []
    with Replaced(loaded.system, placed(loaded.system, weights)) as system:
        for number, chunk in enumerate(ids):
            batch = Batch(torch.from_numpy(chunk[None]), (number,), 0)
            out = system.rollout(batch, system.n_steps)
            found.append(out[0, ids.shape[1] // 2 : -1].float().numpy())
    return np.concatenate(found)


def as_the_tool(
    base: NDArray[np.float32], found: NDArray[np.float32], targets: NDArray[np.int64]
) -> dict[str, Any]:
    """The tool's arithmetic of one position after another."""
    kl, same, nll = [], [], []
    for full, logits, target in zip(base, found, targets, strict=True):
        largest = full.max()
        lowest = max(full.min(), largest - 16)
        scale = np.float32((largest - lowest) / 65535)
        codes = np.where(full > lowest, np.rint((full - lowest) / scale), 0).astype(np.float32)
        p = scale * codes + (
            lowest - largest - np.float32(np.log(np.exp(full - largest).sum(dtype=np.float64)))
        )
        q = logits - logits.max()
        q = q - np.float32(np.log(np.exp(q).sum(dtype=np.float64)))
        counted = p > -16
        kl.append(float((np.exp(p[counted]) * (p[counted] - q[counted])).sum(dtype=np.float64)))
        same.append(float(logits.argmax() == p.argmax()))
        nll.append(-float(q[target]))
    return spread(np.array(kl), np.array(same), np.array(nll))["tokens"]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("checkpoint")
    for name in ("base", "gguf", "text"):
        parser.add_argument(f"--{name}", required=True, type=Path)
    parser.add_argument("--llama", required=True, help="interpreter with xllamacpp")
    parser.add_argument("--n-prompts", type=int, default=8, help="chunks (default %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("benches/record"))
    return parser.parse_args()


def main() -> None:
    args = parse()
    loaded, checkpoint = load_model(args.model, dtype="float32"), read_any(args.checkpoint)
    tokens = evaluation_chunks(loaded, args.text, Take(seq_len=512, n_prompts=args.n_prompts))
    ids = np.stack(tokens.sequences)
    targets = ids[:, tokens.scored_from + 1 :].ravel()
    weights = weights_of(checkpoint)
    ours = compare(loaded.system, {"Q": weights}, tokens)[1].summary()["tokens"]
    dense = of_loopq(loaded, {}, ids)
    theirs = [of_engine(args.llama, path, ids, dense.shape[1]) for path in (args.base, args.gguf)]
    rows = {
        "loopq's logits, the tool's arithmetic": as_the_tool(dense, of_loopq(loaded, weights, ids), targets),
        "llama.cpp's logits, the tool's arithmetic": as_the_tool(theirs[0], theirs[1], targets),
        "`loopq evaluate --llama-cpp-style`": ours,
    }
    lines = [
        f"# KL as llama-perplexity prints it, {datetime.date.today()}", "",
        f"`python -m benches.llama_cpp_kl`: `{Path(args.model).name}` and `{args.gguf.name}`, {len(ids)} chunks of 512 "
        f"tokens of {args.text.name}, {ours['n_scored']} positions scored; {processor()}.", "",
        "| by | mean | median | 90 % | 99 % | same top token | perplexity |", "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, t in rows.items():
        marks = " | ".join(f"{t['quantiles'][i]:.6f}" for i in (50, 90, 99))
        lines.append(
            f"| {name} | {t['kl']:.6f} ± {t['kl_error']:.6f} | {marks} | {100 * t['same_top']:.3f} % | "
            f"{t['perplexity']:.4f} |"
        )
    text = "\n".join(lines) + "\n"
    (args.out / f"llama-cpp-kl-{datetime.date.today()}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
