"""An export in llama.cpp: how far its predictions are from loopq's.

Run: python -m benches.formats.llama_cpp --python PYTHON --checkpoint Q --gguf FILE --text TEXT [--record FILE]

PYTHON is the interpreter of an environment with `pip install xllamacpp`, which brings llama.cpp's server as a
library. FILE is what `loopq export Q --format gguf --vocabulary ...` wrote. Both get the same token ids; of the token
after each prompt llama.cpp's 50 most probable are compared with `loopq.load` in float32: KL in nats over these and
the rest as one, and how often both have the same most likely token. llama.cpp rounds activations to 8 bits for
products with 4-bit codes. The last line is greedy text from both.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch

import loopq
from benches.python.record import write
from loopq.calibrate.data import windows
from loopq.generate import Decoder, Generation, decode
from loopq.systems.base import Batch

N_PROBS, N_TEXT = 50, 24
#: Runs in the other environment: requests in, llama.cpp's answers out.
SERVE = """
import json, sys
import xllamacpp
settings = xllamacpp.CommonParams()
settings.model.path, settings.n_ctx, settings.n_parallel, settings.warmup = sys.argv[1], 1024, 1, False
server = xllamacpp.Server(settings)
answers = []
for request in json.load(open(sys.argv[2])):
    found = server.handle_completions(request)
    answers.append(json.loads(found) if isinstance(found, (str, bytes)) else found)
json.dump(answers, open(sys.argv[3], "w"))
"""


def served(python: str, gguf: Path, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Answers of llama.cpp's server, one for each request."""
    asked, out = gguf.with_suffix(".requests.json"), gguf.with_suffix(".answers.json")
    asked.write_text(json.dumps(requests))
    subprocess.run([python, "-c", SERVE, gguf, asked, out], check=True, stderr=subprocess.DEVNULL)
    found: list[dict[str, Any]] = json.loads(out.read_text())
    asked.unlink()
    out.unlink()
    return found


def kl_of_top(theirs: dict[int, float], ours: np.ndarray) -> float:
    """KL of llama.cpp's distribution to ours, over the tokens it names and the rest as one."""
    named = np.array(list(theirs))
    p, q = np.exp([theirs[i] for i in named]), np.exp(ours[named])
    p, q = (np.append(x, max(1.0 - x.sum(), 1e-12)) for x in (p, q))
    return float((q * np.log(q / p)).sum())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", required=True, help="interpreter of an environment with xllamacpp")
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--start", default="The capital of France is")
    parser.add_argument("--record", type=Path)
    args = parser.parse_args()

    loaded = loopq.load(args.checkpoint)
    loaded.model.float()
    system = loaded.system
    tokens = windows(
        args.text.read_text("utf-8")[:400_000], loaded.encode, args.seq_len, args.prompts, args.text.name
    )
    texts = [row.tolist() for row in tokens.sequences] + [list(loaded.encode(args.start))]
    requests = [{"prompt": text, "n_predict": 1, "temperature": 0, "n_probs": N_PROBS} for text in texts]
    requests[-1]["n_predict"] = N_TEXT
    *answers, last = (answer["choices"][0] for answer in served(args.python, args.gguf, requests))
    kls, same = [], []
    for text, answer in zip(texts, answers, strict=False):
        with torch.no_grad():
            logits = system.rollout(Batch(torch.tensor([text]), (0,)), system.n_steps)[0, -1]
        ours = logits.double().log_softmax(-1).numpy()
        top = answer["logprobs"]["content"][0]["top_logprobs"]
        theirs = {int(entry["id"]): float(entry["logprob"]) for entry in top}
        kls.append(kl_of_top(theirs, ours))
        same.append(max(theirs, key=lambda i: theirs[i]) == int(ours.argmax()))
    decoder, ids = Decoder(system, system.n_steps, Generation()), list(texts[-1])
    for _ in range(N_TEXT):
        ids.append(int(decoder(ids).argmax()))
    own = decode(loaded, ids[-N_TEXT:])
    found = {
        "prompts": len(kls), "seq_len": args.seq_len, "kl": float(np.mean(kls)), "largest_kl": float(np.max(kls)),
        "agreement": float(np.mean(same)), "same_text": last["text"] == own, "text": own,
    }  # fmt: skip
    for name, value in found.items():
        print(f"{name}: {value}")
    write(args.record, [found])


if __name__ == "__main__":
    main()
