"""An export in llama.cpp: how far its predictions are from loopq's.

Run: python -m benches.formats.llama_cpp --python PYTHON --checkpoint Q --gguf FILE --text TEXT [--record FILE]

PYTHON is the interpreter of an environment with `pip install xllamacpp`, which brings llama.cpp's server as a
library. FILE is what `loopq export Q --format gguf --vocabulary ...` wrote. Both get the same token ids; of the token
after each prompt llama.cpp's 50 most probable are compared with `loopq.load` in float32: KL in nats over these and
the rest as one, and how often both have the same most likely token. llama.cpp rounds activations to 8 bits for
products with 4-bit codes. `kl_of_one_run` is the KL to loopq with one run of the loop: what an engine would show that
does not loop. The last line is greedy text from both.

Of the small Nanbeige, `benches/zoo/weights/nanbeige_small`, FILE is written here where it is not there: its config.json
has to be put in the published class's words.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

import benches.zoo.register  # noqa: F401  the small Nanbeige
import loopq
from benches.python.record import write
from loopq.calibrate.data import windows
from loopq.formats.convert import read_any, write_as
from loopq.formats.gguf import write_gguf
from loopq.inference.generate import Decoder, Generation, decode
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


def write_small_nanbeige(folder: str, out: Path) -> None:
    """Write a checkpoint of the zoo's Nanbeige as GGUF, with the published class's config.json and bytes as tokens."""
    import gguf

    checkpoint = read_any(folder)
    small = json.loads(checkpoint.side_files["config.json"])
    renamed = {
        "hidden_size": "n_embd", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
        "num_key_value_heads": "n_kv_heads", "max_position_embeddings": "block_size", "rms_norm_eps": "norm_eps",
        "rope_theta": "rope_base",
    }  # fmt: skip
    same = ("vocab_size", "intermediate_size", "head_dim", "num_loops", "loop_loss_weights")
    config = {new: small[old] for new, old in renamed.items()} | {name: small[name] for name in same}
    config |= {"architectures": ["NanbeigeForCausalLM"], "tie_word_embeddings": False}
    told = dataclasses.replace(checkpoint, side_files={"config.json": json.dumps(config).encode()})
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    # GPT-2's letters for bytes.
    letters = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        writer = gguf.GGUFWriter(place / "vocabulary.gguf", "nanbeige")
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list([letters[b] for b in range(256)])
        writer.add_token_types([int(gguf.TokenType.NORMAL)] * 256)
        writer.add_token_merges([f"{letters[0]} {letters[1]}"])
        writer.add_add_bos_token(False)
        for finish in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.close):
            finish()
        write_as(place / "Q", told, "native")
        write_gguf(place / "Q", out, place / "vocabulary.gguf")


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
    if system.name == "nanbeige" and not args.gguf.exists():
        write_small_nanbeige(args.checkpoint, args.gguf)
    tokens = windows(
        args.text.read_text("utf-8")[:400_000], loaded.encode, args.seq_len, args.prompts, args.text.name
    )
    texts = [row.tolist() for row in tokens.sequences] + [list(loaded.encode(args.start))]
    requests = [{"prompt": text, "n_predict": 1, "temperature": 0, "n_probs": N_PROBS} for text in texts]
    requests[-1]["n_predict"] = N_TEXT
    *answers, last = (answer["choices"][0] for answer in served(args.python, args.gguf, requests))
    kls, kls_of_one, same = [], [], []
    for text, answer in zip(texts, answers, strict=False):
        batch = Batch(torch.tensor([text]), (0,))
        with torch.no_grad():
            logits = [system.rollout(batch, n_steps)[0, -1].double() for n_steps in (system.n_steps, 1)]
        ours, of_one = (x.log_softmax(-1).numpy() for x in logits)
        top = answer["logprobs"]["content"][0]["top_logprobs"]
        theirs = {int(entry["id"]): float(entry["logprob"]) for entry in top}
        kls.append(kl_of_top(theirs, ours))
        kls_of_one.append(kl_of_top(theirs, of_one))
        same.append(max(theirs, key=lambda i: theirs[i]) == int(ours.argmax()))
    decoder, ids = Decoder(system, system.n_steps, Generation()), list(texts[-1])
    for _ in range(N_TEXT):
        ids.append(int(decoder(ids).argmax()))
    own = decode(loaded, ids[-N_TEXT:])
    found = {
        "prompts": len(kls), "seq_len": args.seq_len, "kl": float(np.mean(kls)), "largest_kl": float(np.max(kls)),
        "kl_of_one_run": float(np.mean(kls_of_one)), "agreement": float(np.mean(same)),
        "same_text": last["text"] == own, "text": own,
    }  # fmt: skip
    for name, value in found.items():
        print(f"{name}: {value}")
    write(args.record, [found])


if __name__ == "__main__":
    main()
